"""What a run is built from reaches the parts that it is for: each setting of the spec, each name that the rehearsal found, each rule of the job."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import lockstep
from lockstep.checkpoint.runs.run_folder import AttemptOrigin, Replay
from lockstep.communication.group import Group
from lockstep.data.sampler import MicroBatch
from lockstep.job.inputs.variables import reads_of, variables_noted
from lockstep.job.loading import load_job
from lockstep.record.events.union import Event, StageEnded, Warned, tell_nobody
from lockstep.spec.fields import Spec
from lockstep.spec.loading import load_spec
from lockstep.training import problems
from lockstep.training import run as run_module
from lockstep.training.driver_requests import NoRequests
from lockstep.training.job_data import make_sampler
from lockstep.training.loop import surroundings
from lockstep.training.metric_rules import check_followed, check_metric
from lockstep.training.planning import make_plan
from lockstep.training.run import Run, watch_bits
from lockstep.training.setup import prepare
from lockstep.training.step import problems as step_problems
from lockstep.training.step.job_weights import JobWeights
from lockstep.training.step.loss_form import LossForm
from tests.distributed.kinds import document
from tests.distributed.phase_kinds import Gan
from tests.distributed.small_jobs import Plain, points
from tests.raised import raises

ALONE = Group(0, 1, torch.device("cpu"))


def spec_of(**sections: Any) -> Spec:
    return load_spec(
        {
            "job": {"use": "tests.distributed.small_jobs:Plain", "params": {"samples": 20}},
            "batch": {"global": 8, "micro": 4},
            "length": {"steps": 4},
            "record": {"uri": "off"},
            "rehearsal": "off",
            **sections,
        }
    )


def prepared(spec: Spec, job: lockstep.Job, told: list[Event] | None = None, **more: Any) -> Run:
    with surroundings(spec):
        return prepare(spec, job, ALONE, (told if told is not None else []).append, **more)


class Evaluated(Plain):
    def eval_data(self) -> Any:
        return TensorDataset(*points(6))


class Weighing(Evaluated):
    """Evaluates half of its weights."""

    @contextmanager
    def eval_weights(self, model: nn.Module, optimizer: Any) -> Iterator[None]:  # type: ignore[override]
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.5)
        yield


# --- the plan ---------------------------------------------------------------------------------------------


class Long(Plain):
    def lengths(self, data: Any) -> Sequence[int]:
        return [1 + i % 5 for i in range(len(data))]


@pytest.mark.parametrize(
    ("sections", "wanted"),
    [
        ({}, {"drop_last": True, "total_steps": 4, "group": 1, "tokens": None}),
        ({"data": {"drop_last": False}, "length": {"epochs": 3}}, {"drop_last": False, "total_steps": 9}),
        ({"length": {"epochs": 3}}, {"total_steps": 6}),
        ({"data": {"group": {"size": 2}}}, {"group": 2}),
        ({"data": {"shuffle": "by_length"}}, {"tokens": None, "grouped": True}),
        (
            {"data": {"shuffle": "by_length"}, "batch": {"global": 8, "micro": 4, "tokens": 10}},
            {"tokens": 10, "grouped": True},
        ),
    ],
)
def test_each_setting_of_the_data_and_the_length_reaches_the_plan(
    sections: Mapping[str, Any], wanted: Mapping[str, Any]
) -> None:
    plan = make_plan(spec_of(**sections), Long(Long.Params(samples=20)), TensorDataset(*points(20)))
    assert (plan.samples, plan.global_batch, plan.micro_batch) == (20, 8, 4)
    values = {"grouped": plan.by_length is not None}
    assert {name: values.get(name, getattr(plan, name, None)) for name in wanted} == wanted


@pytest.mark.parametrize("samples", [0, 20])
def test_a_run_without_a_sample_to_train_on_is_refused(samples: int) -> None:
    """Of an empty set that is its own mistake; else of what the spec leaves out."""
    data: Any = TensorDataset(*points(20)) if samples else []
    job = Plain(Plain.Params(samples=20))
    refused = (
        raises(problems.ALL_LEFT_OUT, got=20)
        if samples
        else raises(problems.NO_PLAN, remedy="train_data holds no sample: give it some")
    )
    with refused:
        make_plan(spec_of(**({"data": {"without": "0-19"}} if samples else {})), job, data)
    if samples:
        assert make_plan(spec_of(data={"without": "0-3"}), job, data).samples == 20
        with raises(problems.NO_SUCH_SAMPLE, field="data.without", got=20, wanted=20):
            make_plan(spec_of(data={"without": "20"}), job, data)
        with raises(problems.NO_PLAN, remedy="lower batch.global or set data.drop_last=false"):
            make_plan(spec_of(batch={"global": 24, "micro": 4}), job, data)


# --- rules that need a metric -----------------------------------------------------------------------------


@pytest.mark.parametrize("field", ["early_stop", "checkpoint.keep_best"])
def test_a_rule_needs_a_metric_of_the_evaluation(field: str) -> None:
    """One of the test would let it decide; one that is not known yet is looked at later."""

    def spec(metric: str) -> Spec:
        rule = {"metric": metric, "mode": "min"}
        if field == "early_stop":
            return spec_of(early_stop={**rule, "patience": 2})
        return spec_of(checkpoint={"keep_best": rule})

    known = ["eval/loss", "test/loss"]
    check_metric(spec("eval/loss"), known)
    check_metric(spec("eval/lost"), None)
    check_metric(spec_of(), [])
    with raises(
        problems.NO_METRIC, field=f"{field}.metric", got="eval/lost", hint="; did you mean 'eval/loss'?"
    ):
        check_metric(spec("eval/lost"), known)
    with raises(problems.TEST_DECIDES, field=f"{field}.metric", got="test/loss"):
        check_metric(spec("test/loss"), known)


def following(*metrics: str) -> Any:
    return SimpleNamespace(metrics=metrics)


def test_a_schedule_needs_a_metric_of_the_evaluation() -> None:
    known = ["eval/loss", "test/loss"]
    check_followed(following("eval/loss"), known)
    check_followed(following("eval/lost"), None)
    check_followed(following(), [])
    with raises(
        problems.SCHEDULE_METRIC,
        got="eval/lost",
        wanted="its evaluations give none; did you mean 'eval/loss'?",
    ):
        check_followed(following("eval/loss", "eval/lost"), known)
    for none in ([], ["test/loss"]):
        with raises(problems.SCHEDULE_METRIC, got="eval/loss", wanted="the job has no eval_data"):
            check_followed(following("eval/loss"), none)
    with raises(problems.TEST_DECIDES, field="job.schedule", got="test/loss"):
        check_followed(following("test/loss"), known)


class Following(Evaluated):
    """Its rate falls with a metric that its evaluations do not give."""

    def schedule(self, optimizer: Any, updates: Any) -> Any:
        return lockstep.Plateau(torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer), "eval/lost")


@pytest.mark.parametrize("evaluates", [True, False])
def test_a_run_whose_schedule_follows_nothing_is_refused_before_its_first_step(evaluates: bool) -> None:
    job = Following(Following.Params(samples=20))
    if not evaluates:
        job.eval_data = lambda: None  # type: ignore[method-assign]
    with raises(problems.SCHEDULE_METRIC, got="eval/lost"):
        prepared(spec_of(rehearsal="quick"), job)


def test_a_run_whose_rule_needs_another_metric_is_refused_before_its_first_step() -> None:
    stop = {"metric": "eval/lost", "mode": "min", "patience": 2}
    with raises(problems.NO_METRIC, got="eval/lost"):
        prepared(spec_of(early_stop=stop, rehearsal="quick"), Evaluated(Evaluated.Params(samples=20)))


# --- the run ----------------------------------------------------------------------------------------------


def test_a_run_in_another_group_keeps_what_the_rehearsal_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its evaluation and the job's weights are of that group from then on, and no checkpoint is read again."""
    run = prepared(spec_of(evaluate={"every": {"steps": 2}}), Weighing(Weighing.Params(samples=20)))
    assert run.evaluate is not None
    found: list[Any] = []

    def stepper(*given: Any) -> Any:
        found.extend(given)
        return made(*given)

    made = run_module.Stepper
    monkeypatch.setattr(run_module, "Stepper", stepper)
    old = run.step
    old.forms = {"": LossForm(("a",), ("b",), True, frozenset({"0.weight"}))}
    joined: list[Group] = []
    monkeypatch.setattr(type(run.evaluate), "join", lambda self, group: joined.append(group))
    group = Group(0, 1, torch.device("cpu"))
    again = run.in_group(group, tell_nobody, AttemptOrigin(attempt=2))
    assert found == [run.spec, again.plan, group, run.state, old.forms]
    assert again.step is not old and again.step.compute.settings is old.compute.settings
    assert joined == [group] and joined[0] is group
    assert again.group is again.step.group is group
    weights = again.state.job_weights
    assert isinstance(weights, JobWeights) and weights.group is group
    assert (again.facts["workers"], again.start) == (1, None)


def test_a_run_without_weights_of_its_own_or_an_evaluation_changes_groups(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = prepared(spec_of(), Plain(Plain.Params(samples=20)))
    assert (run.evaluate, run.state.job_weights) == (None, None)
    assert run.in_group(ALONE, tell_nobody, None).group is ALONE


def test_a_jobs_weights_know_the_newest_step_and_leave_no_room_for_others() -> None:
    run = prepared(spec_of(), Weighing(Weighing.Params(samples=20)))
    weights = run.state.job_weights
    assert isinstance(weights, JobWeights)
    run.state.counters.step = 3
    assert weights.step() == 3
    with raises(problems.EVAL_WEIGHTS_BESIDE, field="ema", got="0.9"):
        prepared(spec_of(ema=0.9), Weighing(Weighing.Params(samples=20)))
    with raises(problems.EVAL_WEIGHTS_BESIDE, field="sharding", got="'full'"):
        prepared(spec_of(sharding="full"), Weighing(Weighing.Params(samples=20)))


def test_a_run_has_no_evaluation_where_there_is_nothing_to_evaluate() -> None:
    assert prepared(spec_of(), Plain(Plain.Params(samples=20))).evaluate is None
    assert prepared(spec_of(), Evaluated(Evaluated.Params(samples=20))).evaluate is not None


def test_one_worker_alone_shares_out_nothing() -> None:
    """`sharding: full` leaves it the model as it is."""
    run = prepared(spec_of(sharding="full"), Plain(Plain.Params(samples=20)))
    assert (run.state.sharding, run.plan.in_passes) == (None, False)


class Closing(Plain):
    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(model.parameters())


def test_an_optimizer_that_evaluates_the_loss_again_is_held_against_the_spec() -> None:
    with raises(step_problems.CLOSURE_FP16, name="LBFGS"):
        prepared(spec_of(precision="fp16"), Closing(Closing.Params(samples=20)))
    assert prepared(spec_of(), Closing(Closing.Params(samples=20))).step is not None


def test_the_rates_of_all_phases_follow_the_schedule() -> None:
    spec = load_spec(document(Gan, rehearsal="off", record={"uri": "off"}))
    state = prepared(spec, load_job(spec.job.use, spec.job.params)).state
    state.schedule.set(2)
    (rate,) = {group["lr"] for group in state.optimizer.param_groups}
    assert rate < min(state.schedule.base)


class Unknowing(Plain):
    """Takes the time for something it computes with."""

    def model(self) -> nn.Module:
        import os

        dict(os.environ)
        return super().model()


def test_what_nothing_can_tell_of_a_job_is_warned_of() -> None:
    told: list[Event] = []
    job = Unknowing(Unknowing.Params(samples=20))
    with variables_noted(reads_of(job)):
        prepared(spec_of(), job, told)
    warnings = [event.text for event in told if isinstance(event, Warned)]
    assert any(text.startswith("the job copies") for text in warnings), warnings
    assert [event.stage for event in told if isinstance(event, StageEnded)] == [
        "checkpoint",
        "data",
        "model",
        "rehearsal",
        "preparation",
    ]


def test_an_attempt_that_says_so_saves_nothing() -> None:
    """A replay of steps would publish checkpoints of another run."""
    run = prepared(spec_of(), Plain(Plain.Params(samples=20)))
    for origin, saves in (
        (AttemptOrigin("a" * 32, 2), True),
        (AttemptOrigin(replay=Replay("a" * 32, "/runs", 0, 3)), False),
        (None, False),
    ):
        assert (run.checkpoints(tell_nobody, NoRequests(), origin).origin is not None) == saves


def test_samples_in_both_sets_are_looked_for_once_a_run() -> None:
    """By the worker that begins it: one that joins gets the facts of the others."""
    job = Evaluated(Evaluated.Params(samples=20))
    assert isinstance(prepared(spec_of(), job).facts["leaked_rows"], int)
    assert "leaked_rows" not in prepared(spec_of(), job, joining_worker=True).facts


def test_a_step_names_the_samples_of_its_micro_batches() -> None:
    """What an error of one of them tells."""
    run = prepared(spec_of(), Plain(Plain.Params(samples=20)))
    sampler = make_sampler(run.spec, run.plan, run.batches.samples)
    named = [
        list(run.step.compute.samples(position, m))
        for position in map(run.plan.position, (0, 3))
        for m in (0, 1)
    ]
    assert named == [list(sampler.at(run.plan.position(step), m).ids) for step in (0, 3) for m in (0, 1)]
    assert len({*map(tuple, named)}) == 4


@pytest.mark.parametrize(
    ("sections", "compares"),
    [
        ({"rehearsal": "quick"}, True),
        ({"rehearsal": "off"}, False),
        ({"rehearsal": "quick", "determinism": "fast"}, False),
    ],
)
def test_what_functions_over_the_whole_set_keep_is_looked_at_where_bits_are_promised(
    sections: Mapping[str, Any], compares: bool
) -> None:
    run = prepared(spec_of(**sections), Evaluated(Evaluated.Params(samples=20)))
    assert run.evaluate is not None
    assert [each.over_all.compares for each in run.evaluate] == [compares]


@pytest.mark.parametrize(("start", "steps"), [(0, [1, 2, 4, 8, 11]), (3, [4, 5, 7, 11])])
def test_micro_batches_are_fetched_twice_in_a_few_steps(
    monkeypatch: pytest.MonkeyPatch, start: int, steps: list[int]
) -> None:
    """The first ones at distances of powers of two from the start, and the last; of each, the worker's first micro-batch."""
    compared: list[Callable[[MicroBatch], bool] | None] = []

    def loader(*args: Any) -> Any:
        *_, comparison, check = args
        assert check is None  # the data have no order of their own
        compared.append(comparison)

    monkeypatch.setattr(run_module, "Loader", loader)
    run = prepared(spec_of(length={"steps": 12}), Plain(Plain.Params(samples=20)))
    run.state.counters.step = start
    run.loader()
    (twice,) = compared
    assert twice is not None
    keys = [MicroBatch(step, m, []) for step in range(start, 12) for m in (0, 1)]
    assert [(key.step, key.micro_batch) for key in keys if twice(key)] == [(step, 0) for step in steps]


@pytest.mark.every(8)
@pytest.mark.thinned(7)
@pytest.mark.parametrize(
    ("sections", "origin", "rechecks"),
    [
        ({"rehearsal": "auto"}, AttemptOrigin(), True),
        ({"rehearsal": "auto"}, AttemptOrigin(replay=Replay("a" * 32, "/runs", 0, 3)), False),
        (
            {"rehearsal": "auto", "determinism": {"recheck": 0.5}},
            AttemptOrigin(replay=Replay("a" * 32, "/runs", 0, 3)),
            True,
        ),
        ({"rehearsal": "off"}, None, False),
        ({"rehearsal": "auto", "determinism": "fast"}, None, False),
        ({"rehearsal": "auto", "reduction": "native"}, None, False),
        ({"rehearsal": "auto", "data": {"loader_processes": 1}}, None, False),
        ({"rehearsal": "auto", "determinism": {"recheck": 0}}, None, False),
    ],
)
def test_steps_are_computed_twice_where_nothing_else_compares_them(
    sections: Mapping[str, Any], origin: AttemptOrigin | None, rechecks: bool
) -> None:
    run = prepared(spec_of(), Plain(Plain.Params(samples=20)))
    run.step.accumulation.recheck = None
    watch_bits(run.step, spec_of(**sections), run.plan, run.batches, tell_nobody, origin)
    assert (run.step.accumulation.recheck is not None) == rechecks
