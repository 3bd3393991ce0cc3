"""Local Aggregator against a shuffle: a topic's records by their key, and a bucketed copy of a table by its key."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from benchmarks.harness import Aim, Comparison, Variant, Workbench
from python_jobs.data_value import bucketed_table
from python_jobs.data_value.local_aggregator import Parameters, aggregated, judged
from python_jobs.data_value.partition_groups import AT, KEY, OFFSET, RECORDS, VALUE
from python_jobs.shared.kafka.bronze_records import bronze_rows
from python_jobs.shared.records.json_records import ERROR_CLASS
from services.kafka import Broker, Record, running_broker

RECORD_COUNT, A_VISIT, PARTITIONS = 2_000_000, 5, 4
ROWS, BUCKETS = 20_000_000, 8
AT_MOST = 0.7


def comparisons(bench: Workbench) -> Iterator[Comparison]:
    """Groups of a topic, then groups of a table."""
    with running_broker(bench.folder / "kafka") as broker:
        yield of_a_topic(bench, broker)
    yield of_a_table(bench)


def of_a_topic(bench: Workbench, broker: Broker) -> Comparison:
    """The visits of a topic's records, with their pages in order of time."""
    count = bench.rows(RECORD_COUNT)
    visits = count // A_VISIT
    broker.create_topic("visits", partitions=PARTITIONS)
    records = (Record(b"category_%d/article" % (n % 20), key=b"%d" % (n % visits)) for n in range(count))
    broker.produce("visits", records, {"linger.ms": 50, "batch.num.messages": 50_000})
    params = Parameters(
        bootstrap_servers=broker.bootstrap_servers,
        topic="visits",
        partitions=PARTITIONS,
        target="none",
        dead_letter="none",
        checkpoint="none",
    )

    def topic() -> DataFrame:
        reader = bench.spark.read.format("kafka").option("subscribe", "visits").option("includeHeaders", True)
        loaded = reader.option("kafka.bootstrap.servers", broker.bootstrap_servers).load()
        return bronze_rows(loaded, 0, {})

    def shuffled() -> DataFrame:
        usable = judged(topic(), params).where(F.col(ERROR_CLASS).isNull())
        record = F.struct(F.col(AT).alias("at"), F.col(OFFSET).alias("offset"), F.col(VALUE).alias("value"))
        return usable.groupBy(KEY).agg(F.array_sort(F.collect_list(record)).alias(RECORDS))

    def local() -> DataFrame:
        return aggregated(topic(), params).where(F.col(ERROR_CLASS).isNull()).select(KEY, RECORDS)

    return Comparison(
        title="Visits of a keyed topic",
        rows=count,
        note=(
            f"{PARTITIONS} partitions, {A_VISIT} records a visit. Both read the topic and write their groups into a "
            "Delta table; what the job's MERGE and checkpoint cost isn't in it."
        ),
        variants=[_written(bench, "shuffled", shuffled), _written(bench, "local", local)],
        aims=[Aim("local", "shuffled", AT_MOST)],
        repetitions=3,
    )


def of_a_table(bench: Workbench) -> Comparison:
    """The groups of a table's key, in a Delta table and in its bucketed copy."""
    spark, rows = bench.spark, bench.rows(ROWS)
    source = str(bench.folder / "source")
    spark.range(rows).select(
        F.md5(F.pmod(F.xxhash64("id"), F.lit(rows // A_VISIT)).cast("string")).alias("visit_id"),
        F.col("id").alias("at"),
    ).write.format("delta").save(source)
    spark.sql("create database if not exists fast")
    bucketed_table.run(
        spark,
        bucketed_table.Parameters(source=source, view="fast.visits", key=["visit_id"], buckets=BUCKETS),
    )

    def groups(table: Callable[[], DataFrame]) -> Callable[[], DataFrame]:
        return lambda: (
            table().groupBy("visit_id").agg(F.count("*").alias("events"), F.min("at"), F.max("at"))
        ).toDF("visit_id", "events", "first", "last")

    return Comparison(
        title="Groups of a table",
        rows=rows,
        note=f"{BUCKETS} buckets. Writing the copy once isn't in it.",
        variants=[
            _written(bench, "shuffled", groups(lambda: bench.table(source))),
            _written(bench, "local", groups(lambda: spark.table("fast.visits"))),
        ],
        aims=[Aim("local", "shuffled", AT_MOST)],
        repetitions=3,
    )


def _written(bench: Workbench, name: str, groups: Callable[[], DataFrame]) -> Variant:
    target = str(bench.folder / name)
    return Variant(
        name,
        lambda: groups().write.format("delta").save(target),
        lambda: bench.table(target),
        lambda: shutil.rmtree(target, ignore_errors=True),
    )
