"""What a loader process inherits from its parent, separated from it before the process fetches.

A forked process shares every open file with its parent and with its siblings: one position for all of them, which a `seek` of one moves
for the others. Here each file gets a description of its own, at the same position, so what a reader has in its buffer still fits.
A connection cannot be had twice: what one process asks, another one may be answered. So it reads as one that the other
side has closed, after which a client connects anew or fails. Threads are not inherited at all: a pool of them starts new ones, and
a wait for one that stayed behind is an error.
"""

from __future__ import annotations

import errno
import fcntl
import os
import queue
import signal
import socket
import stat
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import thread as thread_pools
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

_LISTED = Path("/proc/self/fd")

_KEPT_FLAGS = os.O_ACCMODE | os.O_APPEND | os.O_NONBLOCK | getattr(os, "O_DIRECT", 0)

LOOKS_S = 10.0
"""How often a loader process looks whether it waits for what cannot come."""

_TORCHS_OWN = "torch-shm-dir"
"""In the address of the process that keeps torch's shared memory, to which any process may speak."""


class Opened(NamedTuple):
    """A descriptor, and what it leads to."""

    fd: int
    device: int
    inode: int


_CUT: list[str] = []
"""What this process has inherited and cannot read, each by what it is: first what a dataset may have opened."""

_APART = set[Opened]()
"""What was open before there was a dataset."""

_NAMED = 3
"""How many of them an error names."""


class WaitsForeverError(RuntimeError):
    """A loader process waits for a thread that it does not have. Example: a thread of the dataset's that fills a queue."""


def opened() -> list[Opened]:
    """What this process has open at the moment, but for its standard streams; nothing where the system does not list it."""
    streams = [_descriptor(fd) for fd in range(3)]
    every = [_descriptor(int(path.name)) for path in _LISTED.iterdir()] if _LISTED.is_dir() else []
    stream_files = {descriptor[1:] for descriptor in streams if descriptor is not None}
    return [
        descriptor
        for descriptor in every
        if descriptor is not None and descriptor.fd > 2 and descriptor[1:] not in stream_files
    ]


def set_apart() -> None:
    """Note what is open before there is a dataset: an error about a sample that cannot be read names it last."""
    _APART.clear()
    _APART.update(opened())


def separate_from_parent(inherited: Iterable[Opened]) -> None:
    """In a forked process: give the files, connections and thread pools that were open in the parent a state of their own here."""
    for descriptor in sorted(inherited, key=lambda descriptor: (descriptor in _APART, descriptor.fd)):
        if _descriptor(descriptor.fd) == descriptor:  # else its number has become another's before the fork
            _separate(descriptor.fd)
    for pool in _pools():
        _start_anew(pool)


def explanation(error: BaseException) -> str:
    """What follows the text of an error where it may come from a file or a connection that this process cannot read."""
    every = list(dict.fromkeys(_CUT))
    if not every or not _is_cut(error):
        return ""
    more = f" and {len(every) - _NAMED} more" if len(every) > _NAMED else ""
    return (
        f"; a loader process cannot read what was open before it was forked ({', '.join(every[:_NAMED])}{more}): open it where it is used, "
        "in each process (os.getpid()) its own, or set data.loader_processes=0"
    )


def _is_cut(error: BaseException) -> bool:
    """Whether an error, or one that it follows from, is that of a reader whose other side is gone."""
    chain: list[BaseException] = []
    following: BaseException | None = error
    while following is not None and not any(following is link for link in chain):  # it may be its own cause
        chain.append(following)
        following = following.__cause__ or following.__context__
    return any(
        (isinstance(raised, ConnectionError) and not isinstance(raised, ConnectionRefusedError))
        or (isinstance(raised, EOFError) and not raised.args)  # a file that is cut short has more to say
        or (isinstance(raised, OSError) and raised.errno == errno.EBADF)
        for raised in chain
    )


def look_for_waits(inside: CodeType) -> None:
    """From now on raise WaitsForeverError in the main thread of this process where it waits, called from `inside`, and no thread is left
    that could end it.
    """

    def look(_number: int, frame: FrameType | None) -> None:
        others = [
            thread
            for thread in threading.enumerate()
            if thread is not threading.main_thread() and _is_users(thread)
        ]
        if frame is None or others or not _waits_for_good(frame):
            return
        while frame is not None:
            if frame.f_code is inside:
                raise WaitsForeverError(
                    "it waits for a thread of the process that this loader process was forked from; start threads where they are used, "
                    "in each process (os.getpid()) its own, or set data.loader_processes=0"
                )
            frame = frame.f_back

    signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, LOOKS_S, LOOKS_S)


def _waits_for_good(frame: FrameType) -> bool:
    return frame.f_code is threading.Condition.wait.__code__ and frame.f_locals["timeout"] is None


def _is_users(thread: threading.Thread) -> bool:
    """Whether it is a thread of the user's, not one by which a process hands over its results."""
    return thread.name != "QueueFeederThread"


def _descriptor(fd: int) -> Opened | None:
    """A descriptor with the file that it leads to; None for one that is closed."""
    try:
        status = os.fstat(fd)
    except OSError:  # closed since it was listed
        return None
    return Opened(fd, status.st_dev, status.st_ino)


def _separate(fd: int) -> None:
    """Give this process a state of its own of what a descriptor is read from; what cannot be had twice reads as closed."""
    status, flags = os.fstat(fd), fcntl.fcntl(fd, fcntl.F_GETFL)
    if flags & os.O_ACCMODE == os.O_WRONLY or flags & getattr(os, "O_PATH", 0):
        return  # nothing is read from it
    if stat.S_ISREG(status.st_mode) and status.st_size:  # an empty one is there for its lock
        _reopen(fd, flags)
    elif stat.S_ISFIFO(status.st_mode):
        read, write = os.pipe()
        os.close(write)
        _replace(fd, read)
        _CUT.append("a pipe")
    elif stat.S_ISSOCK(status.st_mode):
        _close_connection(fd)


def _reopen(fd: int, flags: int) -> None:
    """Open a file again at the same position, which is this process's alone from here on."""
    position = os.lseek(fd, 0, os.SEEK_CUR)
    try:
        reopened = os.open(_LISTED / str(fd), flags & _KEPT_FLAGS)
    except OSError as error:
        _CUT.append(f"the file {str((_LISTED / str(fd)).readlink())!r} ({error.strerror})")
        reopened = os.open(os.devnull, os.O_WRONLY)  # reading from it fails
    else:
        os.lseek(reopened, position, os.SEEK_SET)
    _replace(fd, reopened)


def _close_connection(fd: int) -> None:
    peer = _peer(fd)
    if peer is None or _TORCHS_OWN in str(peer):
        return
    with _no_timeout():
        near_end, far_end = socket.socketpair()
    far_end.close()
    os.set_blocking(near_end.fileno(), os.get_blocking(fd))
    _replace(fd, near_end.detach())
    _CUT.append(f"the connection to {peer}" if peer else "a connection")


def _peer(fd: int) -> Any:
    """The address of the other side of a connection; None for a socket that is none."""
    with _no_timeout(), closing(socket.socket(fileno=os.dup(fd))) as duplicate:
        try:
            return None if duplicate.type == socket.SOCK_DGRAM else duplicate.getpeername()
        except OSError:  # it waits for connections
            return None


@contextmanager
def _no_timeout() -> Iterator[None]:
    """No default timeout: with one, Python would make a socket non-blocking that other code uses as well."""
    timeout_s = socket.getdefaulttimeout()
    socket.setdefaulttimeout(None)
    try:
        yield
    finally:
        socket.setdefaulttimeout(timeout_s)


def _replace(fd: int, replacement: int) -> None:
    """Have `fd` lead to the file of `replacement`, which is closed."""
    os.dup2(replacement, fd, inheritable=os.get_inheritable(fd))
    os.close(replacement)


def _pools() -> Iterator[thread_pools.ThreadPoolExecutor]:
    """The thread pools that had threads in the parent. Python has no public way to find them."""
    visited = set[int]()
    for thread in list(thread_pools._threads_queues):
        reference, *_ = getattr(thread, "_args", None) or [lambda: None]  # a thread that has ended has none
        pool = reference()
        if isinstance(pool, thread_pools.ThreadPoolExecutor) and id(pool) not in visited:
            visited.add(id(pool))
            yield pool


def _start_anew(pool: thread_pools.ThreadPoolExecutor) -> None:
    """Forget the threads that have stayed in the parent, with what they had yet to do."""
    old_queue, pool._work_queue = pool._work_queue, queue.SimpleQueue()
    pool._threads, pool._idle_semaphore = set(), threading.Semaphore(0)
    pool._shutdown_lock = threading.Lock()
    with suppress(queue.Empty):
        while True:
            work = old_queue.get_nowait()
            if work is not None:
                work.future.cancel()
