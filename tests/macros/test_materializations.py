"""Each config of dbt's is honoured or refused in a sentence, by each materialization on the kernel of macros/shared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import yaml

from tests.support.dbt_project import DbtProject
from tests.support.rows import assert_rows
from tests.support.session import environment

DAY_1, DAY_2 = "2026-01-05", "2026-01-06"
LATER = '{"start": "2026-02-01", "end": "2026-02-02"}'  # a sample without rows of these days
SOURCES = """
sources: [{name: raw, schema: '{{ target.schema }}', tables: [{name: landed, config: {event_time: day}}]}]
"""
# What a model of each needs, and the table that holds its rows of DAY_1.
DAILY = """
select id, amount, day from {{ source('raw', 'landed') }}
where day = date'{{ lakehouse_patterns.logical_date() }}'
"""
WHERE = {"lakehouse_patterns": {"data_overwrite": {"where": "day = date'{logical_date}'"}}}
# The time of a change is the day; a history has the columns of TYPES and its own.
CHANGES = DAILY.replace("day from", "day, day as changed_on from")
MERGED = {
    "materialized": "incremental",
    "incremental_strategy": "merge",
    "unique_key": "id",
    "on_schema_change": "append_new_columns",  # dbt wants it, or `fail`, for a contract
    "meta": {"lakehouse_patterns": {"merger": {"deletes": "none"}}},
}
AUDITED: dict[str, Any] = {"lakehouse_patterns": {"awap": {
    "period": "day",
    "audits": [{"name": "dated", "type": "record", "valid_when": "day > date'2000-01-01'", "outcome": "dispatch",
                "max_invalid_share": 0.5}],
}}}  # fmt: skip
BASES: dict[str, dict[str, Any]] = {
    "data_overwrite": {"materialized": "data_overwrite", "meta": WHERE},
    "versioned_table": {"materialized": "versioned_table"},
    "unit_tables": {"materialized": "unit_tables"},
    "merger": MERGED,
    "scd2": {
        "materialized": "scd2",
        "unique_key": "id",
        "meta": {"lakehouse_patterns": {"scd2": {"changed_at": "changed_on"}}},
    },
    "awap": {"materialized": "awap", "meta": AUDITED},
}
QUERIES = dict.fromkeys(BASES, DAILY) | {"scd2": CHANGES}
STORED = {
    "data_overwrite": "{}",
    "versioned_table": "{}_20260105",
    "unit_tables": "{}_2026_01",
    "merger": "{}",
    "awap": "{}",
    "scd2": "{}",
}
TYPES = {"id": "int", "amount": "int", "day": "date"}
OWN = {
    "scd2": {
        "effective_from": "date",
        "effective_to": "date",
        "is_current": "boolean",
        "closed_by_delete": "boolean",
        "changes": "array<struct<changed_at: date, is_deleted: boolean>>",
    }
}
DESCRIPTION = "It's the \\ of a day, one row a `id`."
COMMENTS = {"id": "The customer's key", "amount": "100 \\ %", "day": None}

# Over a model with an event_time, of which dbt renders a subquery with --sample and in a microbatch.
IN_WINDOW = {
    "sampled": "{{ lakehouse_patterns.windowed_deduplicator(ref('merger'), key='id', order_by='amount') }}",
    "sampled_version": "select * from {{ lakehouse_patterns.time_travel(ref('merger'), version=0) }}",
}
MICROBATCH = {
    "materialized": "incremental",
    "incremental_strategy": "microbatch",
    "event_time": "day",
    "begin": DAY_1,
    "batch_size": "day",
    "partition_by": "day",
}

HONOURED: dict[str, Any] = {
    "persist_docs": {"relation": True, "columns": True},
    "partition_by": "day",
    "tblproperties": {"shop.owner": "ada"},
    "post_hook": "create or replace temporary view hooked_{{ this.identifier }} as select 1 as one",
}
# Not these: a unit that an operation makes would lack the constraints of a contract.
WITH_CONTRACT = ("data_overwrite", "versioned_table", "merger", "scd2", "awap")
REFUSED: dict[str, dict[str, Any]] = {
    "data_overwrite": {
        "incremental_predicates": ["true"],
        "file_format": "parquet",
        "clustered_by": "id",
        "buckets": 2,
        "unique_key": "id",
        "incremental_strategy": "merge",
        "merge_exclude_columns": ["id"],
        "on_schema_change": "sync_all_columns",
        "full_refresh": True,
        "sql_header": "select 1",
    },
    "versioned_table": {
        "incremental_predicates": ["true"],
        "file_format": "parquet",
        "unique_key": "id",
        "clustered_by": "id",
        "on_schema_change": "append_new_columns",
        "sql_header": "select 1",
    },
    "unit_tables": {
        "incremental_predicates": ["true"],
        "file_format": "parquet",
        "contract": {"enforced": True},
        "on_schema_change": "append_new_columns",
        "full_refresh": True,
    },
    "scd2": {
        "incremental_predicates": ["true"],
        "file_format": "parquet",
        "clustered_by": "id",
        "buckets": 2,
        "incremental_strategy": "merge",
        "merge_update_columns": ["amount"],
        "on_schema_change": "sync_all_columns",
    },
    "awap": {
        "incremental_predicates": ["true"],
        "file_format": "parquet",
        "clustered_by": "id",
        "buckets": 2,
        "unique_key": "id",
        "incremental_strategy": "merge",
        "merge_exclude_columns": ["id"],
        "on_schema_change": "sync_all_columns",
    },
    "merger": {"clustered_by": "id", "buckets": 2, "sql_header": "select 1"},
}
# Built by no test: their contracts fail. With a companion table for the rows that they don't publish.
UNBUILT: dict[str, dict[str, Any]] = {
    "awap": {},
    "merger": {"meta": {"lakehouse_patterns": {"merger": {"deletes": "none", "on_null_key": "quarantine"}}}},
    "scd2": {
        "meta": {"lakehouse_patterns": {"scd2": {"changed_at": "changed_on", "on_null_key": "quarantine"}}},
    },
}
REFUSALS = [(name, config) for name, configs in REFUSED.items() for config in configs]


def model(select: str, **config: Any) -> str:
    """Return a model's text."""
    return f"{{{{ config(**{config!r}) }}}}\n{select}\n"


def properties(names: dict[str, bool]) -> str:
    """Return the YAML of models, with a contract where it is said so."""
    return yaml.safe_dump(
        {
            "models": [
                {
                    "name": name,
                    "description": DESCRIPTION,
                    "config": {"contract": {"enforced": True}} if contract else {},
                    "constraints": [{"type": "check", "name": "positive", "expression": "amount >= 0"}]
                    if contract
                    else [],
                    "columns": [
                        {
                            "name": column,
                            "data_type": data_type,
                            "description": COMMENTS.get(column) or "",
                            "constraints": [{"type": "not_null"}] if contract and column == "id" else [],
                        }
                        for column, data_type in (TYPES | OWN.get(name.removeprefix("unbuilt_"), {})).items()
                    ],
                }
                for name, contract in names.items()
            ]
        }
    )


class Kernel:
    """One project of all materializations; see `kernel`."""

    def __init__(self, project: DbtProject) -> None:
        self.project, self.spark = project, project.spark

    def land(self, *rows: tuple[int, int, str]) -> None:
        """Make the source hold these rows."""
        frame = self.spark.createDataFrame(list(rows), "id int, amount int, day string")
        self.project.source("landed", frame.withColumn("day", frame.day.cast("date")))

    def run(self, day: str, *arguments: str) -> None:
        with environment(LOGICAL_DATE=day):
            self.project.run("run", *arguments)

    def fails(self, day: str, *arguments: str) -> str:
        with environment(LOGICAL_DATE=day):
            return self.project.fails("run", *arguments)

    def operations(self, name: str) -> list[str]:
        """Return what each commit of a table did, the oldest first."""
        return [commit["operation"] for commit in reversed(self.project.history(name))]

    def commented(self, name: str) -> int:
        """Return how many commits of a table changed comments of its columns."""
        return sum(operation.startswith("CHANGE COLUMN") for operation in self.operations(name))

    def rows(self, name: str) -> list[tuple[Any, ...]]:
        return [(row.id, row.amount, str(row.day)) for row in self.project.table(name).collect()]

    def comments(self, name: str) -> dict[str, str | None]:
        """Return the comments of a relation's columns, and its own under an empty name."""
        lines = self.spark.sql(f"describe extended {self.project.schema}.{name}").collect()
        end = next(
            number for number, line in enumerate(lines) if not line.col_name or line.col_name[0] == "#"
        )
        own = {line.col_name: line.data_type for line in lines[end:]}
        return {line.col_name: line.comment for line in lines[:end]} | {"": own.get("Comment")}


@pytest.fixture(scope="module")
def kernel(make_project: Callable[..., DbtProject]) -> Kernel:
    """All honoured configs in one model a materialization, run for DAY_1 and again; refused ones in a model each."""
    files = {"models/sources.yml": SOURCES}
    for name, base in BASES.items():
        files[f"models/{name}.sql"] = model(QUERIES[name], **base, **HONOURED)
        silent = {"file_format": None} if name in ("versioned_table", "unit_tables") else {}
        files[f"models/fresh_{name}.sql"] = model(QUERIES[name], **base | silent)
    for name, config in REFUSALS:
        files[f"models/refused/{name}_{config}.sql"] = model(
            QUERIES[name], **BASES[name] | {config: REFUSED[name][config]}
        )
        files[f"models/refused/granted_{name}.sql"] = model(
            QUERIES[name], **BASES[name], grants={"select": ["ada"]}
        )
    files["models/described.sql"] = model(
        "select * from {{ lakehouse_patterns.time_travel(ref('data_overwrite'), version=0) }}",
        materialized="view",
    )
    in_time = {"event_time": "day"}
    files["models/merger.sql"] = model(QUERIES["merger"], **BASES["merger"], **HONOURED, **in_time)
    for name, query in IN_WINDOW.items():
        files[f"models/{name}.sql"] = model(query, materialized="view")
    files["models/microbatch.sql"] = model(IN_WINDOW["sampled"], **MICROBATCH)
    for name in UNBUILT:
        files[f"models/unbuilt_{name}.sql"] = model(QUERIES[name], **BASES[name] | UNBUILT[name])
    contracts = {name: name in WITH_CONTRACT for name in BASES}
    contracts |= {"unit_tables_contract": True} | {f"unbuilt_{name}": True for name in UNBUILT}
    files["models/properties.yml"] = properties(contracts)
    kernel = Kernel(make_project(files))
    kernel.land((1, 10, DAY_1), (2, 20, DAY_1), (3, 30, DAY_2))
    kernel.run(DAY_1, "--select", *BASES)
    return kernel


@pytest.mark.parametrize("name", BASES)
def test_descriptions_partitions_properties_and_hooks_are_honoured(kernel: Kernel, name: str) -> None:
    assert_rows(kernel.rows(name), [(1, 10, DAY_1), (2, 20, DAY_1)])
    assert kernel.comments(name) == COMMENTS | dict.fromkeys(OWN.get(name, ())) | {"": DESCRIPTION}
    stored = f"{kernel.project.schema}.{STORED[name].format(name)}"
    detail = kernel.spark.sql(f"describe detail {stored}").collect()[0]
    assert detail.partitionColumns == ["day"]
    assert detail.properties.get("shop.owner") == "ada"
    assert kernel.spark.table(f"hooked_{name}").count() == 1


@pytest.mark.parametrize("name", WITH_CONTRACT)
def test_constraints_of_a_contract_are_the_table_s(kernel: Kernel, name: str) -> None:
    stored = f"{kernel.project.schema}.{STORED[name].format(name)}"
    detail = kernel.spark.sql(f"describe detail {stored}").collect()[0]
    assert detail.properties.get("delta.constraints.positive") == "amount >= 0"
    with pytest.raises(Exception, match="DELTA_VIOLATE_CONSTRAINT"):
        kernel.spark.sql(f"insert into {stored} (id, amount, day) values (null, 1, date'{DAY_1}')")


def test_a_rerun_that_changes_no_description_commits_none(kernel: Kernel) -> None:
    history = kernel.operations("scd2")
    version = kernel.operations("versioned_table_20260105")
    kernel.run(DAY_1, "--select", "data_overwrite", "merger", "scd2", "awap", "versioned_table")
    assert kernel.operations("scd2") == history
    assert kernel.operations("awap")[-1] == "WRITE"
    assert kernel.commented("awap") == 1
    assert kernel.operations("versioned_table_20260105")[len(version)].startswith("CREATE OR REPLACE TABLE")
    assert kernel.operations("versioned_table_20260105")[len(version) + 1 :] == version[1:]
    assert kernel.operations("data_overwrite")[-1] == "WRITE"
    assert kernel.commented("data_overwrite") == 1
    assert kernel.commented("merger") == 1
    assert kernel.commented("scd2") == 1
    kernel.spark.sql(
        f"alter table {kernel.project.schema}.merger alter column amount comment 'changed by hand'"
    )
    kernel.run(DAY_1, "--select", "merger")
    assert kernel.commented("merger") == 3
    assert kernel.comments("merger") == COMMENTS | {"": DESCRIPTION}


def test_a_contract_is_checked_at_every_run(kernel: Kernel) -> None:
    """Not only when dbt-spark creates the table: the source's amounts have become texts. Nothing is left behind."""
    landed = kernel.project.table("landed").union(
        kernel.spark.sql(f"select cast(null as int), 5, date'{DAY_1}'")
    )
    kernel.project.source(
        "landed", landed.withColumn("amount", landed.amount.cast("string")).localCheckpoint()
    )
    error = kernel.fails(DAY_1, "--select", *WITH_CONTRACT, *(f"unbuilt_{name}" for name in UNBUILT))
    kernel.land((1, 10, DAY_1), (2, 20, DAY_1), (3, 30, DAY_2))
    assert error.count("This model has an enforced contract that failed") == len(WITH_CONTRACT) + len(UNBUILT)
    left = kernel.spark.sql(f"show tables in {kernel.project.schema} like 'unbuilt_*'")
    assert left.where("not isTemporary").collect() == []
    for name in WITH_CONTRACT:
        assert_rows(kernel.rows(name), [(1, 10, DAY_1), (2, 20, DAY_1)])


def test_rows_that_break_a_contract_are_not_published(kernel: Kernel) -> None:
    """They are found before rejects and results are written, in a new table as in one that has its constraints."""
    kernel.land((1, 11, DAY_1), (2, -20, DAY_1), (3, -30, DAY_2))
    commits = kernel.operations("awap__audit_results")
    error = kernel.fails(DAY_1, "--select", "awap", "unbuilt_awap")
    kernel.land((1, 10, DAY_1), (2, 20, DAY_1), (3, 30, DAY_2))
    assert error.count("the number of rows that do not hold amount >= 0 is 1, allowed at most 0") == 2
    assert_rows(kernel.rows("awap"), [(1, 10, DAY_1), (2, 20, DAY_1)])
    assert kernel.operations("awap__audit_results") == commits
    assert not kernel.spark.catalog.tableExists(f"{kernel.project.schema}.unbuilt_awap")


@pytest.fixture(scope="module")
def refusals(kernel: Kernel) -> str:
    return kernel.fails(DAY_1, "--select", "path:models/refused")


def _of(name: str) -> str:
    return "meta.lakehouse_patterns.merger" if name == "merger" else f"materialized='{name}'"


@pytest.mark.parametrize(("name", "config"), REFUSALS)
def test_what_has_no_effect_is_refused(refusals: str, name: str, config: str) -> None:
    sentence = {
        "on_schema_change": f"on_schema_change of materialized='{name}' must be one of",
        "full_refresh": f"materialized='{name}' knows the rows of one slice",
        "file_format": f"materialized='{name}' needs file_format='delta', got 'parquet'",
        "sql_header": f"{_of(name)} has no use for sql_header: Spark takes one statement at a time, use a pre_hook",
    }.get(config, f"{_of(name)} has no use for {config}")
    (line,) = [text for text in refusals.split("\n") if sentence in text]
    failed = [text for text in refusals.split("\n") if text.startswith(f"{name}_{config}: error")]
    assert line
    assert failed


@pytest.mark.parametrize("name", REFUSED)
def test_grants_are_asked_of_the_engine_which_has_none(refusals: str, name: str) -> None:
    assert f"granted_{name}: error" in refusals


def test_empty_never_changes_published_rows(kernel: Kernel) -> None:
    """And it makes what is not there yet, without rows: the models that read it can be checked as well."""
    commits = {name: kernel.operations(STORED[name].format(name)) for name in BASES}
    kernel.run(DAY_1, "--empty", "--select", *BASES, *(f"fresh_{name}" for name in BASES))
    for name in BASES:
        assert_rows(kernel.rows(name), [(1, 10, DAY_1), (2, 20, DAY_1)])
        assert kernel.operations(STORED[name].format(name)) == commits[name]
        assert kernel.rows(f"fresh_{name}") == []
    refused = kernel.fails(DAY_1, "--empty", "--full-refresh", "--select", "merger", "scd2", "awap")
    assert refused.count("--empty would replace the rows of") == 2
    assert_rows(kernel.rows("awap"), [(1, 10, DAY_1), (2, 20, DAY_1)])
    kernel.run(DAY_1, "--select", *(f"fresh_{name}" for name in BASES))
    for name in BASES:
        assert_rows(kernel.rows(f"fresh_{name}"), [(1, 10, DAY_1), (2, 20, DAY_1)])


def test_sample_never_changes_published_rows(kernel: Kernel) -> None:
    """The sample holds no row of DAY_1: published as the whole it would take all rows from readers."""
    commits = {name: kernel.operations(STORED[name].format(name)) for name in BASES}
    refused = kernel.fails(DAY_1, "--sample", LATER, "--select", *BASES, "unbuilt_awap")
    assert refused.count("--sample reads a part of each input, which m") == len(BASES) + 1
    for name in BASES:
        assert f"would publish as the whole in {kernel.project.schema}.{name}: leave out --sample" in refused
        assert_rows(kernel.rows(name), [(1, 10, DAY_1), (2, 20, DAY_1)])
        assert kernel.operations(STORED[name].format(name)) == commits[name]
    assert not kernel.spark.catalog.tableExists(f"{kernel.project.schema}.unbuilt_awap")


def test_a_macro_that_describes_a_relation_works_with_empty(kernel: Kernel) -> None:
    kernel.run(DAY_1, "--empty", "--select", "described")
    assert kernel.rows("described") == []
    kernel.run(DAY_1, "--select", "described")
    assert kernel.project.table("described").columns == ["id", "amount", "day"]


def test_a_macro_that_describes_a_relation_works_on_a_time_window(kernel: Kernel) -> None:
    """The published table has rows of DAY_1: a sample has them if it begins on that day, and so has a microbatch."""
    window = '{"start": "%s", "end": "%s"}'
    kernel.run(DAY_1, "--sample", window % (DAY_1, DAY_2), "--select", *IN_WINDOW)
    for name in IN_WINDOW:
        assert_rows(kernel.rows(name), [(1, 10, DAY_1), (2, 20, DAY_1)])
    kernel.run(DAY_1, "--sample", LATER, "--select", *IN_WINDOW)
    for name in IN_WINDOW:
        assert kernel.rows(name) == []
    days = ("--event-time-start", DAY_1, "--event-time-end", DAY_2)
    kernel.run(DAY_1, "--select", "microbatch", *days)
    assert_rows(kernel.rows("microbatch"), [(1, 10, DAY_1), (2, 20, DAY_1)])


def test_docs_are_generated_without_a_logical_date(kernel: Kernel) -> None:
    """What runs a model needs one: a default day would load or replace rows of a day that nobody asked for."""
    with environment(LOGICAL_DATE=""):
        kernel.project.run(
            "docs", "generate", "--select", "data_overwrite", "versioned_table", "unit_tables", "awap"
        )
    assert "day = date'1970-01-01'" in kernel.project.compiled("awap")
    assert "the logical date must be a day such as 2024-01-01" in kernel.fails(
        "", "--select", "data_overwrite"
    )


def test_a_second_day_of_a_unit_commits_its_rows_alone(kernel: Kernel) -> None:
    """Comments are on the view, which is not made again either. It is the module's last test: it adds a day."""
    commits = kernel.operations("unit_tables_2026_01")
    kernel.run(DAY_2, "--select", "unit_tables")
    assert kernel.operations("unit_tables_2026_01") == [*commits, "WRITE"]
    assert kernel.comments("unit_tables") == COMMENTS | {"": DESCRIPTION}
    assert_rows(kernel.rows("unit_tables"), [(1, 10, DAY_1), (2, 20, DAY_1), (3, 30, DAY_2)])
