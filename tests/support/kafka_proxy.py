"""A TCP proxy in front of the real broker: it sees each produce request, and a test may lose or hold it.

It proves what a client does when answers are lost or late, without a double of the broker: all that passes is the
broker's own.
"""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from services.kafka import Broker
from services.processes import HOST

PRODUCE = 0
PASS, LOSE, LOSE_ANSWER = "pass", "lose", "lose the answer"
"""What happens to a request: it passes; the broker doesn't get it; the client doesn't get the broker's answer."""


@dataclass
class KafkaProxy:
    """The produce requests that clients sent through the proxy."""

    address: str
    """Address for clients, host:port."""
    decide: Callable[[bytes], str] = lambda request: PASS
    """Function from a produce request to what happens to it; while it doesn't return, its connection waits."""
    requests: list[tuple[int, bytes]] = field(default_factory=list)
    """Produce requests in the order in which they came, each with the number of its connection; the values are in them
    as they are."""
    timeline: list[str] = field(default_factory=list)
    """``request`` and ``answer`` of the produce requests in the order in which they passed."""
    max_in_flight: int = 0
    """Maximum number of produce requests of one connection that had no answer yet, without the lost ones."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def reset(self, decide: Callable[[bytes], str] = lambda request: PASS) -> None:
        """Forget the requests, and decide about the next ones with this function."""
        self.requests, self.timeline, self.max_in_flight, self.decide = [], [], 0, decide

    def holding(self, value: bytes) -> list[int]:
        """Return the connection of each produce request that holds a value."""
        return [number for number, request in self.requests if value in request]


class _Connection:
    """One client's connection, and the one to the broker in its place."""

    def __init__(self, proxy: KafkaProxy, number: int, client: socket.socket, port: int) -> None:
        self._proxy, self._number, self._client = proxy, number, client
        self._broker = socket.create_connection((HOST, port))
        self._waiting: dict[int, bool] = {}
        for run in (self._requests, self._answers):
            threading.Thread(target=run, daemon=True).start()

    def close(self) -> None:
        for end in (self._client, self._broker):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def _requests(self) -> None:
        with suppress(OSError, EOFError):
            while True:
                frame = _frame(self._client)
                (kind,) = struct.unpack(">h", frame[:2])
                (number,) = struct.unpack(">i", frame[4:8])
                decided = PASS
                if kind == PRODUCE:
                    with self._proxy.lock:
                        self._proxy.requests.append((self._number, frame))
                        self._proxy.timeline.append("request")
                        self._waiting[number] = False
                        self._proxy.max_in_flight = max(self._proxy.max_in_flight, len(self._waiting))
                    decided = self._proxy.decide(frame)
                if decided == LOSE:
                    self._waiting.pop(number)
                    continue
                if decided == LOSE_ANSWER:
                    self._waiting[number] = True
                _send(self._broker, frame)
        self.close()

    def _answers(self) -> None:
        with suppress(OSError, EOFError):
            while True:
                frame = _frame(self._broker)
                (number,) = struct.unpack(">i", frame[:4])
                with self._proxy.lock:
                    is_produced = number in self._waiting
                    is_lost = self._waiting.pop(number, False)
                    if is_produced and not is_lost:
                        self._proxy.timeline.append("answer")
                if not is_lost:
                    _send(self._client, frame)
        self.close()


def _frame(source: socket.socket) -> bytes:
    (size,) = struct.unpack(">i", _exactly(source, 4))
    return _exactly(source, size)


def _exactly(source: socket.socket, size: int) -> bytes:
    found = b""
    while len(found) < size:
        part = source.recv(size - len(found))
        if not part:
            raise EOFError
        found += part
    return found


def _send(target: socket.socket, frame: bytes) -> None:
    target.sendall(struct.pack(">i", len(frame)) + frame)


@contextmanager
def proxied(broker: Broker) -> Iterator[KafkaProxy]:
    """Run a proxy in front of the broker until the block ends."""
    proxy = KafkaProxy(f"{HOST}:{broker.proxy_port}")
    connections: list[_Connection] = []
    with socket.create_server((HOST, broker.proxy_port), backlog=50) as server:

        def accept() -> None:
            with suppress(OSError):
                while True:
                    client, _ = server.accept()
                    connections.append(_Connection(proxy, len(connections), client, broker.behind_proxy_port))

        accepting = threading.Thread(target=accept, daemon=True)
        accepting.start()
        try:
            yield proxy
        finally:
            server.shutdown(socket.SHUT_RDWR)
            accepting.join()
            for connection in connections:
                connection.close()
