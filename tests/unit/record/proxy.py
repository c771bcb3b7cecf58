"""A proxy in front of a real MLflow server that refuses, stays silent, resets, or loses what the server answered."""

from __future__ import annotations

import http.client
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType

HOP = {"connection", "keep-alive", "transfer-encoding", "content-length", "host", "accept-encoding"}
REFUSALS = (401, 403, 404, 413, 429, 500, 503)
FAULTS = (*map(str, REFUSALS), "timeout", "reset", "lost")
"""Answers of a status, no answer within the client's patience, a connection that is reset before the server hears of the
request, and one that is reset after the server has acted."""

Judge = Callable[[str, str, int], str]
"""Method, path and number of a request: one of FAULTS, or nothing where it is to pass."""


def passing(method: str, path: str, number: int) -> str:
    """No fault."""
    return ""


class Proxy:
    """Forwards to the server on `port`. `judge` says what becomes of each request; `silence_s` is how long a timeout takes."""

    def __init__(self, port: int, silence_s: float = 1.5) -> None:
        self.port_behind, self.silence_s = port, silence_s
        self.judge: Judge = passing
        self.requests: list[tuple[str, str]] = []
        self.faults = 0
        self._lock = threading.Lock()
        self._server = _Server(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        self.uri = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Proxy:
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()

    def reset(self, judge: Judge = passing) -> None:
        """Count from 0 again."""
        with self._lock:
            self.judge, self.requests, self.faults = judge, [], 0

    def verdict(self, method: str, path: str) -> str:
        with self._lock:
            number = len(self.requests)
            self.requests.append((method, path.partition("?")[0]))
            fault = self.judge(method, path, number)
            self.faults += bool(fault)
            return fault


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: object, client_address: object) -> None:
        """A client that has gone meanwhile, as after its timeout, is no error of a test."""


def _handler(proxy: Proxy) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def _any(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            fault = proxy.verdict(self.command, self.path)
            if fault == "reset":
                return self._reset()
            if fault == "timeout":
                threading.Event().wait(proxy.silence_s)
                return self._reset()
            if fault.isdigit():
                return self._answer(int(fault), {"Content-Type": "text/html"}, b"<h1>no</h1>")
            status, headers, answer = self._forwarded(body)
            if fault == "lost":
                return self._reset()
            return self._answer(status, headers, answer)

        do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _any

        def _forwarded(self, body: bytes) -> tuple[int, dict[str, str], bytes]:
            behind = http.client.HTTPConnection("127.0.0.1", proxy.port_behind, timeout=60)
            headers = {name: text for name, text in self.headers.items() if name.lower() not in HOP}
            behind.request(self.command, self.path, body, headers)
            response = behind.getresponse()
            answer = response.read()
            behind.close()
            told = {name: text for name, text in response.getheaders() if name.lower() not in HOP}
            return response.status, told, answer

        def _answer(self, status: int, headers: dict[str, str], answer: bytes) -> None:
            self.send_response(status)
            for name, text in headers.items():
                self.send_header(name, text)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(answer)

        def _reset(self) -> None:
            self.close_connection = True
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            pass

        def finish(self) -> None:
            with suppress(OSError, ValueError):  # of a connection that was reset
                super().finish()

    return Handler
