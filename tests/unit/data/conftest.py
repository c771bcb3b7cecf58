"""An S3 server on loopback, and a proxy in front of it that can be told to fail."""

from __future__ import annotations

import http.client
import logging
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest


class Faults(ThreadingHTTPServer):
    """Passes requests on to `upstream`; of the next `failing` reads whose path has `part` in it, each is answered 503."""

    daemon_threads = True

    def __init__(self, upstream: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.upstream = upstream
        self.part, self.failing, self.failed = "", 0, 0
        self.lock = threading.Lock()

    def fail(self, part: str, times: int) -> None:
        self.part, self.failing, self.failed = part, times, 0

    def fails(self, path: str) -> bool:
        with self.lock:
            if not self.failing or self.part not in path:
                return False
            self.failing, self.failed = self.failing - 1, self.failed + 1
            return True


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Faults

    def _pass_on(self) -> None:
        if self.command == "GET" and self.server.fails(self.path):
            self.send_response(503)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        upstream = http.client.HTTPConnection(self.server.upstream)
        upstream.request(self.command, self.path, headers=dict(self.headers))
        answer = upstream.getresponse()
        content = answer.read()
        self.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in {"transfer-encoding", "connection", "content-length", "server", "date"}:
                self.send_header(name, value)
        length = answer.getheader("Content-Length") if self.command == "HEAD" else None
        self.send_header("Content-Length", length or str(len(content)))
        self.end_headers()
        self.wfile.write(content)
        upstream.close()

    do_GET = do_HEAD = _pass_on

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="session")
def faults() -> Iterator[Faults]:
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    moto = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    moto.start()
    proxy = Faults("{}:{}".format(*moto.get_host_and_port()))
    thread = threading.Thread(target=proxy.serve_forever, daemon=True)
    thread.start()
    yield proxy
    proxy.shutdown()
    proxy.server_close()
    thread.join()
    moto.stop()


@pytest.fixture(scope="session")
def s3_query(faults: Faults) -> str:
    """The query of a URI that leads to the proxy, with a bucket `tables` behind it."""
    from pyarrow.fs import FileSystem

    host, port = faults.server_address[:2]
    query = f"scheme=http&endpoint_override={host}:{port}&region=us-east-1&allow_bucket_creation=true"
    files, _ = FileSystem.from_uri(f"s3://key:secret@tables?{past(query, faults)}")
    files.create_dir("tables", recursive=False)
    return query


def past(query: str, faults: Faults) -> str:
    """The same, past the proxy, which passes on reads alone."""
    host, port = faults.server_address[:2]
    return query.replace(f"{host}:{port}", faults.upstream)


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Fingerprints are remembered in a folder of the test's own."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder
