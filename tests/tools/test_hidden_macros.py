"""dbt's docs show what users call, with arguments in dbt's own types."""

import contextlib
import io
from pathlib import Path

import pytest
from dbt.cli.main import dbtRunner
from dbt_common.events.base_types import EventMsg

from tests.support.dbt_project import PACKAGE, PROFILES, REPOSITORY
from tools.hidden_macros import FILE, listing

PROJECT = """
name: harness
version: "1.0"
profile: harness
flags: {validate_macro_args: true, send_anonymous_usage_stats: false}
"""


def test_private_macros_and_variants_are_listed_and_overrides_are_not(tmp_path: Path) -> None:
    (tmp_path / "f.sql").write_text(
        "{% macro keep() %}{% endmacro %}{% macro default__keep() %}{% endmacro %}{% macro _half() %}{% endmacro %}"
        "{% macro spark__create_table_as() %}{% endmacro %}"
    )
    hidden = [line for line in listing(tmp_path).splitlines() if line.startswith("  - ")]
    assert hidden == [
        "  - {name: _half, docs: {show: false}}",
        "  - {name: default__keep, docs: {show: false}}",
    ]


def test_the_list_is_current() -> None:
    assert FILE.read_text(encoding="utf-8") == listing(REPOSITORY / "macros"), (
        "run python -m tools.hidden_macros"
    )


def test_the_package_passes_dbt_s_own_check_of_macro_arguments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("models", "dbt_packages"):
        (tmp_path / folder).mkdir()
    (tmp_path / "dbt_packages" / PACKAGE).symlink_to(REPOSITORY / "macros")
    (tmp_path / "dbt_project.yml").write_text(PROJECT)
    (tmp_path / "profiles.yml").write_text(PROFILES.format(schema="harness"))
    monkeypatch.chdir(tmp_path)
    warnings: list[str] = []

    def listen(event: EventMsg) -> None:
        if event.info.name == "InvalidMacroAnnotation":
            warnings.append(event.info.msg)

    with contextlib.redirect_stdout(io.StringIO()):
        parsed = dbtRunner(callbacks=[listen]).invoke(
            ["parse", "--project-dir", str(tmp_path), "--profiles-dir", str(tmp_path)]
        )
    assert parsed.success
    assert warnings == []
    shown = {
        macro.name
        for macro in parsed.result.macros.values()
        if macro.package_name == PACKAGE and macro.docs.show
    }
    assert {"surrogate_key", "materialization_scd2_spark", "check_pattern_options"} <= shown
    assert not {name for name in shown if name.startswith("_") or "__" in name}
