"""Stores to test: a folder, and a bucket of an S3 server on loopback."""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from lockstep.checkpoint.runs.run_folder import Attempt, RunFolder
from lockstep.checkpoint.storage.interface import Storage
from lockstep.checkpoint.storage.opening import open_storage


@pytest.fixture(scope="session")
def s3() -> Iterator[str]:
    """The query of a URI that leads to a real S3 server, and the bucket `runs` in it."""
    from moto.server import ThreadedMotoServer
    from pyarrow.fs import FileSystem

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    _one_put_at_a_time()
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    query = f"scheme=http&endpoint_override={host}:{port}&region=us-east-1&allow_bucket_creation=true"
    files, _ = FileSystem.from_uri(f"s3://key:secret@runs?{query}")
    files.create_dir("runs", recursive=False)
    yield query
    server.stop()


@cache
def _one_put_at_a_time() -> None:
    """As S3 does, decide on the condition of a put and make it in one moment: moto looks, and puts a little later."""
    from moto.s3.responses import S3Response

    real, lock = S3Response.put_object, threading.Lock()

    def put_object(self: S3Response) -> Any:
        with lock:
            return real(self)

    S3Response.put_object = put_object  # type: ignore[method-assign]


@pytest.fixture
def uri(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A storage that nobody else uses, as the spec would name it: a folder, or what `everywhere` asks for."""
    if getattr(request, "param", "local") == "local":
        return str(tmp_path / "runs")
    return f"s3://key:secret@runs/{uuid.uuid4().hex}?{request.getfixturevalue('s3')}"


@pytest.fixture
def storage(uri: str) -> Storage:
    return open_storage(uri)


@pytest.fixture
def run(storage: Storage) -> RunFolder:
    return RunFolder.create(storage, "run-a")


@pytest.fixture
def attempt(run: RunFolder) -> Attempt:
    return run.claim()
