"""Transformation Replicator in SQL: the same rules as the job's, checked while a model is compiled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from dbt.adapters.spark.relation import SparkRelation
from dbt_common.exceptions import DbtRuntimeError
from pyspark.sql import SparkSession

from python_jobs.ingestion import data_contract
from python_jobs.ingestion.data_contract import load_contract
from python_jobs.ingestion.transformation_replicator import permitted
from python_jobs.shared.core.failures import DataRefused
from tests.patterns.ingestion.test_transformation_replicator import (
    CONTRACT,
    EXPECTED,
    KEY,
    KEY_NAME,
    PLANTED,
    ROWS,
    USERS,
    planted_in,
    pseudonym,
)
from tests.support.dbt_project import DbtProject
from tests.support.render import MacroRenderer
from tests.support.rows import assert_rows
from tests.support.snippets import snippets

PAGE = "docs/ingestion.md"
THIS = "tests/patterns/ingestion/test_transformation_replicator_sql.py::"


@pytest.fixture(scope="module")
def users(spark: SparkSession) -> SparkRelation:
    """Return a relation that holds ROWS."""
    spark.sql("create database if not exists replicated")
    spark.createDataFrame(ROWS, USERS).write.mode("overwrite").saveAsTable("replicated.users")
    return SparkRelation.create(schema="replicated", identifier="users")


def relation_of(spark: SparkSession, sql: str) -> SparkRelation:
    spark.sql("create database if not exists replicated")
    spark.sql(f"create or replace view replicated.changed as {sql}")
    return SparkRelation.create(schema="replicated", identifier="changed")


def columns_of(text: str) -> list[dict[str, Any]]:
    return yaml.safe_load(text)["columns"]


def test_the_macro_and_the_job_select_the_same(
    render: MacroRenderer, spark: SparkSession, users: SparkRelation, ansi_modes: str, tmp_path: Path
) -> None:
    contract = tmp_path / "users.yml"
    contract.write_text(CONTRACT, encoding="utf-8")
    columns = render("transformation_replicator", relation=users, contract=columns_of(CONTRACT))
    assert columns.split(",\n    ") == data_contract.select_list(load_contract(str(contract)))
    assert_rows(spark.sql(f"select {columns} from replicated.users"), EXPECTED)
    assert KEY not in columns


# What dbt says of a relation and a contract that don't fit, and the job says too.
REFUSED = [
    ("select 1 as a, 2 as phone", "[{name: a}]", "doesn't list phone"),
    ("select 1 as a", "[{name: a}, {name: email}]", "the contract names email, which the source doesn't have; it"),
    ("select named_struct('b', 1, 'c', 2) as a", "[{name: a.b}]", "doesn't list a.c"),
    ("select named_struct('b', 1) as a", "[{name: a}]", "a is a struct: the contract must list its fields"),
    ("select named_struct('b', 1) as a", "[{name: a.b}, {name: a.c}]", "the contract names a.c"),
    ("select array(named_struct('b', 1, 'c', 2)) as a", "[{name: a.element.b}]", "doesn't list a.element.c"),
    ("select array(named_struct('b', 1)) as a", "[{name: a}]", "a is an array: the contract must list its elements"),
    ("select map('b', named_struct('c', 1, 'd', 2)) as a", "[{name: a, keys: [b]}, {name: a.value.c}]",
     "doesn't list a.value.d"),
    ("select map('b', 1) as a", "[{name: a}]", "a is a map: the contract must list the keys that may leave"),
    ("select map('b', array(1)) as a", "[{name: a, keys: [b]}]", "a is a map: the contract must list the fields"),
    ("select parse_json('1') as a", "[{name: a}]", "a is a variant"),
    ("select 1 as a", "[{name: a, keys: [b]}]", "a is a int: it has no fields"),
    ("select array(1) as a", "[{name: a, transform: {substring: 2}}]", "the contract can only transform what is in it"),
]  # fmt: skip


@pytest.mark.parametrize(("sql", "columns", "sentence"), REFUSED)
def test_a_relation_that_does_not_fit_the_contract_is_refused_when_compiled(
    render: MacroRenderer, spark: SparkSession, tmp_path: Path, sql: str, columns: str, sentence: str
) -> None:
    relation = relation_of(spark, sql)
    with pytest.raises(DbtRuntimeError) as by_macro:
        render("transformation_replicator", relation=relation, contract=yaml.safe_load(columns))
    contract = tmp_path / "contract.yml"
    contract.write_text(f"dataset: d\ncolumns: {columns}", encoding="utf-8")
    with pytest.raises(DataRefused) as by_job:
        permitted(spark.sql(sql), load_contract(str(contract)))
    assert sentence in str(by_macro.value)
    assert sentence in str(by_job.value)


@pytest.mark.parametrize(
    ("columns", "sentence"),
    [
        ("[{name: a}, {name: A}]", "lists A twice"),
        ("[{name: id, tags: [pii]}]", "nothing may leave"),
        ("[{name: a, transform: {md5: x}}]", "must be one of keyed_hash, substring, constant"),
        ("[{name: a, transform: {keyed_hash: 'the key itself'}}]", "the name of the environment variable"),
        ("[{name: a, transform: {substring: 0}}]", "from 1"),
        ("[{name: a}, {name: a.b}]", "list, tag and transform the fields only"),
        ("[]", "there is no contract"),
    ],
)
def test_a_wrong_contract_is_refused_when_compiled(
    render: MacroRenderer, spark: SparkSession, columns: str, sentence: str
) -> None:
    absent = SparkRelation.create(schema="replicated", identifier="absent")
    with pytest.raises(DbtRuntimeError, match=sentence):
        render("transformation_replicator", relation=absent, contract=yaml.safe_load(columns))
    with pytest.raises(DbtRuntimeError, match="on_unknown must be one of fail, drop, got 'keep'"):
        render("transformation_replicator", relation=absent, contract=[{"name": "a"}], on_unknown="keep")
    assert "`a` as `a`" in render("transformation_replicator", relation=absent, contract=[{"name": "a"}])


def test_nested_values_in_maps_and_arrays(
    render: MacroRenderer, spark: SparkSession, ansi_modes: str
) -> None:
    sql = """
        select
            map('x', named_struct('keep', 'k', 'drop', 's'), 'y', named_struct('keep', 'n', 'drop', 's')) as m,
            array(named_struct('in', array(named_struct('keep', 1, 'drop', 's')))) as a,
            'gone' as extra
    """
    relation = relation_of(spark, sql)
    contract = yaml.safe_load(
        "[{name: m, keys: [x]}, {name: m.value.keep}, {name: m.value.drop, tags: [pii]},"
        " {name: a.element.in.element.keep, transform: {constant: 'c'}},"
        " {name: a.element.in.element.drop, tags: [pii]}]"
    )
    columns = render("transformation_replicator", relation=relation, contract=contract, on_unknown="drop")
    assert_rows(spark.sql(f"select {columns} from replicated.changed"), [({"x": ("k",)}, [([("c",)],)])])


def test_each_tagged_column_and_field_that_a_replica_still_has_is_named(
    render: MacroRenderer, spark: SparkSession
) -> None:
    """The test `no_sensitive_columns`: in any case of the names, in structs and arrays, but not what is transformed."""
    replica = relation_of(
        spark,
        """
        select 1 as id, 'x' as Email, named_struct('city', 'c', 'Street', 's') as address,
            array(named_struct('version', 1, 'owner', 'o', 'serial', 's')) as devices
        """,
    )
    contract = yaml.safe_load(
        "[{name: id}, {name: email, tags: [pii]}, {name: address.city}, {name: address.street, tags: [pii]},"
        " {name: devices.element.version}, {name: devices.element.owner, tags: [pii]},"
        " {name: devices.element.serial, tags: [pii], transform: {constant: 'x'}}]"
    )
    found = spark.sql(
        render("test_no_sensitive_columns", model=replica, replica_of="users", contract=contract)
    )
    assert_rows(found, [("Email",), ("address.Street",), ("devices.element.owner",)])


def page_models() -> list[str]:
    """Return the page's YAML and model, with a key that is set."""
    codes = snippets(PAGE, f"{THIS}test_the_models_of_the_page")
    return [code.replace("USERS_PSEUDONYM_KEY", KEY_NAME) for code in codes]


@pytest.fixture(scope="module")
def project(make_project: Any, spark: SparkSession) -> DbtProject:
    """Build the page's models while email may still leave, and a model whose test must fail."""
    schema, model = page_models()
    before = schema.replace("{name: email, config: {tags: [pii]}}", "{name: email}").replace(
        "USERS_PSEUDONYM_KEY", KEY_NAME
    )
    project = make_project({"models/schema.yml": before, "models/staging_users.sql": model})
    columns = "id string, plan string, email string, address struct<city: string, street: string>"
    rows = [(row[0], row[2], row[3], row[7]) for row in ROWS]
    project.source("users", spark.createDataFrame(rows, columns))
    project.run("build")
    return project


def test_the_models_of_the_page(project: DbtProject, make_project: Any, spark: SparkSession) -> None:
    """A column that is tagged later is gone with the next run, and so is every file that held it."""
    target = project.location / "staging_users"
    assert "email" in project.table("staging_users").columns
    assert planted_in(target) == [PLANTED[0]]

    schema, model = page_models()
    (project.root / "models" / "schema.yml").write_text(schema, encoding="utf-8")
    project._manifest = None
    assert "no_sensitive_columns" in project.fails("test"), "the target still has it"
    project.run("build")
    assert project.table("staging_users").columns == ["id", "plan", "address"]
    assert_rows(
        project.table("staging_users"),
        [
            (pseudonym("u1"), "free", ("Paris",)),
            (pseudonym("u2"), "", None),
            (pseudonym("u1"), "free", ("Paris",)),
        ],
    )
    assert planted_in(target) == []
    logs = b"".join(
        path.read_bytes() for path in [*project.root.rglob("*.log"), *project.root.rglob("target/**/*.sql")]
    )
    assert [text for text in (*PLANTED, KEY) if text.encode() in logs] == []

    model_file = project.root / "models" / "staging_users.sql"
    model_file.write_text(model.replace("interval 0 hours", "interval 1 hours"), encoding="utf-8")
    project._manifest = None
    assert (
        "transformation_replicator_purge removes the files of all older versions, but "
        f"{project.schema}.staging_users keeps them: its delta.deletedFileRetentionDuration is interval 1 hours"
    ) in project.fails("run")

    project.source("users", project.table("users").selectExpr("*", "'1' as phone"))
    assert "doesn't list phone" in project.fails("run")
    assert "phone" not in project.table("staging_users").columns

    model_file.write_text(model.replace("'delta.dataSkippingNumIndexedCols': '0',", ""), encoding="utf-8")
    project._manifest = None
    assert "a replica needs tblproperties" in project.fails("run")
