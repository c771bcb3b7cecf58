"""Runs a function in a forked process, so that whatever it does to objects, modules, generators and files ends with that process.

The child has a copy of the parent's memory. It has one intra-op thread, because the parent's are not inherited, reads open files from
positions of its own (`data.fork_isolation`), and cannot speak over the parent's connections. It hands back one value through a pipe.
"""

from __future__ import annotations

import gc
import os
import pickle
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch

from lockstep.data import fork_isolation
from lockstep.errors import LockstepError
from lockstep.job.inputs.imports import Asked, note_imports
from lockstep.job.inputs.variables import Values, reads_of
from lockstep.job.interface import Job
from lockstep.process import end_with_parent
from lockstep.running_time import running_s
from lockstep.threads import autograd_has_threads

T = TypeVar("T")

SLICE_S = 1.0
"""A wait is taken in pieces of so many seconds: while both processes are stopped, neither is silent."""

LIMIT_S = 60.0
"""The least time after which a child is considered stuck, in seconds: a library may wait for threads that a fork does not inherit."""

TIMES_AS_LONG = 100.0
"""A child may take as many times as long as the first micro-batch did in the parent."""


class NoChildError(Exception):
    """The child gave no verdict, for a reason of the fork and not of the job. Example: a dataset's connection, which a fork cannot use."""


class RemoteTracebackError(Exception):
    """The traceback of an error as the child printed it, as the cause of that error in the parent."""


def can_fork(device: torch.device) -> bool:
    """Whether a child can compute what this process computes. CUDA's context and autograd's threads do not survive a fork."""
    return device.type == "cpu" and not torch.cuda.is_available() and not autograd_has_threads()


def in_child(
    function: Callable[[], T],
    job: Job,
    *,
    forked: Callable[[], None] = lambda: None,
    limit_s: float = LIMIT_S,
) -> T:
    """The value of `function()`, computed in a child; `forked` is called there first, to drop connections of the parent.

    The variables that the `job` reads there, and what it imports, count as read and imported here: they are inputs of the run.

    Raises what the function raises if it is a LockstepError. Raises NoChildError where the child ended without a value or was still at work
    after `limit_s` seconds.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    opened, began, parent = fork_isolation.opened(), time.monotonic(), os.getpid()
    read, write = os.pipe()
    with _no_collection():
        pid = os.fork()
        if pid == 0:
            gc.freeze()
    if pid == 0:
        os.close(read)
        _serve(partial(_noted, function, job), forked, opened, write, parent)
    os.close(write)
    try:
        answer = _answer(read, limit_s)
    finally:
        os.close(read)
        code = _end(pid, finished=answer is not None)
    if not answer:
        end = (
            f"ended without a result (exit code {code})"
            if answer is not None
            else "was stopped, still at work"
        )
        raise NoChildError(f"a process of its own {end} after {time.monotonic() - began:.0f} s")
    value, error, trace, cut = pickle.loads(answer)
    if error is None:
        result, reads, imports = value
        for name, read in reads.items():
            reads_of(job).read(name, read)
        note_imports(job, imports)
        return result  # type: ignore[no-any-return]
    if cut:
        raise NoChildError(f"a process of its own failed: {error}{cut}")
    raise error from RemoteTracebackError(trace)


@contextmanager
def _no_collection() -> Iterator[None]:
    """No garbage is collected in the block. A child that freezes there all that it inherits never destroys a process group of its parent, whose
    destructor joins threads that a fork does not copy: it crashes, or waits for ever.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _serve(
    function: Callable[[], Any],
    forked: Callable[[], None],
    opened: list[fork_isolation.Opened],
    write: int,
    parent: int,
) -> None:
    """In the child: compute, hand over, and end without anything that the parent registered for its own end, whatever is raised."""
    code = 1
    try:
        end_with_parent(parent)  # which waits for it in this thread
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends it
        forked()
        pipe = os.fstat(write)
        fork_isolation.separate_from_parent(
            [
                descriptor
                for descriptor in opened
                if (descriptor.device, descriptor.inode) != (pipe.st_dev, pipe.st_ino)
            ]
        )
        fork_isolation.look_for_waits(_result.__code__)
        torch.set_num_threads(1)
        content = _result(function)
        sys.stdout.flush()
        sys.stderr.flush()
        with os.fdopen(write, "wb") as file:
            file.write(content)
        code = 0
    finally:
        os._exit(code)


def _noted(function: Callable[[], T], job: Job) -> tuple[T, Values, Asked]:
    value = function()
    return value, reads_of(job).values, note_imports(job)


def _result(function: Callable[[], Any]) -> bytes:
    """The value of the function, or what it raised, packed."""
    try:
        return pickle.dumps((function(), None, "", ""))
    except NoChildError as error:  # of a child of this one
        return pickle.dumps((None, error, traceback.format_exc(), ""))
    except LockstepError as error:
        return pickle.dumps((None, error, traceback.format_exc(), fork_isolation.explanation(error)))
    except BaseException as error:  # noqa: BLE001 - nothing may leave the child but by the pipe
        wrapped = RuntimeError(f"in a process of its own: {type(error).__name__}: {error}")
        return pickle.dumps((None, wrapped, traceback.format_exc(), fork_isolation.explanation(error)))


def _answer(read: int, limit_s: float) -> bytes | None:
    """All that the child writes until it closes its end; None where it does not do so in time."""
    parts, until = list[bytes](), running_s() + limit_s
    while (remaining_s := until - running_s()) > 0:
        if select.select([read], [], [], min(SLICE_S, remaining_s))[0]:
            if not (part := os.read(read, 1 << 20)):
                return b"".join(parts)
            parts.append(part)
    return None


def _end(pid: int, *, finished: bool) -> int:
    """Reap the child, after ending it unless it has `finished`. Returns its exit code; a signal's number is negative."""
    if not finished:
        os.kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
