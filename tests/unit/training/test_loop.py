"""What a run asks and is asked while it trains: whether to go on, where to meet the others, and what it tells of its losses and its times."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

from lockstep.checkpoint.runs.run_folder import AttemptOrigin, Replay
from lockstep.communication.group import Group
from lockstep.errors import JobError
from lockstep.job.loading import load_job
from lockstep.record.events.union import CheckpointRow, Document, Event, Finished, Restored, Started
from lockstep.record.ledger.rows import EvaluationRow, Observation, StepRow
from lockstep.spec.fields import Spec
from lockstep.spec.loading import load_spec
from lockstep.training import clock
from lockstep.training.driver_requests import NoRequests
from lockstep.training.elastic import problems
from lockstep.training.elastic.errors import LeftError
from lockstep.training.elastic.membership import Progress
from lockstep.training.elastic.recovery import Seat, next_attempt
from lockstep.training.loop import fit, goes_on, join, tell_compiled
from lockstep.training.step.compiled import NAME as COMPILED
from tests.distributed.small_jobs import Plain, points
from tests.raised import raises

STEPS = 4
CPU = torch.device("cpu")
ALONE = Group(0, 1, CPU)


class Evaluated(Plain):
    """Has six samples for evaluation."""

    def eval_data(self) -> Dataset[Any]:
        return TensorDataset(*points(6))


def spec_of(**sections: Any) -> Spec:
    return load_spec(
        {
            "job": {"use": "tests.distributed.small_jobs:Plain", "params": {"samples": 16}},
            "batch": {"global": 8, "micro": 4},
            "length": {"steps": STEPS},
            "record": {"uri": "off"},
            "rehearsal": "off",
            **sections,
        }
    )


class Asked(NoRequests):
    """What is asked of a run: `regroup` after the next step from this question on, and to end once `wanted` questions were answered."""

    def __init__(self, regroup: int | None = None, wanted: int | None = None) -> None:
        self.asked = self.looked = 0
        self._regroup, self._wanted = regroup, wanted

    def regroup(self) -> bool:
        self.asked += 1
        return self.asked == self._regroup

    def go_on(self, look: Callable[[], object], *, ends: bool) -> bool:
        self.looked += 1
        return self._wanted is None or self.looked <= self._wanted


class Rendezvous:
    """Where the workers meet: it answers the next who comes with `answers`, of which an error is raised."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.said_ready: list[Seat] = []
        self.came: list[tuple[Seat, Progress | None]] = []

    def ready(self, seat: Seat) -> None:
        self.said_ready.append(seat)

    def regroup(self, seat: Seat, progress: Progress | None) -> Seat | None:
        self.came.append((seat, progress))
        answer = self.answers.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        return seat if answer else None

    def enter(self, seat: Seat) -> Seat | None:
        return self.regroup(seat, None)


class Told(list[Event]):
    """The events of a run, in order."""

    def losses(self) -> list[tuple[int, str]]:
        return [(event.step, event.loss.hex()) for event in self if isinstance(event, StepRow)]

    def of(self, kind: type[Event]) -> list[Any]:
        return [event for event in self if isinstance(event, kind)]


def fitted(
    spec: Spec, asked: Asked, recovery: Rendezvous | None = None, origin: AttemptOrigin | None = None
) -> tuple[dict[str, Any] | None, Told]:
    told = Told()
    job = load_job(spec.job.use, spec.job.params)
    return fit(spec, job, ALONE, told.append, asked, origin, recovery), told


def test_workers_that_meet_after_a_step_go_on_with_the_same_bits() -> None:
    """They say that they would come, and come as far as they are; no step is taken twice, and the newest row is told again."""
    whole, wanted = fitted(spec_of(), Asked())
    recovery = Rendezvous(True)
    summary, told = fitted(spec_of(), Asked(regroup=2), recovery)
    assert len(recovery.said_ready) == 1
    assert [progress for _, progress in recovery.came] == [Progress(2, 0)]
    assert told.losses() == wanted.losses()
    assert summary is not None and whole is not None
    assert summary["weights_digest"] == whole["weights_digest"]
    assert (len(told.of(Started)), len(told.of(Finished))) == (2, 1)
    (newest,) = [event for event in told.of(Restored) if event.steps]
    assert [row.step for row in newest.steps] == [2]


def test_the_last_step_is_followed_by_no_rendezvous() -> None:
    recovery = Rendezvous()
    summary, _ = fitted(spec_of(), Asked(regroup=STEPS), recovery)
    assert summary is not None and not summary["stopped"]
    assert recovery.came == []


def test_an_attempt_that_nobody_goes_on_with_ends_with_what_was_asked() -> None:
    with raises(problems.NO_OTHER_GROUP, step=2):
        fitted(spec_of(), Asked(regroup=2), Rendezvous(None))


def test_a_worker_that_is_to_leave_ends_without_a_result() -> None:
    summary, told = fitted(spec_of(), Asked(regroup=2), Rendezvous(LeftError("it leaves")))
    assert summary is None
    assert told.of(Finished) == []


def test_an_error_at_the_rendezvous_is_raised_as_it_is() -> None:
    with pytest.raises(ZeroDivisionError):
        fitted(spec_of(), Asked(regroup=2), Rendezvous(ZeroDivisionError()))


def test_a_run_that_cannot_go_on_in_memory_is_asked_nothing_and_says_nothing() -> None:
    """A worker that said so would be waited for."""
    asked, recovery = Asked(regroup=2), Rendezvous()
    summary, _ = fitted(spec_of(reduction="native"), asked, recovery)
    assert summary is not None
    assert (asked.asked, recovery.said_ready, recovery.came) == (0, [], [])
    alone = Asked(regroup=2)
    assert fitted(spec_of(), alone)[0] is not None
    assert alone.asked == 0


class Failing(Plain):
    """Its loss fails in the second step."""

    def loss(self, model: Any, batch: Any) -> Any:
        self.calls = getattr(self, "calls", 0) + 1
        if self.calls > 2:
            raise ZeroDivisionError("of the job")
        return super().loss(model, batch)


@pytest.mark.parametrize("recovers", [True, False])
def test_an_error_of_the_jobs_own_ends_the_run_and_brings_nobody_to_a_rendezvous(recovers: bool) -> None:
    """The others would wait for this worker there, and fail as it did."""
    recovery = Rendezvous()
    spec = spec_of(job={"use": "tests.unit.training.test_loop:Failing", "params": {"samples": 16}})
    with pytest.raises(JobError, match="of the job"):
        fitted(spec, Asked(), recovery if recovers else None)
    assert recovery.came == []


def test_a_worker_of_a_run_that_meets_nowhere_ends_with_the_loss_of_another() -> None:
    lost = RuntimeError("[gloo] Connection closed by peer [127.0.0.1]:1234")

    class Losing(Asked):
        def stop(self) -> bool:
            raise lost

    with pytest.raises(RuntimeError) as raised:
        fitted(spec_of(), Losing())
    assert raised.value is lost


@pytest.mark.parametrize(("rank", "wanted"), [(0, False), (1, False), (0, True), (1, True)])
def test_whether_a_run_goes_on_is_for_the_first_rank_to_say(rank: int, wanted: bool) -> None:
    """The others do not ask, and leave where it does: each would break the next collective of the rest."""

    class Two(Group):
        __slots__ = ()

        def gather(self, value: Any) -> list[Any]:
            return [wanted, True] if self.rank else [value, True]

    asked = Asked(wanted=1 if wanted else 0)
    run: Any = SimpleNamespace(group=Two(rank, 2, CPU))
    assert goes_on(run, asked) is wanted
    assert asked.looked == (rank == 0)


def test_a_run_tells_what_it_observes_and_the_memory_that_it_took() -> None:
    _, told = fitted(spec_of(record={"uri": "off", "observe_every": 2}), Asked())
    observed = told.of(Observation)
    assert [event.step for event in observed] == [1, 2, 4]
    assert all(any(name.startswith("layers/") for name in event.values) for event in observed)
    assert [event.name for event in told.of(Document)].count("memory.json") == 1


@pytest.mark.every(2)
@pytest.mark.parametrize(("wanted", "steps"), [(0, 0), (2, 4), (1, 2), (3, 4)])
def test_a_run_of_which_nobody_wants_more_ends_without_an_event(wanted: int, steps: int) -> None:
    """Asked before the first step and after each evaluation, but for that of the last step, which leaves nothing to decide."""
    spec = spec_of(
        job={"use": "tests.unit.training.test_loop:Evaluated", "params": {"samples": 16}},
        evaluate={"every": {"steps": 2}},
    )
    asked = Asked(wanted=wanted)
    summary, told = fitted(spec, asked)
    assert len(told.losses()) == steps
    assert (summary is None) == (told.of(Finished) == []) == (wanted < 2)
    assert asked.looked == min(wanted + 1, 2)


@pytest.mark.parametrize(
    ("early_stop", "replay"),
    [({"metric": "eval/loss", "mode": "max", "patience": 1}, None), (None, Replay("a" * 32, "/runs", 0, 2))],
    ids=["early stop", "replay"],
)
def test_a_run_that_is_over_takes_no_other_step(early_stop: Any, replay: Replay | None) -> None:
    spec = spec_of(
        job={"use": "tests.unit.training.test_loop:Evaluated", "params": {"samples": 16}},
        evaluate={"every": {"steps": 1}},
        early_stop=early_stop,
    )
    summary, told = fitted(spec, Asked(), origin=replay and AttemptOrigin(replay=replay))
    assert [step for step, _ in told.losses()] == [1, 2]
    assert summary is not None and not summary["stopped"]


class Deciding(Asked):
    """Decides like a population, once the state is saved; the group is broken off while it does so for the first time. `ends` is what it was told each time."""

    def __init__(self, told: Told) -> None:
        super().__init__()
        self.told, self.ends = told, list[bool]()

    def run_id(self) -> str:
        return "a" * 32

    def go_on(self, look: Callable[[], object], *, ends: bool) -> bool:
        self.ends.append(ends)
        if len(self.ends) == 2:
            raise BROKEN_OFF
        until = time.monotonic() + 30
        while len(self.told.of(CheckpointRow)) < len(self.ends) - 1:
            assert time.monotonic() < until, "nobody saves what is to be decided about"
            time.sleep(0.01)
        return True


BROKEN_OFF = RuntimeError("connection closed by peer: the group was broken off")


def test_workers_that_go_on_save_before_others_decide_and_leave_nothing_to_decide_at_the_end(
    tmp_path: Path,
) -> None:
    """A group is broken off while a population decides after step 2, and the next one as the last evaluation is told."""
    job = {"use": "tests.unit.training.test_loop:Evaluated", "params": {"samples": 16}}
    every = {"every": {"steps": 2}}
    spec = spec_of(job=job, evaluate=every, checkpoint={"storage": str(tmp_path), **every})
    whole, wanted = fitted(spec, Asked())
    told, lost = Told(), list[int]()

    def tell(event: Event) -> None:
        told.append(event)
        if isinstance(event, EvaluationRow) and event.step == STEPS and not lost:
            lost.append(event.step)
            raise BROKEN_OFF

    class Regrouping(Rendezvous):
        def regroup(self, seat: Seat, progress: Progress | None) -> Seat | None:
            super().regroup(seat, progress)
            return seat._replace(origin=next_attempt(seat.origin, len(self.came) + 1))

    asked = Deciding(told)
    summary = fit(
        spec,
        load_job(job["use"], job["params"]),  # type: ignore[arg-type]
        ALONE,
        tell,
        asked,
        AttemptOrigin(),
        Regrouping(True, True),
    )
    assert asked.ends == [False, False, False, True]
    assert summary is not None and whole is not None
    assert summary["weights_digest"] == whole["weights_digest"]
    assert told.losses() == wanted.losses()


class WithTest(Evaluated):
    def test_data(self) -> Dataset[Any]:
        return TensorDataset(*points(5))


@pytest.mark.parametrize("stops", [False, True])
def test_a_run_is_tested_once_it_is_finished(stops: bool) -> None:
    """One that is stopped goes on later: it would be tested several times, and a person might choose among the results."""

    class Stopping(Asked):
        def stop(self) -> bool:
            return stops

    summary, told = fitted(
        spec_of(job={"use": "tests.unit.training.test_loop:WithTest", "params": {"samples": 16}}), Stopping()
    )
    assert summary is not None
    assert (summary["stopped"], "test" in summary) == (stops, not stops)
    (finished,) = told.of(Finished)
    assert finished.summary == summary


@pytest.mark.parametrize("origin", [None, AttemptOrigin("a" * 32, 2)])
def test_a_worker_that_nobody_lets_in_ends_and_has_read_no_checkpoint(
    tmp_path: Path, origin: AttemptOrigin | None
) -> None:
    """The run of `origin` has none: one that looked for it would fail."""
    spec = spec_of(checkpoint={"storage": str(tmp_path)})
    recovery = Rendezvous(None)
    assert join(spec, load_job(spec.job.use, spec.job.params), CPU, recovery, origin) is None
    ((seat, progress),) = recovery.came
    assert (seat.group, seat.origin, progress) == (ALONE, origin, None)


@pytest.mark.every(2)
@pytest.mark.parametrize("part", ["evaluation", "none"])
def test_an_evaluation_is_no_part_of_the_time_of_a_step(monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    """It takes a thousand seconds here; the step after it as long as any other."""
    passed = [0.0]

    class Slow(Evaluated):
        def eval_data(self) -> Any:
            data = super().eval_data()

            class Waited(Dataset[Any]):
                def __len__(self) -> int:
                    return 6

                def __getitem__(self, index: int) -> Any:
                    passed[0] += 1000.0
                    return data[index]

            return Waited()

    def now() -> float:
        return time.perf_counter() + passed[0]

    monkeypatch.setattr(clock, "time", SimpleNamespace(perf_counter=now, time=time.time))
    spec = spec_of(evaluate={"every": {"steps": 2 if part == "evaluation" else STEPS}})
    told = Told()
    fit(spec, Slow(Slow.Params(samples=16)), ALONE, told.append, NoRequests())
    assert passed[0] >= 1000.0
    assert max(row.step_s for row in told.of(StepRow)) < 500.0


@pytest.mark.parametrize(
    ("compiled", "rank", "start", "tells"),
    [
        (True, 0, None, True),
        (True, 0, SimpleNamespace(fork=True), True),
        (True, 0, SimpleNamespace(fork=False), False),
        (True, 1, None, False),
        (False, 0, None, False),
    ],
)
def test_what_was_compiled_is_told_once_a_run(compiled: bool, rank: int, start: Any, tells: bool) -> None:
    """At its beginning and that of a fork, by one rank; a resumed run has the same."""
    run: Any = SimpleNamespace(
        state=SimpleNamespace(compiled=SimpleNamespace(text=lambda: "{}") if compiled else None),
        start=start,
        group=Group(rank, 2, CPU),
    )
    told = Told()
    tell_compiled(run, told.append)
    assert [(event.name, event.text) for event in told.of(Document)] == [(COMPILED, "{}")] * tells
