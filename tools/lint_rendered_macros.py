"""sqlfluff over the SQL that macros render: in a macro file itself it skips everything, as Jinja definitions.

The calls are declared in `tests/rendered/<family>.yml`, a list of
`{macro, arguments, within}`: `within` puts a fragment where it belongs (`select * from t where {}`). A public
macro that renders no SQL, or none without a running model, says so: `{macro, skip: <reason>}`.

    python -m tools.lint_rendered_macros
"""

import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from sqlfluff.core import FluffConfig, Linter

from tools.findings import ROOT, report
from tools.jinja_files import blocks

# Rendered SQL has the indentation, line lengths and blank lines of its templates, which nobody reads.
LAYOUT_OF_TEMPLATES = ("LT02", "LT05", "LT07", "LT08", "LT12", "LT13", "LT14", "LT15")


@dataclass(frozen=True)
class Call:
    """One call of a macro, as declared."""

    macro: str
    arguments: dict[str, Any] = field(default_factory=dict)
    within: str = "{}"
    skip: str | None = None


def main() -> int:
    """Render and lint every declared call; return how the process should exit."""
    calls = [
        Call(**entry)
        for path in sorted((ROOT / "tests" / "rendered").glob("*.yml"))
        for entry in yaml.safe_load(path.read_text(encoding="utf-8")) or []
    ]
    undeclared = macros_without_call(ROOT / "macros", calls)
    with tempfile.TemporaryDirectory() as folder:
        return report([*undeclared, *lint(calls, renderer(Path(folder)))])


def macros_without_call(macros: Path, calls: Iterable[Call]) -> Iterator[str]:
    """Yield a line for each public macro, outside `macros/shared`, that no call renders."""
    declared = {call.macro for call in calls}
    for block in blocks(macros):
        exempt = block.kind != "macro" or not block.public or block.path.parent.name == "shared"
        if not exempt and block.name not in declared:
            yield f"{block.path}:{block.line}: no call of '{block.name}' in tests/rendered/"


def lint(calls: Iterable[Call], render: Callable[..., Any]) -> Iterator[str]:
    """Yield a line for each violation in the SQL of each call, with the SQL's line."""
    raw = {"templater": "raw"}
    excluded = [*FluffConfig.from_path(str(ROOT), overrides=raw).get("rule_denylist"), *LAYOUT_OF_TEMPLATES]
    config = FluffConfig.from_path(str(ROOT), overrides={**raw, "exclude_rules": ",".join(excluded)})
    linter = Linter(config=config)
    for number, call in enumerate(calls, start=1):
        if call.skip:
            continue
        sql = call.within.format(render(call.macro, **call.arguments))
        for violation in linter.lint_string(sql + "\n").violations:
            line = sql.splitlines()[violation.line_no - 1].strip()
            what = f"{violation.rule_code()} {violation.desc()}"
            yield f"call {number} of {call.macro}: {what}\n    {line}"


def renderer(folder: Path) -> Callable[..., Any]:
    """Return the test harness's renderer, on a session of its own."""
    from tests.support.render import MacroRenderer
    from tests.support.session import start_session

    return MacroRenderer(folder / "project", start_session(folder))


if __name__ == "__main__":
    sys.exit(main())
