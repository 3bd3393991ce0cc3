"""The README's pattern table, generated from `catalog/` between its two markers.

python -m tools.pattern_table            write it
python -m tools.pattern_table --check    only say whether it is current
"""

import argparse
import sys
from collections.abc import Iterable

from tools.catalog import Pattern, patterns
from tools.findings import ROOT

BEGIN, END = "<!-- patterns: begin -->", "<!-- patterns: end -->"


def main() -> int:
    """Write or check the table; return how the process should exit."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--check", action="store_true", help="write nothing, fail if the table is not current"
    )
    readme = ROOT / "README.md"
    text = readme.read_text(encoding="utf-8")
    current = with_table(text, table(patterns()))
    if parser.parse_args().check:
        if text != current:
            print("README.md: the pattern table is not current, run `python -m tools.pattern_table`")
        return int(text != current)
    readme.write_text(current, encoding="utf-8")
    return 0


def table(entries: Iterable[Pattern]) -> str:
    """Return one Markdown row a pattern: page, family, forms with their files, count of proved behaviours."""
    rows = ["| Pattern | Family | Forms | Behaviours proved |", "| --- | --- | --- | ---: |"]
    for entry in entries:
        forms = ", ".join(f"[{kind}]({path})" for form in entry.forms for kind, path in form.items())
        proved = sum(behaviour.test is not None for behaviour in entry.behaviours)
        rows.append(
            f"| [{entry.name}]({entry.page}) | {entry.family.replace('_', ' ')} | {forms} "
            f"| {proved} of {len(entry.behaviours)} |"
        )
    return "\n".join(rows)


def with_table(text: str, rows: str) -> str:
    """Return the text with what stands between the markers replaced by the rows."""
    try:
        before, rest = text.split(BEGIN)
        _, after = rest.split(END)
    except ValueError:
        raise SystemExit(f"README.md must hold one {BEGIN} and one {END}") from None
    return f"{before}{BEGIN}\n{rows}\n{END}{after}"


if __name__ == "__main__":
    sys.exit(main())
