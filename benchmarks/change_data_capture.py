"""Change Data Capture: topic to bronze against the smallest query, and the way from PostgreSQL's commit to silver."""

from __future__ import annotations

import contextlib
import statistics
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from benchmarks.harness import Aim, Comparison, Variant, Workbench
from case_study.continuous import Models, follow
from python_jobs.ingestion.change_data_capture import Parameters, run
from services.debezium import Connector
from services.kafka import Broker, Record, running_broker
from services.postgres import Database, running_postgres
from services.processes import running
from tests.support.dbt_project import DbtProject
from tests.support.snippets import snippets

RECORDS = 2_000_000
WHOLE_RECORD = ("string(key) as key", "topic", "partition", "offset", "timestamp", "headers")
CHANGES_A_SECOND = 500
SECONDS = 180
WARM_AFTER_SECONDS = 60
USERS = 10_000
PAGE_TEST = "tests/patterns/ingestion/test_change_data_capture_sql.py::test_the_models_of_the_page"
MODELS = ("users_flagged", "users_changes", "users_dead_letter", "users_current", "users_history")


def comparisons(bench: Workbench) -> Iterator[Comparison]:
    """Throughput of the job, then the latency of the whole way."""
    with running_broker(bench.folder / "kafka") as broker:
        yield throughput(bench, broker)
        yield latency(bench, broker)


def throughput(bench: Workbench, broker: Broker) -> Comparison:
    """The job against a query that reads a topic and writes its values to Delta, nothing else."""
    count = bench.rows(RECORDS)
    broker.create_topic("records", partitions=2)
    payload = (
        b'{"visit_id": "%d", "page": "category_1/article_7", "context": {"referral": "search", "ad": null}}'
    )
    records = (Record(payload % number, key=b"%d" % (number % 1_000)) for number in range(count))
    broker.produce("records", records, {"linger.ms": 50, "batch.num.messages": 50_000})
    folders = iter(range(1_000_000))
    paths: dict[str, Path] = {}

    def query(name: str, *columns: str) -> None:
        """Write columns of the topic's records to Delta by its own sink: no claim, no times, no checks."""
        paths[name] = folder = bench.folder / f"run-{next(folders)}"
        stream = bench.spark.readStream.format("kafka").option("subscribe", "records")
        stream = stream.option("kafka.bootstrap.servers", broker.bootstrap_servers)
        stream = stream.option("startingOffsets", "earliest").option("includeHeaders", "headers" in columns)
        sink = stream.load().selectExpr("string(value) as payload", *columns).writeStream.format("delta")
        sink = sink.option("checkpointLocation", str(folder / "checkpoint"))
        sink.trigger(availableNow=True).start(str(folder / "bronze")).awaitTermination()

    def job() -> None:
        paths["job"] = folder = bench.folder / f"run-{next(folders)}"
        run(
            bench.spark,
            Parameters(broker.bootstrap_servers, ["records"], str(folder / "bronze"), str(folder / "c")),
        )

    def payloads(name: str) -> DataFrame:
        return bench.table(paths[name] / "bronze").select("payload")

    return Comparison(
        title="Kafka to bronze",
        rows=count,
        variants=[
            Variant("smallest query", lambda: query("smallest"), lambda: payloads("smallest")),
            Variant(
                "a query that keeps the whole record",
                lambda: query("whole", *WHOLE_RECORD),
                lambda: payloads("whole"),
            ),
            Variant("change_data_capture.py", job, lambda: payloads("job")),
        ],
        aims=[Aim("change_data_capture.py", "smallest query", at_most=1.25)],
        repetitions=3,
        note=(
            "The smallest query keeps the value alone, in Delta's own sink. The second one keeps key, value, headers, "
            "position and time, as the job does. 80 % of the throughput is a ratio of 1.25."
        ),
    )


def latency(bench: Workbench, broker: Broker) -> Comparison:
    """500 changes a second in PostgreSQL; how long after its commit each is in the silver table."""
    seconds = max(10, int(SECONDS * bench.scale))
    measured: dict[str, Any] = {}

    def whole_way() -> None:
        with running_postgres(bench.folder / "postgres") as postgres:
            database = postgres.create_database("shop")
            database.execute(
                "create table users (id bigint primary key, name text)",
                f"insert into users select i, 'user ' || i from generate_series(1, {USERS}) as i",
            )
            with running(Connector(bench.folder / "connect", broker, database, ["public.users"], "shop")):
                measured.update(_measure(bench, broker, database, seconds))

    return Comparison(
        title=f"PostgreSQL to silver at {CHANGES_A_SECOND} changes a second",
        rows=CHANGES_A_SECOND * seconds,
        variants=[Variant("models of the page, as the runner runs them", whole_way, None)],
        repetitions=1,
        warm_up=False,
        note=(
            f"The time is that of the whole run, services started and stopped. A change's latency runs from its commit "
            f"in PostgreSQL to the end of the dbt run that made it readable in current state and history; {seconds} "
            "seconds of changes after the snapshot is in silver. The table of dead letters has a schedule of its own "
            "and isn't run. In the first minute the session is still cold."
        ),
        facts=lambda: measured,
    )


class _Watched(Models):
    """The models, and after each run the newest change that is in silver."""

    def __init__(self, project: DbtProject) -> None:
        super().__init__("users_flagged+", exclude=["users_dead_letter"], flags=project.flags())
        self._project = project
        self.seen: list[tuple[int, float]] = []

    def run(self) -> None:
        """Run the models and look."""
        super().run()
        readable = time.time()
        newest = self._project.table("users_current").agg(F.max("lsn")).collect()[0][0]
        self.seen.append((int(newest or 0), readable))


def _measure(bench: Workbench, broker: Broker, database: Database, seconds: int) -> dict[str, Any]:
    spark = bench.spark
    project = DbtProject(bench.folder / "project", spark, _project_files())
    target = str(bench.folder / "bronze")
    params = Parameters(
        broker.bootstrap_servers,
        ["shop.public.users"],
        target,
        str(bench.folder / "checkpoint"),
        trigger="1 second",
    )
    _wait_for_topic(broker, "shop.public.users")
    run(spark, Parameters(params.bootstrap_servers, params.topics, target, params.checkpoint))
    spark.sql(f"create table {project.schema}.users_records using delta location '{target}'")
    models = _Watched(project)
    models.run()
    first_change = models.seen[-1][0]

    writer = threading.Thread(target=_write, args=(database, seconds))
    failure: list[BaseException] = []

    def until_all_is_seen() -> None:
        writer.start()
        writer.join()
        with database.connect() as connection:
            connection.execute("update users set name = 'last' where id = 1")
        deadline = time.time() + 120
        while time.time() < deadline and not failure:
            newest = project.table("users_current").where("id = 1 and name = 'last'")
            if models.seen and not newest.isEmpty():
                break
            time.sleep(1)
        for query in spark.streams.active:
            query.stop()

    watcher = threading.Thread(target=until_all_is_seen)
    watcher.start()
    try:
        with contextlib.suppress(KeyboardInterrupt):
            follow(spark, params, models)
    except BaseException as error:
        failure.append(error)
        raise
    finally:
        watcher.join()
    changes = (
        project.table("users_changes")
        .where(F.col("lsn") > first_change)
        .select("lsn", F.unix_micros("changed_at").alias("at"))
        .collect()
    )
    begin = min(change["at"] for change in changes)
    waits = [
        (
            next(seen for newest, seen in models.seen if newest >= change["lsn"]) - change["at"] / 1e6,
            change["at"],
        )
        for change in changes
    ]
    warm_from = begin + WARM_AFTER_SECONDS * 1_000_000
    return (
        _percentiles("first minute", [wait for wait, at in waits if at < warm_from])
        | _percentiles("after it", [wait for wait, at in waits if at >= warm_from])
        | {"dbt runs": len(models.seen) - 1}
    )


def _percentiles(when: str, waits: list[float]) -> dict[str, Any]:
    waits = sorted(waits)
    if not waits:
        return {}
    return {
        f"changes, {when}": len(waits),
        f"p50 seconds, {when}": round(statistics.median(waits), 2),
        f"p95 seconds, {when}": round(waits[int(len(waits) * 0.95)], 2),
        f"longest seconds, {when}": round(waits[-1], 2),
    }


def _project_files() -> dict[str, str]:
    files = {
        f"models/{name}.sql": text
        for name, text in zip(MODELS, snippets("docs/ingestion.md", PAGE_TEST), strict=True)
    }
    files["models/sources.yml"] = (
        'version: 2\nsources:\n  - name: raw\n    schema: "{{ target.schema }}"\n'
        "    tables: [{name: users_records}]\n"
    )
    return files


def _write(database: Database, seconds: int) -> None:
    """Commit CHANGES_A_SECOND updates a second, each in a transaction of its own."""
    begun = time.monotonic()
    with database.connect() as connection:
        for number in range(CHANGES_A_SECOND * seconds):
            ahead = number / CHANGES_A_SECOND - (time.monotonic() - begun)
            if ahead > 0:
                time.sleep(ahead)
            connection.execute("update users set name = %s where id = %s", [f"n{number}", number % USERS + 1])


def _wait_for_topic(broker: Broker, topic: str) -> None:
    deadline = time.monotonic() + 60
    while topic not in broker.topics() or len(broker.records(topic)) < USERS:
        if time.monotonic() > deadline:
            raise TimeoutError(f"the snapshot did not reach {topic}")
        time.sleep(0.2)
