"""Jobs on tables whose columns have the names of the jobs' own helper columns, and names that need quotes.

Each function is called on DataFrames, in mixed case where Spark ignores it. The twin for the macros is
tests/macros/test_identifiers.py.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import re
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from python_jobs.data_value import bin_pack_orderer, dynamic_joiner
from python_jobs.data_value.bulk_sinks import Output
from python_jobs.error_management import (
    dynamic_late_data_integrator,
    filter_interceptor,
    late_data_detector,
    static_late_data_integrator,
    windowed_counter,
    windowed_deduplicator,
)
from python_jobs.idempotency import backfill, data_overwrite, keyed_sessions, proxy, stateful_merger
from python_jobs.ingestion import (
    change_data_feed,
    compactor,
    data_contract,
    full_loader,
    incremental_table_loader,
    transformation_replicator,
)
from python_jobs.shared.core.failures import WrongUse
from python_jobs.shared.delta.compaction import worth_compacting
from python_jobs.shared.delta.streams import empty_source
from python_jobs.shared.records.json_records import parse_records
from python_jobs.shared.records.session_streams import unusable
from python_jobs.shared.spark.sql_text import identifier
from python_jobs.streaming import batch_reprocessor
from python_jobs.streaming.corrections import ACTION, UNCHANGED, compared
from python_jobs.streaming.gold_rows import Definition
from tests.support.rows import assert_rows

NOW = dt.datetime(2024, 3, 1, 12, tzinfo=dt.UTC)
AWKWARD = ["Partition", "rows", "Date", "a.b", "order`id`", "select"]  # Delta takes no spaces


@pytest.mark.parametrize("names", [("copies", "null_0"), ("Key", "Copies"), ("a.b", "order `id`")])
def test_full_loader_checks_keys_of_any_name(spark: SparkSession, names: tuple[str, str]) -> None:
    rows = spark.createDataFrame([(1, "a"), (1, "a"), (2, None)], ["x", "y"]).toDF(*names)
    found = full_loader.findings(rows, [names[0]], [names[1]]).first()
    assert found is not None
    assert (found["rows"], found["nulls"], found["repeated_keys"]) == (3, [1], 1)
    assert found["repeated_key"] == f'{{"{names[0]}":1}}'
    whole = full_loader.findings(rows, [], list(names)).first()
    assert whole is not None
    assert (whole["rows"], whole["nulls"], whole["repeated_keys"], whole["repeated_key"]) == (
        3,
        [0, 1],
        0,
        None,
    )


@pytest.mark.parametrize("name", ["a.b", "order `id`", "Side", "Record"])
def test_dynamic_joiner_joins_columns_of_any_name(spark: SparkSession, name: str) -> None:
    rows = spark.createDataFrame([("v", NOW)], "id string, at timestamp").toDF(name, "__values")
    expression, other = {name: identifier(name)}, {f"other {name}": identifier(name)}
    params = dynamic_joiner.Parameters(
        left="visits", right="ads", target="joined", late="late", dead_letter="dead", checkpoint="checkpoint",
        left_key=expression, right_key=expression, left_time="__values", right_time="__values",
        left_columns=expression, right_columns=other, left_id=[name], right_id=list(other), max_after="1 minute",
    )  # fmt: skip
    found = dynamic_joiner.joined(rows, rows, params).where("__side is null")
    assert_rows(found.select(*map(identifier, (*expression, *other))), [("v", "v")])


def test_batch_reprocessor_walks_and_corrects_by_a_key_of_any_name(spark: SparkSession) -> None:
    name = "a.b `Window`"
    params = batch_reprocessor.Parameters(
        source="visits", target="sessions", partition="true", key={name: identifier("__id")}, event_time="__at",
        value="`from`", from_="2024-03-01T12", to="2024-03-01T13", until="2024-03-01T14",
    )  # fmt: skip
    visits = [("v", NOW - dt.timedelta(minutes=5), "x"), ("v", NOW, "y")]
    judged = params.judged(spark.createDataFrame(visits, "__id string, __at timestamp, from string"))
    records = judged.withColumn("__event_micros", F.unix_micros("__event_time"))
    found = params.walk.reconstruct(
        lambda hour: records.where(F.col("__event_time").between(hour.start, hour.end)),
        params.range,
        records.where("false").select(identifier(name), F.lit(0).alias("__low"), F.lit(0).alias("__high")),
    )
    rows = params.of_sessions(found.records, found.read)
    changes = compared(rows, rows, [name, "session_id"], "written_at")
    assert_rows(changes.select(ACTION, f"__new.{identifier(name)}", "__new.events"), [(UNCHANGED, "v", 2)])


@pytest.mark.parametrize("group", ["window", "Start", "a.b"])
def test_windowed_counter_groups_by_any_name(spark: SparkSession, group: str) -> None:
    rows = spark.createDataFrame([(NOW, "a"), (NOW, "a"), (NOW, "b")], ["at time", group])
    params = windowed_counter.Parameters(
        source="s", target="t", checkpoint="c", event_time="at time", group_by=[group]
    )
    counted = windowed_counter.windows(rows, params)
    assert counted.columns == ["window_start", "window_end", group, "events"]
    assert_rows(counted.select(identifier(group), "events"), [("a", 2), ("b", 1)])


@pytest.mark.parametrize("name", ["window", "Start", "a.b", "Order By", "newest"])
def test_gold_rows_have_columns_of_any_name(spark: SparkSession, name: str) -> None:
    rows = spark.createDataFrame([(NOW, "a", 1), (NOW, "a", 2), (NOW, "b", 4)], ["at time", name, "n"])
    time, key = "`at time`", {name: identifier(name)}
    windows = Definition(key=key, event_time=time, window="1 hour", sums={f"sum {name}": "n"})
    summed = windows.newest(windows.rows(windows.usable(rows)))
    assert_rows(summed.select(identifier(name), identifier(f"sum {name}")), [("a", 3), ("b", 4)])
    single = Definition(key=key, event_time=time, columns={f"last {name}": "n"})
    newest = single.newest(single.rows(single.usable(rows)))
    assert_rows(newest.select(identifier(name), identifier(f"last {name}")), [("a", 2), ("b", 4)])


@pytest.mark.parametrize("partition", ["files", "Newest", "small_files", "add_size", "a b"])
def test_compactor_chooses_partitions_of_any_name(spark: SparkSession, partition: str) -> None:
    files = [("many", 1, NOW)] * 4 + [("few", 1, NOW)]
    active = spark.createDataFrame(
        files, f"{identifier(partition)} string, __size bigint, __modified_at timestamp"
    )
    policy = compactor.Parameters(table="t", min_small_files=4)
    chosen = worth_compacting(active, [partition], policy, NOW + dt.timedelta(days=1))
    assert chosen.columns == [partition]
    assert_rows(chosen, [("many",)])


@pytest.mark.parametrize("name", ["present_id", "rows", "present", "order id", "a.b"])
def test_incremental_table_loader_compares_and_rejects_rows_of_any_name(
    spark: SparkSession, name: str
) -> None:
    rows = spark.createDataFrame(
        [(1, NOW), (2, NOW), (None, NOW)], f"{identifier(name)} int, `loaded at` timestamp"
    )
    left = incremental_table_loader.not_in(rows, rows.where(f"{identifier(name)} = 1"), [name, "loaded at"])
    assert_rows(left.select(identifier(name)), [(2,), (None,)])
    without = rows.withColumn("loaded at", F.lit(None).cast("timestamp"))
    rejects = incremental_table_loader.undated(without.limit(1), "loaded at", None)
    assert_rows(rejects, [(f'{{"{name}":1,"loaded at":null}}', "loaded at is null")])


def test_keyed_sessions_take_a_key_of_any_name_but_those_of_the_result(spark: SparkSession) -> None:
    rows = spark.createDataFrame(
        [(7, NOW, "home"), (None, NOW, "home")], "dead int, at timestamp, page string"
    )
    declared = {
        "source": "s", "target": "t", "checkpoint": "c", "dead_letter": "d",
        "event_time": "at", "append_time": "at", "value": "page",
    }  # fmt: skip
    params = keyed_sessions.Parameters(**declared, key={"value": "dead", "Event_Time": "dead", "a b": "dead"})
    judged = params.judged(rows)
    assert_rows(
        judged.select("value", "error_message"),
        [(7, None), (None, "the record has NULL in value, Event_Time, a b")],
    )
    assert_rows(unusable(judged).select("dead", "page"), [(None, "home")])
    with pytest.raises(WrongUse, match="key can't name columns that the job writes itself: Status"):
        keyed_sessions.Parameters(**declared, key={"Status": "dead"})


@pytest.mark.parametrize(
    "names",
    [("key", "Before", "rows_before"), ("Op", "event_id", "commit_version"), ("a.b", "after", "select")],
)
def test_change_data_feed_takes_columns_of_any_name(spark: SparkSession, names: tuple[str, str, str]) -> None:
    feed = spark.createDataFrame(
        [(1, "old", "x", "update_preimage", 5, NOW), (1, "new", "x", "update_postimage", 5, NOW)],
        [*names, *change_data_feed.FEED_COLUMNS],
    )
    (event,) = change_data_feed.events(feed, [names[0]], "table").collect()
    assert (event["op"], tuple(event["key"]), event["commit_version"]) == ("u", (1,), 5)
    assert (tuple(event["before"]), tuple(event["after"])) == ((1, "old", "x"), (1, "new", "x"))
    assert event["after"].asDict() == dict(zip(names, (1, "new", "x"), strict=True))


@pytest.mark.parametrize("form", ["within_watermark", "key_and_time", "key_and_window"])
def test_windowed_deduplicator_takes_columns_of_any_name(spark: SparkSession, form: str) -> None:
    names = ["Time", "key_0", "window", "a.b", "select"]
    rows = spark.createDataFrame([(NOW, 1, 2, 3, 4), (NOW, 1, 2, 3, 4), (None, 5, 6, 7, 8)], names)
    params = windowed_deduplicator.Parameters(
        source="s", target="t", dead_letter="d", checkpoint="c", key=["key_0", "`a.b`", "`select`"],
        event_time="Time", form=form, window="1 day" if form == "key_and_window" else None,
    )  # fmt: skip
    judged = windowed_deduplicator.judged(rows.withColumn("Time", F.col("Time")), params)
    assert [name for name in judged.columns if not name.startswith("__")] == [
        *names, "error_class", "error_message",
    ]  # fmt: skip
    assert_rows(
        judged.selectExpr("key_0", "window", "`a.b`", "`select`", "error_class"),
        [(1, 2, 3, 4, None), (1, 2, 3, 4, None), (5, 6, 7, 8, windowed_deduplicator.NULL_EVENT_TIME)],
    )


def test_late_data_detector_takes_columns_of_any_name(spark: SparkSession) -> None:
    names = ["Value", "text", "late", "a.b", "now"]
    rows = spark.createDataFrame([("2024-03-01T11:00:00Z", 1, 2, 3, 4)], names)
    judged = late_data_detector.judged(rows, "Value", NOW, NOW, dt.timedelta(hours=1))
    assert set(judged.columns) == {
        *names,
        *late_data_detector.JUDGEMENT_COLUMNS,
        "error_class",
        "error_message",
    }
    assert_rows(
        judged.selectExpr("Value", "text", "late", "`a.b`", "now", "is_late", "delay_seconds", "error_class"),
        [("2024-03-01T11:00:00Z", 1, 2, 3, 4, True, 3600.0, None)],
    )


def test_transformation_replicator_and_data_overwrite_take_columns_of_any_name(
    spark: SparkSession, tmp_path: Path
) -> None:
    rows = spark.createDataFrame([(1, "x", "secret")], ["Row", "order `id`", "a b"])
    (tmp_path / "contract.yml").write_text(
        "dataset: orders\ncolumns: [{name: row}, {name: 'ORDER `ID`'}, {name: A B, tags: [pii]}]",
        encoding="utf-8",
    )
    contract = data_contract.load_contract(str(tmp_path / "contract.yml"))
    permitted, unknown = transformation_replicator.permitted(rows, contract)
    assert_rows(permitted, [(1, "x")])
    assert unknown == []
    inside = data_overwrite.inside(rows, {"A B": "'secret'", "row": "1"})
    assert inside.columns == ["order `id`"]
    assert_rows(inside, [("x",)])
    assert_rows(data_overwrite.writable(rows, "csv"), [(1, "x", "secret")])


def test_columns_that_differ_from_a_result_in_case_alone_are_refused(
    spark: SparkSession, tmp_path: Path
) -> None:
    rows = spark.createDataFrame([(1, "{}")], ["Rejected_By", "payload"])
    with pytest.raises(
        WrongUse, match="the source has columns that this job writes itself: Rejected_By; rename them"
    ):
        filter_interceptor.flags(rows, [filter_interceptor.Condition("one", "true")])
    schema = spark.createDataFrame([], "rejected_by int").schema
    with pytest.raises(WrongUse, match="the source already has columns of these names: rejected_by"):
        parse_records(rows, schema)
    rows.write.format("delta").save(str(tmp_path / "source"))
    with pytest.raises(
        WrongUse, match=re.escape("the source has columns that this job writes itself: Rejected_By")
    ):
        empty_source(spark, str(tmp_path / "source"), ["rejected_by"])


@pytest.fixture(scope="module")
def awkward(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a Delta table of one row whose columns need quotes or are named like the jobs' own results."""
    path = str(tmp_path_factory.mktemp("awkward") / "source")
    rows = spark.createDataFrame([(dt.date(2024, 3, 1), 1, 2, 3, 4, 5)], AWKWARD)
    rows.write.format("delta").partitionBy("Partition").save(path)
    return path


def test_jobs_that_replace_dates_take_columns_of_any_name(
    spark: SparkSession, awkward: str, tmp_path: Path
) -> None:
    common = {"source": awkward, "partition_column": "Partition"}
    of_a_date = common | {"query": "select * from {source} where `Partition` = {date}"}
    backfill.run(
        spark,
        backfill.Parameters(
            **common, job_id="j", pipeline_version="1", query="select * from {source}", from_="2024-03-01",
            to="2024-03-01", totals=["a.b", "rows"], ledger=f"{tmp_path}/ledger", target=f"{tmp_path}/backfill",
        ),
    )  # fmt: skip
    static_late_data_integrator.run(
        spark,
        static_late_data_integrator.Parameters(
            **of_a_date, target=f"{tmp_path}/static", date="2024-03-01", lookback_days=1
        ),
    )
    dynamic_late_data_integrator.run(
        spark,
        dynamic_late_data_integrator.Parameters(
            **of_a_date, target=f"{tmp_path}/dynamic", state=f"{tmp_path}/state", date="2024-03-01"
        ),
    )
    for job in ("backfill", "static", "dynamic"):
        written = spark.read.format("delta").load(f"{tmp_path}/{job}")
        assert written.columns == AWKWARD, job
        assert_rows(written, [(dt.date(2024, 3, 1), 1, 2, 3, 4, 5)])


def test_stateful_merger_and_proxy_take_columns_of_any_name(
    spark: SparkSession, awkward: str, tmp_path: Path
) -> None:
    query = f"select * from delta.`{awkward}`"
    for day in ("2024-03-01", "2024-03-02"):
        stateful_merger.run(
            spark,
            stateful_merger.Parameters(
                target=f"{tmp_path}/merged", versions=f"{tmp_path}/versions", query=query, execution_time=day,
                key=["order`id`", "a.b"], sequence=["select", "Date"],
            ),
        )  # fmt: skip
    proxy.run(spark, proxy.Parameters(target=f"{tmp_path}/proxy", query=query))
    merged = spark.read.format("delta").load(f"{tmp_path}/merged")
    for rows in (merged, proxy.read_exposed(spark, f"{tmp_path}/proxy")):
        assert rows.columns == AWKWARD
        assert_rows(rows, [(dt.date(2024, 3, 1), 1, 2, 3, 4, 5)])


def test_bin_pack_orderer_takes_columns_of_any_name(spark: SparkSession) -> None:
    given = [("A", "2024-03-01T10:00:30Z", 2), (None, "2024-03-01T10:00:00Z", 1)]
    rows = spark.createDataFrame(given, ["x", "y", "z"]).toDF("Window", "key", "a.b `c`")
    params = bin_pack_orderer.Parameters(
        source="source",
        key="window",
        event_time="KEY",
        ties=["a.b `c`"],
        fields={"d.e `f`": "max(`a.b ``c```) over ()"},
        outputs=[Output("partner", "kinesis", "stream")],
        dead_letter="dead",
        checkpoint="checkpoint",
    )
    judged = params.judged(rows)
    usable, unusable_ = (judged.where(f"error_class is {sign} null") for sign in ("", "not"))
    at = int(dt.datetime(2024, 3, 1, 10, 0, 30, tzinfo=dt.UTC).timestamp()) * 1_000_000
    assert_rows(params.deliverable(usable), [("A", at, [2], '{"d.e `f`":2}')])
    assert_rows(unusable_.select("__record.*", "error_class"), [(*given[1], "NULL_KEY")])
    every = dataclasses.replace(params, ties=[], every="1 minute", fields={"Key": "count(`a.b ``c```)"})
    assert_rows(every.deliverable(usable), [("A", at - 30_000_000, [], '{"Key":1}')])
