"""Ports on loopback that no other process takes meanwhile: not the kernel, which hands out the ephemeral ones,
and not Ray, whose workers have 10002 to 19999."""

import itertools
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

_SERVERS = range(20000, 32768)  # below the kernel's (ip_local_port_range)
_tried = itertools.count()


def free_port() -> int:
    """A port for a server that is about to start. Each process begins elsewhere, and gives none twice."""
    start = os.getpid() * 61
    for _ in _SERVERS:
        port = _SERVERS[(start + next(_tried)) % len(_SERVERS)]
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
    raise AssertionError("no port is free on loopback")


@contextmanager
def refusing_port() -> Iterator[int]:
    """A port at which nobody listens: it is held, so that nobody else can, and refuses every connection."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]
