"""What a change affects, on a small tree and on this repository."""

import subprocess
from pathlib import Path

import pytest

from tools.affected import ALWAYS, affected, base_of_change, changed_files

TREE = {
    "python_jobs/shared/core/retry.py": "",
    "python_jobs/shared/delta/merge.py": "from python_jobs.shared.core import retry",
    "python_jobs/ingestion/loader.py": "from ..shared.delta.merge import x\nHELP = 'as python_jobs.ingestion.proxy'",
    "python_jobs/ingestion/proxy.py": "FILES = ['shared/keys.sql']",
    "services/kafka.py": "",
    "case_study/main.py": "",
    "tools/findings.py": "",
    "macros/shared/keys.sql": "{% macro keys() %}{% endmacro %}",
    "macros/idempotency/merger/merge.sql": "{% macro merger() %}{{ lakehouse_patterns.keys() }}{% endmacro %}",
    "macros/data_value/history.sql": (
        "{% materialization scd2, adapter='spark' %}{{ merger() }}{% endmaterialization %}"
    ),
    "models/gold/gold_users.sql": "{{ config(materialized='scd2') }} select 1",
    "docs/ingestion.md": "<!-- snippet: tests/test_page.py::test_page -->",
    "tests/conftest.py": "from services.kafka import Broker\ndef broker(): Broker()\ndef topic(broker): ...",
    "tests/support/rows.py": "",
    "tests/lakehouse/test_main.py": "import case_study.main",
    "tests/test_catalog.py": "",
    "tests/test_loader.py": "'''Not python_jobs/ingestion/proxy.py.'''\nfrom python_jobs.ingestion import loader",
    "tests/test_page.py": "",
    "tests/test_program.py": "run('python_jobs/ingestion/proxy.py', 'x')",
    "tests/test_code.py": "run('-c', 'from python_jobs.shared.delta.merge import x')",
    "tests/test_topic.py": "def test_topic(topic): ...",
    "tests/test_sql.py": "render('merger')",
    "tests/test_history.py": "MODEL = \"config(materialized='scd2')\"",
    "tests/test_mutated.py": "",
    "tests/test_listed.py": "",
    "tests/mutations/all.yml": (
        "- {id: m, file: case_study/main.py, find: a, replace: b, test: 'tests/test_mutated.py::test_m'}"
    ),
    "catalog/ingestion.yml": (
        "- {id: p, name: P, names: {}, forms: [], page: docs/ingestion.md#p,"
        " sections: {book: {spec: s, bullets: 1}},"
        " files: [macros/shared/_keys.yml, tests/test_listed.py],"
        " behaviours: [{id: b, bullet: 1, sentence: s, test: 'tests/test_program.py::test_b'}]}"
    ),
    "macros/shared/_keys.yml": "",
}


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("tree")
    for name, text in TREE.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize(
    ("changed", "tests"),
    [
        ("python_jobs/shared/core/retry.py", {"test_code", "test_loader"}),
        ("python_jobs/ingestion/loader.py", {"test_loader"}),
        ("python_jobs/ingestion/proxy.py", {"test_program"}),
        ("services/kafka.py", {"test_topic"}),
        ("case_study/main.py", {"lakehouse/test_main", "test_mutated"}),
        ("macros/shared/keys.sql", {"test_sql", "test_history", "test_program", "lakehouse/test_main"}),
        ("macros/data_value/history.sql", {"test_history", "lakehouse/test_main"}),
        ("models/gold/gold_users.sql", {"lakehouse/test_main"}),
        ("macros/shared/_keys.yml", {"test_listed", "test_program"}),
        ("docs/ingestion.md", {"test_page"}),
        ("tests/test_topic.py", {"test_topic"}),
        ("catalog/ingestion.yml", set()),
        ("CHANGELOG.md", set()),
        ("python_jobs/ingestion/gone.py", set()),
    ],
)
def test_the_tests_of_a_change(tree: Path, changed: str, tests: set[str]) -> None:
    found, _ = affected([changed], tree)
    named = {f"tests/{name}.py" for name in tests}
    assert set(found or ()) == named | {"tests/test_catalog.py"}


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ("tests/support/rows.py", "tests/support/rows.py is part of the harness"),
        ("tests/conftest.py", "tests/conftest.py is part of the harness"),
        ("python_jobs/table.bin", "it is unknown what depends on python_jobs/table.bin"),
    ],
)
def test_the_harness_and_what_is_unknown_affect_everything(tree: Path, changed: str, reason: str) -> None:
    assert affected([changed, "CHANGELOG.md"], tree) == (None, reason)


def test_nothing_changed_affects_nothing(tree: Path) -> None:
    assert affected([], tree) == ([], "")


def test_this_repository_s_merger_affects_its_tests_and_not_the_compactor_s() -> None:
    found = set(affected(["macros/idempotency/merger/merge.sql"])[0] or ())
    assert found >= {
        *ALWAYS,
        "tests/patterns/idempotency/test_merger.py",
        "tests/patterns/data_value/test_scd_type_1.py",
        "tests/test_consumer_project.py",
    }
    assert "tests/patterns/ingestion/test_compactor.py" not in found


def test_the_change_begins_where_the_branch_does_or_some_hours_ago(tmp_path: Path) -> None:
    def git(*arguments: str, at: str = "2026-11-29T12:00:00Z") -> str:
        identity = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
        done = subprocess.run(
            ["git", *identity, *arguments], cwd=tmp_path, env={"GIT_COMMITTER_DATE": at, "PATH": "/usr/bin:/bin"},
            check=True, capture_output=True, text=True,
        )  # fmt: skip
        return done.stdout.strip()

    def commit(name: str, at: str) -> str:
        (tmp_path / name).touch()
        git("add", name)
        git("commit", "-m", name, at=at)
        return git("rev-parse", "HEAD")

    git("init", "-b", "main")
    commit("a", "2026-11-29T01:00:00Z")
    assert base_of_change(tmp_path) is None
    old = commit("b", "2026-11-29T02:00:00Z")
    new = commit("c", "2026-11-29T10:00:00Z")
    commit("d", "2026-11-29T11:00:00Z")
    assert base_of_change(tmp_path) == old
    (tmp_path / "e").touch()
    assert changed_files(old, tmp_path) == ["c", "d", "e"]
    git("update-ref", "refs/remotes/origin/main", new)
    assert base_of_change(tmp_path) == new
