"""Events: everything that a run can report, as one union of frozen values.

Code that trains, drives or watches a run tells events and never waits. The journal is the log of the `Recorded` ones;
the ledger, the run's page, the points that go to MLflow, the progress line and the watchdog are folds over events. A new fact is one
event here and one case in the fold that shows it.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from lockstep.errors import LockstepError
from lockstep.record import problems
from lockstep.record.ledger.rows import EvaluationRow, Observation, StepRow

EndStatus = Literal["FAILED", "KILLED"]

_SEGMENT_FILE = re.compile(r"(\d{9,})-(\d{9,})\.([0-9a-f]{32})\.[0-9a-f]{16}\.rows")


# --- recorded: in the journal, in this order ------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Opened:
    """A recorder has begun to write the record of `run`. `process` has the tags that identify it to others; `at` is Unix time in seconds."""

    at: float
    process: Mapping[str, str] = field(default_factory=dict)
    run: str = ""


SOURCE = "source"
"""The fact that has files of the job which only a worker knows of: their texts by path below its root."""


@dataclass(frozen=True, slots=True)
class Started:
    """An attempt is prepared. Each attempt tells it again.

    Of `facts`, `plan` (a mapping) becomes parameters, `environment` becomes environment.json and some tags, `git` (see
    `record.git_state`) becomes tags and git.diff, `source` files in `source/`. Of the others a single value becomes the tag `lockstep.<name>`, and
    anything else becomes `<name>.json`.
    """

    facts: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class InputsFound:
    """Something that decides about the run was found after its start, in step number `step`: from here on this is its identity, with all its fields.

    `source` has the texts of files of the job that came with it, by path.
    """

    step: int
    fields: Mapping[str, Any]
    identity: str
    source: Mapping[str, str] = field(default_factory=dict)


class CheckpointRow(NamedTuple):
    """One save, as the record sees it: published at `uri`, or given up for `error`. Times in seconds."""

    step: int
    uri: str | None
    error: str | None
    nbytes: int
    waited_s: float
    """How long training waited for the previous save."""
    copied_s: float
    """How long training waited for the copy."""
    written_s: float
    wall_clock: float
    """Unix time in seconds at which it was over."""
    deleted: tuple[int, ...] = ()
    """Steps whose checkpoints were deleted."""
    essential: tuple[tuple[int, str], ...] = ()
    """The newest checkpoint, the best one and the pinned ones, newest first: step and URI. The store should have them whole."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """The load of a node at `at` (Unix seconds), under MLflow's names."""

    node: str
    at: float
    values: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class AttemptsSummarised:
    """What is known of each attempt so far; told again whenever it changes."""

    attempts: Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class PeakMemory:
    """The most memory that each rank has held so far, in bytes, by rank: of its GPU if it has one, else of its process."""

    bytes_by_rank: Sequence[int]


MEMORY_SNAPSHOT = "memory-"
"""How the names of documents begin that say what a worker held as its memory ran out."""

PICKLE = ".pickle"
"""How the name of a document ends whose text is bytes in base64."""


@dataclass(frozen=True, slots=True)
class Document:
    """A text to store under the name of a file."""

    name: str
    text: str

    @property
    def tells_memory(self) -> bool:
        """Whether it says, for a person, what a worker held as its memory ran out."""
        return self.name.startswith(MEMORY_SNAPSHOT) and self.name.endswith(".txt")

    @property
    def memory_line(self) -> str:
        """The owners of most memory, with the name of the document, where it `tells_memory`."""
        why, largest, *_ = [*self.text.splitlines(), "", ""]
        return f"{largest}; {self.name} has the rest ({why})"

    @property
    def content(self) -> str | bytes:
        """The content of the file. ValueError where its text is none."""
        return base64.b64decode(self.text, validate=True) if self.name.endswith(PICKLE) else self.text


@dataclass(frozen=True, slots=True)
class Finished:
    """The run reached its end, or was stopped by a signal that it obeyed (`stopped` in its summary).

    `files` are in the run's folder. Single values of the summary become tags `lockstep.<name>`; all of it is summary.json.
    """

    summary: Mapping[str, Any]
    files: Sequence[Path] = ()
    at: float | None = field(default=None, compare=False)
    """When the run ended (Unix seconds), as its recorder heard it; None where nobody heard it."""

    @property
    def error(self) -> str:
        """Why a run that reached its end still does not count as finished: its last checkpoint could not be saved. Else empty."""
        return "" if self.summary.get("stopped") else str(self.summary.get("unsaved") or "")

    @property
    def status(self) -> Literal["FINISHED", "FAILED", "KILLED"]:
        """The run's status from now on."""
        return "KILLED" if self.summary.get("stopped") else "FAILED" if self.error else "FINISHED"


@dataclass(frozen=True, slots=True)
class Failed:
    """The run ended early: `message` is the one line, `details` the traceback."""

    message: str
    details: str = ""
    status: EndStatus = "FAILED"
    at: float | None = field(default=None, compare=False)
    """As in `Finished`."""


@dataclass(frozen=True, slots=True)
class TakenOver:
    """A newer attempt has taken the run over from this one, and decides how the run goes on and ends."""

    message: str


@dataclass(frozen=True, slots=True)
class Diagnosed:
    """Something that is wrong with a run: the rule that found it (each reports once in a run), its evidence, and a remedy."""

    rule: str
    step: int
    """The step after which it was found."""
    evidence: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.rule}: {self.evidence}; {self.remedy}"


@dataclass(frozen=True, slots=True)
class Alerted:
    """A rule of the spec's `alert` has fired, after `step`. Each rule fires once in a run."""

    rule: str
    step: int
    evidence: str

    def __str__(self) -> str:
        return f"alert: {self.rule}: {self.evidence} (step {self.step})"


@dataclass(frozen=True, slots=True)
class Warned:
    """Something that a person should know, and that ends nothing. The journal has each text once."""

    text: str


@dataclass(frozen=True, slots=True)
class Straggling:
    """A rank keeps the others waiting. The journal has each text once."""

    text: str


@dataclass(frozen=True, slots=True)
class Violated:
    """A step or an evaluation that was repeated gave other bits, although the run promises the same ones."""

    text: str


@dataclass(frozen=True, slots=True)
class SetAside:
    """The store refused something, for `reason`; it is to be sent again."""

    what: str
    reason: str


@dataclass(frozen=True, slots=True)
class Mended:
    """Damaged lines of the journal, by the byte at which each begins, and what became of their content."""

    starts: Sequence[int]
    how: str


class Witness(NamedTuple):
    """Identifies a worker that saw or computed wrong bits, with its digests of what was compared."""

    rank: int
    host: str
    pid: int
    device: str
    uuid: str
    """The UUID of the GPU; empty for a processor."""
    digests: tuple[int, ...]
    """Empty where only is known that they were others than those of the other workers."""

    def __str__(self) -> str:
        device = ", ".join(filter(None, (self.device, self.uuid)))
        return f"rank {self.rank} (host {self.host}, {device}, process {self.pid})"


@dataclass(frozen=True, slots=True)
class Corrupted:
    """Workers had different bits of `quantity` after a step, or of a micro-batch's gradient, where they must be the same.

    What attempts up to `attempt` recorded of the steps after `since` is doubted: when such a step is taken again, it replaces that.
    """

    step: int
    since: int
    attempt: int
    quantity: str
    tensor: str
    """The first tensor that differs, or empty if unknown."""
    workers: tuple[Witness, ...]
    wrong: tuple[int, ...]
    """The ranks that were wrong; none if that cannot be decided."""
    how: Literal["majority", "repetition", "recomputation", "undecided"]
    """How it was decided who was wrong."""
    micro_batch: int | None = None

    def wrong_beside(self, right: tuple[int, ...]) -> tuple[int, ...]:
        """The ranks that were wrong where these digests are right: none where nobody had those, for then these are not digests of the same.

        Of one whose digests are not known only is known that it or the other one was wrong.
        """
        known = [worker.digests for worker in self.workers if worker.digests]
        # Within a step all have learning rates that they had not at the end of the one before.
        unlike = [i for i, values in enumerate(zip(*known, strict=False)) if len({*values}) > 1]
        compared = unlike or range(len(right))
        others = tuple(
            worker.rank
            for worker in self.workers
            if worker.digests and any(worker.digests[i] != right[i] for i in compared)
        )
        unknown = tuple(worker.rank for worker in self.workers if not worker.digests)
        if len(others) + len(unknown) < len(self.workers):
            return others or unknown
        return others if len(others) == 1 and unknown else ()

    @property
    def untrusted_workers(self) -> tuple[Witness, ...]:
        """The workers that were wrong; all of them if that cannot be decided."""
        return tuple(worker for worker in self.workers if not self.wrong or worker.rank in self.wrong)

    def __str__(self) -> str:
        where = f"after step {self.step}"
        if self.micro_batch is not None:
            where = f"in step {self.step}, micro-batch {self.micro_batch},"
        first = f", first in {self.tensor!r}" if self.tensor else ""
        named = " and ".join(map(str, self.untrusted_workers))
        if not self.wrong:
            return f"{where} the workers have different {self.quantity}{first}; which is wrong cannot be told from these alone: {named}"
        how = {
            "majority": "than the majority of the workers",
            "repetition": "than when it was computed again",
            "recomputation": "than when these steps were taken again",
        }[self.how]
        return f"{where} {named} had other {self.quantity} {how}{first}"


@dataclass(frozen=True, slots=True)
class ResumeChecked:
    """A process of its own has taken up the checkpoint of `step`, and the bits of its next step are the run's."""

    step: int
    cpu_s: float
    """The processor time that it took, in seconds."""


@dataclass(frozen=True, slots=True)
class TimeSpent:
    """What became of the time of a run up to `at` (Unix seconds); `ledger.goodput` defines the figures. Told with each end of the run."""

    at: float
    wall_s: float
    """Seconds since the run began."""
    counted_s: float
    """Seconds in steps that count."""
    away_s: float
    """Seconds in which no command was at the run."""
    interruptions: int
    """How often the run was interrupted, other than as planned."""
    lost_s: float
    """Seconds that the interruptions took."""
    lost_worker_h: float
    """Hours of workers that the interruptions took: their time, by the workers of the attempt that each ended."""

    @property
    def effective(self) -> float:
        """The share of the run's time that went into steps that count, from 0 to 1."""
        return self.counted_s / self.wall_s if self.wall_s > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Delivered:
    """Everything told before this has reached the store."""


class Segment(NamedTuple):
    """A sealed segment, by reference: its steps, the digest of their deterministic columns, and its file."""

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
        """The segment that a file's name describes. StorageError for any other name."""
        match = _SEGMENT_FILE.fullmatch(name)
        if match is None:
            raise problems.LEDGER_UNREADABLE(what=repr(name), got="it is no segment")
        return cls(int(match[1]), int(match[2]), match[3], size, sha256)


# --- passing: the journal does not keep them --------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Restored:
    """The rows up to the checkpoint that an attempt starts from, or rows that may not have arrived. The record may have them already, or more.

    The steps of `segments` come before `steps`; they are read only if the record lacks them.
    """

    steps: Sequence[StepRow]
    evaluations: Sequence[EvaluationRow]
    segments: Sequence[Segment] = ()
    observations: Sequence[Observation] = ()


@dataclass(frozen=True, slots=True)
class Alive:
    """Nothing hangs, although no step is done: an evaluation, a save or a wait goes on. Told often."""


@dataclass(frozen=True, slots=True)
class Printed:
    """What a worker has printed since the last of these events; it goes to `logs/<name>.txt`."""

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class Joined:
    """A worker has begun: where to find its process."""

    rank: int
    node: str
    pid: int
    stacks_file: Path
    """Where the process writes its stacks on SIGUSR1."""
    runtime_env: str
    """The runtime environment of the process, as Ray writes it."""


@dataclass(frozen=True, slots=True)
class StageEnded:
    """An attempt finished one of its stages (`attempts.restart_stages.STAGES`) at `at` (Unix seconds)."""

    stage: str
    at: float


@dataclass(frozen=True, slots=True)
class Broke:
    """A worker ended with an error; the error as one line, and its traceback."""

    error: LockstepError
    details: str
    rank: int = 0


Row = StepRow | EvaluationRow
Recorded = (
    Opened
    | Started
    | InputsFound
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
    | Alerted
    | Warned
    | Straggling
    | Violated
    | SetAside
    | Mended
    | Corrupted
    | ResumeChecked
    | TimeSpent
    | Delivered
)
Passing = Restored | Alive | Printed | Joined | StageEnded | Broke
Event = Recorded | Passing

Tell = Callable[[Event], None]
"""Takes an event and never waits."""


def tell_nobody(event: Event) -> None:
    """The `Tell` of ranks other than 0, and of runs that are not recorded."""
