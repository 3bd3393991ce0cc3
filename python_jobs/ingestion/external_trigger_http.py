"""External Trigger: a notification starts each workload that subscribed to it once.

    python -m python_jobs.ingestion.external_trigger_http --config conf/jobs/external_trigger_visits.yml

Notifications come to ``POST /events`` (push: the program doesn't poll and costs nothing without events) and, if the
configuration names a topic, from Kafka (pull: a consumer waits at the broker). Each envelope is written to the run
registry before it is acknowledged. Then threads start its runs, at most ``max_active_runs`` of a workload at a time,
and end when nothing is queued. A run is a local command (``spark-submit``, ``dbt build``), in the folder in which
this program was started, or a DAG's run in Airflow.

Unreadable records, and runs whose attempts all failed, are dead letters. ``GET /dead-letters`` lists them, and
``POST /dead-letters/<id>/replay`` starts exactly one run for a dead letter.

Source: Data Engineering Design Patterns, chapter 2, External Trigger.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import fcntl
import functools
import importlib.metadata
import json
import logging
import math
import os
import re
import shutil
import signal
import string
import subprocess
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import filelock
import flask
from confluent_kafka import Consumer, KafkaException
from tenacity.nap import sleep_using_event

from python_jobs.ingestion.airflow_client import Airflow, TriggerFailed
from python_jobs.ingestion.run_registry import Envelope, Run, RunRegistry
from python_jobs.ingestion.trigger_events import PLACEHOLDERS, Event, Filter, digest, read_envelope
from python_jobs.shared.core.clock import utc_now
from python_jobs.shared.core.command_line import run_program
from python_jobs.shared.core.failures import (
    DataRefused,
    JobFailed,
    NotReady,
    WrongUse,
    present,
    require_above_zero,
    require_at_least,
)
from python_jobs.shared.core.http_service import guarded_app, listening_server, require_token
from python_jobs.shared.core.intervals import duration, moved
from python_jobs.shared.core.json_text import json_text
from python_jobs.shared.core.retry import Failure, Retrier, RetryPolicy, classify
from python_jobs.shared.core.yaml_files import read_yaml
from python_jobs.shared.kafka.clients import WatchedTopic, passes, positions_of_topic

NAME = "external_trigger"
REGISTRY_FILE = "runs.sqlite"
MAX_ENVELOPE_BYTES = 1_000_000
KAFKA_ANSWER_SECONDS = 10
_WAY_OUT = "run again with another group, which reads the new topic from its first message"
_PRUNE_EVERY = dt.timedelta(hours=1)

_OF_THE_RUN = frozenset({"run_id", "conf_file"})

log = logging.getLogger(NAME)


@dataclass(frozen=True)
class Workload:
    """A command or a DAG, and the events that start it."""

    name: str
    """Name of the workload, which is part of its runs' ids."""
    when: Filter = field(default_factory=Filter)
    """Filter for the events that start the workload; by default every created object."""
    command: list[str] | None = None
    """A local command; {bucket}, {file_to_load}, {partition_from}, {partition_to}, {run_id} and {conf_file} stand for
    the event's values, $NAME for environment variables."""
    airflow: Airflow | None = None
    """A DAG, instead of a command."""
    max_active_runs: int = 5
    """Maximum number of runs at a time."""
    attempts: int = 3
    """Maximum number of tries before a run is a dead letter."""
    retry_seconds: float = 10
    """Wait before the second try, in seconds (± 10 %); it doubles before each further try, up to ten minutes."""
    timeout_seconds: float = 3600
    """Maximum duration of a command, in seconds; a command that runs longer is ended and has failed."""

    def __post_init__(self) -> None:
        if (self.command is None) == (self.airflow is None):
            raise WrongUse(f"workload {self.name} needs either command or airflow")
        limits = {"max_active_runs": self.max_active_runs, "attempts": self.attempts}
        require_at_least(1, **{f"{name} of workload {self.name}": limit for name, limit in limits.items()})
        require_at_least(0, **{f"retry_seconds of workload {self.name}": self.retry_seconds})
        require_above_zero(**{f"timeout_seconds of workload {self.name}": self.timeout_seconds})
        for literal, name in _pieces(self.command or []):
            if name not in {"", *PLACEHOLDERS, *_OF_THE_RUN}:
                raise WrongUse(
                    f"the command of workload {self.name} names {{{name}}}; allowed are "
                    f"{', '.join(sorted(PLACEHOLDERS | _OF_THE_RUN))}"
                )
            if unset := re.search(r"\$[A-Za-z_]\w*", os.path.expandvars(literal)):
                raise WrongUse(f"the command of workload {self.name} names {unset[0]}, which is not set")

    def run_id(self, event: Event) -> str:
        """Return the id of the workload's run for an event."""
        return f"External-{self.name}-{event.id}"


@dataclass(frozen=True)
class Kafka:
    """A topic whose messages are envelopes."""

    bootstrap_servers: str
    """Brokers, host:port,…; $NAME stands for an environment variable."""
    topic: str
    """Topic to read."""
    group: str = NAME
    """Consumer group; its committed offsets are behind the envelopes that are in the registry."""
    settings_file: str | None = None
    """YAML file with further settings of librdkafka, such as those of TLS and SASL."""


@dataclass(frozen=True)
class Parameters:
    """Start workloads when events announce new data."""

    registry: str
    """Folder of the run registry and of the runs' logs; only one trigger at a time may use it."""
    workloads: list[Workload]
    """Workloads that events start."""
    kafka: Kafka | None = None
    """A topic to read envelopes from, in addition to HTTP."""
    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = 8123
    """Port to listen on; 0 takes a free one."""
    token_env: str | None = None
    """Environment variable with the bearer token that every request must carry; only a loopback address needs none."""
    retention_days: float = 90
    """Days for which runs that succeeded, their logs and their envelopes are kept. An event that is delivered again
    after that runs again. Dead letters are kept until they are replayed."""

    def __post_init__(self) -> None:
        names = [workload.name for workload in self.workloads]
        if not names or len(set(names)) < len(names):
            raise WrongUse(f"workloads must have one name each, all different, got {names}")
        require_token(self.host, self.token_env)
        if not 0 <= self.retention_days <= 36_500:
            raise WrongUse(f"retention_days must be between 0 and 36500, got {self.retention_days:g}")


@dataclass(frozen=True)
class Outcome:
    """The result of one envelope."""

    triggered: list[str]
    """Ids of the new runs."""
    known: list[str]
    """Ids of the runs that an earlier delivery has started."""
    ignored: int
    """Number of events that no workload wants."""
    dead_letters: list[str]
    """Ids of the unreadable records."""
    errors: list[str]
    """Reason of each dead letter, in their order."""

    @property
    def rejected(self) -> bool:
        """Whether no record of the envelope can be read."""
        return bool(self.dead_letters) and not (self.triggered or self.known or self.ignored)


# --- the handler ----------------------------------------------------------------------------------------


class Trigger:
    """Accepts envelopes and executes the runs that they start."""

    def __init__(self, parameters: Parameters, registry: RunRegistry) -> None:
        self.workloads = {workload.name: workload for workload in parameters.workloads}
        self.registry = registry
        self._folder = Path(parameters.registry).absolute() / "runs"
        self._retention = duration("days", parameters.retention_days)
        self._pruned_at: dt.datetime | None = None
        self._stopping = threading.Event()
        self._threads: set[threading.Thread] = set()
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        self._lock = threading.Lock()

    def handle(self, body: bytes, now: str | None = None, replaces: str | None = None) -> Outcome:
        """Accept one envelope and return its outcome; after the return, no record of it can get lost.

        Args:
            body: envelope as delivered.
            now: processing time, ISO 8601; default: the clock's time.
            replaces: id of the dead letter of which this call is a replay; default: none.
        """
        now = now or utc_now().isoformat()
        events, poisons = read_envelope(body)
        request_id = str(uuid.uuid4())
        envelope = Envelope(digest(body), body.decode("utf-8-sig")) if events else None
        runs, ignored = [], 0
        for event in events:
            wanted = [workload for workload in self.workloads.values() if workload.when.accepts(event)]
            conf = _conf(event, digest(body), now, request_id)
            runs += [Run(w.run_id(event), w.name, conf) for w in wanted]
            if not wanted:
                ignored += 1
                log.info("ignored %s of %s in %s: no workload wants it", event.type, event.key, event.bucket)
        new = self.registry.accept(runs, poisons, now, replaces, envelope)
        for poison in poisons:
            log.warning("dead letter %s: %s", poison.id, poison.error)
        self.prune(dt.datetime.fromisoformat(now))
        self.wake()
        are_new = set(new)
        known = [run.run_id for run in runs if run.run_id not in are_new]
        return Outcome(new, known, ignored, [p.id for p in poisons], [p.error for p in poisons])

    def prune(self, now: dt.datetime) -> None:
        """Delete runs that succeeded before the retention period, with their logs; at most once an hour."""
        if self._pruned_at is not None and now - self._pruned_at < _PRUNE_EVERY:
            return
        self._pruned_at = now
        for run_id in self.registry.prune(moved(now, -self._retention).isoformat()):
            shutil.rmtree(self._folder / run_id, ignore_errors=True)

    def replay(self, dead_letter: str) -> list[str]:
        """Run a dead letter again and return its runs' ids; none if it is unknown or was replayed before.

        Raises:
            JobFailed: the dead letter still can't be read.
        """
        poison = self.registry.poison(dead_letter)
        if poison is None:
            replayed = self.registry.replay(dead_letter)
            self.wake()
            return [dead_letter] if replayed else []
        _, unread = read_envelope(poison.body)
        if unread:
            raise JobFailed(f"dead letter {dead_letter} still can't be read: {unread[0].error}")
        return self.handle(poison.body, replaces=dead_letter).triggered

    def wake(self) -> None:
        """Start a thread for each queued run that the limits allow."""
        limits = {name: workload.max_active_runs for name, workload in self.workloads.items()}
        while not self._stopping.is_set() and (run := self.registry.claim(limits)):
            thread = threading.Thread(target=self._work, args=(run,), name=run.run_id)
            with self._lock:
                self._threads.add(thread)
            thread.start()

    def stop(self) -> None:
        """End all running runs; they are queued again for the next start."""
        self._stopping.set()
        with self._lock:
            threads, children = list(self._threads), list(self._children.values())
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGTERM)
        for thread in threads:
            thread.join()

    def active(self) -> int:
        """Return the number of runs in progress."""
        with self._lock:
            return len(self._threads)

    def _work(self, run: Run) -> None:
        error = None
        try:
            self._run(run)
        except TriggerFailed as failure:
            error = str(failure)
        except Exception as failure:  # after any error, the event must not get lost
            error = f"{type(failure).__name__}: {failure}"
        if self._stopping.is_set() and error is not None:
            self.registry.requeue(run.run_id)
        else:
            self.registry.finish(run.run_id, utc_now().isoformat(), error)
            log.info("%s: %s", run.run_id, error or "succeeded")
        with self._lock:
            self._threads.discard(threading.current_thread())
        self.wake()

    def _run(self, run: Run) -> None:
        workload = self.workloads[run.workload]
        retrier = Retrier(
            RetryPolicy(
                attempts=workload.attempts,
                base_seconds=workload.retry_seconds,
                cap_seconds=max(600, workload.retry_seconds),
                jitter="tenth",
                attempt_seconds=workload.timeout_seconds,
                total_seconds=math.inf,
            ),
            classifier=_failure_of,
            sleep=sleep_using_event(self._stopping),
        )

        def attempt(timeout: float) -> None:
            if self._stopping.is_set():
                raise TriggerFailed("the trigger is being stopped", transient=False)
            self.registry.attempted(run.run_id)
            if workload.airflow is not None:
                workload.airflow.trigger(run.run_id, json.loads(run.conf))
            else:
                self._execute(workload, run, timeout)

        # What an event starts must be safe to run again: the trigger itself may die at any point.
        retrier.call(attempt, idempotent=True)

    def _execute(self, workload: Workload, run: Run, timeout: float) -> None:
        """Run the command and write its output to a file of the run."""
        folder = self._folder / run.run_id
        folder.mkdir(parents=True, exist_ok=True)
        conf_file, output = folder / "conf.json", folder / "output.log"
        conf_file.write_text(run.conf, encoding="utf-8")
        command = command_of(workload, run, conf_file)
        # The child inherits the lock: if this process dies, the next one waits for the child before its own run.
        with self._exclusive(folder / "lock") as lock, output.open("ab") as stream:
            child = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=stream, stderr=subprocess.STDOUT,
                start_new_session=True, pass_fds=[lock],
            )  # fmt: skip
            with self._lock:
                self._children[run.run_id] = child
            try:
                code = child.wait(timeout)
            except subprocess.TimeoutExpired:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
                raise TriggerFailed(f"ended after {timeout:g} s", transient=True) from None
            finally:
                with self._lock:
                    del self._children[run.run_id]
        if code != 0:
            # By the jobs' contract, 2 is wrong use and 3 is refused data: a retry can't succeed.
            raise TriggerFailed(f"exit code {code}: {_last_line(output)}", transient=code not in (2, 3))

    @contextlib.contextmanager
    def _exclusive(self, path: Path) -> Iterator[int]:
        """Hold a lock that lasts while any process has its file open, children included."""
        with path.open("w") as file:
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:  # a child of a process that died is still running
                    if self._stopping.wait(0.2):
                        raise TriggerFailed("the trigger is being stopped", transient=False) from None
            yield file.fileno()


def _failure_of(error: BaseException) -> Failure:
    if isinstance(error, TriggerFailed):
        return Failure.AMBIGUOUS if error.transient else Failure.PERMANENT
    return classify(error)


def command_of(workload: Workload, run: Run, conf_file: Path) -> list[str]:
    """Return a run's command with the values of its event.

    Raises:
        TriggerFailed: the event has not what the command names.
    """
    conf = json.loads(run.conf)
    values = conf["values"] | {"run_id": run.run_id, "conf_file": str(conf_file)}
    try:
        # Expand variables only in the configuration's text, never in an event's values.
        return [
            "".join(
                os.path.expandvars(literal) + (values[name] if name else "")
                for literal, name in _pieces([part])
            )
            for part in workload.command or []
        ]
    except KeyError as missing:
        raise TriggerFailed(
            f"the command names {{{missing.args[0]}}}, which {conf['file_to_load']} in {conf['bucket']} doesn't tell",
            transient=False,
        ) from None


def _pieces(command: list[str]) -> Iterator[tuple[str, str]]:
    """Yield each text of a command with the name in braces that follows it, or an empty name."""
    for part in command:
        for literal, name, _, _ in string.Formatter().parse(part):
            yield literal, name or ""


def _conf(event: Event, envelope_id: str, now: str, request_id: str) -> str:
    """Return the context of a run as JSON: the trigger, the event and the time.

    If an envelope has many records, each run's context has only its own record; the registry stores the whole envelope
    once.
    """
    return json_text(
        {
            "event": event.alone,
            "envelope_id": envelope_id,
            "trigger": {
                "function_name": NAME,
                "function_version": _version(),
                "request_id": request_id,
            },
            "event_type": event.type,
            "bucket": event.bucket,
            "file_to_load": event.key,
            "event_time": event.time,
            "processing_time": now,
            "values": event.values(),
        }
    )


@functools.cache
def _version() -> str:
    return importlib.metadata.version("lakehouse-patterns")


def _last_line(path: Path) -> str:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 4000))
        lines = file.read().decode(errors="replace").split("\n")
    return next((line.strip()[:500] for line in reversed(lines) if line.strip()), "no output")


# --- where envelopes come from --------------------------------------------------------------------------


def create_app(trigger: Trigger, token: str | None = None) -> flask.Flask:
    """Return the HTTP application, which accepts envelopes and lists and replays dead letters."""
    app = guarded_app(NAME, token, MAX_ENVELOPE_BYTES)

    @app.post("/events")
    def events() -> tuple[flask.Response, int]:
        outcome = trigger.handle(flask.request.get_data())
        # A malformed envelope is stored, too: its sender gets the reason and need not send it again.
        return flask.jsonify(vars(outcome)), 422 if outcome.rejected else 202

    @app.get("/envelopes/<envelope_id>")
    def envelope(envelope_id: str) -> flask.Response:
        body = trigger.registry.envelope(envelope_id)
        if body is None:
            flask.abort(404)
        return flask.Response(body, mimetype="application/json")

    @app.get("/runs")
    def runs() -> flask.Response:
        return flask.jsonify(trigger.registry.runs())

    @app.get("/dead-letters")
    def dead_letters() -> flask.Response:
        return flask.jsonify([vars(letter) for letter in trigger.registry.dead_letters()])

    @app.post("/dead-letters/<dead_letter>/replay")
    def replay(dead_letter: str) -> tuple[flask.Response, int]:
        try:
            return flask.jsonify(triggered=trigger.replay(dead_letter)), 202
        except JobFailed as failure:
            return flask.jsonify(error=str(failure)), 422

    return app


def consumer_of(kafka: Kafka) -> tuple[Consumer, WatchedTopic]:
    """Return a consumer of an existing topic that commits nothing by itself, and the topic as of now.

    Raises:
        NotReady: the brokers don't answer.
        WrongUse: there is no such topic, or a setting is wrong.
        DataRefused: the group's position belongs to a topic that was deleted and recreated.
    """
    settings = {} if kafka.settings_file is None else read_yaml(kafka.settings_file, "settings file")
    client = settings | {"bootstrap.servers": os.path.expandvars(kafka.bootstrap_servers)}
    try:
        consumer = Consumer(
            {"auto.offset.reset": "earliest", "log_level": 0}
            | client
            | {"group.id": kafka.group, "enable.auto.commit": False}
        )
    except (KafkaException, TypeError) as failure:
        said = failure.args[0].str() if isinstance(failure, KafkaException) else failure
        raise WrongUse(f"the settings of Kafka are wrong: {said}") from None
    try:
        topic = consumer.list_topics(kafka.topic, timeout=KAFKA_ANSWER_SECONDS).topics[kafka.topic]
        if topic.error is not None:
            raise WrongUse(f"topic '{kafka.topic}' can't be read: {topic.error.str()}")
        watched = WatchedTopic(client, kafka.topic, _WAY_OUT)
        positions_of_topic(consumer, kafka.topic, list(topic.partitions), watched, fail_on_data_loss=True)
    except KafkaException as failure:
        consumer.close()
        raise NotReady(f"Kafka doesn't answer: {failure.args[0].str()}") from None
    except JobFailed:
        consumer.close()
        raise
    consumer.subscribe([kafka.topic])
    return consumer, watched


def consume(consumer: Consumer, topic: WatchedTopic, trigger: Trigger, stopping: threading.Event) -> None:
    """Accept messages until ``stopping`` is set; an offset is committed after its envelope is in the registry.

    Raises:
        DataRefused: the topic was deleted and recreated, so the consumer may have passed messages of the new one.
        JobFailed: Kafka ended the reading.
    """
    try:
        while not stopping.is_set():
            message = consumer.poll(1.0)
            if message is None:
                continue
            error = message.error()
            if error is not None:
                if error.fatal() or not passes(error):
                    raise JobFailed(f"Kafka: {error.str()}")
                log.warning("Kafka: %s", error.str())  # librdkafka connects again by itself
                continue
            topic.require_unchanged()
            trigger.handle(message.value() or b"")
            partition = present(message.partition(), "the partition of a Kafka message")
            following = present(message.offset(), "the offset of a Kafka message") + 1
            reached = topic.position(topic.topic, partition, following)
            consumer.commit(offsets=[reached], asynchronous=False)
    finally:
        consumer.close()


# --- the process ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def running_trigger(parameters: Parameters) -> Iterator[Trigger]:
    """Open the registry, resume the runs of an earlier process, and stop cleanly at the end.

    Raises:
        JobFailed: another process works on this registry.
    """
    folder = Path(parameters.registry).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        only_one = filelock.FileLock(folder / "trigger.lock", timeout=0)
        only_one.acquire()
    except filelock.Timeout:
        raise JobFailed(f"another trigger works on {folder}; give this one its own registry") from None
    registry = RunRegistry(folder / REGISTRY_FILE)
    trigger = Trigger(parameters, registry)
    try:
        registry.requeue_running()
        trigger.prune(utc_now())
        trigger.wake()
        yield trigger
    finally:
        trigger.stop()
        registry.close()
        only_one.release()


def serve(parameters: Parameters, ready: Callable[[int], None] = lambda port: None) -> None:
    """Handle events until a signal; call ``ready`` with the port when events are accepted."""
    stopping = threading.Event()
    failures: list[Exception] = []
    with (
        running_trigger(parameters) as trigger,
        contextlib.suppress(KeyboardInterrupt),
        contextlib.ExitStack() as stack,
    ):
        token = require_token(parameters.host, parameters.token_env)
        server = listening_server(create_app(trigger, token), parameters.host, parameters.port)
        if parameters.kafka is not None:
            consumer, topic = consumer_of(parameters.kafka)

            def consume_or_end() -> None:
                try:
                    consume(consumer, topic, trigger, stopping)
                except Exception as failure:  # nobody would notice a dead thread: the process ends
                    failures.append(failure)
                    os.kill(os.getpid(), signal.SIGTERM)

            thread = threading.Thread(target=consume_or_end, name="kafka")
            thread.start()
            stack.callback(thread.join)
            stack.callback(stopping.set)
        stack.callback(server.close)
        ready(server.effective_port)
        server.run()
    if failures:
        failure = failures[0]
        if isinstance(failure, DataRefused):
            raise failure
        said = str(failure) if isinstance(failure, JobFailed) else f"{type(failure).__name__}: {failure}"
        raise JobFailed(f"reading from Kafka has ended: {said}")


def run(parameters: Parameters) -> dict[str, object]:
    """Serve until a signal; return the number of runs in each state."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    serve(parameters, lambda port: print(f"http://{parameters.host}:{port}", flush=True))
    registry = RunRegistry(Path(parameters.registry) / REGISTRY_FILE)
    try:
        return {"runs": Counter(str(entry["status"]) for entry in registry.runs())}
    finally:
        registry.close()


if __name__ == "__main__":
    run_program(Parameters, run)
