"""Hides helpers from dbt's docs: private macros and dispatched variants are listed in `macros/_hidden__macros.yml`.

python -m tools.hidden_macros            write it
python -m tools.hidden_macros --check    only say whether it is current
"""

import argparse
import sys
from pathlib import Path

from tools.findings import ROOT
from tools.jinja_files import blocks

FILE = ROOT / "macros" / "_hidden__macros.yml"
HEAD = "# Written by `python -m tools.hidden_macros`: helpers that dbt's docs don't show.\nversion: 2\n\nmacros:\n"


def main() -> int:
    """Write the list, or say that it is not current; return how the process should exit."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing")
    check, text = parser.parse_args().check, listing(ROOT / "macros")
    if not check:
        FILE.write_text(text, encoding="utf-8")
    elif FILE.read_text(encoding="utf-8") != text:
        print(f"{FILE.relative_to(ROOT)} is not current, run `python -m tools.hidden_macros`")
        return 1
    return 0


def listing(macros: Path) -> str:
    """Return the YAML; macros that override dbt's (`spark__…`) are described and hidden where they stand."""
    names = {
        block.name for block in blocks(macros) if not block.public and not block.name.startswith("spark__")
    }
    return HEAD + "".join(f"  - {{name: {name}, docs: {{show: false}}}}\n" for name in sorted(names))


if __name__ == "__main__":
    sys.exit(main())
