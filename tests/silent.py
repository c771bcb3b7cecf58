"""A store on loopback that takes every request and never answers."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple


class SilentStore(NamedTuple):
    """The URI of a folder in its bucket, and whether it has a request."""

    uri: str
    asked: threading.Event


@contextmanager
def silent_store() -> Iterator[SilentStore]:
    """The store, which ends with the block."""
    asked, connections = threading.Event(), []

    def take(server: socket.socket) -> None:
        with suppress(OSError):
            while True:
                connections.append(server.accept()[0])
                asked.set()

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=take, args=(server,), daemon=True).start()
        place = f"127.0.0.1:{server.getsockname()[1]}"
        yield SilentStore(
            f"s3://key:secret@bucket/runs?endpoint_override={place}&scheme=http&region=us-east-1", asked
        )
        server.shutdown(socket.SHUT_RDWR)
        for connection in connections:
            connection.close()
