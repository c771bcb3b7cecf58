"""A supervisor without a cluster: it is the real one, as are its mailbox and its checkpoints, and what lies around it plays a script.

A script is a generator of what the workers of one attempt do; it goes on by one `yield` whenever the supervisor waits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from lockstep.attempts.cluster_view import ClusterView
from lockstep.attempts.mailbox import LOOK_S, Asked, Mailbox, RunStatus
from lockstep.attempts.placement import WorkerPlacement
from lockstep.attempts.resizing import Advice
from lockstep.attempts.supervisor import Supervisor
from lockstep.checkpoint.runs.run_checkpoints import opened
from lockstep.checkpoint.runs.run_folder import AttemptOrigin, RunFolder
from lockstep.driver.options import RunOptions
from lockstep.driver.result import Result
from lockstep.driver.signals import StopSignal
from lockstep.driver.start_stages import StageEnds
from lockstep.errors import ClusterError, LockstepError, RecordError
from lockstep.record.events.union import AttemptsSummarised, Broke, CheckpointRow, Event, Finished, Joined
from lockstep.record.recorder_state import RecorderState
from lockstep.spec.fields import Spec
from lockstep.spec.loading import load_spec
from lockstep.training.elastic.membership import Arrival, Progress
from tests.unit.checkpoint.one_process import write_checkpoint
from tests.unit.record.rows import step_row

RUN_ID = "a" * 32
SUMMARY = {
    "identity": "1" * 64,
    "step": 0,
    "epoch": 0,
    "samples": 0,
    "skipped": 0,
    "stopped": False,
    "workers": 1,
    "metrics": {},
    "weights_digest": "2" * 64,
    "best_digest": None,
    "best_step": None,
    "first_step_at": None,
    "steps_per_s": None,
    "samples_per_s": None,
    "data_wait_share": None,
}


class Told:
    """The progress, the run registry and the gauges: they note what they are told."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.shown: list[tuple[Any, ...]] = []

    def say(self, text: str) -> None:
        self.lines.append(text)

    def show(self, *rows: Any) -> None: ...

    def table(self, *_: Any) -> None: ...

    def begins(self, run_id: str, workers: int) -> None:
        self.shown.append(("RUNNING", run_id, workers))

    def reached(self, step: int, workers: int) -> None: ...

    def ends(self, status: str, step: int) -> None:
        self.shown.append((status, step))


class Recording:
    """The record as a driver has it; the mailbox is in this process, and nobody empties it."""

    def __init__(self, run_id: str | None = RUN_ID) -> None:
        self.run_id = run_id
        self.mailbox = Mailbox()
        self.state = RecorderState(run_id=run_id, folder="/runs/a")
        self.guardian = SimpleNamespace(tell=lambda **_: None, record=lambda *_: None)
        self.told: list[Event] = []
        self.refused: list[str] = []
        self.closed = self.asked_to_stop = self.is_named = False
        self.looks = 0
        """How often the driver has looked into the mailbox."""
        self.at_the_end: dict[str, Any] = {}
        """What the recorder's state has beside, once it has written all that is left."""
        self.refusal: RecordError | None = None
        """What it could not record."""

    def begin(self, attempt: int, workers: int, *, wait: bool) -> None:
        self.mailbox.begin(attempt, workers)

    def status(self) -> RunStatus:
        self.looks += 1
        return self.mailbox.status()._replace(recorder=self.state)

    def members(self) -> list[Joined]:
        view = self.status().view
        return [view.members[rank] for rank in sorted(view.members)]

    def reopen(self, lost: Exception) -> ClusterError:
        return ClusterError(f"the mailbox was lost: {lost}")

    def named(self) -> None:
        self.is_named = True
        self.mailbox.name()

    def tell(self, *events: Event) -> None:
        assert not self.closed
        self.told += events

    def ask_stop(self) -> None:
        self.asked_to_stop = True
        self.mailbox.ask_stop()

    def ask_save(self) -> None:
        self.mailbox.ask_save()

    def ask_regroup(self, leaving: Sequence[int]) -> bool:
        return self.mailbox.ask_regroup(leaving)

    def refuse(self, why: str) -> None:
        self.refused.append(why)
        self.mailbox.refuse(why)

    def close(self) -> RecordError | None:
        self.closed = True
        self.state = self.state._replace(**self.at_the_end)
        return self.refusal

    @property
    def summaries(self) -> list[dict[str, Any]]:
        """The account, as it was told last."""
        told = [event for event in self.told if isinstance(event, AttemptsSummarised)]
        return [dict(one) for one in told[-1].attempts] if told else []


class Workers:
    """The workers of one attempt, as one process that does what `script` says."""

    def __init__(
        self,
        script: Script,
        spec: Spec,
        origin: AttemptOrigin,
        mailbox: Mailbox,
        place: WorkerPlacement,
        *_: Any,
    ) -> None:
        self.spec, self.origin, self.place = spec, origin, place
        self.over, self.error, self.names_lost = self, None, False
        self.stage_ends, self.lost = StageEnds(), dict[int, str]()
        self.can_regroup, self.replaced_by_ray, self.run_id = False, False, origin.run_id
        self.attempt = origin.attempt
        """The attempt that its workers tell of: they may have gone on to another."""
        self.joining_workers = SimpleNamespace(failed={}, ended=[])
        self.inside: tuple[int, ...] = ()
        self.ended = self.given_up = False
        self.asked = Asked()
        self.mailbox, self._script = mailbox, script(self)

    # --- for the supervisor -----------------------------------------------------------------------------------

    def start(self) -> None:
        self.stage_ends.note("decision")
        for rank in range(self.place.workers):
            self.tell(Joined(rank, f"node-{'abc'[rank]}", 1, Path("stacks"), "{}"))
            self.mailbox.ready(self.attempt, rank)

    def wait(self, timeout_s: float) -> bool:
        """What the supervisor has of `over`: a short wait lets the script go on, and one for the end lets it end."""
        time.sleep(min(timeout_s, 0.02))
        if timeout_s <= LOOK_S:
            return next(self._script, self) is self
        list(self._script)
        return True

    def end(self) -> None:
        self.ended = True
        self._script.close()

    def give_up(self) -> None:
        self.given_up = True

    def let_in(self, numbers: Sequence[int]) -> None:
        self.inside = tuple(numbers)

    def dismiss(self, numbers: Sequence[int]) -> None:
        self.joining_workers.ended += numbers

    # --- for a script -----------------------------------------------------------------------------------------

    def until(self, happened: Callable[[], object]) -> Generator[None]:
        """Wait until the supervisor has done something."""
        until = time.monotonic() + 30.0
        while not happened():
            assert time.monotonic() < until, "the supervisor does not do it"
            yield

    def tell(self, *events: Event) -> None:
        self.asked = self.mailbox.tell(self.attempt, events)

    def step(self, number: int) -> None:
        self.tell(step_row(number, attempt=self.attempt, wall_clock=time.time()))

    def save(self, step: int) -> None:
        """Write and publish a checkpoint, as the attempt that this is."""
        folder: RunFolder = opened(self.spec.checkpoint.storage, RUN_ID)
        number = self.origin.attempt
        attempt = folder.claim(number) if folder.fence().number < number else folder.attempt(number)
        write_checkpoint(attempt, step, {"model": {"w": torch.full((2,), float(step))}})
        self.tell(CheckpointRow(step, folder.shown, None, 8, 0.0, 0.0, 0.0, time.time()))

    def lose(self, why: str = "rank 0 of 1 was lost: it was killed") -> None:
        self.error: Any = ClusterError(why)

    def outlive(self, rank: int, why: str, step: int) -> None:
        """One worker is lost and the others come to the rendezvous after this step: they go on as another attempt."""
        self.lost[rank] = why
        assert self.mailbox.lose(rank)
        for other in self.mailbox.status().numbers:
            if other != rank:
                self.mailbox.arrive(self.attempt, other, Arrival(Progress(step, 0), "host", 1))
        self.attempt += 1

    def join(self, number: int, step: int) -> Generator[None]:
        """A worker is started beside those that train, which are asked for another group after this step, and it is let in."""
        joining = Joined(number, f"node-{'abc'[number]}", 1, Path("stacks"), "{}")
        self.mailbox.enter(self.origin.attempt, joining, Arrival(None, "host", 1))
        yield from self.until(lambda: self.mailbox.tell(self.attempt, []).regroup == self.attempt)
        for other in self.mailbox.status().numbers:
            self.mailbox.arrive(self.attempt, other, Arrival(Progress(step, 0), "host", 1))
        self.attempt += 1

    def break_with(self, error: LockstepError) -> None:
        self.tell(Broke(error, "its traceback"))

    def finish(self, step: int, *, stopped: bool = False) -> None:
        self.tell(Finished({**SUMMARY, "step": step, "stopped": stopped}))


Script = Callable[[Workers], Generator[None]]


class Watch:
    """The cluster around an attempt; `advice` is what it advises, one after another. It asks for room until it is closed."""

    def __init__(self, place: WorkerPlacement, without: frozenset[str], advice: Iterator[Advice]) -> None:
        self.each, self.without, self._advice = place.each, without, advice
        self.workers, self.advised = place.workers, 0
        self.asks_for_room = True
        self.left: list[int] = []
        self.grown: list[int] = []

    def advice(self, _members: Sequence[Joined]) -> Advice:
        self.advised += 1
        return next(self._advice, Advice())

    def outlived(self, workers: int) -> None:
        self.left.append(workers)

    def changed(self, workers: int) -> None:
        self.grown.append(workers)

    def close(self) -> None:
        self.asks_for_room = False


class Unhurried(StopSignal):
    """Notes the pauses before attempts, and makes none."""

    def __init__(self) -> None:
        super().__init__()
        self.pauses: list[float] = []

    def wait(self, seconds: float) -> bool:
        self.pauses.append(seconds)
        return self.asked


@dataclass
class Supervised:
    """One run under a supervisor, with a script for each attempt, and what came of it."""

    storage: Path
    scripts: Sequence[Script]
    sections: dict[str, Any] = field(default_factory=dict)
    advice: Sequence[Advice] = ()
    origin: AttemptOrigin = field(default_factory=AttemptOrigin)
    run_id: str | None = RUN_ID
    ranks: int = 1
    around: dict[str, Any] = field(default_factory=dict)
    """Of its surroundings, those that are others than here."""

    def __post_init__(self) -> None:
        self.recording, self.told, self.stop = Recording(self.run_id), Told(), Unhurried()
        self.run_ids: list[str] = []
        """What the caller is told of the run's id."""
        self.workers: list[Workers] = []
        self.watches: list[Watch] = []
        self.spec = load_spec(
            {
                "job": {"use": "a:B"},
                "record": {"uri": "off"},
                "checkpoint": {"storage": str(self.storage)},
                **self.sections,
            }
        )
        place = WorkerPlacement(self.ranks, {"CPU": 1.0}, frozenset({"node-a", "node-b"}), frozenset())
        advised = iter(self.advice)

        def workers(*args: Any) -> Any:
            assert not any(watch.asks_for_room for watch in self.watches), (
                "a watch of an ended attempt goes on"
            )
            self.workers.append(Workers(self.scripts[len(self.workers)], *args))
            return self.workers[-1]

        def watch(_spec: Spec, at: WorkerPlacement, without: frozenset[str]) -> Any:
            self.watches.append(Watch(at, without, advised))
            return self.watches[-1]

        def placed(*_: Any) -> WorkerPlacement:
            return place

        def told(*_: Any) -> Any:
            return self.told

        recording: Any = self.recording
        self.supervisor = Supervisor(
            self.spec,
            RunOptions(progress=self.told),
            self.stop,
            self.origin,
            recording,
            {},
            [],
            self.run_ids.append,
            ClusterView(placed, placed, placed, workers, watch, told, told)._replace(**self.around),
        )

    def run(self) -> Result:
        """The run's result. Raises what ends it."""
        return self.supervisor.run()
