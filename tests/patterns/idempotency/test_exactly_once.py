"""Exactly-Once: what a table or a row takes twice and what not, where no other pattern's test says so."""

from __future__ import annotations

import ast
import datetime as dt
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeGuard

import pytest
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from python_jobs.idempotency.inbox import Inbox
from python_jobs.idempotency.versioned_rows import StaleVersion, read_row, set_row
from python_jobs.shared.core.failures import WrongUse
from python_jobs.shared.delta.checkpoints import claim
from python_jobs.shared.delta.commits import latest_version, write_once
from python_jobs.shared.delta.table_streams import TableStream
from python_jobs.shared.postgres.relations import Connection
from services.postgres import Database
from tests.support.pytest_ids import REPOSITORY
from tests.support.rows import assert_rows
from tests.support.snippets import snippet
from tests.support.waiting import at_once

PAGE = "docs/idempotency.md"
HERE = "tests/patterns/idempotency/test_exactly_once.py"
NOW = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)


# --- Delta -------------------------------------------------------------------------------------------------


def test_the_batch_function_of_the_page_writes_each_batch_once(spark: SparkSession, tmp_path: Path) -> None:
    source, checkpoint = str(tmp_path / "source"), str(tmp_path / "checkpoint")
    tables = [str(tmp_path / name) for name in ("visits", "copy")]

    def deliver(*ids: str) -> None:
        rows = spark.createDataFrame([(id_,) for id_ in ids], "visit_id string")
        rows.write.format("delta").mode("append").save(source)
        visits = spark.readStream.format("delta").load(source)
        names = {"spark": spark, "visits": visits, "tables": tables, "checkpoint": checkpoint}
        exec(snippet(PAGE, f"{HERE}::test_the_batch_function_of_the_page_writes_each_batch_once"), names)

    deliver("v1")
    before = [latest_version(spark, table) for table in tables]
    # A crash between the tables' commits and Spark's own mark.
    for mark in (tmp_path / "checkpoint" / "commits").glob("*0*"):
        mark.unlink()
    deliver("v2")
    for table, version in zip(tables, before, strict=True):
        assert_rows(spark.read.format("delta").load(table), [("v1",), ("v2",)])
        assert latest_version(spark, table) == version + 1, "the batch that came again committed nothing"


def test_a_new_checkpoint_is_refused_by_tables_that_the_query_has_filled(
    spark: SparkSession, tmp_path: Path
) -> None:
    table = str(tmp_path / "visits")
    rows = spark.createDataFrame([("v1",)], "visit_id string")
    lost, new = str(tmp_path / "lost"), str(tmp_path / "new")

    def claimed(checkpoint: str, query: str = "visits", **options: Any) -> str:
        return claim(spark, checkpoint, {"job": query}, [table], **options)

    assert claimed(lost) == claimed(lost), "a table that isn't there yet holds nothing"
    write_once(spark, rows, table, transaction=(claimed(lost), 0))
    with pytest.raises(
        WrongUse, match=r"'.*new' is new, but this query has already written to the table '.*visits'"
    ):
        claimed(new)
    assert claimed(str(tmp_path / "beside"), query="another query into the same table")
    assert claimed(lost), "its own checkpoint is never asked"

    writer = claimed(new, start_over=True)
    assert writer != claimed(lost)
    write_once(spark, rows, table, transaction=(writer, 0))
    assert_rows(spark.read.format("delta").load(table), [("v1",), ("v1",)])
    assert claimed(new) == writer, "asked once"


def test_a_declared_stream_knows_its_tables_by_their_ids_and_asks_those_that_it_appends_to(
    spark: SparkSession, tmp_path: Path
) -> None:
    source, target = str(tmp_path / "source"), str(tmp_path / "target")
    rows = spark.createDataFrame([("v1",)], "visit_id string")

    def claimed(checkpoint: str, **others: Any) -> str:
        given = {"job": "visits", "source": source, "writes": {"target": target}, "appends_to": [target]}
        return TableStream(**(given | others), checkpoint=str(tmp_path / checkpoint)).claim(spark)  # type: ignore[arg-type]

    for table in (source, target):
        write_once(spark, rows, table)
    writer = claimed("lost")
    write_once(spark, rows, target, transaction=(writer, 0))
    with pytest.raises(
        WrongUse, match=r"'.*new' is new, but this query has already written to the table '.*target'"
    ):
        claimed("new")
    assert claimed("new", start_over=True) not in (writer, None)
    assert claimed("lost") == writer
    with pytest.raises(WrongUse, match=r"'.*lost' was made for another target; give"):
        claimed("lost", writes={"target": source})


# The Checkpointer looks at its target itself.
ASKS_ITSELF = {"checkpointer.py"}
# It reads a folder of files, so that it isn't declared as the stream of a table; it names its table itself.
READS_FILES = {"api_gateway_replay.py"}
# It reads topics and tables, and names its tables itself.
READS_BOTH = {"sidecar.py"}
# Change Data Capture goes on behind the offsets in its table. What the Change Data Feed publishes again is known by key
# and version. The Metadata Decorator writes no table. A row of the Batch-Microbatch Continuum only replaces one with
# fewer events.
APPEND_AGAIN = {
    "batch_microbatch_continuum.py", "change_data_capture.py", "change_data_feed.py", "metadata_decorator.py",
}  # fmt: skip


def test_every_job_that_appends_names_its_tables_to_the_checkpoint() -> None:
    """A stream is declared with the tables that it appends to; no other job claims a checkpoint."""
    trees = {path.name: ast.parse(path.read_text()) for path in (REPOSITORY / "python_jobs").rglob("*.py")}
    claiming = {name for name, tree in trees.items() if any(map(_is_claim, ast.walk(tree)))}
    assert claiming == {*ASKS_ITSELF, *READS_FILES, *READS_BOTH, "table_streams.py", "topic_streams.py"}
    naming_none = {name for name, tree in trees.items() if any(map(_names_no_table, ast.walk(tree)))}
    assert naming_none == APPEND_AGAIN
    declaring = {name for name, tree in trees.items() if any(map(_is_declaration, ast.walk(tree)))}
    assert declaring == {
        "wrapper.py", "filter_interceptor.py", "dead_letter.py", "windowed_deduplicator.py", "windowed_counter.py",
        "late_data_detector.py", "keyed_sessions.py", "change_data_feed.py", "dead_letters.py", "session_tables.py",
        "static_joiner.py", "dynamic_joiner.py", "hybrid_source.py", "bin_pack_orderer.py",
        "metadata_decorator.py", "batch_microbatch_continuum.py", "change_data_capture.py", "local_aggregator.py",
    }  # fmt: skip


def _names_no_table(node: ast.AST) -> bool:
    return isinstance(node, ast.keyword) and node.arg == "appends_to" and ast.unparse(node.value) == "[]"


def _is_declaration(node: ast.AST) -> bool:
    declared = ("TableStream", "TopicStream", "params.stream")
    return isinstance(node, ast.Call) and ast.unparse(node.func) in declared


def _is_claim(node: ast.AST) -> TypeGuard[ast.Call]:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "claim"


def test_an_option_that_delta_does_not_know_promises_nothing(spark: SparkSession, table_path: str) -> None:
    """The guide's sketch: the option is silently ignored, and the rows are there twice."""
    rows = spark.createDataFrame([("v1",)], "visit_id string")
    for _ in range(2):
        rows.write.format("delta").mode("append").option("idempotentWrites", "true").save(table_path)
    assert_rows(spark.read.format("delta").load(table_path), [("v1",), ("v1",)])


def test_one_of_the_two_options_of_a_transaction_alone_is_refused(
    spark: SparkSession, table_path: str
) -> None:
    rows = spark.createDataFrame([("v1",)], "visit_id string")
    with pytest.raises((PySparkException, Py4JJavaError), match="txnVersion"):
        rows.write.format("delta").mode("append").option("txnAppId", "query").save(table_path)


# --- PostgreSQL --------------------------------------------------------------------------------------------


@pytest.fixture
def connection(database: Database) -> Iterator[Connection]:
    database.execute("create table stock (article text primary key, pieces int, version bigint not null)")
    with database.connect() as connection:
        yield connection


def stock(connection: Connection) -> tuple[int, int]:
    row = read_row(connection, "stock", {"article": "a"})
    assert row is not None
    return row["pieces"], row["version"]


@pytest.mark.postgres
def test_the_second_of_two_absolute_sets_from_one_version_is_refused(connection: Connection) -> None:
    assert set_row(connection, "stock", {"article": "a"}, {"pieces": 42}) == 1
    assert set_row(connection, "stock", {"article": "a"}, {"pieces": 41}, version=1) == 2
    with pytest.raises(
        StaleVersion, match="stock, article a: the values were computed from version 1, which"
    ):
        set_row(connection, "stock", {"article": "a"}, {"pieces": 41}, version=1)
    with pytest.raises(StaleVersion, match="computed from version 0"):
        set_row(connection, "stock", {"article": "a"}, {"pieces": 7})
    assert stock(connection) == (41, 2)
    # Without the guard the second sale is lost: two programs have read 42, and both set 41.
    for _ in range(2):
        connection.execute("update stock set pieces = 41 where article = 'a'")
    assert stock(connection) == (41, 2)


@pytest.mark.postgres
def test_of_two_sets_at_once_one_is_refused(connection: Connection, database: Database) -> None:
    set_row(connection, "stock", {"article": "a"}, {"pieces": 42})

    def sell(seller: Connection) -> int:
        try:
            return set_row(seller, "stock", {"article": "a"}, {"pieces": 41}, version=1)
        except StaleVersion:
            return 0

    with database.connect() as one, database.connect() as other:
        outcomes = at_once(lambda: sell(one), lambda: sell(other))
    assert sorted(outcomes) == [0, 2]
    assert stock(connection) == (41, 2)


@pytest.mark.postgres
def test_a_key_is_text_whatever_it_holds(connection: Connection) -> None:
    article = "x'); drop table stock; --"
    set_row(connection, "stock", {"article": article}, {"pieces": 1})
    assert read_row(connection, "stock", {"article": article}) == {
        "article": article, "pieces": 1, "version": 1,
    }  # fmt: skip
    assert read_row(connection, "stock", {"article": "x"}) is None


@pytest.mark.postgres
def test_sales_of_the_page_take_from_the_stock_once_each(connection: Connection) -> None:
    set_row(connection, "stock", {"article": "a"}, {"pieces": 42})
    sales = [("sale-1", "a", 1), ("sale-2", "a", 2), ("sale-1", "a", 1)]
    names: dict[str, Any] = {"connection": connection, "sales": sales, "now": NOW, "Inbox": Inbox}
    exec(snippet(PAGE, f"{HERE}::test_sales_of_the_page_take_from_the_stock_once_each"), names)
    assert stock(connection) == (39, 3)
