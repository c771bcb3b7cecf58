"""Events: everything that a run can tell, as one union of frozen values.

Whoever trains, drives or watches a run tells events and never waits. The journal is the log of those that are `Recorded`;
the ledger, the run's page, the points that go to MLflow, the progress line and the watchdog are folds over events. A new fact is one
event here and one case in the fold that shows it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from lockstep.errors import FailedAt, LockstepError, StorageError

EndStatus = Literal["FAILED", "KILLED"]

_SEGMENT_FILE = re.compile(r"(\d{9,})-(\d{9,})\.([0-9a-f]{32})\.[0-9a-f]{16}\.rows")


# --- recorded: in the journal, in this order ------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Opened:
    """A recorder has begun to write. `process` are the tags by which others find it; `at` is Unix time in seconds."""

    at: float
    process: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Started:
    """An attempt is prepared. Told again by each attempt.

    Of `facts`, `plan` (a mapping) becomes parameters, `environment` environment.json and some tags, `git` (see
    `environment.git_state`) tags and git.diff. Of the others a single value becomes the tag `lockstep.<name>` and
    anything else `<name>.json`.
    """

    facts: Mapping[str, Any]


class Digests(NamedTuple):
    """What a step left, each as a whole number below 2**64; `training.digests` says how they are made."""

    weights: int
    optimizer: int
    gradients: tuple[int, ...] | None
    """Of each micro-batch that is not empty, by its index; None with `reduction: native`, which keeps none apart."""
    average: int | None = None
    """Of the moving average of the weights; None without `ema`."""


class StepRow(NamedTuple):
    """One optimizer step that was done. Given to the recorder, a row and its `parts` do not change any more.

    `loss` and `parts` are means over the global batch, `weight` what the loss was divided by; `grad_norm` is the norm
    before clipping and `clipped_norm` after; `step_s` is the whole step, the wait for data included.
    """

    step: int
    """Number of the step in the run, counted from 1."""
    epoch: int
    """Epoch it belongs to, counted from 0."""
    samples: int
    """Training samples consumed by the run so far, this step's included."""
    loss: float
    weight: float
    parts: Mapping[str, float]
    lr: float
    grad_norm: float
    clipped_norm: float
    scale: float
    skipped: bool
    data_wait_s: float
    step_s: float
    wall_clock: float
    """Unix time in seconds at which the step was done; its metrics carry it, however late they are written."""
    attempt: int
    digests: Digests | None = None
    """In the steps that have them by the plan (`record.digest_every`)."""


class EvaluationRow(NamedTuple):
    """One evaluation, after step number `step`; `metrics` are named `eval/…` already."""

    step: int
    epoch: int
    metrics: Mapping[str, float]
    seconds: float
    wall_clock: float


class Observation(NamedTuple):
    """What was looked at beside the row of a step, in the steps that `record.observe_every` names.

    `values` are named as their metrics: those under `layers/` have the same bits in every execution of the run, the others have not.
    """

    step: int
    values: Mapping[str, float]
    wall_clock: float
    """Unix time in seconds at which it was made."""


class CheckpointRow(NamedTuple):
    """One save, as the record is told of it: published at `uri`, or given up for `error`. Times in seconds."""

    step: int
    uri: str | None
    error: str | None
    nbytes: int
    waited_s: float
    """What training waited for the save before."""
    copied_s: float
    """What training waited for the copy."""
    written_s: float
    wall_clock: float
    """Unix time in seconds at which it was over."""
    deleted: tuple[int, ...] = ()
    """Steps whose checkpoints were deleted."""
    essential: tuple[tuple[int, str], ...] = ()
    """The newest checkpoint, the best and those that are pinned, newest first: step and URI. The store is to have them whole."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """What a node was busy with at `at` (Unix seconds), by the names under which MLflow knows it."""

    node: str
    at: float
    values: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class AttemptsSummarised:
    """What is known of each attempt so far; told again whenever that changes."""

    attempts: Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class PeakMemory:
    """The most memory that each rank has held so far, in bytes, by rank: of its device where that is a GPU, else of its process."""

    bytes_by_rank: Sequence[int]


@dataclass(frozen=True, slots=True)
class Document:
    """A text to keep under the name of a file."""

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class Finished:
    """The run came to its end, or was stopped by a signal that it heeded (`stopped` in its summary).

    `files` lie in the run's folder. Single values of the summary become tags `lockstep.<name>`, all of it is summary.json.
    """

    summary: Mapping[str, Any]
    files: Sequence[Path] = ()

    @property
    def error(self) -> str:
        """Why a run that came to its end by itself has not finished: its last checkpoint could not be saved. Else nothing."""
        return "" if self.summary.get("stopped") else str(self.summary.get("unsaved") or "")

    @property
    def status(self) -> Literal["FINISHED", "FAILED", "KILLED"]:
        """What the run is from now on."""
        return "KILLED" if self.summary.get("stopped") else "FAILED" if self.error else "FINISHED"


@dataclass(frozen=True, slots=True)
class Failed:
    """The run ended early: `message` is the one line, `details` the traceback."""

    message: str
    details: str = ""
    status: EndStatus = "FAILED"


@dataclass(frozen=True, slots=True)
class TakenOver:
    """A newer attempt has taken the run from this one: how the run goes on and ends is that one's to say."""

    message: str


@dataclass(frozen=True, slots=True)
class Diagnosed:
    """Something that a run shows to be wrong with it: the rule that speaks, once in a run, its evidence and what to do about it."""

    rule: str
    step: int
    """The step after which it was seen."""
    evidence: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.rule}: {self.evidence}; {self.remedy}"


@dataclass(frozen=True, slots=True)
class SetAside:
    """Something was refused by the store, for `reason`, and is to be sent to it again."""

    what: str
    reason: str


@dataclass(frozen=True, slots=True)
class Mended:
    """Lines of the journal that were damaged, by the byte at which each begins, and what became of what they held."""

    starts: Sequence[int]
    how: str


@dataclass(frozen=True, slots=True)
class Sealed:
    """The first line of a journal that was cut: the segments, in its folder, that have the steps it has no more."""

    segments: Sequence[Segment]


class Witness(NamedTuple):
    """A worker, as one that saw or computed wrong bits is named, and its digests of what was compared."""

    rank: int
    host: str
    pid: int
    device: str
    uuid: str
    """Of a GPU; empty for a processor."""
    digests: tuple[int, ...]

    def __str__(self) -> str:
        device = ", ".join(filter(None, (self.device, self.uuid)))
        return f"rank {self.rank} (host {self.host}, {device}, process {self.pid})"


@dataclass(frozen=True, slots=True)
class Corrupted:
    """Workers that must have the same bits of `quantity` after a step, or of a micro-batch's gradient, had not.

    What attempts up to `attempt` recorded of the steps after `since` is doubted: a step that is taken again takes its place.
    """

    step: int
    since: int
    attempt: int
    quantity: str
    tensor: str
    """The first that differs, or empty where it is not known."""
    workers: tuple[Witness, ...]
    wrong: tuple[int, ...]
    """The ranks that were wrong; none where it cannot be told."""
    how: Literal["majority", "repetition", "recomputation", "undecided"]
    """How they were told from the others."""
    micro_batch: int | None = None

    @property
    def suspects(self) -> tuple[Witness, ...]:
        """The workers that were wrong; all of them where it cannot be told which."""
        return tuple(worker for worker in self.workers if not self.wrong or worker.rank in self.wrong)

    def __str__(self) -> str:
        where = f"after step {self.step}"
        if self.micro_batch is not None:
            where = f"in step {self.step}, micro-batch {self.micro_batch},"
        first = f", first in {self.tensor!r}" if self.tensor else ""
        named = " and ".join(map(str, self.suspects))
        if not self.wrong:
            return f"{where} the workers have different {self.quantity}{first}; which is wrong cannot be told from these alone: {named}"
        how = {
            "majority": "than the majority of the workers",
            "repetition": "than when it was computed again",
            "recomputation": "than when these steps were taken again",
        }[self.how]
        return f"{where} {named} had other {self.quantity} {how}{first}"


@dataclass(frozen=True, slots=True)
class Delivered:
    """All that was told before has reached the store."""


class Segment(NamedTuple):
    """A sealed segment, as others refer to it: its steps, the digest of their deterministic columns, and its file."""

    first: int
    last: int
    digest: str
    size: int
    sha256: str

    @property
    def name(self) -> str:
        """The name of its file."""
        return f"{self.first:09d}-{self.last:09d}.{self.digest}.{self.sha256[:16]}.rows"

    @classmethod
    def of(cls, name: str, size: int, sha256: str) -> Segment:
        """The segment of a file's name. StorageError for a name that is none."""
        found = _SEGMENT_FILE.fullmatch(name)
        if found is None:
            raise StorageError(f"ledger: {name!r} is no segment")
        return cls(int(found[1]), int(found[2]), found[3], size, sha256)


# --- passing: for whoever watches now -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Restored:
    """The rows up to the checkpoint that an attempt starts from, or those that may not have arrived. The record may have them already, or more.

    The steps of `segments` come before `steps`; they are read where the record lacks them.
    """

    steps: Sequence[StepRow]
    evaluations: Sequence[EvaluationRow]
    segments: Sequence[Segment] = ()
    observations: Sequence[Observation] = ()


@dataclass(frozen=True, slots=True)
class Alive:
    """Nothing hangs, though no step is done: an evaluation, a save or a wait goes on. Told often."""


@dataclass(frozen=True, slots=True)
class Straggling:
    """A rank keeps the others waiting."""

    text: str


@dataclass(frozen=True, slots=True)
class Warned:
    """Something that a person should know of, and that ends nothing."""

    text: str


@dataclass(frozen=True, slots=True)
class Printed:
    """What a worker has printed since the last of these: it goes to `logs/<name>.txt`."""

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class Joined:
    """A worker has begun: where its process is found. Times are Unix seconds."""

    rank: int
    node: str
    pid: int
    stacks_file: Path
    """Where the process writes its stacks on SIGUSR1."""
    imported_at: float
    """When the process had imported all that a worker needs; infinity for one that was not started ahead."""
    runtime_env: str
    """Ray's name for the environment of the process."""


@dataclass(frozen=True, slots=True)
class StageEnded:
    """An attempt came to the end of one of its stages (`attempts.stages.STAGES`) at `at` (Unix seconds)."""

    stage: str
    at: float


@dataclass(frozen=True, slots=True)
class Broke:
    """A worker ended with an error, told as one line, and its traceback."""

    error: LockstepError
    details: str
    rank: int = 0
    place: FailedAt | None = None
    """The micro-batch, where that failed, and not the way to a peer or to storage."""


Row = StepRow | EvaluationRow
Recorded = (
    Opened
    | Started
    | StepRow
    | EvaluationRow
    | Observation
    | CheckpointRow
    | Sampled
    | AttemptsSummarised
    | PeakMemory
    | Document
    | Finished
    | Failed
    | TakenOver
    | Diagnosed
    | SetAside
    | Mended
    | Corrupted
    | Sealed
    | Delivered
)
Passing = Restored | Alive | Straggling | Warned | Printed | Joined | StageEnded | Broke
Event = Recorded | Passing

Tell = Callable[[Event], None]
"""Takes an event and never waits."""


def tell_nobody(event: Event) -> None:
    """For ranks other than 0, and for runs that are not recorded."""
