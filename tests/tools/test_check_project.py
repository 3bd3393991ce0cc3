"""Each rule of the architecture finds the fixture that breaks it, and nothing else."""

from dataclasses import replace
from pathlib import Path

import pytest

from tools.check_project import (
    JVM_MODULE,
    SQL_TEXT_MODULE,
    Relation,
    foreign_files,
    increments,
    macros_without_dispatch,
    misnamed_relations,
    private_surfaces,
    quoted_names,
    silent_drops,
    unsafe_conversions,
)

VISITS = Relation(
    "silver_visits", "model", "silver_visits", "silver", stored=True, location_root="/lake/silver"
)


@pytest.mark.parametrize(
    "relation",
    [
        VISITS,
        replace(VISITS, stored=False, location_root=None),
        Relation("snapshot_users", "snapshot", "snapshot_users", "snapshots", True, "s3://lake/snapshots/"),
        Relation("bronze_visits", "source", "bronze_visits", "silver", False, None),
    ],
)
def test_relations_that_carry_their_layer_pass(relation: Relation) -> None:
    assert list(misnamed_relations([relation])) == []


@pytest.mark.parametrize(
    ("change", "finding"),
    [
        ({"identifier": "visits"}, "identifier 'visits' starts with none of bronze_, silver_, gold_"),
        ({"identifier": "gold_visits"}, "identifier 'gold_visits' says 'gold', its folder 'silver'"),
        ({"location_root": "/lake/gold"}, "location_root '/lake/gold' doesn't end with '/silver'"),
        ({"location_root": None}, "location_root 'None' doesn't end with '/silver'"),
        (
            {"kind": "source", "stored": False, "identifier": "raw"},
            "identifier 'raw' starts with none of bronze_",
        ),
    ],
)
def test_each_misnamed_relation_is_found(change: dict[str, str], finding: str) -> None:
    (found,) = misnamed_relations([replace(VISITS, **change)])
    assert finding in found


def test_two_relations_with_one_identifier_are_found_in_any_case() -> None:
    other = Relation("visits_again", "source", "Silver_Visits".lower(), "silver", False, None)
    assert list(misnamed_relations([VISITS, other])) == [
        "source 'visits_again': identifier 'silver_visits' is taken by model 'silver_visits'"
    ]


def model_of(sql: str, folder: Path) -> Path:
    """Write a model with the SQL on its second line."""
    file = folder / "m.sql"
    file.write_text(f"select\n    {sql}\n")
    return file


@pytest.mark.parametrize(
    "sql",
    [
        "cast(payload as int)",
        "cast(coalesce(a, b) as timestamp)",
        "CAST (a as\n date)",
        "payload::int",
        "to_timestamp(event_time)",
        "date(event_time)",
        "element_at(items, 1)",
        "items[0]",
        "{% set sql = 'cast(a as int)' %}",
    ],
)
def test_each_conversion_that_depends_on_the_ansi_mode_is_found(tmp_path: Path, sql: str) -> None:
    (found,) = unsafe_conversions([model_of(sql, tmp_path)])
    assert found.startswith(f"{tmp_path}/m.sql:2: ")


@pytest.mark.parametrize(
    "sql",
    [
        "try_cast(payload as int)",
        "cast(concat(a, (b)) as string)",
        "cast(null as int)",
        "cast('2026-01-01' as date)",
        "try_to_timestamp(event_time)",
        "try_element_at(items, 1), get(items, 0)",
        "decimal(18, 2)",
        "current_date(), to_json(a), snapshot_date(b)",
        "{{ columns[0] }}, {% set x = names['a'] %}",
        "{# cast(a as int) #} -- cast(a as int)",
        "cast(n as int) -- ansi-safe: a count",
        "array_column_of_strings",
    ],
)
def test_conversions_that_cannot_raise_pass(tmp_path: Path, sql: str) -> None:
    assert list(unsafe_conversions([model_of(sql, tmp_path)])) == []


DISPATCHING = """
{% macro latest(relation) %}
    {{ return(adapter.dispatch('latest', 'lakehouse_patterns')(relation)) }}
{% endmacro %}
{% macro default__latest(relation) %} select 1 {% endmacro %}
{% macro _private() %}{% endmacro %}
"""


@pytest.mark.parametrize(
    ("text", "instead", "finding"),
    [
        ("latest(relation)", "latest(relation)", None),
        (
            "adapter.dispatch('latest', 'lakehouse_patterns')",
            "x.default__latest",
            "no adapter.dispatch('latest'",
        ),
        ("macro default__latest", "macro default__latest_", "has no default__latest"),
        ("default__latest(relation)", "default__latest(relation, ties)", "take different arguments"),
    ],
)
def test_a_macro_that_does_not_dispatch_is_found(
    tmp_path: Path, text: str, instead: str, finding: str | None
) -> None:
    (tmp_path / "m.sql").write_text(DISPATCHING.replace(text, instead))
    found = list(macros_without_dispatch(tmp_path))
    assert (found == []) if finding is None else (finding in found[0])


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ('spark.read.option("mode", "DROPMALFORMED").json(path)', 1),
        ("select from_json(payload, 'a int', map('mode', 'dropMalformed'))", 1),
        ('spark.read.option("mode", "PERMISSIVE").json(path)', 0),
    ],
)
def test_a_reader_that_drops_malformed_records_is_found(tmp_path: Path, line: str, found: int) -> None:
    (tmp_path / "job.py").write_text(f"one\n{line}\n")
    lines = list(silent_drops([tmp_path / "job.py"]))
    assert len(lines) == found
    assert all(text.startswith(f"{tmp_path / 'job.py'}:2: DROPMALFORMED") for text in lines)


@pytest.mark.parametrize(
    ("sql", "column"),
    [
        ("update t\nset visits = visits + 1", "visits"),
        ("merge into t using s on t.k = s.k when matched then update\nset t.`n` = t.`n` + s.`n`", "n"),
        ("update t set a = 1,\nb=b-1", "b"),
        ("update t\nset visits = 42, total = other + 1", None),
        ("select a\nfrom t -- set a = a + 1", None),
        ("{{ macro(a,\ndepth=depth + 1) }}", None),
    ],
)
def test_an_update_that_adds_to_what_is_stored_is_found(tmp_path: Path, sql: str, column: str | None) -> None:
    (tmp_path / "m.sql").write_text(sql)
    found = list(increments([tmp_path / "m.sql"]))
    assert [line.split(" is added to")[0] for line in found] == (
        [f"{tmp_path / 'm.sql'}:2: '{column}'"] if column else []
    )


@pytest.mark.parametrize(
    "text",
    [
        "/ho" + "me/ann/lake",
        "cd /wo" + "rk/main",
        "--index" + "-url x",
        "https://pypi" + ".example.org/simple",
        "https://repo.example/x https://maven" + ".example/x",
    ],
)
def test_text_of_one_machine_is_found(tmp_path: Path, text: str) -> None:
    file = tmp_path / "README.md"
    file.write_text(f"one\n{text}\n")
    (found,) = foreign_files([file], own_paths=[])
    assert found.startswith(f"{file}:2: ")


def test_the_checkout_itself_is_found_and_its_neighbour_is_not(tmp_path: Path) -> None:
    file = tmp_path / "a.md"
    file.write_text("/srv/lake/x and /srv/lakes/x")
    assert len(list(foreign_files([file], own_paths=["/srv/lake"]))) == 1


@pytest.mark.parametrize(
    "text", ["$HOME/lake and {root}/work/x", "see https://docs.getdbt.com/reference", "lakehouse/home/x"]
)
def test_other_text_passes(tmp_path: Path, text: str) -> None:
    file = tmp_path / "README.md"
    file.write_text(text)
    assert list(foreign_files([file], own_paths=[])) == []


def test_jars_and_large_files_are_found(tmp_path: Path) -> None:
    jar, large = tmp_path / "x.jar", tmp_path / "rows.csv"
    jar.touch()
    large.write_bytes(b"x" * 1_000_001)
    assert list(foreign_files([jar, large], own_paths=[])) == [
        f"{jar}: a .jar file is fetched or generated, not committed",
        f"{large}: 1,000,001 bytes, above 1 MB",
    ]


@pytest.mark.parametrize(
    ("line", "finding"),
    [
        ("x = spark._jvm.java", "'._jvm' is private to PySpark"),
        ("x = spark._jsc", "'._jsc' is private to PySpark"),
        ("x = table._jdt.deltaLog()", "'._jdt' is private to PySpark"),
        ("x = rows._jdf", "'._jdf' is private to PySpark"),
        ("x = spark._jsparkSession", "'._jsparkSession' is private to PySpark"),
        ("x = DataFrame(dataset, spark)", "'DataFrame(…)' is made of a Java object"),
        ("x = jvm(spark).java", None),
        ("x: DataFrame = rows._columns  # spark._jvm", None),
    ],
)
def test_what_is_private_to_pyspark_is_used_in_one_module(
    tmp_path: Path, line: str, finding: str | None
) -> None:
    job, home = tmp_path / "python_jobs/ingestion/loader.py", tmp_path / JVM_MODULE
    for path in (job, home):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{line}\n")
    found = list(private_surfaces([job, home], tmp_path))
    assert found == ([] if finding is None else [f"{job}:1: {finding}, use {JVM_MODULE}"])


@pytest.mark.parametrize(
    ("line", "is_found"),
    [
        ('condition = f"`{name}` = 1"', True),
        ('condition = f"{identifier(name)} = 1"', False),
        ('"""Reads ``{source}``."""', False),
    ],
)
def test_names_are_quoted_in_one_module(tmp_path: Path, line: str, is_found: bool) -> None:
    job, home = tmp_path / "python_jobs/ingestion/loader.py", tmp_path / SQL_TEXT_MODULE
    for path in (job, home):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{line}\n")
    found = list(quoted_names([job, home], tmp_path))
    assert [finding.split(" ")[0] for finding in found] == ([f"{job}:1:"] if is_found else [])
