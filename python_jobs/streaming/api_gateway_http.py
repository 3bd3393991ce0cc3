"""API Gateway: producers post records by HTTP; the gateway checks them and delivers them to Kafka, or keeps them.

    python -m python_jobs.streaming.api_gateway_http --config api_gateway.yml

``POST /ingestion/ingest/<topic>/<event_key>`` takes a JSON array of records. All of them are accepted (202) or none
is (400, with the reasons of each rejected record). A record passes its topic's JSON Schema and rules; it is delivered
as it was sent, with the key ``event_key`` and the headers ``origin`` (``api``), ``referral`` (the Referer header) and
``event_id`` (the request's Idempotency-Key, or a random id, and the record's place).

An outage of the broker doesn't reach the producers, in one of two ways:

* dead letter: a request waits up to ``flush_seconds`` for the broker; what isn't delivered by then is written into the
  fallback folder, from which ``api_gateway_replay.py`` delivers it later;
* buffer (``buffer`` names a file): each request is written into a queue on disk and answered; the gateway itself
  delivers the queue in order. When the queue is full, records go to the fallback folder.

Guarantee: an accepted record is in the topic, in the buffer or in the fallback; a kill of the gateway loses none.
Delivery is at least once: consumers drop repeated ``event_id``s. A request that can be kept nowhere is answered with
503. Cost: one small process; with a buffer, two synchronous writes to SQLite for each request.

Source: Data Engineering Design Patterns, chapter 11, API Gateway.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import logging
import math
import re
import signal
import sqlite3
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import flask
from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient

from python_jobs.shared.core.clock import utc_now
from python_jobs.shared.core.command_line import run_program
from python_jobs.shared.core.failures import NotReady, WrongUse, require_above_zero, require_at_least
from python_jobs.shared.core.http_service import guarded_app, listening_server, require_token
from python_jobs.shared.kafka.clients import client_settings
from python_jobs.shared.kafka.producers import Sender
from python_jobs.shared.kafka.settings import refuse_secrets
from python_jobs.streaming.gateway_delivery import Counts, DirectDelivery, Forwarder
from python_jobs.streaming.gateway_records import (
    Message,
    Topic,
    UnreadableBody,
    is_topic_name,
    read_records,
)
from python_jobs.streaming.gateway_stores import Buffer, BufferFull, Fallback
from python_jobs.streaming.rate_limit import RateLimit

NAME = "api_gateway"
REQUEST_ID = "Idempotency-Key"
RETRY_AFTER_SECONDS = 5
"""What a producer is told to wait when nothing can keep its records."""
_TOPICS_SECONDS = 5
_OVERHEAD_BYTES = 100_000  # a message's key and headers, beside its value

log = logging.getLogger(NAME)


@dataclass(frozen=True)
class Parameters:
    """Take records by HTTP, check them, and deliver them to Kafka."""

    topics: list[Topic]
    """Topics that producers may write to."""
    bootstrap_servers: str
    """Kafka brokers, host:port,host:port."""
    fallback: str
    """Folder for records that can't be delivered; production needs a resilient disk that all instances share."""
    buffer: str | None = None
    """File of the queue from which the gateway delivers; one gateway uses it. Default: no queue, each request waits
    for the broker."""
    buffer_records: int = 100_000
    """Maximum number of records in the queue; when it is full, records go to the fallback."""
    flush_seconds: float = 20
    """Seconds for which a request without a buffer waits for the broker."""
    max_body_bytes: int = 900_000
    """Maximum size of a request in bytes; Kafka's topics take messages up to 1,048,588 bytes by default."""
    requests_per_second: float = 200
    """Maximum number of requests a second of each client address."""
    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = 8124
    """Port to listen on; 0 takes a free one."""
    token_env: str | None = None
    """Environment variable with the bearer token that every request must carry; only a loopback address needs none."""
    threads: int = 8
    """Maximum number of requests that are answered at a time."""
    settings: dict[str, str] = field(default_factory=dict)
    """Further settings of Kafka's client (librdkafka's names); a secret as ${env:NAME}."""

    def __post_init__(self) -> None:
        names = [topic.name for topic in self.topics]
        if not names or len(set(names)) < len(names):
            raise WrongUse(f"topics must have one name each, all different, got {names}")
        require_token(self.host, self.token_env)
        require_at_least(1, buffer_records=self.buffer_records, max_body_bytes=self.max_body_bytes)
        require_at_least(1, threads=self.threads)
        require_above_zero(flush_seconds=self.flush_seconds, requests_per_second=self.requests_per_second)
        if math.isinf(self.requests_per_second) or self.flush_seconds > 3600:
            raise WrongUse("requests_per_second must be finite, and flush_seconds 3600 at most")
        refuse_secrets(self.settings)
        if unsafe := sorted(_DURABLE.keys() & self.settings.keys()):
            raise WrongUse(f"the settings {', '.join(unsafe)} can't be changed: records could get lost")

    def producer_settings(self) -> dict[str, Any]:
        """Return the settings of the producer."""
        # With a buffer no message expires: its order would change when it is sent again.
        timeout = 0 if self.buffer else int(self.flush_seconds * 1000)
        own = {
            "linger.ms": 5,
            "reconnect.backoff.max.ms": 1000,
            "partitioner": "murmur2_random",  # as Java's clients, so that a replayed record follows its key
            "message.max.bytes": self.max_body_bytes + _OVERHEAD_BYTES,
        }
        return (
            own
            | client_settings(self.bootstrap_servers, self.settings)
            | _DURABLE
            | {"delivery.timeout.ms": timeout}
        )


_DURABLE: dict[str, Any] = {"enable.idempotence": True, "acks": "all"}


class Refused(Exception):
    """A request without an accepted record, with its HTTP status and the answer."""

    def __init__(self, status: int, error: str, **details: Any) -> None:
        super().__init__(error)
        self.status = status
        self.answer = {"error": error, **details}


# --- the gateway ------------------------------------------------------------------------------------------


class Gateway:
    """Checks the records of requests, and delivers or stores them."""

    def __init__(
        self,
        parameters: Parameters,
        fallback: Fallback,
        counts: Counts,
        direct: DirectDelivery | None = None,
        buffer: Buffer | None = None,
        buffered: Callable[[], None] = lambda: None,
    ) -> None:
        """Take the stores: without a buffer, ``direct`` delivers; ``buffered`` is called after new messages."""
        self._checkers = {topic.name: topic.checker() for topic in parameters.topics}
        self._fallback, self._direct = fallback, direct
        self._buffer, self._buffered = buffer, buffered
        self._counts = counts

    def accept(
        self, target: str, body: Callable[[], bytes], referral: str = "", request_id: str | None = None
    ) -> dict[str, int]:
        """Check a request's records, deliver or store all of them, and return how many went where.

        Args:
            target: ``<topic>/<event_key>``.
            body: function that returns the request's body.
            referral: the request's Referer.
            request_id: id that is the same when the request is sent again; default: a random one.

        Raises:
            Refused: no record was accepted.
        """
        topic, key = self._target(target)
        now = utc_now()
        records = self._checked(topic, body(), now)
        request_id = request_id or str(uuid.uuid4())
        messages = [
            Message(topic, key, text, referral, request_id, ordinal, now.isoformat(timespec="microseconds"))
            for ordinal, text in enumerate(records)
        ]
        where = self._keep(messages)
        self._counts.add(accepted=len(messages), **where)
        return {"accepted": len(messages), **where}

    def status(self) -> dict[str, int]:
        """Return the numbers of records since the start, and of those that wait in the buffer."""
        counts = self._counts.of("accepted", "delivered", "stored", "rejected")
        return counts | {"buffered": 0 if self._buffer is None else len(self._buffer)}

    def _target(self, target: str) -> tuple[str, str]:
        topic, _, key = target.partition("/")
        if not key or "/" in key or not is_topic_name(topic):
            raise Refused(
                400, "the path must be /ingestion/ingest/<topic>/<event_key>, and a topic is no path"
            )
        if "\ufffd" in key:
            raise Refused(400, "the event key must be UTF-8")
        if topic not in self._checkers:
            raise Refused(
                404, f"there is no topic '{topic}' here; there are {', '.join(sorted(self._checkers))}"
            )
        return topic, key

    def _checked(self, topic: str, body: bytes, now: dt.datetime) -> list[str]:
        try:
            records = read_records(body)
        except UnreadableBody as failure:
            raise Refused(400, str(failure)) from None
        check = self._checkers[topic]
        checked = ((place, check(record, now)) for place, record in enumerate(records))
        rejected = [{"record": place, "reasons": reasons} for place, reasons in checked if reasons]
        if rejected:
            self._counts.add(rejected=len(records))
            sentence = f"{len(rejected)} of {len(records)} records are invalid; none was accepted"
            raise Refused(400, sentence, rejected=rejected)
        return [record.text for record in records]

    def _keep(self, messages: Sequence[Message]) -> dict[str, int]:
        if self._buffer is not None:
            try:
                self._buffer.append(messages)
                self._buffered()
                return {"buffered": len(messages)}
            except BufferFull:
                log.warning("the buffer is full: %d records go to the fallback", len(messages))
            except sqlite3.Error as failure:
                log.error("the buffer can't be written: %s", failure)
        left = list(messages) if self._direct is None else self._direct.undelivered(messages)
        try:
            self._fallback.write(left)
        except OSError as failure:
            log.error("the fallback can't be written: %s", failure)
            raise Refused(503, "the records can't be kept now; send them again later") from None
        return {"delivered": len(messages) - len(left), "stored": len(left)}


def create_app(
    gateway: Gateway, limit: RateLimit, max_body_bytes: int, token: str | None = None
) -> flask.Flask:
    """Return the HTTP application."""
    app = guarded_app(NAME, token, max_body_bytes)
    app.url_map.merge_slashes = False  # an empty topic is an error, not the key that follows it

    @app.before_request
    def limited() -> tuple[flask.Response, int, dict[str, str]] | None:
        seconds = limit.wait(flask.request.remote_addr or "")
        if seconds == 0:
            return None
        return flask.jsonify(error="too many requests"), 429, {"Retry-After": str(math.ceil(seconds))}

    @app.post("/ingestion/ingest/<path:target>")
    def ingest(target: str) -> tuple[flask.Response, int]:
        request_id = flask.request.headers.get(REQUEST_ID)
        if request_id is not None and not re.fullmatch(r"[!-~]{1,200}", request_id):
            raise Refused(400, f"{REQUEST_ID} must be 1 to 200 visible ASCII characters")
        referral = _text_of_header(flask.request.headers.get("Referer", ""))
        return flask.jsonify(gateway.accept(target, flask.request.get_data, referral, request_id)), 202

    @app.get("/status")
    def status() -> flask.Response:
        return flask.jsonify(gateway.status())

    @app.errorhandler(Refused)
    def refused(refusal: Refused) -> tuple[flask.Response, int, dict[str, str]]:
        headers = {"Retry-After": str(RETRY_AFTER_SECONDS)} if refusal.status == 503 else {}
        return flask.jsonify(refusal.answer), refusal.status, headers

    return app


def _text_of_header(header: str) -> str:
    """Return a header's text; a server reads its bytes as Latin-1, and most senders write UTF-8."""
    try:
        return header.encode("latin-1").decode()
    except UnicodeError:
        return header


# --- the process ------------------------------------------------------------------------------------------


@contextlib.contextmanager
def running_gateway(parameters: Parameters) -> Iterator[Gateway]:
    """Open the stores, start the delivery, and stop it cleanly at the end.

    Raises:
        JobFailed: another gateway uses the buffer.
        NotReady: the brokers answer, and a topic doesn't exist.
        WrongUse: a schema or a setting is wrong.
    """
    settings = parameters.producer_settings()
    fallback, counts = Fallback(parameters.fallback), Counts()
    with contextlib.ExitStack() as stack:
        try:
            sender = Sender(settings)
        except (KafkaException, TypeError) as failure:
            said = failure.args[0].str() if isinstance(failure, KafkaException) else failure
            raise WrongUse(f"the settings of Kafka are wrong: {said}") from None
        stack.callback(sender.close)
        _require_topics(parameters)
        if parameters.buffer is None:
            yield Gateway(parameters, fallback, counts, DirectDelivery(sender, parameters.flush_seconds))
            return
        buffer = Buffer(parameters.buffer, parameters.buffer_records)
        stack.callback(buffer.close)
        forwarder = Forwarder(buffer, sender, fallback, counts)
        gateway = Gateway(parameters, fallback, counts, None, buffer, forwarder.wake)
        forwarder.start()
        stack.callback(forwarder.stop)
        yield gateway


def _require_topics(parameters: Parameters) -> None:
    """Check that the topics exist; while no broker answers, the gateway starts without this check."""
    client = client_settings(parameters.bootstrap_servers, parameters.settings)
    try:
        known = AdminClient(client).list_topics(timeout=_TOPICS_SECONDS).topics
    except KafkaException as failure:
        log.warning("Kafka doesn't answer, records are kept until it does: %s", failure.args[0].str())
        return
    if absent := [topic.name for topic in parameters.topics if topic.name not in known]:
        raise NotReady(f"there is no topic {', '.join(absent)} at {parameters.bootstrap_servers}; create it")


def serve(parameters: Parameters, ready: Callable[[int], None] = lambda port: None) -> dict[str, int]:
    """Take requests until a signal; call ``ready`` with the port when they are taken. Return the numbers of records."""
    token = require_token(parameters.host, parameters.token_env)
    with running_gateway(parameters) as gateway:
        limit = RateLimit(parameters.requests_per_second)
        app = create_app(gateway, limit, parameters.max_body_bytes, token)
        with contextlib.suppress(KeyboardInterrupt):
            server = listening_server(app, parameters.host, parameters.port, parameters.threads)
            try:
                ready(server.effective_port)
                server.run()
            finally:
                server.close()
        return gateway.status()


def run(parameters: Parameters) -> dict[str, int]:
    """Serve until a signal; return the numbers of records."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    return serve(parameters, lambda port: print(f"http://{parameters.host}:{port}", flush=True))


if __name__ == "__main__":
    run_program(Parameters, run)
