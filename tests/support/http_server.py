"""A real HTTP server on a free port, for one handler."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class QuietHandler(BaseHTTPRequestHandler):
    """A handler whose ``get`` answers a GET and whose ``post`` answers a POST; it logs nothing."""

    def do_GET(self) -> None:
        """Answer a request."""
        self.get()

    def get(self) -> None:
        """Answer a GET."""
        raise NotImplementedError

    def do_POST(self) -> None:
        """Answer a request."""
        self.post(self.rfile.read(int(self.headers["Content-Length"])))

    def post(self, body: bytes) -> None:
        """Answer a POST."""
        raise NotImplementedError

    def answer(self, status: int, body: bytes) -> None:
        """Send a status and a body; the client may have given up waiting."""
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        try:
            self.wfile.write(body)
        except BrokenPipeError:
            self.close_connection = True

    def log_message(self, *_: Any) -> None:
        """Print nothing."""


@contextmanager
def serving(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """Serve until the block ends; yield the server's URL without a path."""
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
