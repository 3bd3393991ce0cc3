"""Jobs on tables whose columns have the names of the jobs' own helper columns, and names that need quotes.

Each function is called on DataFrames, in mixed case where Spark ignores it. The twin for the macros is
tests/macros/test_identifiers.py.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import re
from pathlib import Path
from typing import Any, Literal

import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from python_jobs.data_value import (
    bin_pack_orderer,
    bucketed_table,
    distributed_aggregator,
    dynamic_joiner,
    incremental_sessionizer,
    metadata_decorator,
    stateful_sessionizer,
    static_joiner,
    static_joiner_api,
    wrapper,
)
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
    change_data_capture,
    change_data_feed,
    compactor,
    data_contract,
    full_loader,
    incremental_table_loader,
    readiness_marker,
    transformation_replicator,
)
from python_jobs.shared.core.failures import DataRefused, WrongUse
from python_jobs.shared.core.json_text import json_text
from python_jobs.shared.delta.compaction import worth_compacting
from python_jobs.shared.delta.streams import empty_source
from python_jobs.shared.kafka.bronze_records import RAW_TYPES
from python_jobs.shared.records.json_records import parse_records
from python_jobs.shared.records.session_streams import unusable
from python_jobs.shared.spark.sql_text import identifier
from python_jobs.shared.spark.times import with_timestamp
from python_jobs.streaming import (
    batch_reprocessor,
    batch_reprocessor_records,
    hybrid_source,
    sidecar,
    zero_etl_synchronizer,
)
from python_jobs.streaming.batch_sinks import SideSink
from python_jobs.streaming.corrections import ACTION, UNCHANGED, compared
from python_jobs.streaming.gold_rows import Definition
from python_jobs.streaming.inputs import Source
from python_jobs.streaming.synchronized_topics import SynchronizedTopic
from tests.support.pytest_ids import REPOSITORY
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
        judged.selectExpr("Value", "text", "late", "`a.b`", "now", "is_late", "error_class"),
        [("2024-03-01T11:00:00Z", 1, 2, 3, 4, True, None)],
    )
    tally = late_data_detector.Tally(("a.b", "now"), [("3", "4")])
    assert tally.usable(judged, names).columns == [*names, *late_data_detector.JUDGEMENT_COLUMNS]


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
    for name in ("__Position", "__result_0"):
        with pytest.raises(WrongUse, match=f"columns that this job writes itself: {name}; rename them"):
            filter_interceptor.flags(
                rows.select(F.lit(1).alias(name)), [filter_interceptor.Condition("one", "true")]
            )
    schema = spark.createDataFrame([], "rejected_by int").schema
    with pytest.raises(WrongUse, match="the source already has columns of these names: rejected_by"):
        parse_records(rows, schema)
    for name in ("__record", "__Typed"):
        with pytest.raises(WrongUse, match=f"columns that this job writes itself: {name}; rename them"):
            parse_records(
                rows.select("payload", F.lit(1).alias(name)), spark.createDataFrame([], "a int").schema
            )
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


def test_a_column_with_the_name_of_a_job_s_time_is_refused(spark: SparkSession) -> None:
    rows = spark.createDataFrame([(NOW, 1)], ["at", "__Event_Time"])
    assert with_timestamp(rows, "__other", "at").columns == ["at", "__Event_Time", "__other"]
    with pytest.raises(WrongUse, match="columns that this job writes itself: __Event_Time; rename them"):
        with_timestamp(rows, "__event_time", "at")


def test_static_joiner_joins_columns_of_any_name(spark: SparkSession) -> None:
    params = static_joiner.Parameters(
        source="facts", reference="devices", target="joined", checkpoint="checkpoint",
        keys={"Versions": "order `id`"}, columns={"a.b": "Facts"}, as_of="`select`", effective_from="From",
        effective_to="To",
    )  # fmt: skip
    facts = spark.createDataFrame([(1, NOW), (2, NOW)], ["Versions", "select"])
    reference = spark.createDataFrame(
        [(1, "phone", NOW, None)], "`order `` id` int, Facts string, From timestamp, To timestamp"
    ).withColumnRenamed("order ` id", "order `id`")
    join = static_joiner.Join(spark, params)
    join.require_one_row_a_key(reference)
    found = join.joined(facts, reference)
    assert found.columns == ["Versions", "select", "a.b", "__matched"]
    assert_rows(found.selectExpr("versions", "`a.b`"), [(1, "phone"), (2, None)])


def test_static_joiner_api_joins_columns_of_any_name(spark: SparkSession) -> None:
    params = static_joiner_api.Parameters(
        source="facts", target="joined", cache="cache", key="a.b", column="order `id`",
        url="http://localhost/bulk", keys_parameter="ids",
    )  # fmt: skip
    rows = spark.createDataFrame([("k", 1), ("x", 2)], ["a.b", "Lookup_Key"])
    cache = spark.createDataFrame([("k", "found", NOW)], ["lookup_key", "value", "looked_up_at"])
    found = static_joiner_api.joined(rows, cache, params)
    assert found.columns == ["a.b", "Lookup_Key", "order `id`"]
    assert_rows(found, [("k", 1, "found"), ("x", 2, None)])


def test_distributed_aggregator_takes_columns_of_any_name(spark: SparkSession) -> None:
    params = distributed_aggregator.Parameters(
        source="files", schema="a int", jdbc_url="jdbc:postgresql://h/d", user="u", password_env="P",
        table="devices", query="select * from {files}", day="Run", date="2024-03-01",
        dimensions=["a.b", "order `id`"], measures={"Value": "`select`"}, valid_when={"Value": "`select` > 0"},
        target="cube",
    )  # fmt: skip
    day = dt.date(2024, 3, 1)
    rows = spark.createDataFrame(
        [(day, "a", "x", 2), (day, "a", "x", 4)], ["run", "A.B", "order `id`", "select"]
    )
    cells = distributed_aggregator.cube(rows, params).where("grouping_id = 0")
    assert_rows(cells.selectExpr("`a.b`", "`order ``id```", "row_count", "value_sum"), [("a", "x", 2, 6)])
    with pytest.raises(DataRefused, match=re.escape('the key {"order `id`":"x"} more than once')):
        distributed_aggregator.require_unique(rows, ["order `id`"], "devices")


def test_incremental_sessionizer_takes_columns_of_any_name(spark: SparkSession, awkward: str) -> None:
    params = incremental_sessionizer.Parameters(
        source=awkward, partition="`Partition` = {date}", key={"a.b": "`a.b`", "Order Id": "rows"},
        event_time="Partition", value="`select`", ties=["order`id`", "select"], run="2024-03-01T00",
        first_run="2024-03-01T00", pending="pending", target="target", dead_letter="dead",
    )  # fmt: skip
    this = incremental_sessionizer.Run(spark, params)
    open_ = this.rows(this.judged()).where("status = 'open'")
    assert_rows(open_.selectExpr("`a.b`", "`Order Id`", "events", "values"), [(3, 1, 1, ["5"])])


def test_hybrid_source_takes_columns_of_any_name(spark: SparkSession) -> None:
    columns = {"Rows": "`a.b`", "order `id`": "`select`"}
    params = hybrid_source.Parameters(
        history="history", topic="visits", bootstrap_servers="b", boundary={"0": 1}, history_columns=columns,
        live_columns={"Rows": "1", "order `id`": "payload"}, target="target", checkpoint="checkpoint",
    )  # fmt: skip
    rows = spark.createDataFrame([("visits", 0, 0, 5, 6)], ["Topic", "partition", "offset", "a.b", "select"])
    found = params.history_rows(rows)
    assert found.columns[3:5] == list(columns)
    assert_rows(found.select(*map(identifier, columns)), [(5, 6)])


def test_batch_reprocessor_records_takes_columns_of_any_name(spark: SparkSession, tmp_path: Path) -> None:
    names = ["__is_gone", "__New", "__old", "__id", "a.b", "order`id`", "t", "Select"]
    source, target = f"{tmp_path}/source", f"{tmp_path}/target"
    params = batch_reprocessor_records.Parameters(
        source=source, topic="visits", begin={"0": 0}, end={"0": 3}, target=target,
        columns={name: identifier("__action") for name in names},
    )  # fmt: skip

    def corrected(*values: int) -> dict[str, Any]:
        records = [("visits", 0, offset, value) for offset, value in enumerate(values)]
        rows = spark.createDataFrame(records, "topic string, partition int, offset bigint, __action int")
        rows.write.format("delta").mode("overwrite").save(source)
        return batch_reprocessor_records.run(spark, params) | {"target": None}

    none = {"added": 0, "replaced": 0, "removed": 0, "unchanged": 0, "target": None}
    assert corrected(1, 2, 3) == none | {"added": 3}
    assert corrected(1, 5) == none | {"replaced": 1, "removed": 1, "unchanged": 1}
    found = spark.read.format("delta").load(target).select(*map(identifier, names))
    assert_rows(found, [(1,) * len(names), (5,) * len(names)])


def test_zero_etl_synchronizer_declares_fields_of_any_name(spark: SparkSession, tmp_path: Path) -> None:
    names = ["__typed", "__Record", "Typed", "unreadable_fields", "a.b", "order id", "select"]

    def entry(**fields: str) -> SynchronizedTopic:
        schema = tmp_path / "fields.json"
        schema.write_text(json_text(fields))
        return SynchronizedTopic(topic="visits", table="raw.visits", location="raw", schema=str(schema))

    declared = zero_etl_synchronizer.declared_fields(entry(**dict.fromkeys(names, "int")))
    value = json_text({name: number for number, name in enumerate(names)}).encode()
    raw = [(bytearray(value), None, "visits", 0, 0, NOW, None)]
    records = spark.createDataFrame(raw, ", ".join(f"{name} {type_}" for name, type_ in RAW_TYPES.items()))
    rows = zero_etl_synchronizer.rows_of(spark, records, declared)
    assert rows.columns == [*RAW_TYPES, *names]
    assert_rows(rows.select(*map(identifier, names)), [tuple(range(len(names)))])
    with pytest.raises(WrongUse, match="has fields that are named like columns of the record: Offset; leave"):
        zero_etl_synchronizer.declared_fields(entry(Offset="int"))


def test_metadata_decorator_takes_columns_of_any_name(spark: SparkSession) -> None:
    rows = spark.createDataFrame([("k", "v", 1)], ["a.b", "order `id`", "Topic"])
    found = metadata_decorator.decorate(rows, "order `id`", "a.b", {"job_version": "v1"})
    named = found.selectExpr("string(key) as k", "string(value) as v", "headers.key as names")
    assert_rows(named, [("k", "v", ["job_version"])])


def test_bucketed_table_takes_a_key_of_any_name(spark: SparkSession, awkward: str, tmp_path: Path) -> None:
    spark.sql(f"create schema awkward_buckets location '{tmp_path}/buckets'")
    try:
        key = ["order`id`", "a.b"]
        report = bucketed_table.run(
            spark, bucketed_table.Parameters(source=awkward, view="awkward_buckets.fast", key=key, buckets=2)
        )
        assert bucketed_table.bucketing(spark, report["copy"]) == (2, key)
        assert_rows(spark.table("awkward_buckets.fast"), [(dt.date(2024, 3, 1), 1, 2, 3, 4, 5)])
    finally:
        spark.sql("drop schema awkward_buckets cascade")


def test_wrapper_passes_columns_of_any_name_on_but_that_of_the_envelope(spark: SparkSession) -> None:
    rows = spark.createDataFrame([("{}", 1, 2)], ["order `id`", "Processing_Context", "a.b"])
    found = wrapper.wrap(rows, "order `id`", "v1", 1)
    assert found.columns == ["value", "Processing_Context", "a.b"]
    assert_rows(found.selectExpr("processing_context", "`a.b`"), [(1, 2)])
    wrapper.check_columns(rows, "a.b")
    with pytest.raises(WrongUse, match="the source has a column 'Value', which is the name of the envelope"):
        wrapper.check_columns(rows.withColumnRenamed("a.b", "Value"), "order `id`")


@pytest.mark.parametrize("late", ["strict", "mutable"])
def test_readiness_marker_takes_times_of_any_name(
    spark: SparkSession, late: Literal["strict", "mutable"]
) -> None:
    params = readiness_marker.Parameters(
        source="s", target="folder/t", event_column="a.b", ingestion_column="order `id`", from_="2024-03-01T12",
        to="2024-03-01T13", late=late,
    )  # fmt: skip
    before = NOW - dt.timedelta(hours=1)
    rows = spark.createDataFrame([(NOW, NOW, 1), (before, NOW, 2)], ["a.b", "order `id`", "Start"])
    (hour,) = params.window.split("hour")
    assert_rows(readiness_marker.rows_of(rows, params, hour).select("Start"), [(1,)])
    came_late = readiness_marker.came_late(rows, params, hour)
    assert [(touched.start, count) for touched, count in readiness_marker.touched(came_late, params)] == [
        (before, 1)
    ]


def test_change_data_capture_derives_columns_of_any_name_but_the_record_s() -> None:
    given: dict[str, Any] = {"bootstrap_servers": "b", "topics": ["t"], "target": "t", "checkpoint": "c"}
    change_data_capture.Parameters(**given, derive={"Event Date": "to_date(timestamp)"})
    with pytest.raises(WrongUse, match="derive names columns that the record itself has: Payload"):
        change_data_capture.Parameters(**given, derive={"Payload": "1"})


def test_sidecar_takes_columns_of_any_name(spark: SparkSession, tmp_path: Path) -> None:
    rows = spark.createDataFrame([(1, 2, 3)], ["x", "y", "z"]).toDF("Nothing", "a.b", "select")
    columns = {"Rows": "Nothing", "order`id`": "`a.b`", "Sink": "`select`"}
    source = Source("web.site", columns, table="web")
    sink = SideSink(
        "out", "select `order``id``` as `Select`, Sink as `a.b` from {rows}", table=f"{tmp_path}/out"
    )
    parameters = sidecar.Parameters(
        sources=[source], target=f"{tmp_path}/all", sinks=[sink], checkpoint="checkpoint"
    )
    writer = sidecar.BatchWriter(parameters, [], parameters.batch_sinks(), "writer", None)
    writer.write(source.rows(rows), 0)
    target, out = (spark.read.format("delta").load(f"{tmp_path}/{name}") for name in ("all", "out"))
    own = ["origin", "source", "batch_id", "writer_id", "ingested_at"]
    assert target.columns == [*columns, *own]
    assert_rows(target.drop(*own), [(1, 2, 3)])
    assert_rows(out, [(2, 3, 0, "writer")])
    assert out.columns == ["Select", "a.b", "batch_id", "writer_id"]


def test_sessions_of_a_stream_take_columns_of_any_name(spark: SparkSession, tmp_path: Path) -> None:
    """One stream for Stateful Sessionizer, Partial State Writer and Keyed Sessions: their state is one class."""
    names = ["At", "a.b", "order`id`", "Started_At", "select"]
    given = [
        (NOW, 1, 2, 3, 4),
        (NOW, 1, 2, 3, 5),
        (None, 1, 2, 3, 6),
        (NOW + dt.timedelta(hours=1), 9, 9, 9, 9),
    ]
    rows = spark.createDataFrame(given, "at timestamp, x int, y int, z int, w int").toDF(*names)
    rows.coalesce(1).write.format("delta").save(f"{tmp_path}/source")
    params = stateful_sessionizer.Parameters(
        source=f"{tmp_path}/source", key={"a.b": "`a.b`", "Order`Id`": identifier("order`id`")},
        event_time="At", value="`select`", ties=["Started_At", "select"], target=f"{tmp_path}/target",
        dead_letter=f"{tmp_path}/dead", checkpoint=f"{tmp_path}/checkpoint",
    )  # fmt: skip
    report = stateful_sessionizer.run(spark, params)
    assert (report["sessions_written"], report["dead"]) == (1, 1)
    closed = spark.read.format("delta").load(f"{tmp_path}/target")
    assert_rows(closed.selectExpr("`a.b`", "`Order``Id```", "values"), [(1, 2, ["4", "5"])])


DATES = "test_jobs_that_replace_dates_take_columns_of_any_name"
MERGER_AND_PROXY = "test_stateful_merger_and_proxy_take_columns_of_any_name"
REPLICATOR_AND_OVERWRITE = "test_transformation_replicator_and_data_overwrite_take_columns_of_any_name"
IN_ANY_CASE = "test_columns_that_differ_from_a_result_in_case_alone_are_refused"
FIXED = (
    "the columns that it reads are those of a table or a topic of ours, and it adds none to a user's table"
)
NO_COLUMN = "it copies or counts what is in files and names no column of a table"
USERS_CONDITIONS = "it evaluates the user's conditions on his table and adds no column"
# Each job on Spark with its test here, or the reason why it has none.
JOBS = {
    "data_value/bin_pack_orderer": "test_bin_pack_orderer_takes_columns_of_any_name",
    "data_value/bucketed_table": "test_bucketed_table_takes_a_key_of_any_name",
    "data_value/distributed_aggregator": "test_distributed_aggregator_takes_columns_of_any_name",
    "data_value/dynamic_joiner": "test_dynamic_joiner_joins_columns_of_any_name",
    "data_value/incremental_sessionizer": "test_incremental_sessionizer_takes_columns_of_any_name",
    "data_value/local_aggregator": FIXED,
    "data_value/metadata_decorator": "test_metadata_decorator_takes_columns_of_any_name",
    "data_value/stateful_sessionizer": "test_sessions_of_a_stream_take_columns_of_any_name",
    "data_value/static_joiner": "test_static_joiner_joins_columns_of_any_name",
    "data_value/static_joiner_api": "test_static_joiner_api_joins_columns_of_any_name",
    "data_value/wrapper": "test_wrapper_passes_columns_of_any_name_on_but_that_of_the_envelope",
    "error_management/checkpointer": FIXED,
    "error_management/dead_letter": IN_ANY_CASE,
    "error_management/dead_letter_queue": FIXED,
    "error_management/dead_letter_replay": FIXED,
    "error_management/dynamic_late_data_integrator": DATES,
    "error_management/filter_interceptor": IN_ANY_CASE,
    "error_management/kafka_consumer": FIXED,
    "error_management/late_data_detector": "test_late_data_detector_takes_columns_of_any_name",
    "error_management/static_late_data_integrator": DATES,
    "error_management/windowed_counter": "test_windowed_counter_groups_by_any_name",
    "error_management/windowed_deduplicator": "test_windowed_deduplicator_takes_columns_of_any_name",
    "idempotency/backfill": DATES,
    "idempotency/data_overwrite": REPLICATOR_AND_OVERWRITE,
    "idempotency/keyed_files": "its files are named by the run, and their columns are those of the user's query",
    "idempotency/keyed_sessions": "test_keyed_sessions_take_a_key_of_any_name_but_those_of_the_result",
    "idempotency/proxy": MERGER_AND_PROXY,
    "idempotency/stateful_merger": MERGER_AND_PROXY,
    "idempotency/time_travel": "it names versions and no column",
    "idempotency/transactional_writer": "it writes the columns of the user's query and adds none",
    "ingestion/change_data_capture": "test_change_data_capture_derives_columns_of_any_name_but_the_record_s",
    "ingestion/change_data_feed": "test_change_data_feed_takes_columns_of_any_name",
    "ingestion/compactor": "test_compactor_chooses_partitions_of_any_name",
    "ingestion/full_loader": "test_full_loader_checks_keys_of_any_name",
    "ingestion/incremental_loader": FIXED,
    "ingestion/incremental_table_loader": (
        "test_incremental_table_loader_compares_and_rejects_rows_of_any_name"
    ),
    "ingestion/passthrough_replicator": NO_COLUMN,
    "ingestion/readiness_marker": "test_readiness_marker_takes_times_of_any_name",
    "ingestion/transformation_replicator": REPLICATOR_AND_OVERWRITE,
    "quality/audit_files": NO_COLUMN,
    "streaming/api_gateway_replay": FIXED,
    "streaming/batch_microbatch_continuum": "test_gold_rows_have_columns_of_any_name",
    "streaming/batch_reprocessor": "test_batch_reprocessor_walks_and_corrects_by_a_key_of_any_name",
    "streaming/batch_reprocessor_records": "test_batch_reprocessor_records_takes_columns_of_any_name",
    "streaming/hybrid_source": "test_hybrid_source_takes_columns_of_any_name",
    "streaming/partial_state_writer": "test_sessions_of_a_stream_take_columns_of_any_name",
    "streaming/sidecar": "test_sidecar_takes_columns_of_any_name",
    "streaming/streaming_reprocessor": USERS_CONDITIONS,
    "streaming/zero_etl_synchronizer": "test_zero_etl_synchronizer_declares_fields_of_any_name",
}


def test_every_job_has_its_names_tested_or_a_reason() -> None:
    """A job that is added to neither fails here; so does an entry whose test is not in this file."""
    jobs = {
        str(path.relative_to(REPOSITORY / "python_jobs").with_suffix(""))
        for path in (REPOSITORY / "python_jobs").rglob("*.py")
        if re.search(r"^    run_job\(Parameters, ", path.read_text(encoding="utf-8"), re.MULTILINE)
    }
    assert jobs - JOBS.keys() == set()
    tests = {name for name in JOBS.values() if name.startswith("test_")}
    assert tests <= globals().keys()
