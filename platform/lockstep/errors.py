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
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Generic, NamedTuple, TypeVar

from lockstep.exit_codes import ExitCode


class FailedAt(NamedTuple):
    """The micro-batch during which a device or a memory failed, and what failed; `step` is counted from 1."""

    failure: str
    step: int
    micro_batch: int
    samples: tuple[int, ...]


class LockstepError(Exception):
    """A failure that Lockstep understands. `str(error)` is the one line that a person is shown."""

    exit_code: int = ExitCode.FAILED
    failed_at: FailedAt | None = None
    """The micro-batch, if it failed in one and not in the connection to a peer or to storage."""
    code: str = ""
    """Which `Problem` it is; empty for one that is in no table yet, as are the facts below."""
    facts: Mapping[str, str] = MappingProxyType({})
    """What its line says of this case, by name: `got`, `wanted`, `where`, …"""
    evidence: str = ""
    """Its line without the remedy."""
    remedy: str = ""
    field: str = ""
    """The field of the spec that it is about, dotted, where one alone is."""
    check: str = ""
    """The check of `lockstep check` that it belongs to, in whichever check it shows."""
    unclear: bool = False
    """Whether its line does not say what is wrong, so that the traceback is needed."""

    def with_message(self, message: str) -> LockstepError:
        """The same error with another message, as one with more context. Its micro-batch, facts, evidence and remedy are kept; its traceback and causes are not."""
        kind, _, state = self.__reduce__()
        changed = kind(message)
        changed.__dict__.update(state)
        return changed

    def as_kind(self, kind: type[ErrorT]) -> ErrorT:
        """The same error as one of another class: its line, code, facts and micro-batch are kept."""
        changed = kind(str(self))
        changed.__dict__.update(self.__reduce__()[2])
        return changed

    def __reduce__(self) -> tuple[type[LockstepError], tuple[str], dict[str, Any]]:
        """One of a class that a job has derived arrives as the class here that it is: its own may want other arguments, or not be known there."""
        kind = next(kind for kind in type(self).__mro__ if kind.__module__.partition(".")[0] == "lockstep")
        return (
            kind,
            (str(self),),
            {name: value for name, value in self.__dict__.items() if hasattr(kind, name)},
        )


ErrorT = TypeVar("ErrorT", bound=LockstepError)


@dataclass(frozen=True, slots=True)
class Problem(Generic[ErrorT]):
    """One kind of error as data: calling it with the facts of a case makes the error, and docs/failures.md has a row of it.

    `text` and `remedy` are templates of the line, whose halves a semicolon parts.
    """

    code: str
    """Its name for programs, which stays as it is when the words change."""
    error: type[ErrorT]
    text: str
    """What, what was got, what is wanted: with the facts in braces, `{got!r}` in quotation marks. A fact `field` is the error's."""
    remedy: str = ""
    cause: str = field(kw_only=True)
    """For the page, in Markdown: when it comes."""
    advice: str = field(kw_only=True)
    """For the page: what to do."""
    shown: str = field(default="", kw_only=True)
    """The line as the page has it, where that is not the template with its facts left out."""
    check: str = field(default="", kw_only=True)
    unclear: bool = field(default=False, kw_only=True)

    def __call__(self, **facts: object) -> ErrorT:
        """The error of one case."""
        values = {name: str(value) for name, value in facts.items()}
        evidence, remedy = self.text.format(**values), self.remedy.format(**values)
        error = self.error(f"{evidence}; {remedy}" if remedy else evidence)
        error.code, error.facts, error.evidence, error.remedy = self.code, values, evidence, remedy
        error.check, error.unclear, error.field = self.check, self.unclear, values.get("field", "")
        return error

    @property
    def section(self) -> str:
        """The section of docs/failures.md: its class, or the one of the tree above that a room's own class is a kind of."""
        return next(kind.__name__ for kind in self.error.__mro__ if kind.__module__ == __name__)

    @property
    def row(self) -> str:
        """Its row in docs/failures.md."""
        shown = self.shown
        if not shown:
            shown = re.sub(r"\{\w+\}", "…", re.sub(r"\{\w+!r\}", "'…'", self.text)) + (
                "; …" if self.remedy else ""
            )
        return f"| `{shown}` | {self.cause} | {self.advice} |"


def table(problems: Iterable[Problem[Any]]) -> str:
    """A table of docs/failures.md."""
    return "\n".join(
        ["| message | cause | remedy |", "|---|---|---|", *(problem.row for problem in problems)]
    )


def evidence_and_remedy(line: str) -> tuple[str, str]:
    """The halves of a line that is in no table: by the form of all lines, what to do comes after the last semicolon. Empty where it has none."""
    evidence, _, remedy = line.rpartition("; ")
    return (evidence, remedy) if evidence else (line, "")


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


def closest(name: str, known: Iterable[str]) -> str | None:
    """The one of `known` that was probably meant; None where none is close."""
    return next(iter(difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.55)), None)


def nearest(name: str, known: Iterable[str]) -> str:
    """`; did you mean 'lr'?` for the closest of `known`, or the list of them where none is close."""
    candidates = sorted(known)
    if (close := closest(name, candidates)) is not None:
        return f"; did you mean {close!r}?"
    return f"; known here: {', '.join(candidates)}" if candidates else ""


def first_line(error: BaseException) -> str:
    """The kind of an error and the first line of its message, for a report of one line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"
