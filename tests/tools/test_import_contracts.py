"""The contracts of imports name what the tree holds; ``make lint`` checks the imports themselves."""

from __future__ import annotations

import re
import tomllib

import grimp

from tests.support.pytest_ids import REPOSITORY
from tests.support.without_spark import programs_without_spark

_CONTRACTS = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["tool"][
    "importlinter"
]["contracts"]


def _contract(name: str) -> dict[str, list[str]]:
    return next(contract for contract in _CONTRACTS if contract["name"].startswith(name))


def test_every_entry_point_is_protected_from_imports() -> None:
    found = {
        ".".join(path.relative_to(REPOSITORY).with_suffix("").parts)
        for path in (REPOSITORY / "python_jobs").rglob("*.py")
        if re.search(r"^if __name__ == ", path.read_text(encoding="utf-8"), re.MULTILINE)
    }
    assert sorted(_contract("An entry point is a leaf")["protected_modules"]) == sorted(found)


def test_every_program_without_spark_is_kept_from_importing_it() -> None:
    """Libraries that run in a user's own program may be named as well; import-linter refuses names without a module."""
    named = set(_contract("What runs without Spark")["source_modules"])
    assert {"python_jobs.shared.core", *programs_without_spark()} <= named


def test_a_stream_and_a_batch_share_what_makes_sessions_and_it_neither_reads_nor_writes() -> None:
    """The contract's lists, asked of the imports themselves."""
    contract = _contract("What makes sessions of records")
    imports = grimp.build_graph("python_jobs", include_external_packages=True)
    shared = "python_jobs.shared.records.session_rows"
    jobs = [
        "data_value.stateful_sessionizer",
        "streaming.partial_state_writer",
        "streaming.batch_reprocessor",
    ]
    for job in (f"python_jobs.{name}" for name in jobs):
        assert imports.chain_exists(importer=job, imported=shared)
        assert imports.chain_exists(importer=job, imported="python_jobs.shared.delta.tables"), "the control"
    assert {shared, "python_jobs.shared.core.sessions"} <= set(contract["source_modules"])
    for module in contract["source_modules"]:
        reached = imports.find_upstream_modules(module)
        assert not [name for name in reached if name.startswith(tuple(contract["forbidden_modules"]))]
