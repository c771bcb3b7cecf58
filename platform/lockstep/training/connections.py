"""The connections of a gloo group, so that it can be broken off: gloo itself has no way, in torch 2.13 its `abort` does nothing.

A rank that is shut out of its own connections meets an error in whatever it waits for, and so do those that wait for it. Which of the
process's sockets are the group's is told by both ends: it is one that two members have opened between them while they formed it.
"""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple


class Ends(NamedTuple):
    """Addresses of a connection: host and port of this side, and of the other."""

    own: tuple[Any, ...]
    peer: tuple[Any, ...]


Sockets = Mapping[int, Ends]
"""Connected TCP sockets by their descriptors."""


def connected() -> Sockets:
    """Those of this process; none where the system does not list them."""
    listed = Path("/proc/self/fd")
    if not listed.is_dir():
        return {}
    found = {}
    for path in listed.iterdir():
        with suppress(OSError):  # closed since it was listed, or not connected
            fd = int(path.name)
            if stat.S_ISSOCK(os.fstat(fd).st_mode):
                found[fd] = _ends(fd)
    return found


@contextmanager
def _opened(fd: int) -> Iterator[socket.socket]:
    """A socket of someone else's, as Python sees it: nothing about it changes."""
    timeout_s = socket.getdefaulttimeout()
    socket.setdefaulttimeout(None)  # with one, Python would have the socket block no more
    try:
        opened = socket.socket(fileno=os.dup(fd))
    finally:
        socket.setdefaulttimeout(timeout_s)
    with opened:
        yield opened


def _ends(fd: int) -> Ends:
    """OSError where the socket is not connected."""
    with _opened(fd) as opened:
        if opened.family not in (socket.AF_INET, socket.AF_INET6):
            raise OSError("not TCP")
        return Ends(opened.getsockname()[:2], opened.getpeername()[:2])


def opened_since(before: Sockets) -> Sockets:
    """The sockets that were not there `before`."""
    return {fd: ends for fd, ends in connected().items() if before.get(fd) != ends}


def shared(own: Sockets, others: Iterable[Sequence[Ends]]) -> Sockets:
    """Those of `own` whose other end is one of the sockets of the `others`."""
    there = {(ends.peer, ends.own) for sockets in others for ends in sockets}
    return {fd: ends for fd, ends in own.items() if (ends.own, ends.peer) in there}


def shut(sockets: Sockets) -> None:
    """End these connections, those that are still there, for both sides. The descriptors stay with whoever has opened them."""
    for fd, ends in sockets.items():
        with suppress(OSError):  # it is closed, or another file by now
            if _ends(fd) == ends:
                with _opened(fd) as opened:
                    opened.shutdown(socket.SHUT_RDWR)


def is_cut(sockets: Sockets) -> bool:
    """Whether one of these connections has ended, or is closed in this process."""
    for fd, ends in sockets.items():
        try:
            if _ends(fd) != ends:
                return True
        except OSError:
            return True
    return False


Inodes = Mapping[int, int]
"""Sockets by their descriptors, each by its inode: what it is still known by when it is connected no more."""


def inodes(sockets: Sockets) -> Inodes:
    return {fd: os.fstat(fd).st_ino for fd in sockets}


def still_open(known: Inodes) -> list[int]:
    """The descriptors of those that nobody in this process has closed."""
    found = []
    for fd, inode in known.items():
        with suppress(OSError):  # it is closed
            if os.fstat(fd).st_ino == inode:
                found.append(fd)
    return found


def take_away(descriptors: Iterable[int]) -> None:
    """Put an empty file in the place of what is open there: whoever looks at it finds no connection, and may close it."""
    with Path(os.devnull).open("rb") as empty:
        for fd in descriptors:
            os.dup2(empty.fileno(), fd, inheritable=False)


def close(sockets: Sockets) -> None:
    """Close the descriptors in this process alone: the connections stay with those that share them."""
    for fd, ends in sockets.items():
        with suppress(OSError):
            if _ends(fd) == ends:
                os.close(fd)
