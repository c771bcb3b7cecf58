"""Every error that Lockstep raises on purpose.

    LockstepError            exit code 1: the run failed
    ├── SpecError            exit code 2: the spec, an override or the usage is wrong
    │   └── JobImportError   exit code 2: `job.use` does not lead to a Job
    ├── JobError             the job's own code broke, or broke a rule of training
    │   └── ResumeError      a resume of the run goes on with other bits, or cannot go on
    ├── DataError            the data cannot be read, or are not what the job wants
    ├── DeterminismError     `determinism: strict` cannot be kept here
    ├── NumericsError        a loss or a gradient is not finite
    ├── ExportError          a model cannot be exported, or its artifact computes something else
    ├── DriftError           ranks that must agree do not
    │   └── CorruptionError  the bits of a worker are wrong: what follows from them is taken again
    ├── StorageError         a file or folder of the run cannot be read or written
    │   └── TransientStorageError   for a reason that may pass: it is tried again
    ├── RecordError          the tracking store cannot be reached or refuses
    │   └── NoSuchRunError   the store answers, and has no run of this id
    └── ClusterError         workers cannot be placed, or were lost
        ├── DeviceError      a GPU or its driver failed
        └── SilentError      something was waited for that did not answer in time

A message is one line: what, what was got, what is wanted, what to do; the spec's field comes first where
there is one. Every error takes that one string, so all of them survive pickling between processes.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any, NamedTuple

from lockstep.exit_codes import ExitCode


class FailedAt(NamedTuple):
    """The micro-batch during which a device or a memory failed, and what failed; `step` is counted from 1."""

    what: str
    step: int
    micro_batch: int
    samples: tuple[int, ...]


class LockstepError(Exception):
    """A failure that Lockstep understands. `str(error)` is the one line that a person is shown."""

    exit_code: int = ExitCode.FAILED
    place: FailedAt | None = None
    """The micro-batch, if it failed in one and not in the connection to a peer or to storage."""

    def with_message(self, message: str) -> LockstepError:
        """The same error with another message. Its place and other attributes are kept; its traceback and causes are not."""
        kind, _, state = self.__reduce__()
        changed = kind(message)
        changed.__dict__.update(state)
        return changed

    def __reduce__(self) -> tuple[type[LockstepError], tuple[str], dict[str, Any]]:
        """One of a class that a job has derived arrives as the class here that it is: its own may want other arguments, or not be known there."""
        kind = next(kind for kind in type(self).__mro__ if kind.__module__.partition(".")[0] == "lockstep")
        return kind, (str(self),), {name: it for name, it in self.__dict__.items() if hasattr(kind, name)}


class SpecError(LockstepError):
    """The spec, an override or the command line is wrong. Example: `batch.micro: got 48, which does not divide batch.global = 256; …`."""

    exit_code = ExitCode.REFUSED


class JobImportError(SpecError):
    """`job.use` does not lead to a subclass of Job. Example: the module has a syntax error, or no such class."""


class JobError(LockstepError):
    """The job broke a rule of training. Example: a parameter that gets no gradient."""


class ResumeError(JobError):
    """A process that took up a checkpoint computed the next step otherwise than the run. Example: state in a global that no checkpoint keeps."""


class DataError(LockstepError):
    """The data cannot be read, or are not what the job wants. Example: a Parquet file that was cut short."""


class DeterminismError(LockstepError):
    """The same bits cannot be promised. Example: an operator without a deterministic kernel."""


class NumericsError(LockstepError):
    """A loss or gradient is not finite. Example: the loss of step 412, micro-batch 3 is nan."""

    step: int | None = None
    """The step, from 0, that all ranks left with this error before its update; None outside training."""
    micro_batch: int | None = None
    """The micro-batch of the first loss that was not finite, if known."""
    phase: str = ""
    """The phase of the step, if it has some; the phases before it have updated."""


class ExportError(LockstepError):
    """A model cannot be exported, or its artifact computes something else. Example: a batch size that is written into the model."""


class DriftError(LockstepError):
    """Ranks that must hold the same bits do not. Example: a cluster of mixed processors under strict."""


class CorruptionError(DriftError):
    """A worker has other bits than it should. Example: memory of its GPU that lost one; the other ranks hold other weights."""


class StorageError(LockstepError):
    """A file or folder of the run cannot be read or written."""


class TransientStorageError(StorageError):
    """Storage failed for a reason that may pass: tried again with pauses. Example: a full disk, a stale file handle, a timeout."""


class RecordError(LockstepError):
    """The tracking store cannot be reached or refuses what it is given."""


class NoSuchRunError(RecordError):
    """The store answers, but has no run of this id. Example: a misspelt id, or that of a run in another store."""


class ClusterError(LockstepError):
    """Workers cannot be placed, or one was lost."""


class DeviceError(ClusterError):
    """A GPU or its driver failed. Example: an uncorrectable ECC error."""


class SilentError(ClusterError):
    """Something did not answer in time. Example: a mailbox whose process is stopped."""


def nearest(name: str, known: Iterable[str]) -> str:
    """`; did you mean 'lr'?` for the closest of `known`, or the list of them where none is close."""
    candidates = sorted(known)
    close = difflib.get_close_matches(name, candidates, n=1, cutoff=0.55)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; known here: {', '.join(candidates)}" if candidates else ""


def first_line(error: BaseException) -> str:
    """The kind of an error and the first line of its message, for a report of one line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"
