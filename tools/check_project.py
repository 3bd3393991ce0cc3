"""Checks the architecture's rules that need no run.

Names (dbt's manifest): identifiers are unique and carry their layer, `location_root` is the layer's.
dbt-spark's temporary views carry only the alias, so two models with one alias would exchange rows.
SQL text: conversions that raise under ANSI and give NULL without it are `try_` ones (dbt-spark turns ANSI
off, Spark 4 jobs have it on); public macros dispatch.
Records: no reader drops records that it can't parse; such records go to a dead-letter table.
Reruns: no update adds to a stored value, because a second run would add again.
Jobs: PySpark's private attributes and the quotes of SQL text are used in one module each.
Files: no path of one machine, no registry address, no jar, no file above 1 MB.

    python -m tools.check_project
"""

import ast
import os
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.findings import PYTHON_FOLDERS, ROOT, report
from tools.git_files import git_files
from tools.jinja_files import blocks, without_comments

SQL_FOLDERS = ("macros", "models", "snapshots")
JOB_FOLDERS = ("python_jobs", "case_study")
JVM_MODULE = "python_jobs/shared/spark/jvm.py"
SQL_TEXT_MODULE = "python_jobs/shared/spark/sql_text.py"
PRIVATE_ATTRIBUTE = r"_(?:j[a-z]{1,3}|jvm|jsparkSession|jbuilder|jreader|jwrite|jwriter|gateway)"
PREFIXES = {layer: f"{layer}_" for layer in ("bronze", "silver", "gold", "observability", "staging")}
PREFIXES["snapshots"] = "snapshot_"
MEGABYTE = 1_000_000

# Expressions that raise under ANSI for a malformed value and give NULL without ANSI, each with its replacement.
# A line that is safe has a comment with the reason: `ansi-safe: <reason>`.
ANSI_RULES = {
    r"(?<![\w.])cast\s*\(": "try_cast",
    r"(?<=[\w)'])::(?=\w)": "try_cast",
    r"(?<![\w.])to_(?:timestamp|date|number|binary)\s*\(": "the try_to_… function, or try_cast(… as date)",
    r"(?<![\w.])(?:date|timestamp|int|bigint|double|decimal)\s*\(\s*(?!\d+\s*[,)])": "try_cast",
    r"(?<![\w.])(?:element_at|elt)\s*\(": "get or try_element_at",
    r"(?<![\w.])(?:make_date|make_timestamp|make_interval|parse_url|unix_timestamp)\s*\(": "its try_ form",
}
SUBSCRIPT = r"(?<=[\w)])\[\s*[\w']+\s*\]"  # column[0], map['key']: not looked for inside Jinja
TOTAL_CAST = re.compile(r"\s*(?:(?:null|'[^']*'|-?\d+)\s+as\s.*|.*\sas\s+string\s*)", re.I | re.DOTALL)
SAFE = re.compile(r"ansi-safe: \S")

# A stored value as a sum or difference of itself: `set visits = visits + 1`, `set t.visits = t.visits + s.visits`.
INCREMENT = r"(?:\bset\s+|,\s*)(?:\w+\.)?`?(\w+)`?\s*=\s*(?:\w+\.)?`?\1`?\s*[+-]"

REGISTRY = r"https?://[^\s\"'/]*(?:pypi|artifactory|nexus|maven|registry)[\w.:-]*/\w"
FOREIGN_TEXT = {
    r"(?<![\w.$}\"'])/(?:home|Users)/[a-z]\w*": "a path of one machine",
    r"(?<![\w.$}])/(?:work|root)/\w+": "a path of one machine",
    rf"--(?:extra-)?index-url|PIP_INDEX_[U]RL|{REGISTRY}": "a registry address: each machine has its own",
}


@dataclass(frozen=True)
class Relation:
    """One table or view of the case study, as dbt resolved it."""

    name: str
    kind: str  # model, snapshot, seed or source
    identifier: str
    folder: str  # the first folder below models/; `snapshots` for a snapshot
    stored: bool  # False for views and ephemeral models: they have no location
    location_root: str | None


def main() -> int:
    """Check the repository and return the exit code."""
    sql = sorted(path for folder in SQL_FOLDERS for path in (ROOT / folder).rglob("*.sql"))
    jobs = sorted(path for folder in JOB_FOLDERS for path in (ROOT / folder).rglob("*.py"))
    return report(
        [
            *misnamed_relations(relations_of(parse(ROOT))),
            *unsafe_conversions(sql),
            *macros_without_dispatch(ROOT / "macros"),
            *silent_drops([*sql, *(p for f in PYTHON_FOLDERS for p in (ROOT / f).rglob("*.py"))]),
            *increments(sql),
            *private_surfaces([*jobs, *sorted((ROOT / "benchmarks").rglob("*.py"))], ROOT),
            *quoted_names(jobs, ROOT),
            *foreign_files(committed_files(ROOT), own_paths=(str(ROOT), str(Path.home()))),
        ]
    )


def parse(project: Path) -> Any:
    """Return dbt's manifest of the project; parsing opens no connection."""
    from dbt.cli.main import dbtRunner

    os.environ.setdefault("DBT_PROFILES_DIR", str(project / "profiles"))
    os.environ.setdefault("LAKEHOUSE_ROOT", str(project / "lakehouse"))
    result = dbtRunner().invoke(["--quiet", "parse", "--project-dir", str(project)])
    if not result.success:
        raise SystemExit(f"dbt parse failed: {result.exception}")
    return result.result


def relations_of(manifest: Any) -> list[Relation]:
    """Return the tables and views of a parsed project."""
    nodes = [n for n in manifest.nodes.values() if n.resource_type in ("model", "snapshot", "seed")]
    return [
        *(
            Relation(
                name=node.name,
                kind=str(node.resource_type),
                identifier=node.alias,
                folder="snapshots" if node.resource_type == "snapshot" else node.fqn[1],
                stored=node.config.materialized not in ("view", "ephemeral"),
                location_root=node.config.get("location_root"),
            )
            for node in nodes
        ),
        *(
            Relation(s.name, "source", s.identifier, folder=s.fqn[1], stored=False, location_root=None)
            for s in manifest.sources.values()
        ),
    ]


def misnamed_relations(relations: Iterable[Relation]) -> Iterator[str]:
    """Yield a line for each identifier that is used twice or lacks its layer, and each location of another layer."""
    taken: dict[str, Relation] = {}
    for relation in relations:
        what = f"{relation.kind} '{relation.name}'"
        other = taken.setdefault(relation.identifier.lower(), relation)
        if other is not relation:
            yield f"{what}: identifier '{relation.identifier}' is taken by {other.kind} '{other.name}'"
        layer = layer_of(relation.identifier)
        if layer is None:
            prefixes = ", ".join(PREFIXES.values())
            yield f"{what}: identifier '{relation.identifier}' starts with none of {prefixes}"
        elif relation.kind != "source" and layer != relation.folder:
            yield f"{what}: identifier '{relation.identifier}' says '{layer}', its folder '{relation.folder}'"
        if relation.stored and not (relation.location_root or "").rstrip("/").endswith(f"/{relation.folder}"):
            yield f"{what}: location_root '{relation.location_root}' doesn't end with '/{relation.folder}'"


def layer_of(identifier: str) -> str | None:
    """Return the layer that an identifier carries as its prefix, or None."""
    return next((layer for layer, prefix in PREFIXES.items() if identifier.startswith(prefix)), None)


def unsafe_conversions(files: Iterable[Path]) -> Iterator[str]:
    """Yield a line for each conversion whose result depends on the ANSI mode."""
    for path in files:
        text = path.read_text(encoding="utf-8")
        marked = {number for number, line in enumerate(text.splitlines(), 1) if SAFE.search(line)}
        sql = _without_sql_comments(without_comments(text))
        findings = [
            (match, instead)
            for rule, instead in ANSI_RULES.items()
            for match in re.finditer(rule, sql, re.I)
            if not TOTAL_CAST.fullmatch(_inside_brackets(sql, match.end()))
        ]
        findings += [(m, "get or try_element_at") for m in re.finditer(SUBSCRIPT, _without_jinja(sql))]
        for match, instead in sorted(findings, key=lambda finding: finding[0].start()):
            line = sql.count("\n", 0, match.start()) + 1
            if line not in marked:
                yield f"{path}:{line}: '{match[0].strip()}' depends on the ANSI mode, use {instead}"


def increments(files: Iterable[Path]) -> Iterator[str]:
    """Yield a line for each update that adds to a stored value instead of setting it."""
    for path in files:
        sql = _without_jinja(_without_sql_comments(without_comments(path.read_text(encoding="utf-8"))))
        for match in re.finditer(INCREMENT, sql, re.I):
            line = sql.count("\n", 0, match.start(1)) + 1
            yield f"{path}:{line}: '{match[1]}' is added to, and again by a rerun: set it to an absolute value"


def macros_without_dispatch(macros: Path) -> Iterator[str]:
    """Yield a line for each public macro that a user couldn't override for an engine.

    `macros/shared` is exempt: argument checks and the like emit no SQL.
    """
    declared = {block.name: block for block in blocks(macros)}
    for block in declared.values():
        if block.kind != "macro" or not block.public or block.path.parent.name == "shared":
            continue
        where = f"{block.path}:{block.line}"
        if not re.search(
            rf"adapter\.dispatch\(\s*'{block.name}'\s*,\s*'lakehouse_patterns'\s*\)", block.body
        ):
            yield f"{where}: no adapter.dispatch('{block.name}', 'lakehouse_patterns') in '{block.name}'"
        elif f"default__{block.name}" not in declared:
            yield f"{where}: '{block.name}' has no default__{block.name}"
        elif declared[f"default__{block.name}"].arguments != block.arguments:
            yield f"{where}: '{block.name}' and default__{block.name} take different arguments"


def silent_drops(files: Iterable[Path]) -> Iterator[str]:
    """Yield a line for each reader that silently drops malformed records."""
    for path in sorted(files):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if re.search("dropmalformed", line, re.I):
                yield f"{path}:{number}: DROPMALFORMED loses records without a trace, use a dead-letter table"


def private_surfaces(files: Iterable[Path], root: Path) -> Iterator[str]:
    """Yield a line for each use of PySpark's private attributes outside of the module for them."""
    for path in files:
        if path == root / JVM_MODULE:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and re.fullmatch(PRIVATE_ATTRIBUTE, node.attr):
                yield f"{path}:{node.lineno}: '.{node.attr}' is private to PySpark, use {JVM_MODULE}"
            elif (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id == "DataFrame"
                and node.args
            ):
                yield f"{path}:{node.lineno}: 'DataFrame(…)' is made of a Java object, use {JVM_MODULE}"


def quoted_names(files: Iterable[Path], root: Path) -> Iterator[str]:
    """Yield a line for each value that is put between backticks without escaping its own."""
    for path in files:
        if path == root / SQL_TEXT_MODULE:
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if re.search(r"(?<!`)`\{", line):
                yield f"{path}:{number}: a name between backticks may hold one, use {SQL_TEXT_MODULE}"


def committed_files(repository: Path) -> list[Path]:
    """Return the files that git has or would add."""
    return [path for name in git_files(repository) if (path := repository / name).is_file()]


def foreign_files(files: Iterable[Path], own_paths: Iterable[str]) -> Iterator[str]:
    """Yield a line for each file that doesn't belong in the repository, or whose text doesn't."""
    rules = FOREIGN_TEXT | {
        rf"{re.escape(own)}\b": "a path of this machine" for own in own_paths if own.count("/") > 1
    }
    for path in files:
        if path.suffix in (".jar", ".whl", ".parquet"):
            yield f"{path}: a {path.suffix} file is fetched or generated, not committed"
        elif path.stat().st_size > MEGABYTE:
            yield f"{path}: {path.stat().st_size:,} bytes, above 1 MB"
        else:
            text = path.read_text(encoding="utf-8", errors="replace")
            for rule, what in rules.items():
                for match in re.finditer(rule, text):
                    yield f"{path}:{text.count(chr(10), 0, match.start()) + 1}: '{match[0]}' is {what}"


def _inside_brackets(text: str, start: int) -> str:
    """Return the text from just after an opening bracket to its closing one, on any line."""
    depth = 1
    for position in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[position], 0)
        if depth == 0:
            return text[start:position]
    return text[start:]


def _without_sql_comments(text: str) -> str:
    return re.sub(r"--[^\n]*", "", text)


def _without_jinja(text: str) -> str:
    return re.sub(r"\{[{%].*?[%}]\}", lambda match: "\n" * match[0].count("\n"), text, flags=re.DOTALL)


if __name__ == "__main__":
    sys.exit(main())
