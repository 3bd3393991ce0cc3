"""The pattern table of the README and the site's first page, generated from `catalog/` between two markers.

python -m tools.pattern_table            write it
python -m tools.pattern_table --check    only say whether it is current
"""

import argparse
import os
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import PurePosixPath

from tools.catalog import Pattern, patterns
from tools.findings import ROOT

BEGIN, END = "<!-- patterns: begin -->", "<!-- patterns: end -->"
PAGES = (PurePosixPath("README.md"), PurePosixPath("docs/index.md"))


def main() -> int:
    """Write or check the tables and return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing, fail if a table is not current")
    check = parser.parse_args().check
    stale = 0
    for page in PAGES:
        text = (ROOT / page).read_text(encoding="utf-8")
        current = with_table(text, table(patterns(), page.parent), page)
        stale += text != current
        if check and text != current:
            print(f"{page}: the pattern table is not current, run `python -m tools.pattern_table`")
        elif text != current:
            (ROOT / page).write_text(current, encoding="utf-8")
    return int(check and stale > 0)


def table(entries: Iterable[Pattern], folder: PurePosixPath) -> str:
    """Return one Markdown row for each pattern: page, family, forms with their files, number of proved behaviours.

    Links are relative to `folder`, the folder of the table's page.
    """
    rows = ["| Pattern | Family | Forms | Behaviours proved |", "| --- | --- | --- | ---: |"]
    for entry in entries:
        forms = ", ".join(
            f"[{label}]({os.path.relpath(path, folder)})" for label, path in labelled(entry).items()
        )
        proved = sum(behaviour.test is not None for behaviour in entry.behaviours)
        rows.append(
            f"| [{entry.name}]({os.path.relpath(entry.page, folder)}) | {entry.family.replace('_', ' ')} "
            f"| {forms} | {proved} of {len(entry.behaviours)} |"
        )
    return "\n".join(rows)


def labelled(entry: Pattern) -> dict[str, str]:
    """Return the forms by their kind, with the file's name if a pattern has several forms of one kind."""
    forms = [(kind, path) for form in entry.forms for kind, path in form.items()]
    kinds = Counter(kind for kind, _ in forms)
    return {kind if kinds[kind] == 1 else f"{kind} {PurePosixPath(path).stem}": path for kind, path in forms}


def with_table(text: str, rows: str, page: PurePosixPath) -> str:
    """Return the page's text with the rows between the markers."""
    try:
        before, rest = text.split(BEGIN)
        _, after = rest.split(END)
    except ValueError:
        raise SystemExit(f"{page} must hold one {BEGIN} and one {END}") from None
    return f"{before}{BEGIN}\n{rows}\n{END}{after}"


if __name__ == "__main__":
    sys.exit(main())
