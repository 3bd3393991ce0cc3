"""A limit on the requests of each client: a bucket of tokens that fills up again each second."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable

MAX_CLIENTS = 10_000
"""Number of clients that are remembered; the one that has been silent for the longest is forgotten first."""


class RateLimit:
    """Allows each client so many requests a second; after a pause, as many at once."""

    def __init__(self, per_second: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_second = per_second
        self._capacity = max(1.0, per_second)
        self._clock = clock
        self._lock = threading.Lock()
        self._clients: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def wait(self, client: str) -> float:
        """Count a request; return 0 if it is allowed, else the seconds after which one is."""
        with self._lock:
            now = self._clock()
            tokens, at = self._clients.pop(client, (self._capacity, now))
            tokens = min(self._capacity, tokens + (now - at) * self._per_second)
            allowed = tokens >= 1
            self._clients[client] = (tokens - 1 if allowed else tokens, now)
            if len(self._clients) > MAX_CLIENTS:
                self._clients.popitem(last=False)
            return 0 if allowed else (1 - tokens) / self._per_second
