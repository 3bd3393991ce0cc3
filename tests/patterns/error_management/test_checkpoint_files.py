"""Checkpointer: what a checkpoint's files say, and which query may go on with them."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from python_jobs.error_management.checkpoint_files import (
    SHUFFLE_PARTITIONS,
    STATE_PROVIDER,
    Checkpoint,
    PartitionLag,
    Plan,
    StateOperator,
    changes,
    lags,
    plan_of,
    read_checkpoint,
    refuse_changes,
    require_durable,
)
from python_jobs.shared.core.failures import DataRefused, WrongUse
from python_jobs.shared.delta.offsets_files import parse_offsets
from tests.support.session import setting
from tests.support.snippets import snippet

PAGE = "docs/error_management.md"
HERE = "tests/patterns/error_management/test_checkpoint_files.py"

METADATA = {
    "batchWatermarkMs": 1709287200000,
    "batchTimestampMs": 1709290800000,
    "conf": {SHUFFLE_PARTITIONS: "200", STATE_PROVIDER: "RocksDB"},
}
OFFSETS_18 = f'v1\n{json.dumps(METADATA)}\n{{"visits":{{"1":1276,"0":1224}}}}\n-\n{{"logOffset":3}}'


def test_an_offsets_file_tells_watermark_settings_and_each_source() -> None:
    offsets = parse_offsets(18, OFFSETS_18)
    assert offsets.batch_id == 18
    assert offsets.watermark == dt.datetime(2024, 3, 1, 10, tzinfo=dt.UTC)
    assert offsets.written_at == dt.datetime(2024, 3, 1, 11, tzinfo=dt.UTC)
    assert offsets.settings[SHUFFLE_PARTITIONS] == "200"
    assert offsets.topics() == {"visits": {0: 1224, 1: 1276}}
    assert offsets.sources[1:] == (None, {"logOffset": 3})
    assert parse_offsets(0, OFFSETS_18.replace("1709287200000", "0")).watermark is None


@pytest.mark.parametrize("text", [OFFSETS_18[:-3], OFFSETS_18[:60], "v1", "v1\n{}\n{}", "v1\n[]"])
def test_an_offsets_file_that_is_cut_off_is_refused(text: str) -> None:
    with pytest.raises(DataRefused, match="offsets file 18 can't be read"):
        parse_offsets(18, text)


def test_an_offsets_file_of_another_version_is_refused() -> None:
    with pytest.raises(DataRefused, match="offsets file 18 is of version 'v9'; v1 can be read"):
        parse_offsets(18, OFFSETS_18.replace("v1", "v9", 1))


def test_the_lag_is_counted_for_each_partition_new_and_truncated_ones_too() -> None:
    ranges = {("visits", 0): (0, 1300), ("visits", 1): (1280, 1290), ("visits", 2): (5, 25)}
    assert lags(parse_offsets(18, OFFSETS_18).topics(), ranges) == [
        PartitionLag("visits", 0, 1224, 1300, lag=76, expired=0),
        PartitionLag("visits", 1, 1276, 1290, lag=14, expired=4),
        PartitionLag("visits", 2, None, 25, lag=20, expired=0),
    ]


@pytest.mark.parametrize(
    "checkpoint", ["/tmp/visits", "/var/tmp/a/b", "/dev/shm/x", "file:///tmp/visits", "hdfs://host/tmp/x"]
)
def test_a_checkpoint_in_a_temporary_folder_is_refused(checkpoint: str) -> None:
    folder = "/".join(checkpoint.removeprefix("file://").removeprefix("hdfs://host").split("/")[:2])
    with pytest.raises(WrongUse, match=f"lies in the temporary folder {folder}"):
        require_durable(checkpoint)


def test_a_temporary_folder_is_found_behind_a_link_and_by_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", "/scratch")
    with pytest.raises(WrongUse, match="temporary folder /scratch"):
        require_durable("/scratch/checkpoints/visits")
    link = tmp_path / "durable"
    link.symlink_to("/var/tmp")
    with pytest.raises(WrongUse, match="lies in the temporary folder"):
        require_durable(str(link / "visits"))


@pytest.mark.parametrize(
    "checkpoint", ["/data/tmp/visits", "/tmpfiles/x", "s3a://bucket/checkpoints/x", "lakehouse/checkpoints/x"]
)
def test_a_checkpoint_beside_the_tables_is_accepted(checkpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/")
    require_durable(checkpoint)


# --- before an upgrade ------------------------------------------------------------------------------------

OFFSETS = parse_offsets(3, OFFSETS_18.replace('\n-\n{"logOffset":3}', ""))
HELD = Checkpoint(
    OFFSETS,
    OFFSETS,
    (StateOperator("stateStoreSave", ("struct<start:timestamp,end:timestamp>", "string")),),
)
SAME = Plan(
    ("kafka",),
    frozenset({"visits"}),
    (StateOperator("stateStoreSave", ("struct<start:timestamp,end:timestamp>", "string")),),
    {SHUFFLE_PARTITIONS: "200", STATE_PROVIDER: "RocksDB"},
)


def test_a_query_that_is_the_same_may_go_on() -> None:
    assert changes(HELD, SAME) == []
    assert changes(Checkpoint(None, None, ()), SAME) == [], "nothing has begun yet"


@pytest.mark.parametrize(
    ("planned", "sentence"),
    [
        ({"sources": ("kafka", "delta")}, "sources were kafka and are kafka, delta"),
        ({"sources": ("delta",)}, "sources were kafka and are delta"),
        ({"topics": frozenset({"visits", "clicks"})}, "Kafka topics were visits and are clicks, visits"),
        ({"operators": ()}, "stateful operators were stateStoreSave and are none"),
        (
            {"operators": (*SAME.operators, StateOperator("dedupe", ("string",)))},
            "stateful operators were stateStoreSave and are dedupe, stateStoreSave",
        ),
        (
            {"operators": (StateOperator("stateStoreSave", ("string",)),)},
            r"keys of the state were \(struct<start:timestamp,end:timestamp>, string\) and are \(string\)",
        ),
    ],
)
def test_what_must_not_change_is_refused(planned: dict[str, object], sentence: str) -> None:
    found = changes(HELD, Plan(**{**SAME.__dict__, **planned}))  # type: ignore[arg-type]
    with pytest.raises(WrongUse, match=f"can't go on with this query: .*{sentence}"):
        refuse_changes("lakehouse/checkpoints/visits", found)


def test_what_spark_keeps_is_told_and_allowed() -> None:
    found = changes(HELD, Plan(**{**SAME.__dict__, "settings": {SHUFFLE_PARTITIONS: "8"}}))
    assert [(change.what, change.held, change.planned, change.allowed) for change in found] == [
        (SHUFFLE_PARTITIONS, "200", "8", True)
    ]
    refuse_changes("lakehouse/checkpoints/visits", found)


@pytest.fixture(scope="module")
def checkpoint(
    spark: SparkSession, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Callable[..., DataFrame]]:
    """Return a checkpoint of a real query over a Delta table, and a function that plans a changed one."""
    folder = tmp_path_factory.mktemp("upgrade")
    source = str(folder / "visits")
    rows = [
        ("a", dt.datetime(2024, 3, 1, 10, 1, tzinfo=dt.UTC), 1),
        ("b", dt.datetime(2024, 3, 1, 10, 2, tzinfo=dt.UTC), 2),
    ]
    spark.createDataFrame(rows, "page string, at timestamp, n int").write.format("delta").save(source)

    def query(keys: tuple[str, ...] = ("page",), deduplicated: bool = False, of: str = "delta") -> DataFrame:
        stream = spark.readStream.format("delta").load(source)
        if of == "file":
            stream = spark.readStream.schema(stream.schema).parquet(source)
        stream = stream.withWatermark("at", "10 minutes").where("n > 0")
        if deduplicated:
            stream = stream.dropDuplicates(["page", "at"])
        return stream.groupBy(F.window("at", "10 minutes"), *keys).agg(F.sum("n").alias("total"))

    sink = query().writeStream.format("noop").option("checkpointLocation", str(folder / "checkpoint"))
    sink.outputMode("update").trigger(availableNow=True).start().awaitTermination()
    return folder / "checkpoint", query


def test_a_real_checkpoint_is_compared_with_real_queries(
    spark: SparkSession, checkpoint: tuple[Path, Callable[..., DataFrame]]
) -> None:
    """By what Spark itself wrote, on one hand, and the plan before it is started, on the other."""
    folder, query = checkpoint
    held = read_checkpoint(spark, str(folder))
    window = "struct<start:timestamp,end:timestamp>"
    assert held.operators == (StateOperator("stateStoreSave", (window, "string")),)
    assert held.offsets is not None
    assert held.done == held.offsets
    assert changes(held, plan_of(query())) == []
    page: dict[str, Any] = {}
    exec(snippet(PAGE, f"{HERE}::test_a_real_checkpoint_is_compared_with_real_queries"), page)
    page["check"](spark, str(folder), query())
    with pytest.raises(WrongUse, match="can't go on with this query: keys of the state were"):
        page["check"](spark, str(folder), query(keys=("n",)))
    assert changes(held, plan_of(query().where("total > 1").select("total"))) == []

    def refused(changed: DataFrame) -> list[tuple[str, str, str]]:
        return [(c.what, c.held, c.planned) for c in changes(held, plan_of(changed)) if not c.allowed]

    assert refused(query(keys=("n",))) == [("keys of the state", f"({window}, string)", f"({window}, int)")]
    assert refused(query(keys=())) == [("keys of the state", f"({window}, string)", f"({window})")]
    assert refused(query(deduplicated=True)) == [
        ("stateful operators", "stateStoreSave", "dedupe, stateStoreSave")
    ]
    assert refused(query().limit(5)) == [
        ("stateful operators", "stateStoreSave", "globalLimit, stateStoreSave")
    ]
    assert refused(query(of="file")) == [("sources", "delta", "file")]
    with setting(spark, SHUFFLE_PARTITIONS, "7"):
        (kept,) = changes(held, plan_of(query()))
    assert (kept.what, kept.held, kept.planned, kept.allowed) == (SHUFFLE_PARTITIONS, "1", "7", True)


def test_the_same_query_is_started_on_it_and_keeps_what_the_checkpoint_holds(
    spark: SparkSession, checkpoint: tuple[Path, Callable[..., DataFrame]]
) -> None:
    folder, query = checkpoint
    sink = query().writeStream.format("noop").option("checkpointLocation", str(folder))
    with setting(spark, SHUFFLE_PARTITIONS, "7"):
        sink.outputMode("update").trigger(availableNow=True).start().awaitTermination()
    held = read_checkpoint(spark, str(folder))
    assert held.offsets is not None
    assert held.offsets.settings[SHUFFLE_PARTITIONS] == "1"
