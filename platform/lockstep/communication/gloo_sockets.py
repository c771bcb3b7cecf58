"""The TCP connections of a gloo group, which can be shut to abort it: in torch 2.13 gloo's own `abort` does nothing.

Once a rank's connections are shut, whatever it waits for raises an error, and so does whatever waits for it. Both ends together tell which of
a process's sockets belong to the group: those that two members opened between them while they formed it.
"""

from __future__ import annotations

import ctypes
import os
import socket
import stat
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple


class Ends(NamedTuple):
    """Addresses of a connection: host and port of this side, and of the other."""

    local: tuple[Any, ...]
    peer: tuple[Any, ...]


Sockets = Mapping[int, Ends]
"""Connected TCP sockets by their descriptors."""


def connected() -> Sockets:
    """The connected TCP sockets of this process; none where the system does not list them."""
    listed = Path("/proc/self/fd")
    if not listed.is_dir():
        return {}
    sockets = {}
    for path in listed.iterdir():
        with suppress(OSError):  # closed since it was listed, or not connected
            fd = int(path.name)
            if stat.S_ISSOCK(os.fstat(fd).st_mode):
                sockets[fd] = _ends(fd)
    return sockets


@contextmanager
def _opened(fd: int) -> Iterator[socket.socket]:
    """A Python socket for a descriptor that other code owns. The descriptor itself stays as it is."""
    timeout_s = socket.getdefaulttimeout()
    socket.setdefaulttimeout(None)  # with a default timeout, Python would make the shared socket non-blocking
    try:
        opened = socket.socket(fileno=os.dup(fd))
    finally:
        socket.setdefaulttimeout(timeout_s)
    with opened:
        yield opened


def _ends(fd: int) -> Ends:
    """The addresses of both ends. OSError where the socket is not TCP or not connected."""
    with _opened(fd) as opened:
        if opened.family not in (socket.AF_INET, socket.AF_INET6):
            raise OSError("not TCP")
        return Ends(opened.getsockname()[:2], opened.getpeername()[:2])


def opened_since(earlier: Sockets) -> Sockets:
    """The sockets of this process that are not among the `earlier` ones."""
    return {fd: ends for fd, ends in connected().items() if earlier.get(fd) != ends}


def listening() -> frozenset[tuple[int, int]]:
    """The listening TCP sockets of this process, by descriptor and inode; none where the system does not list them."""
    listed = Path("/proc/self/fd")
    listeners = set()
    for path in listed.iterdir() if listed.is_dir() else ():
        with suppress(OSError):  # closed since it was listed
            fd = int(path.name)
            status = os.fstat(fd)
            if stat.S_ISSOCK(status.st_mode):
                with _opened(fd) as opened:
                    tcp = opened.family in (socket.AF_INET, socket.AF_INET6)
                    if tcp and opened.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                        listeners.add((fd, status.st_ino))
    return frozenset(listeners)


_ATTACH_FILTER = 26
"""Linux's SO_ATTACH_FILTER, which Python does not name."""


def refuse_connections(listeners: Iterable[tuple[int, int]]) -> None:
    """Have the kernel drop whatever comes for these listening sockets: nobody connects to them any more. What is connected goes on.

    gloo keeps its listener for as long as the group lives, and takes whoever connects. It would not bear that another closes it. Without effect where the
    system has no such filter.
    """
    nothing = ctypes.create_string_buffer(
        struct.pack("HBBI", 0x06, 0, 0, 0)
    )  # BPF: return 0, no byte of the packet
    program = struct.pack("HL", 1, ctypes.addressof(nothing))
    for fd, _ in listeners:
        with suppress(OSError), _opened(fd) as opened:
            opened.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, program)


def shared(local: Sockets, others: Iterable[Sequence[Ends]]) -> Sockets:
    """The `local` sockets whose other end is one of the sockets of the `others`."""
    mirrored = {(ends.peer, ends.local) for sockets in others for ends in sockets}
    return {fd: ends for fd, ends in local.items() if (ends.local, ends.peer) in mirrored}


def shut(sockets: Sockets) -> None:
    """Shut down those of these connections that still exist, for both sides. The descriptors stay open, with their owners."""
    for fd, ends in sockets.items():
        with suppress(OSError):  # closed, or the descriptor is another file by now
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
"""The inode of each socket by its descriptor: it still identifies a socket that is no longer connected."""


def inodes(sockets: Sockets) -> Inodes:
    """Those of the sockets that are still open: the owner of a connection may close it as soon as its other end is gone."""
    open_inodes = {}
    for fd, ends in sockets.items():
        with suppress(OSError):
            inode = os.fstat(fd).st_ino
            if _ends(fd) == ends:  # asked last: another file that had the descriptor before has other ends
                open_inodes[fd] = inode
    return open_inodes


def still_open(known: Inodes) -> list[int]:
    """The descriptors that nobody in this process has closed."""
    descriptors = []
    for fd, inode in known.items():
        with suppress(OSError):  # it is closed
            if os.fstat(fd).st_ino == inode:
                descriptors.append(fd)
    return descriptors


def take_away(descriptors: Iterable[int]) -> None:
    """Replace what is open there with an empty file: a user of the descriptor finds no connection, and may still close it."""
    with Path(os.devnull).open("rb") as empty:
        for fd in descriptors:
            os.dup2(empty.fileno(), fd, inheritable=False)


def close(sockets: Sockets) -> None:
    """Close the descriptors in this process only: other processes that share the connections keep them."""
    for fd, ends in sockets.items():
        with suppress(OSError):
            if _ends(fd) == ends:
                os.close(fd)
