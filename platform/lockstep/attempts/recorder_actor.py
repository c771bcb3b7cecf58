"""The recorder as a Ray actor: one writer on the driver's node, which every attempt's rank 0 speaks to."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import ray
from torch import Tensor

from lockstep.attempts.stages import Moments
from lockstep.attempts.watchdog import Member
from lockstep.checkpoint.runs import pin_aliased
from lockstep.errors import ClusterError, LockstepError, RecordError
from lockstep.record.environment import git_state
from lockstep.record.ledger import CheckpointRow, EvaluationRow, History, StepRow
from lockstep.record.recorder import Recorder
from lockstep.spec.fields import Spec
from lockstep.training.weights import save_weights

LOST = (ray.exceptions.RayActorError, ray.exceptions.OutOfMemoryError)
"""What a call raises where the recorder's process is gone."""

FLUSH_S = 0.25
"""How long rank 0 gathers rows before it sends them: a call costs about 0.2 ms of the training thread."""


ALIVE_S = 1.0
"""How often an evaluation or a save tells that it goes on."""

ROWS_PER_CALL = 10_000
"""Rows of an earlier attempt that are sent at once."""


class News(NamedTuple):
    """What the driver asks for while a run goes on."""

    step: StepRow | None
    evaluation: EvaluationRow | None
    total_steps: int | None
    failure: LockstepError | None
    recording: bool
    """Whether the run exists in its store."""
    warnings: tuple[str, ...]
    moments: Mapping[str, float]
    """When the attempt at hand came to the end of its stages in the worker of rank 0."""
    stragglers: tuple[str, ...]
    """Ranks of the attempt at hand that keep the others waiting, a line each."""
    alive: int
    """Grows with everything that the attempt at hand tells from its first step on; 0 before."""


class Wishes(NamedTuple):
    """What the driver asks of the workers."""

    stop: bool
    saves: int
    """How many checkpoints it has asked for in this attempt."""


class Ending(NamedTuple):
    """How a run ended: its summary, or the first error that a worker reported with its traceback."""

    summary: dict[str, Any] | None
    error: LockstepError | None
    details: str


class RecorderActor:
    """Methods in the group `write` are carried out in the order in which they were called.

    The store is opened with the first facts that a worker tells, just before the first step: opening MLflow takes
    some four seconds of a processor, which would else be missing while the workers start.
    """

    def __init__(self, spec: Spec, run_id: str | None) -> None:
        self._recorder = Recorder(
            spec, run_id=run_id, on_aliases=partial(pin_aliased, spec.checkpoint.storage)
        )
        self._warnings: list[str] = []
        self._open = False
        self._stop = self._moving = False
        self._saves = 0
        self._signal: int | None = None
        self._files: tuple[Path, ...] = ()
        self._total_steps: int | None = None
        self._summary: dict[str, Any] | None = None
        self._attempt = self._alive = 0
        self._members: dict[int, Member] = {}
        self._moments = Moments()
        self._stragglers: list[str] = []
        self._error: LockstepError | None = None
        self._details = ""

    @ray.method(concurrency_group="write")
    def started(self, facts: Mapping[str, Any]) -> None:
        self._total_steps = facts.get("plan", {}).get("total_steps", self._total_steps)
        self._recorder.started(facts)
        self._start()

    def _start(self) -> None:
        if not self._open:
            self._open = True
            self._recorder.start()

    @ray.method(concurrency_group="write")
    def joined(self, attempt: int, member: Member) -> None:
        """A worker has begun."""
        if attempt == self._attempt:
            self._members[member.rank] = member

    @ray.method(concurrency_group="write")
    def moments(self, attempt: int, ends: Mapping[str, float]) -> None:
        """When stages of an attempt ended in the worker of rank 0."""
        if attempt == self._attempt:
            for stage, at in ends.items():
                self._moments.note(stage, at)

    @ray.method(concurrency_group="news")
    def members(self) -> list[Member]:
        """The workers of the attempt at hand."""
        return [self._members[rank] for rank in sorted(self._members)]

    @ray.method(concurrency_group="write")
    def alive(self) -> None:
        self._alive += bool(self._alive)  # what comes before the first step may take as long as it likes

    @ray.method(concurrency_group="write")
    def document(self, name: str, text: str) -> None:
        self._recorder.document(name, text)

    @ray.method(concurrency_group="write")
    def steps(self, rows: Sequence[StepRow]) -> None:
        self._recorder.steps(rows)
        if rows[-1].attempt == self._attempt:
            self._alive += 1
            self._moments.note("first_step", rows[0].wall_clock)

    @ray.method(concurrency_group="write")
    def evaluation(self, row: EvaluationRow) -> None:
        self._recorder.evaluation(row)
        self._alive += bool(self._alive)

    @ray.method(concurrency_group="write")
    def straggling(self, attempt: int, text: str) -> None:
        if attempt == self._attempt:
            self._stragglers.append(text)

    @ray.method(concurrency_group="write")
    def checkpoint(self, row: CheckpointRow) -> None:
        self._recorder.checkpoint(row)

    @ray.method(concurrency_group="write")
    def warn(self, text: str) -> None:
        self._warnings.append(text)

    @ray.method(concurrency_group="write")
    def finished(self, summary: Mapping[str, Any], files: Sequence[Path]) -> None:
        self._summary, self._files = dict(summary), tuple(files)
        if not (self._moving and summary["stopped"]):
            self.settle()

    @ray.method(concurrency_group="write")
    def settle(self) -> None:
        """The attempt that ended is the run's last."""
        assert self._summary is not None
        self._recorder.finished({**self._summary, "signal": self._signal}, self._files)

    @ray.method(concurrency_group="write")
    def system(self, node: str, values: Mapping[str, float]) -> None:
        self._recorder.system(node, values)

    @ray.method(concurrency_group="write")
    def output(self, name: str, text: str) -> None:
        """What a worker has printed."""
        self._recorder.output(name, text)

    @ray.method(concurrency_group="write")
    def broke(self, attempt: int, error: LockstepError, details: str) -> None:
        """A worker's error. The first one counts, before any that is the loss of a peer: its consequence."""
        if attempt != self._attempt:
            return  # a worker of an attempt that was given up
        if self._error is None or (
            isinstance(self._error, ClusterError) and not isinstance(error, ClusterError)
        ):
            self._error, self._details = error, details

    @ray.method(concurrency_group="write")
    def begin(self, attempt: int) -> None:
        """Another attempt begins: what ended the one before is no longer this run's end."""
        self._attempt, self._error, self._details = attempt, None, ""
        self._members, self._alive, self._moments = {}, 0, Moments()
        self._stragglers = []
        self._stop, self._moving, self._saves, self._summary = False, False, 0, None

    @ray.method(concurrency_group="write")
    def account(self, attempts: Sequence[Mapping[str, Any]]) -> None:
        """What is known of each attempt so far."""
        self._recorder.attempts(attempts)

    @ray.method(concurrency_group="write")
    def ended(self, message: str, details: str, status: str) -> None:
        """The run ended early, as the driver sees it."""
        self._start()
        self._recorder.failed(message, details, status)  # type: ignore[arg-type]

    @ray.method(concurrency_group="write")
    def close(self) -> RecordError | None:
        """Write what is left. Returns, rather than raises, what could not be written: Ray would wrap it."""
        self._start()
        try:
            self._recorder.close()
        except RecordError as error:
            return error
        finally:
            if self._recorder.violation:
                self._warnings.append(self._recorder.violation)
        return None

    @ray.method(concurrency_group="ask")
    def run_folder(self) -> Path:
        return self._recorder.run_folder()

    @ray.method(concurrency_group="news")
    def known_run_id(self) -> str | None:
        """The run's id, or None as long as there is no run. Never waits."""
        return self._recorder.run_id() if self._recorder.opened else None

    @ray.method(concurrency_group="ask")
    def run_id(self) -> str:
        return self._recorder.run_id()

    @ray.method(concurrency_group="ask")
    def names(self) -> tuple[str, str, str]:
        """Run id, link, folder."""
        return self._recorder.run_id(), self._recorder.url(), str(self._recorder.run_folder())

    @ray.method(concurrency_group="news")
    def news(self) -> News:
        latest = self._recorder.latest
        return News(
            latest.step,
            latest.evaluation,
            self._total_steps,
            self._recorder.failure(),
            self._recorder.opened,
            tuple(self._warnings),
            dict(self._moments.at),
            tuple(self._stragglers),
            self._alive,
        )

    @ray.method(concurrency_group="news")
    def stop(self, moving: bool = False, signal_number: int | None = None) -> None:
        """Ask the workers to end the attempt after their next step: the run as well, unless it is `moving` to others."""
        self._stop, self._moving, self._signal = True, moving, signal_number

    @ray.method(concurrency_group="news")
    def save(self) -> None:
        """Ask the workers for a checkpoint after their next step; the attempt goes on."""
        self._saves += 1

    @ray.method(concurrency_group="news")
    def wishes(self) -> Wishes:
        return Wishes(self._stop, self._saves)

    @ray.method(concurrency_group="news")
    def ending(self) -> Ending:
        return Ending(self._summary, self._error, self._details)


def start_recorder(spec: Spec, environment: Mapping[str, str], run_id: str | None) -> Any:
    """A recorder actor on this node; it takes no CPU from the workers."""
    here = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
        ray.get_runtime_context().get_node_id(), soft=False
    )
    remote = ray.remote(num_cpus=0, concurrency_groups={"write": 1, "ask": 2, "news": 1})(RecorderActor)
    options: dict[str, Any] = {"scheduling_strategy": here}
    if environment:
        options["runtime_env"] = {"env_vars": dict(environment)}
    return remote.options(**options).remote(spec, run_id)


class RemoteRecord:
    """The record of rank 0 in a Ray worker: rows go to the actor in small packs, and nothing waits for them."""

    def __init__(self, actor: Any, folder: Path, attempt: int) -> None:
        self._actor = actor
        self._attempt = attempt
        self._folder = folder
        self._rows: list[StepRow] = []
        self._sent_at = 0.0
        self._alive_at = 0.0
        self._wishes = Wishes(False, 0)
        self._saves = 0
        self._asked: Any = None

    def started(self, facts: Mapping[str, Any]) -> None:
        self._actor.moments.remote(self._attempt, {"preparation": time.time()})
        self._actor.started.remote({**facts, "git": git_state(self._folder)})

    def loaded(self) -> None:
        self._actor.moments.remote(self._attempt, {"checkpoint": time.time()})

    def restored(self, history: History) -> None:
        for start in range(0, len(history.steps), ROWS_PER_CALL):
            self._actor.steps.remote(history.steps[start : start + ROWS_PER_CALL])
        for row in history.evaluations:
            self._actor.evaluation.remote(row)

    def step(self, row: StepRow) -> None:
        self._rows.append(row)
        if time.monotonic() - self._sent_at >= FLUSH_S:
            self._flush()

    def evaluation(self, row: EvaluationRow) -> None:
        self._flush()
        self._actor.evaluation.remote(row)

    def straggling(self, text: str) -> None:
        self._actor.straggling.remote(self._attempt, text)

    def finished(self, summary: Mapping[str, Any], weights: Mapping[str, Mapping[str, Tensor]]) -> None:
        self._flush()
        files = save_weights(ray.get(self._actor.run_folder.remote()), weights)
        ray.get(self._actor.finished.remote(dict(summary), files))

    def stopping(self) -> bool:
        return self._wishes.stop

    def saving(self) -> bool:
        asked, self._saves = self._wishes.saves > self._saves, self._wishes.saves
        return asked

    def run_id(self) -> str:
        run_id: str = ray.get(self._actor.run_id.remote())
        return run_id

    def checkpoint(self, row: CheckpointRow) -> None:
        self._actor.checkpoint.remote(row)

    def alive(self) -> None:
        if time.monotonic() - self._alive_at >= ALIVE_S:
            self._alive_at = time.monotonic()
            self._actor.alive.remote()

    def warn(self, text: str) -> None:
        self._actor.warn.remote(text)

    def _flush(self) -> None:
        if self._rows:
            self._actor.steps.remote(self._rows)
        self._rows, self._sent_at = [], time.monotonic()
        self._hear()

    def _hear(self) -> None:
        """Take in an answer that has come, and ask again."""
        if self._asked is not None and ray.wait([self._asked], timeout=0)[0]:
            self._wishes, self._asked = ray.get(self._asked), None
        if self._asked is None:
            self._asked = self._actor.wishes.remote()
