"""API Gateway: records a second, the latency of a request, and what is lost while the broker is killed ten times.

Requests of 100 records come from four connections of this process; gateway, broker and clients share the cores.
"""

from __future__ import annotations

import http.client
import itertools
import json
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml
from confluent_kafka import Producer

from benchmarks.harness import Comparison, Variant, Workbench
from python_jobs.shared.core.json_text import json_text
from services.kafka import Broker, running_broker

RECORDS, BATCH, CONNECTIONS = 60_000, 100, 4
PACED_SECONDS, PACED_RECORDS = 15, 5_500
KILLS = 10
SCHEMA = {
    "type": "object",
    "required": ["visit_id", "event_time", "user_id", "page"],
    "properties": {
        "visit_id": {"type": "string", "minLength": 1},
        "event_time": {"type": "string", "format": "date-time"},
        "user_id": {"type": "integer", "minimum": 0},
        "page": {"type": "string", "pattern": "^/"},
        "duration": {"type": "number", "minimum": 0},
    },
}


def record(number: int) -> dict[str, Any]:
    """Return one visit."""
    return {
        "visit_id": f"v{number}",
        "event_time": "2024-03-01T10:00:00Z",
        "user_id": number % 1000,
        "page": f"/page/{number % 100}",
        "duration": 1.5,
    }


@contextmanager
def gateway(folder: Path, topic: str, broker: Broker, buffer: bool) -> Iterator[str]:
    """Run a gateway for one topic and yield its address."""
    folder.mkdir(parents=True)
    (folder / "visit.json").write_text(json_text(SCHEMA), encoding="utf-8")
    settings = {
        "topics": [
            {
                "name": topic,
                "schema": str(folder / "visit.json"),
                "rules": [{"field": "event_time", "not_after": "now", "tolerance_seconds": 60}],
            }
        ],
        "bootstrap_servers": broker.bootstrap_servers,
        "fallback": str(folder / "fallback"),
        "buffer": str(folder / "buffer.sqlite") if buffer else None,
        "buffer_records": 10_000_000,
        "flush_seconds": 20 if buffer else 2,
        "requests_per_second": 1_000_000,
        "port": 0,
    }
    (folder / "gateway.yml").write_text(yaml.safe_dump(settings), encoding="utf-8")
    command = [
        sys.executable,
        "-m",
        "python_jobs.streaming.api_gateway_http",
        "--config",
        str(folder / "gateway.yml"),
    ]
    with (folder / "gateway.log").open("w") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
    finally:
        process.terminate()
        process.wait(60)


class Client:
    """One connection to a gateway, with the seconds of each request and the numbers of the accepted records."""

    def __init__(self, url: str, topic: str) -> None:
        self._address, self._topic = urlsplit(url).netloc, topic
        self._connection = http.client.HTTPConnection(self._address, timeout=60)
        self.seconds: list[float] = []
        self.accepted: list[int] = []

    def post(self, first: int) -> None:
        """Send one request, whose records are numbered from ``first``."""
        numbers = range(first, first + BATCH)
        body = json_text([record(number) for number in numbers])
        begin = time.perf_counter()
        self._connection.request(
            "POST",
            f"/ingestion/ingest/{self._topic}/user-{first // BATCH % 50}",
            body,
            {"Content-Type": "application/json"},
        )
        answer = self._connection.getresponse()
        answer.read()
        self.seconds.append(time.perf_counter() - begin)
        if answer.status == 202:
            self.accepted.extend(numbers)


def post_all(url: str, topic: str, records: int) -> None:
    """Send so many records as fast as the gateway takes them."""
    clients = [Client(url, topic) for _ in range(CONNECTIONS)]

    def work(place: int) -> None:
        for first in range(place * BATCH, records, CONNECTIONS * BATCH):
            clients[place].post(first)

    with ThreadPoolExecutor(CONNECTIONS) as threads:
        list(threads.map(work, range(CONNECTIONS)))
    if sum(len(client.accepted) for client in clients) != records:
        raise AssertionError("the gateway has refused records")


def post_paced(url: str, topic: str, per_second: float, is_over: Callable[[], bool]) -> list[Client]:
    """Send so many records a second until ``is_over``; a late request doesn't thin out the next ones."""
    clients = [Client(url, topic) for _ in range(CONNECTIONS)]
    numbers = itertools.count()
    begin, pause = time.perf_counter(), BATCH / per_second

    def work(client: Client) -> None:
        while not is_over():
            number = next(numbers)
            time.sleep(max(0.0, begin + number * pause - time.perf_counter()))
            client.post(number * BATCH)

    with ThreadPoolExecutor(CONNECTIONS) as threads:
        list(threads.map(work, clients))
    return clients


def status(url: str) -> dict[str, int]:
    """Return the gateway's numbers."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=60)
    connection.request("GET", "/status")
    found: dict[str, int] = json.loads(connection.getresponse().read())
    return found


def await_empty(url: str) -> None:
    """Wait until the gateway's buffer is empty."""
    while status(url)["buffered"]:
        time.sleep(0.05)


def percentile(clients: list[Client], share: float) -> str:
    """Return the share's percentile of the clients' requests, in milliseconds."""
    seconds = sorted(itertools.chain.from_iterable(client.seconds for client in clients))
    return f"{seconds[int(share * (len(seconds) - 1))] * 1000:.0f} ms"


class Bench:
    """The broker, its topics, and a gateway of each variant."""

    def __init__(self, bench: Workbench, broker: Broker, stack: ExitStack) -> None:
        self._bench, self._broker, self._stack = bench, broker, stack
        self._numbers = itertools.count()
        self._records = bench.rows(RECORDS)
        self._urls: dict[str, str] = {}
        self._topics: dict[str, str] = {}
        self._stacks: dict[str, ExitStack] = {}

    def fresh(self, variant: str) -> None:
        """Give a variant an empty topic and a gateway of its own."""
        self._stop(variant)
        number = next(self._numbers)
        self._topics[variant] = self._broker.create_topic(f"{variant}_{number}", partitions=2)
        if variant != "producer":
            stack = self._stacks[variant] = self._stack.enter_context(ExitStack())
            folder = self._bench.folder / f"{variant}_{number}"
            started = gateway(folder, self._topics[variant], self._broker, variant == "buffer")
            self._urls[variant] = stack.enter_context(started)

    def _stop(self, variant: str) -> None:
        if variant in self._stacks:
            self._stacks.pop(variant).close()

    def produce(self) -> None:
        """Write the records with a producer of the same settings, without checks."""
        producer = Producer(
            {"bootstrap.servers": self._broker.bootstrap_servers, "linger.ms": 5, "enable.idempotence": True}
        )
        for number in range(self._records):
            value = json_text(record(number)).encode()
            while True:
                try:
                    producer.produce(self._topics["producer"], value, b"user-%d" % (number // BATCH % 50))
                    break
                except BufferError:
                    producer.poll(0.1)
            producer.poll(0)
        producer.flush()

    def post(self, variant: str) -> None:
        """Send the records to a variant's gateway and wait until the broker has them."""
        post_all(self._urls[variant], self._topics[variant], self._records)
        await_empty(self._urls[variant])

    def content(self, variant: str) -> Any:
        """Return the values in a variant's topic."""
        values = [
            ((message.value() or b"").decode(),) for message in self._broker.records(self._topics[variant])
        ]
        return self._bench.spark.createDataFrame(values, "value string")

    def facts(self) -> dict[str, Any]:
        """Return the latencies at a steady rate, and what ten kills of the broker have lost."""
        found: dict[str, Any] = {}
        for variant in ("direct", "buffer"):
            self.fresh(variant)
            url, topic = self._urls[variant], self._topics[variant]
            post_all(url, topic, 2_000)
            end = time.perf_counter() + PACED_SECONDS * min(1, self._bench.scale)
            begin = time.perf_counter()
            clients = post_paced(url, topic, PACED_RECORDS, lambda: time.perf_counter() > end)  # noqa: B023
            rate = sum(len(client.accepted) for client in clients) / (time.perf_counter() - begin)
            latencies = f"median {percentile(clients, 0.5)}, p99 {percentile(clients, 0.99)}"
            found[f"{variant}: a request at {rate:,.0f} records/s"] = latencies
        for variant in ("direct", "buffer"):
            self.fresh(variant)
        found |= self._killed()
        return found

    def _killed(self) -> dict[str, Any]:
        """Kill the broker while both gateways take records; compare what they accepted with what is there."""
        over = threading.Event()
        with ThreadPoolExecutor(2) as threads:
            runs = {
                variant: threads.submit(
                    post_paced, self._urls[variant], self._topics[variant], 500, over.is_set
                )
                for variant in ("direct", "buffer")
            }
            try:
                for _ in range(KILLS):
                    time.sleep(1)
                    self._broker.kill()
                    time.sleep(1)
                    self._broker.start()
            finally:
                over.set()
        await_empty(self._urls["buffer"])
        found = {}
        for variant, run in runs.items():
            clients = run.result()
            accepted = {number for client in clients for number in client.accepted}
            messages = self._broker.records(self._topics[variant])
            there = Counter(_number(message.value() or b"") for message in messages)
            fallback = (self._bench.folder / self._topics[variant] / "fallback").rglob("*.jsonl")
            lines = [line for file in fallback for line in file.read_text(encoding="utf-8").splitlines()]
            stored = Counter(_number(json.loads(line)["value"].encode()) for line in lines)
            twice = sum((there + stored).values()) - len(there + stored)
            found[f"{variant}: {KILLS} kills of the broker"] = (
                f"{len(accepted):,} records accepted, {len(accepted - (there + stored).keys())} lost, {twice} twice, "
                f"{stored.total():,} in the fallback, p99 {percentile(clients, 0.99)}"
            )
        return found


def _number(value: bytes) -> int:
    return int(json.loads(value)["visit_id"].removeprefix("v"))


def comparisons(bench: Workbench) -> Iterator[Comparison]:
    """A producer without a gateway, and both variants of the gateway."""
    with running_broker(bench.folder / "kafka") as broker, ExitStack() as stack:
        both = Bench(bench, broker, stack)
        yield Comparison(
            title=f"Requests of {BATCH} records",
            rows=bench.rows(RECORDS),
            note=(
                "Four connections; gateway, broker and clients share the cores. The producer writes the same records "
                "with the same durability, but checks none. Each time ends when the broker has all records."
            ),
            variants=[
                Variant(
                    "a producer",
                    both.produce,
                    lambda: both.content("producer"),
                    lambda: both.fresh("producer"),
                ),
                Variant(
                    "the gateway",
                    lambda: both.post("direct"),
                    lambda: both.content("direct"),
                    lambda: both.fresh("direct"),
                ),
                Variant(
                    "the gateway with a buffer",
                    lambda: both.post("buffer"),
                    lambda: both.content("buffer"),
                    lambda: both.fresh("buffer"),
                ),
            ],
            repetitions=3,
            facts=both.facts,
        )
