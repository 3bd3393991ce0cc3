"""Runs sqlfluff over the SQL that macros render, because it skips Jinja definitions in the macro files.

`tests/rendered/<family>.yml` declares the calls as a list of `{macro, arguments, within}`: `within` puts a fragment
into a statement (`select * from t where {}`). A public macro that renders no SQL, or none without a running model, has
an entry `{macro, skip: <reason>}`. The SQL of materializations comes from a run of `tests/consumer_project`.

    python -m tools.lint_rendered_macros
"""

import re
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

# Rendered SQL has the line breaks and indentation of its templates, which nobody reads, and quotes every column.
# CV10: a message that quotes a name has its quotes escaped.
# LT01, LT06: within `struct(…)` sqlfluff reads `* except (…)` as a function.
# ST05: what a macro renders also stands behind a user's `with`, so it can't begin with its own.
GENERATED = (
    "LT01", "LT02", "LT05", "LT06", "LT07", "LT08", "LT09", "LT12", "LT13", "LT14", "LT15", "RF06", "AL09", "CV10",
    "ST05",
)  # fmt: skip
# In an executed statement these are dbt's own: DBT_INTERNAL_SOURCE, `) dbt_internal_test`.
OF_DBT = ("CP02", "AL01")
NOT_OURS = re.compile(r"\s*(?:/\*.*?\*/)?\s*(?:show|describe|drop)\s", re.DOTALL | re.IGNORECASE)


@dataclass(frozen=True)
class Call:
    """One call of a macro, as declared."""

    macro: str
    arguments: dict[str, Any] = field(default_factory=dict)
    within: str = "{}"
    skip: str | None = None


@dataclass(frozen=True)
class Statement:
    """SQL text and its origin."""

    origin: str
    sql: str


def main() -> int:
    """Render, execute and lint, and return the exit code."""
    from tests.support.render import MacroRenderer
    from tests.support.session import start_session

    with tempfile.TemporaryDirectory() as folder:
        root, calls = Path(folder), declared_calls()
        spark = start_session(root)
        return report(
            [
                *macros_without_call(ROOT / "macros", calls),
                *lint(rendered(calls, MacroRenderer(root / "render", spark)), GENERATED),
                *lint(executed(root / "executed", spark), GENERATED + OF_DBT),
            ]
        )


def declared_calls() -> list[Call]:
    """Return the calls of every family."""
    return [
        Call(**entry)
        for path in sorted((ROOT / "tests" / "rendered").glob("*.yml"))
        for entry in yaml.safe_load(path.read_text(encoding="utf-8")) or []
    ]


def macros_without_call(macros: Path, calls: Iterable[Call]) -> Iterator[str]:
    """Yield a line for each public macro, outside `macros/shared`, that no call renders."""
    declared = {call.macro for call in calls}
    for block in blocks(macros):
        exempt = block.kind != "macro" or not block.public or block.path.parent.name == "shared"
        if not exempt and block.name not in declared:
            yield f"{block.path}:{block.line}: no call of '{block.name}' in tests/rendered/"


def rendered(calls: Iterable[Call], render: Callable[..., Any]) -> Iterator[Statement]:
    """Yield the SQL of each call."""
    for number, call in enumerate(calls, start=1):
        if not call.skip:
            sql = call.within.format(render(call.macro, **call.arguments))
            yield Statement(f"call {number} of {call.macro}", sql)


def executed(folder: Path, spark: Any) -> Iterator[Statement]:
    """Yield the SQL that dbt sends when the consumer project's patterns are first built, then run again."""
    from tests.support.consumer_project import consumer_project, statements

    folder.mkdir()
    project = consumer_project(folder, spark)
    for command in ("build", "run"):
        for node, sent in statements(project, command, "--select", "path:models/patterns").items():
            yield from (Statement(f"{command} of {node}", sql) for sql in sent if not NOT_OURS.match(sql))


def lint(statements: Iterable[Statement], exclude: Iterable[str] = GENERATED) -> Iterator[str]:
    """Yield each violation with its line of SQL."""
    raw: dict[str, Any] = {"templater": "raw"}
    excluded = [*FluffConfig.from_path(str(ROOT), overrides=raw).get("rule_denylist"), *exclude]
    config = FluffConfig.from_path(str(ROOT), overrides={**raw, "exclude_rules": ",".join(excluded)})
    linter = Linter(config=config)
    for statement in statements:
        lines = [line.rstrip() for line in statement.sql.splitlines()]
        for violation in linter.lint_string("\n".join(lines) + "\n").violations:
            where = lines[min(violation.line_no, len(lines)) - 1].strip()
            yield f"{statement.origin}: {violation.rule_code()} {violation.desc()}\n    {where}"


if __name__ == "__main__":
    sys.exit(main())
