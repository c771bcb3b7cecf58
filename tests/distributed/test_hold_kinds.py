"""G1 for what users bring: a job of any kind has one value of every bit, or it is refused in one line. None breaks unseen."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from lockstep.checkpoint.runs.run_checkpoints import steps_of
from lockstep.checkpoint.runs.run_folder import AttemptOrigin
from lockstep.data.loader import Loader
from lockstep.data.problems import PROCESSES_DIFFER
from lockstep.errors import LockstepError
from lockstep.record.events.union import Event
from lockstep.record.ledger.rows import StepRow
from lockstep.training.integrity.problems import MEAN_FOR_SUM, NOT_RESUMED, SAVING_CHANGES
from lockstep.training.integrity.rehearsal import trial_batches
from lockstep.training.step import problems
from tests.distributed import (
    further_kinds,
    gradient_kinds,
    keeping_kinds,
    kinds,
    mode_kinds,
    phase_kinds,
    public_kinds,
    step_kinds,
)
from tests.distributed.kinds import (
    RUN,
    BackPropagationThroughTime,
    Kind,
    document,
    taken_up,
    train_attempts,
    train_every,
)
from tests.distributed.pool import Pool
from tests.distributed.training import Kept, train, train_updates_forgotten
from tests.fading import Fading
from tests.forked import Forked
from tests.raised import raises

EVERY = [
    kinds,
    further_kinds,
    step_kinds,
    phase_kinds,
    keeping_kinds,
    mode_kinds,
    public_kinds,
    gradient_kinds,
]
HELD = [kind for module in EVERY for kind in module.HELD]
REFUSED = {kind: refusal for module in EVERY for kind, refusal in module.REFUSED.items()}

ALL = [kind for kind in HELD if kind is not BackPropagationThroughTime]
"""Jobs that several workers can share; the other one has a single micro-batch a step."""

THIRD, OTHERS = ALL[::3], [kind for i, kind in enumerate(ALL) if i % 3]
"""Those of the default run and of the scenarios, and those that wait to be asked for."""

COMPARING = (further_kinds.SupervisedContrast, further_kinds.Survival, further_kinds.Recommendation)
"""Jobs whose losses compare the samples of a micro-batch."""

TOLD = {
    kinds.RateByHook,
    kinds.BuffersInEvaluation,
    BackPropagationThroughTime,
    further_kinds.CodesByMovingAverage,
    further_kinds.FakeQuantised,
    further_kinds.SelfDistillation,
    further_kinds.QueueInABuffer,
    *COMPARING,
    further_kinds.HalfWeights,
    step_kinds.LargestGradients,
    *mode_kinds.TOLD,
}
"""Jobs that are warned of something and exact all the same."""


class Alone(dict[type[Kind], Any]):
    """What each job comes to in one plain process; trained when it is first asked for."""

    def __missing__(self, kind: type[Kind]) -> Any:
        (self[kind],) = train_every([document(kind)])
        return self[kind]


@pytest.fixture(scope="module")
def alone() -> Alone:
    return Alone()


def test_there_are_jobs_of_many_kinds() -> None:
    assert len(HELD) >= 100
    assert len(REFUSED) >= 25


@pytest.mark.parametrize(
    "own",
    [
        pytest.param(THIRD, id="a third"),
        pytest.param([BackPropagationThroughTime, *OTHERS], marks=pytest.mark.exact, id="the others"),
    ],
)
@pytest.mark.exact  # a minute and more
def test_each_kind_learns(alone: Alone, own: list[type[Kind]]) -> None:
    """And none is warned of without a reason."""
    for kind in own:
        _, digests, rows, evaluations, warnings = alone[kind]
        assert len(set(digests)) == len(rows) == 3, kind
        assert evaluations, kind
        assert not warnings or kind in TOLD, (kind, warnings)


def on(kind: type[Kind], processes: int, storage: Path) -> dict[str, Any]:
    """A job's run with so many loader processes, whose checkpoints are kept apart from the other jobs'."""
    data = {"drop_last": False, **kind.more.get("data", {}), "loader_processes": processes}
    return document(kind, data=data, checkpoint={"storage": str(storage / kind.__name__), "every": None})


AT_ONCE = 20
"""Runs of a call of the pool."""

WORKERS = [(2, 1), (1, 2), (3, 1), (1, 3)]
"""Of the attempts before and after a run was stopped. Each kind takes one of these pairs: one kind of 36 by default, every third with `make scenarios`."""

DOZEN = 3 * len(WORKERS)


@pytest.mark.scenario
@pytest.mark.thinned(4)
@pytest.mark.parametrize(
    ("before", "after", "own"),
    [
        *(
            pytest.param(
                *pair,
                THIRD[i::DOZEN],
                marks=[pytest.mark.scenario] if i else [],
                id=f"{pair[0]}-{pair[1]}, {i}",
            )
            for i, pair in enumerate(WORKERS * 3)
        ),
        *(
            pytest.param(
                *pair,
                OTHERS[i :: len(WORKERS)],
                marks=pytest.mark.exact,
                id=f"{pair[0]}-{pair[1]}, the others",
            )
            for i, pair in enumerate(WORKERS)
        ),
        pytest.param(2, 3, ALL, marks=pytest.mark.exact, id="2-3"),
        pytest.param(3, 2, ALL, marks=pytest.mark.exact, id="3-2"),
    ],
)
def test_every_kind_has_one_value(
    pool: Pool,
    alone: Alone,
    before: int,
    after: int,
    own: list[type[Kind]],
    tmp_path: Path,
) -> None:
    """Stopped after a step, and taken up by another number of workers; loader processes for a few."""
    runs = [
        {**on(kind, int(i % 8 == 0), tmp_path), "rehearsal": "off"} for i, kind in enumerate(own)
    ]  # `alone` had one
    begun = attempts(pool, before, [(run, AttemptOrigin()) for run in runs], 1)
    ended = attempts(pool, after, [(run, taken_up(run)) for run in runs], None)
    for i, kind in enumerate(own):
        check(kind, alone[kind], [rank[i] for rank in begun], 0, 1)
        check(kind, alone[kind], [rank[i] for rank in ended], 1, 3)


@pytest.mark.every(6)
@pytest.mark.thinned(3)
@pytest.mark.parametrize(
    "kind",
    [
        keeping_kinds.Window,
        keeping_kinds.OneMemory,
        keeping_kinds.TeacherOutOfTheState,
        keeping_kinds.InnerOptimizer,
        keeping_kinds.InnerOptimizerThatLoads,
        keeping_kinds.InnerOptimizerWithoutState,
    ],
)
def test_what_is_beside_the_weights_is_there_after_a_resume(
    alone: Alone, kind: type[Kind], tmp_path: Path
) -> None:
    """What shares memory does so again, what the model's `state_dict` leaves out is as it was, and an optimizer shares its groups and state with the one that it wraps."""
    run = {**on(kind, 0, tmp_path), "rehearsal": "off"}
    train_attempts([(run, AttemptOrigin())], 2)
    check(kind, alone[kind], train_attempts([(run, taken_up(run))], None), 2, 3)


@pytest.mark.every(2)
@pytest.mark.parametrize("kind", [keeping_kinds.BuffersOfManyTypes, step_kinds.LargestGradients])
def test_buffers_of_any_kind_have_one_value_on_two_workers(
    pool: Pool, alone: Alone, kind: type[Kind]
) -> None:
    """DDP sends no buffers when it is made: of complex ones, which gloo cannot send, it had raised."""
    for (run,) in pool.run(2, train_every, [document(kind)]):
        assert run[:2] == alone[kind][:2]


def attempts(
    pool: Pool, workers: int, runs: list[tuple[Any, AttemptOrigin]], stop_after: int | None
) -> list[Any]:
    """What each rank has of an attempt of each run; one worker is this process. A call of the pool has its time limit: a few runs each."""
    if workers == 1:
        return [train_attempts(runs, stop_after)]
    calls = [
        pool.run(workers, train_attempts, runs[at : at + AT_ONCE], stop_after)
        for at in range(0, len(runs), AT_ONCE)
    ]
    return [[one for call in calls for one in call[rank]] for rank in range(workers)]


def check(kind: type[Kind], whole: Any, ranks: list[Any], start: int, stop: int) -> None:
    """Each rank took the steps `start` … `stop` to the bits of one plain process; rank 0 has the ledger up to there."""
    identity, digests, rows, evaluations = whole[:4]
    for rank in ranks:
        assert (rank[0], rank[1]) == (identity, digests[start:stop]), kind
    assert ranks[0][2] == rows[:stop], kind
    assert ranks[0][3] == (evaluations if stop == 3 else ()), kind


@pytest.mark.exact
@pytest.mark.parametrize("stopped", [0, 1, 2])
@pytest.mark.parametrize("processes", [0, 2])
@pytest.mark.parametrize("workers", [1, 2, 3, 4])
def test_every_kind_has_one_value_on_any_number_of_workers(
    pool: Pool, alone: Alone, workers: int, processes: int, stopped: int, tmp_path: Path
) -> None:
    """From the beginning, and from the checkpoint that one worker left after a step."""
    own = HELD if workers == 1 else ALL
    runs = [{**on(kind, processes, tmp_path), "rehearsal": "off"} for kind in own]  # `alone` had one
    origins = [AttemptOrigin() for _ in runs]
    if stopped:
        train_attempts(list(zip(runs, origins, strict=True)), stopped)
        origins = [taken_up(run) for run in runs]
    ended = attempts(pool, workers, list(zip(runs, origins, strict=True)), None)
    for i, kind in enumerate(own):
        check(kind, alone[kind], [rank[i] for rank in ended], stopped, 3)


@pytest.mark.exact
@pytest.mark.parametrize("workers", [1, 2])
def test_every_kind_outlives_a_kill(pool: Pool, alone: Alone, workers: int, tmp_path: Path) -> None:
    """Killed after its second step, once the first one's checkpoint is on the disk, and taken up from that."""
    runs = [{**on(kind, int(i % 8 == 0), tmp_path), "rehearsal": "off"} for i, kind in enumerate(ALL)]
    for run in runs:
        run["checkpoint"] |= {"every": {"steps": 1}}
        killed = Forked(train_and_die, run, 2)
        assert killed.wait(60) == -signal.SIGKILL, killed.communicate()
    ended = attempts(pool, workers, [(run, taken_up(run)) for run in runs], None)
    for i, kind in enumerate(ALL):
        check(kind, alone[kind], [rank[i] for rank in ended], 1, 3)


def train_and_die(run: dict[str, Any], step: int) -> None:
    """Its process is killed when the run tells of `step`, and a checkpoint of an earlier one is on the disk."""
    tell = Kept.tell

    def dying(kept: Kept, event: Event) -> None:
        if isinstance(event, StepRow) and event.step == step:
            while not steps_of(run["checkpoint"]["storage"], RUN):
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        tell(kept, event)

    with mock.patch.object(Kept, "tell", dying):  # in a class: what a module holds is the jobs' source
        train_attempts([(run, AttemptOrigin())], None)


@pytest.mark.every(21)
@pytest.mark.thinned(10)
@pytest.mark.parametrize("kind", REFUSED, ids=lambda kind: kind.__name__)
def test_what_breaks_the_promise_is_refused_by_name(kind: type[Kind]) -> None:
    problem, facts = REFUSED[kind]
    with raises(problem, **facts):
        train(document(kind, rehearsal="full"))


UNSEEN = [
    kinds.TeacherInParameters,
    kinds.Queue,
    kinds.HiddenInAnAttribute,
    kinds.OwnGenerator,
    kinds.UpdateFromTheLoss,
]


@pytest.mark.every(2)
@pytest.mark.parametrize("extent", ["quick", "full"])
@pytest.mark.parametrize("kind", UNSEEN, ids=lambda kind: kind.__name__)
def test_how_far_the_rehearsal_goes(kind: type[Kind], extent: str) -> None:
    """A quick one sees all of these but the update."""
    if kind is kinds.UpdateFromTheLoss and extent == "quick":
        train(document(kind, rehearsal=extent))
        return
    with pytest.raises(LockstepError):
        train(document(kind, rehearsal=extent))


@pytest.mark.scenario
def test_without_a_rehearsal_two_workers_get_other_bits(pool: Pool) -> None:
    """The negative control: the jobs that are refused do break the promise, under one identity."""
    documents = [document(kind, rehearsal="off") for kind in (kinds.Queue, kinds.HiddenInAnAttribute)]
    one, two = train_every(documents), pool.run(2, train_every, documents)[0]
    assert [run[0] for run in one] == [run[0] for run in two]
    assert all(a[1] != b[1] for a, b in zip(one, two, strict=True))


@pytest.mark.every(4)
@pytest.mark.parametrize(
    "kind",
    [
        further_kinds.TeacherMovedByHook,
        further_kinds.TeacherReplacedByHook,
        further_kinds.WeightAverage,
        step_kinds.ReadsItsGradients,
    ],
)
def test_without_what_hooks_write_two_workers_get_other_bits(pool: Pool, kind: type[Kind]) -> None:
    """The negative control: buffers that an update moves, as the step's rule alone would treat them."""
    one = train_updates_forgotten(document(kind, rehearsal="off"))
    two = pool.run(2, train_updates_forgotten, document(kind, rehearsal="off"))[0]
    assert one.identity == two.identity
    assert (one.digests, one.evaluations) != (two.digests, two.evaluations)


def test_a_parameter_that_is_written_later_is_found_in_the_step() -> None:
    """The rehearsal cannot see what begins after it."""
    with raises(problems.PARAMETER_WRITTEN, name="0.weight", where=re.compile("^step 2, micro-batch 0")):
        train(document(LaterWriter, rehearsal="off"))


class LaterWriter(Kind):
    calls = 0

    def loss(self, model: torch.nn.Module, batch: Any) -> kinds.Loss:
        self.calls += 1
        if self.calls == 6:  # 1 is the rehearsal's, 2 … 5 are the first step's
            with torch.no_grad():
                model[0].weight.mul_(2)  # type: ignore[index]
        return super().loss(model, batch)


def test_the_ledger_has_the_rate_that_was_used() -> None:
    """A hook halves the rate before each update, and what is recorded is the half."""
    trained = train(document(kinds.RateByHook))
    assert [row.lr for row in trained.steps] == [0.25] * 3
    assert [row.lr for row in train(document(kinds.Thermostat)).steps] == [0.1] * 3


def test_state_of_truncated_back_propagation_is_told() -> None:
    """Of several micro-batches' writes to a buffer only the first one's is kept: exact, and said."""
    split = document(BackPropagationThroughTime, batch={"global": 12, "micro": 3}, rehearsal="full")
    assert any(
        "the buffer 'hidden'" in text and "batch.micro = batch.global" in text
        for text in train(split).warnings
    )
    assert train(document(BackPropagationThroughTime)).warnings == ()


def test_a_total_that_is_a_mean_is_refused() -> None:
    with raises(MEAN_FOR_SUM):
        train(document(kinds.TotalIsAMean))


def test_in_their_usual_order_draws_of_threads_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: by luck the first micro-batch repeats."""
    monkeypatch.setattr(trial_batches, "out_of_order", nullcontext)
    monkeypatch.setattr(further_kinds.DrawingInThreads, "apart_s", 0.05)
    assert train(document(further_kinds.DrawsInThreads, rehearsal="off")).warnings == ()


class NoiseInCollation(Kind):
    """Noise that grows weaker with each step, added where the samples are put together."""

    level, begins = 1.0, 0

    def state_dict(self) -> dict[str, Any]:
        return {"level": self.level}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.level = state["level"]

    def after_step(self, model: torch.nn.Module, step: int) -> None:
        if step > self.begins:
            self.level *= 0.8

    def collate(self, samples: Sequence[Any]) -> Any:
        x, y = super().collate(samples)
        return x + self.level * torch.randn_like(x), y


class NoiseThatFadesLater(NoiseInCollation):
    begins = 4


class NoiseInTheLoss(NoiseInCollation):
    """The same, where it may depend on the step."""

    def collate(self, samples: Sequence[Any]) -> Any:
        return Kind.collate(self, samples)

    def loss(self, model: torch.nn.Module, batch: Any) -> kinds.Loss:
        x, y = batch
        return super().loss(model, (x + self.level * torch.randn_like(x), y))


def by_processes(kind: type[Kind], processes: int, **more: Any) -> dict[str, Any]:
    return document(kind, data={"drop_last": False, "loader_processes": processes}, **more)


@pytest.mark.every(4)
@pytest.mark.thinned(2)
@pytest.mark.parametrize(
    ("kind", "step", "more"),
    [
        (NoiseInCollation, 2, {}),
        (NoiseInCollation, 2, {"rehearsal": "off"}),
        (NoiseThatFadesLater, 9, {"length": {"epochs": 4}}),
        (NoiseThatFadesLater, 6, {"length": {"epochs": 2}}),
    ],
)
def test_samples_that_depend_on_training_are_refused_in_loader_processes(
    kind: type[Kind], step: int, more: dict[str, Any]
) -> None:
    """At the first step that has other ones, or at a later one; the last step of the run is looked at in any case."""
    where = f"step {step}, micro-batch 0, differs in batch[0] from what the worker fetches itself"
    with raises(PROCESSES_DIFFER, got=1, where=where, advice=re.compile("job.after_step")):
        train(by_processes(kind, 1, **more))


@pytest.mark.scenario
def test_without_the_look_they_get_other_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: loader processes go on with what they were forked with."""
    monkeypatch.setattr(Loader, "_compare", lambda *_: None)
    runs = [train(by_processes(NoiseInCollation, processes)) for processes in (0, 1)]
    assert runs[0].identity == runs[1].identity
    assert runs[0].digests[0] == runs[1].digests[0]
    assert runs[0].digests[1] != runs[1].digests[1]


@pytest.mark.scenario
def test_samples_that_depend_on_training_are_exact_without_loader_processes(
    pool: Pool, alone: Alone, tmp_path: Path
) -> None:
    """Stopped, and taken up by another number of workers; with loader processes where the loss does it in their place."""
    for kind, processes in (
        (NoiseInCollation, 0),
        (NoiseInTheLoss, 1),
        (further_kinds.KeyedDrawsInThreads, 2),
    ):
        run = {**on(kind, processes, tmp_path), "rehearsal": "off"}
        begun = attempts(pool, 2, [(run, AttemptOrigin())], 1)
        ended = attempts(pool, 1, [(run, taken_up(run))], None)
        check(kind, alone[kind], [rank[0] for rank in begun], 0, 1)
        check(kind, alone[kind], [rank[0] for rank in ended], 1, 3)


class Forgetful(Kind):
    """Its optimizer learns less with each step that it remembers, and keeps that in no state_dict."""

    def optimizer(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        return Fading(model.parameters(), lr=0.05)


class Unsaved(kinds.Thermostat):
    """A temperature that a hook lowers once a step, and that no checkpoint keeps."""

    def state_dict(self) -> dict[str, Any]:
        return {}


@pytest.mark.every(2)
@pytest.mark.parametrize(("kind", "place"), [(Forgetful, "optimizer.taken"), (Unsaved, "job.heat")])
def test_state_that_a_resume_would_lose_is_refused_by_its_results(kind: type[Kind], place: str) -> None:
    """The second step has other bits in a process that has loaded the state after the first one."""
    with raises(NOT_RESUMED, got=re.compile(f"^{place} changes with an update")):
        train(document(kind, rehearsal="full"))
    assert train(document(kinds.Thermostat, rehearsal="full")).warnings == ()


@pytest.mark.every(7)
@pytest.mark.thinned(2)
@pytest.mark.parametrize("kind", keeping_kinds.TOLD, ids=lambda kind: kind.__name__)
def test_what_is_kept_out_of_sight_of_the_first_steps_is_told(kind: type[Kind]) -> None:
    (text,) = train(document(kind, rehearsal="full")).warnings
    assert "\n" not in text
    assert [word for word in keeping_kinds.TOLD[kind] if word not in text] == [], text


@pytest.mark.every(20)
@pytest.mark.thinned(5)
@pytest.mark.parametrize("kind", keeping_kinds.HELD, ids=lambda kind: kind.__name__)
def test_what_is_kept_and_makes_no_difference_is_not_told(kind: type[Kind]) -> None:
    assert train(document(kind, rehearsal="full")).warnings == ()


class LowersWhenSaved(kinds.Thermostat):
    """Each save lowers its temperature, so that a run that saves more often learns something else."""

    def state_dict(self) -> dict[str, Any]:
        self.heat *= 0.5
        return super().state_dict()


class CountingLinear(torch.nn.Linear):
    """Its extra state is how often it was saved."""

    saves = 0

    def get_extra_state(self) -> int:
        self.saves += 1
        return self.saves

    def set_extra_state(self, state: int) -> None:
        self.saves = state


class CountsInTheModel(Kind):
    def model(self) -> torch.nn.Module:
        return torch.nn.Sequential(CountingLinear(kinds.FEATURES, kinds.FEATURES), super().model())


class CountsBeside(kinds.Thermostat):
    """The control: what a save changes is not in the state."""

    saves = 0

    def state_dict(self) -> dict[str, Any]:
        self.saves += 1
        return super().state_dict()


@pytest.mark.parametrize(
    ("kind", "place"), [(LowersWhenSaved, "job.heat"), (CountsInTheModel, r"model\.\S*saves")]
)
def test_state_that_a_save_changes_is_refused(kind: type[Kind], place: str) -> None:
    with raises(SAVING_CHANGES, name=re.compile(place)):
        train(document(kind, rehearsal="full"))
    assert train(document(CountsBeside, rehearsal="full")).steps
