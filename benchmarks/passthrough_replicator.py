"""Passthrough Replicator against `cp` and against the smallest loop of a consumer and a producer.

Files: 2 GB, of which one file has 1.2 GB, copied in a running session, and once by `spark-submit` with a heap of
1 GB, which holds neither the folder nor the file. Topic: 500,000 records of 200 bytes in two partitions.
"""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from confluent_kafka import Consumer, Producer, TopicPartition

from benchmarks.harness import Aim, Comparison, Variant, Workbench
from python_jobs.ingestion import passthrough_replicator
from python_jobs.shared.kafka.replication import Parameters, Replicator
from services.kafka import Broker, Record, running_broker

LARGE_BYTES, SMALL_FILES, SMALL_BYTES = 1_200_000_000, 800, 1_000_000
RECORDS = 500_000
JOB = Path(passthrough_replicator.__file__)


class Rates:
    """What the fastest run of each variant moved in a second."""

    def __init__(self, megabytes: float) -> None:
        self._megabytes = megabytes
        self._seconds: dict[str, float] = {}

    def timed(self, name: str, run: Callable[[], object]) -> Callable[[], None]:
        """Return ``run`` with a clock."""

        def measured() -> None:
            begin = time.perf_counter()
            run()
            seconds = time.perf_counter() - begin
            self._seconds[name] = min(seconds, self._seconds.get(name, seconds))

        return measured

    def facts(self) -> dict[str, Any]:
        """Return one line for each variant."""
        return {
            f"MB/s, {name}": f"{self._megabytes / seconds:,.0f}" for name, seconds in self._seconds.items()
        }


def write_folder(folder: Path, scale: float) -> int:
    """Write one large and many small files; return their bytes."""
    folder.mkdir(parents=True)
    block = os.urandom(SMALL_BYTES)
    large, small = int(LARGE_BYTES * scale), max(2, int(SMALL_FILES * scale))
    with (folder / "large.bin").open("wb") as file:
        for _ in range(max(1, large // SMALL_BYTES)):
            file.write(block)
    for number in range(small):
        path = folder / f"date={number % 10}" / f"part-{number}"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(block)
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def files_of(bench: Workbench, folder: Path) -> Any:
    """Return one row for each file of a folder: its path, size and checksum."""
    rows = []
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        checksum = 0
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                checksum = zlib.crc32(block, checksum)
        rows.append((str(path.relative_to(folder)), path.stat().st_size, checksum))
    return bench.spark.createDataFrame(rows, "path string, size bigint, checksum bigint")


def folders(bench: Workbench) -> Comparison:
    """Copy the folder with `cp` and with the job."""
    source = bench.folder / "source"
    size = write_folder(source, bench.scale)
    targets = {name: bench.folder / name for name in ("cp", "job", "heap")}
    rates = Rates(size / 1e6)

    def job() -> None:
        parameters = passthrough_replicator.Parameters(source=str(source), target=str(targets["job"]))
        passthrough_replicator.run(bench.spark, parameters)

    def with_a_small_heap() -> dict[str, Any]:
        command = ["spark-submit", "--driver-memory", "1g", str(JOB), "--source", str(source)]
        subprocess.run([*command, "--target", str(targets["heap"])], check=True, stdout=subprocess.DEVNULL)
        copied = sum(path.stat().st_size for path in targets["heap"].rglob("*") if path.is_file())
        if copied != size:
            raise AssertionError(f"{copied} of {size} bytes were copied")
        return rates.facts() | {"replicated by a process with a heap of 1 GB": f"{copied:,} bytes"}

    return Comparison(
        title=f"A folder of {size / 1e9:.1f} GB, one file of {LARGE_BYTES * bench.scale / 1e9:.1f} GB",
        rows=sum(path.is_file() for path in source.rglob("*")),
        note=(
            "Rows are files. Both copy names, bytes and times; the job also reads each copy back and compares it with "
            "the source, byte by byte."
        ),
        variants=[
            Variant(
                "cp -a",
                rates.timed(
                    "cp -a",
                    lambda: subprocess.run(["cp", "-a", str(source), str(targets["cp"])], check=True),
                ),
                lambda: files_of(bench, targets["cp"]),
                lambda: shutil.rmtree(targets["cp"], ignore_errors=True),
            ),
            Variant(
                "the job, 4 threads",
                rates.timed("the job", job),
                lambda: files_of(bench, targets["job"]),
                lambda: shutil.rmtree(targets["job"], ignore_errors=True),
            ),
        ],
        aims=[Aim("the job, 4 threads", "cp -a", 2.5)],
        repetitions=5,
        facts=with_a_small_heap,
    )


class Topics:
    """A topic and the replicas of each run."""

    def __init__(self, broker: Broker, records: int) -> None:
        self.broker = broker
        self.source = broker.create_topic("source", partitions=2)
        self._numbers = itertools.count()
        self.targets: dict[str, str] = {}
        value = b"v" * 190
        broker.produce(
            self.source,
            (
                Record(b"%d" % n + value, b"%d" % (n % 1000), (("h", b"1"),), n % 2, 1_700_000_000_000 + n)
                for n in range(records)
            ),
            {"max.in.flight": 5, "linger.ms": 50},
        )

    def fresh(self, variant: str) -> None:
        """Give a variant an empty topic."""
        self.targets[variant] = self.broker.create_topic(f"{variant}_{next(self._numbers)}", partitions=2)

    def replicate(self, variant: str) -> None:
        """Copy with the program."""
        replicator = Replicator(
            Parameters(
                source_topic=self.source,
                source_bootstrap_servers=self.broker.bootstrap_servers,
                target_topic=self.targets[variant],
                target_bootstrap_servers=self.broker.bootstrap_servers,
                until_end=True,
            )
        )
        try:
            replicator.run(threading.Event())
        finally:
            replicator.close()

    def loop(self, variant: str) -> None:
        """Copy with a consumer and a producer and nothing else: no position, no transactions, no header."""
        servers = {"bootstrap.servers": self.broker.bootstrap_servers}
        consumer = Consumer(servers | {"group.id": "loop", "enable.partition.eof": True})
        producer = Producer(servers | {"linger.ms": 5})
        consumer.assign([TopicPartition(self.source, partition, 0) for partition in (0, 1)])
        ends = 0
        while ends < 2:
            for message in consumer.consume(1_000, 0.2):
                if message.error():
                    ends += 1
                    continue
                while True:
                    try:
                        producer.produce(
                            self.targets[variant],
                            message.value(),
                            message.key(),
                            message.partition(),
                            timestamp=message.timestamp()[1],
                            headers=message.headers(),
                        )
                        break
                    except BufferError:
                        producer.poll(0.2)
            producer.poll(0)
        producer.flush()
        consumer.close()

    def content(self, bench: Workbench, variant: str) -> Any:
        """Return, for each partition of a replica, the number of records and a checksum over them in order."""
        rows = {partition: (partition, 0, 0) for partition in (0, 1)}
        for message in self.broker.records(self.targets[variant]):
            partition, count, checksum = rows[message.partition()]
            text = repr((message.key(), message.value(), message.timestamp()[1])).encode()
            rows[partition] = (partition, count + 1, zlib.crc32(text, checksum))
        return bench.spark.createDataFrame(list(rows.values()), "p int, records bigint, checksum bigint")


def topics(bench: Workbench, broker: Broker) -> Comparison:
    """Copy the topic with the program and with the smallest loop."""
    records = bench.rows(RECORDS)
    copies = Topics(broker, records)
    rates = Rates(records * 200 / 1e6)
    return Comparison(
        title="A topic of two partitions",
        rows=records,
        note=(
            "Records of 200 bytes with key, header and timestamp, one broker. The loop knows no position: killed, it "
            "starts again or loses records."
        ),
        variants=[
            Variant(
                "consumer and producer",
                rates.timed("consumer and producer", lambda: copies.loop("loop")),
                lambda: copies.content(bench, "loop"),
                lambda: copies.fresh("loop"),
            ),
            Variant(
                "the program",
                rates.timed("the program", lambda: copies.replicate("replica")),
                lambda: copies.content(bench, "replica"),
                lambda: copies.fresh("replica"),
            ),
        ],
        repetitions=3,
        facts=rates.facts,
    )


def comparisons(bench: Workbench) -> Iterator[Comparison]:
    """Folders, then topics."""
    yield folders(bench)
    with running_broker(bench.folder / "kafka") as broker:
        yield topics(bench, broker)
