"""G1, G4: an evaluation beside training gives the metrics of one in place, and decides after the same step however long it takes, and whatever is killed."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import pytest
from torch import nn

from lockstep.checkpoint.runs.run_checkpoints import claim, steps_of
from lockstep.checkpoint.runs.run_folder import AttemptOrigin
from lockstep.errors import SpecError
from lockstep.spec.loading import load_spec
from lockstep.training.evaluation.evaluator_process import MOST_LOST
from lockstep.training.state import TrainState
from tests.distributed.evaluating import cannot, decided_on_arrival, fails, forked, killed, late
from tests.distributed.evaluation_kinds import AverageWithoutStatistics, NamedSets, StochasticAverage
from tests.distributed.kinds import RUN, Kind, document
from tests.distributed.pool import Pool
from tests.distributed.step_kinds import FallsWhenNothingImproves
from tests.distributed.survivors import Change, Fall, outlive
from tests.distributed.training import Trained, bits, train, train_attempt

Document = dict[str, Any]


class Paced(NamedSets):
    """Each step takes a while, so that a process beside it can come to its answer between two evaluations."""

    pause_s: ClassVar[float] = 0.02
    more: ClassVar[dict[str, Any]] = {
        "length": {"steps": 24},
        "optimizer": {"name": "sgd", "lr": 0.3},
        "evaluate": {"every": {"steps": 4}},
        "early_stop": {"metric": "eval/far/loss", "mode": "max", "patience": 2},
    }

    def after_step(self, model: nn.Module, step: int) -> None:
        time.sleep(self.pause_s)


def beside(kind: type[Kind], **more: Any) -> Document:
    """A run whose evaluations are made by another process."""
    plain = document(kind, **more)
    return {**plain, "evaluate": {**plain.get("evaluate", {}), "beside": True}}


def in_place(kind: type[Kind], **more: Any) -> Document:
    """The same run, whose workers make the evaluations, and which decides when the other does."""
    plain = document(kind, **more)
    return {**plain, "evaluate": {**plain.get("evaluate", {}), "delay": "next"}}


def all_of(trained: Trained) -> Any:
    """Everything that must be the same, the test and the average too."""
    return (
        trained,
        bits(trained.summary.get("test", {})),
        trained.summary["ema_digest"],
        bits(trained.summary["metrics"]),
    )


UNDECIDED: dict[str, Document] = {
    "named sets": {"kind": NamedSets, "early_stop": None},
    "an average": {"kind": NamedSets, "early_stop": None, "ema": 0.6},
    "weights of the job's own": {"kind": StochasticAverage},
    "weights without statistics": {"kind": AverageWithoutStatistics},
}


@pytest.mark.scenario
@pytest.mark.thinned(4)
@pytest.mark.parametrize("name", UNDECIDED)
def test_the_same_bits_rows_and_identity_as_in_place(name: str) -> None:
    """Where no evaluation decides about bits, `beside` and `delay` are placement."""
    more = {**UNDECIDED[name]}
    kind = more.pop("kind")
    plain = all_of(train(document(kind, **more)))
    with forked() as processes:
        assert all_of(train(beside(kind, **more))) == plain
    assert processes.started == 1
    assert all_of(train(in_place(kind, **more))) == plain


@pytest.mark.scenario
def test_a_run_whose_evaluations_decide_has_the_delay_in_its_identity() -> None:
    def fields(one: Document) -> Any:
        return train(one).identity

    early, later = fields(document(NamedSets)), fields(in_place(NamedSets))
    two = document(NamedSets)
    assert len({early, later, fields({**two, "evaluate": {**two["evaluate"], "delay": 2}})}) == 3
    with forked():
        assert fields(beside(NamedSets)) == later
    followed = fields(document(FallsWhenNothingImproves))
    assert fields(in_place(FallsWhenNothingImproves)) != followed


@pytest.mark.scenario
def test_early_stop_ends_the_run_after_the_same_step_for_fast_and_slow_processes() -> None:
    """The evaluation of step 12 is the second without improvement: it decides after step 16, where the next one is due."""
    whole = train(in_place(Paced))
    assert whole.summary["step"] == 16
    assert train(document(Paced)).summary["step"] == 12
    assert [step for step, *_ in whole.evaluations] == [4, 8, 12, 16]
    for serve in (None, late):
        with forked(serve) if serve else forked():
            assert all_of(train(beside(Paced))) == all_of(whole)


@pytest.mark.scenario
def test_a_decision_on_arrival_would_follow_the_speed_of_the_process() -> None:
    """The negative control."""
    with decided_on_arrival(), mock.patch.object(Paced, "pause_s", 0.3):
        with forked():
            fast = train(beside(Paced))
        with forked(late):
            slow = train(beside(Paced))
    assert fast.summary["step"] != slow.summary["step"]


@pytest.mark.scenario
def test_a_delay_in_steps_decides_after_so_many() -> None:
    """And an evaluation of the weights that the run ends with is made where none was due."""
    plain = document(Paced)
    later = {**plain, "evaluate": {"every": {"steps": 4}, "delay": 1}}
    trained = train(later)
    assert trained.summary["step"] == 13
    assert [step for step, *_ in trained.evaluations] == [4, 8, 12, 13]
    with forked():
        assert all_of(train({**later, "evaluate": {**later["evaluate"], "beside": True}})) == all_of(trained)


@pytest.mark.scenario
def test_a_schedule_follows_the_metrics_after_the_same_step() -> None:
    more = {
        "length": {"steps": 9},
        "evaluate": {"every": {"steps": 2}},
        "optimizer": {"name": "sgd", "lr": 3.0},
    }
    at_once, later = (train(make(FallsWhenNothingImproves, **more)) for make in (document, in_place))
    rates = [[row.lr for row in trained.steps] for trained in (at_once, later)]
    assert len(set(rates[0])) > 1
    assert rates[1][2:] == rates[0][:2] + rates[0][2:-2] or rates[0] != rates[1]
    for serve in (None, late):
        with forked(serve) if serve else forked():
            assert all_of(train(beside(FallsWhenNothingImproves, **more))) == all_of(later)


# --- what is killed -------------------------------------------------------------------------------------------


@pytest.mark.scenario
@pytest.mark.thinned(3)
@pytest.mark.parametrize("count", [1, 2, 100])
def test_an_evaluation_whose_process_is_killed_is_made_again(count: int) -> None:
    """By another process, or by the workers. After three in a row they evaluate by themselves from then on."""
    with forked() as processes, killed(count):
        trained = train(beside(Paced))
    assert all_of(trained) == all_of(train(in_place(Paced)))
    assert any("ended with -9; the evaluation of step 4 is made again" in text for text in trained.warnings)
    assert processes.started <= 3
    assert any("by themselves from here on" in text for text in trained.warnings) == (count == 100)


@pytest.mark.scenario
@pytest.mark.parametrize(("serve", "started"), [(cannot, 1), (fails, MOST_LOST)])
def test_a_process_that_cannot_build_the_run_is_not_started_again(serve: Any, started: int) -> None:
    """One that has built it may have met with what passes. Each evaluation waits for what becomes of it."""
    with forked(serve) as processes:
        trained = train(beside(Paced))
    assert all_of(trained) == all_of(train(in_place(Paced)))
    assert processes.started == started
    assert trained.warnings


def saved(make: Any, kind: type[Kind], storage: Path, **more: Any) -> Document:
    checkpoint = {"storage": str(storage), "every": {"steps": 1}, "keep_last": 100, "verify_after_s": None}
    run: Document = make(kind, checkpoint=checkpoint, **more)
    return run


def resumed(run: Document, step: int) -> Trained:
    return train_attempt(run, RUN, claim(run["checkpoint"]["storage"], RUN, step))


@pytest.mark.thinned(3)
@pytest.mark.scenario
@pytest.mark.parametrize(
    ("kind", "steps"), [(NamedSets, (1, 2, 4)), (StochasticAverage, (2, 3)), (Paced, (4, 6, 15))]
)
def test_a_resumed_run_makes_the_pending_evaluation_again(
    tmp_path: Path, kind: type[Kind], steps: tuple[int, ...]
) -> None:
    """From checkpoints of the step at which it began, and of later ones; beside and in place, whoever saved them."""
    whole = train(in_place(kind))
    with forked():
        train_attempt(saved(beside, kind, tmp_path), RUN, AttemptOrigin())
        for step in steps:
            again = resumed(saved(beside if step % 2 else in_place, kind, tmp_path), step)
            assert {**dict.fromkeys(again.evaluations)}.keys() == {**dict.fromkeys(whole.evaluations)}.keys()
            assert all_of(again)[1:] == all_of(whole)[1:]
            assert (again.weights_digest, again.best, again.identity) == (
                whole.weights_digest,
                whole.best,
                whole.identity,
            )
            assert again.digests == whole.digests[step:]


@pytest.mark.scenario
def test_a_stopped_run_does_not_wait_for_its_evaluation(tmp_path: Path) -> None:
    whole = train(in_place(Paced))
    with forked(late):
        began = time.monotonic()
        stopped = train_attempt(saved(beside, Paced, tmp_path), RUN, AttemptOrigin(), 6)
        took_s = time.monotonic() - began
    assert stopped.evaluations == ()
    with forked():
        again = resumed(saved(beside, Paced, tmp_path), 6)
    assert again.evaluations == whole.evaluations
    assert again.weights_digest == whole.weights_digest
    assert took_s < 60


@pytest.mark.scenario
def test_without_the_pending_evaluation_a_resumed_run_would_differ(tmp_path: Path) -> None:
    """The negative control."""
    whole = train(in_place(Paced))
    with forked():
        train_attempt(saved(beside, Paced, tmp_path), RUN, AttemptOrigin())
    restore = TrainState.restore

    def forgetting(self: TrainState, sections: Any, **options: Any) -> None:
        restore(self, {name: part for name, part in sections.items() if name != "evaluation"}, **options)

    with mock.patch.object(TrainState, "restore", forgetting):
        again = resumed(saved(in_place, Paced, tmp_path), 6)
    assert again.evaluations != whole.evaluations


# --- what is kept ---------------------------------------------------------------------------------------------


@pytest.mark.scenario
def test_the_best_checkpoint_is_kept_and_the_pending_one_until_its_evaluation_decides(tmp_path: Path) -> None:
    rule = {"metric": "eval/far/loss", "mode": "max"}
    checkpoint = {"every": {"steps": 1}, "keep_last": 1, "keep_best": rule, "verify_after_s": None}

    def run(make: Any, name: str) -> Document:
        made: Document = make(
            Paced, early_stop=None, checkpoint={**checkpoint, "storage": str(tmp_path / name)}
        )
        return made

    def best(trained: Trained) -> int:
        values = {
            step: float.fromhex(dict(metrics)["eval/far/loss"]) for step, _, metrics in trained.evaluations
        }
        return max(values, key=lambda step: (values[step], -step))

    plain = train_attempt(run(document, "plain"), RUN, AttemptOrigin())
    with forked():
        other = train_attempt(run(beside, "beside"), RUN, AttemptOrigin())
        stopped = train_attempt(run(beside, "stopped"), RUN, AttemptOrigin(), 10)
        kept = set(steps_of(str(tmp_path / "stopped"), RUN))
        again = train_attempt(run(beside, "stopped"), RUN, claim(str(tmp_path / "stopped"), RUN, None))
    assert other.evaluations == plain.evaluations == again.evaluations
    assert stopped.summary["step"] == 10
    assert {8, 10} <= kept <= {4, 8, 10}
    for name in ("plain", "beside", "stopped"):
        assert set(steps_of(str(tmp_path / name), RUN)) == {best(plain), 24}


# --- several workers ------------------------------------------------------------------------------------------


@pytest.mark.thinned(3)
@pytest.mark.scenario
@pytest.mark.parametrize("kind", [NamedSets, StochasticAverage, Paced])
def test_the_same_bits_on_two_workers_with_the_real_process(pool: Pool, kind: type[Kind]) -> None:
    whole = all_of(train(in_place(kind)))
    for trained in pool.run(2, train, beside(kind)):
        assert all_of(trained) == whole


@pytest.mark.thinned(2)
@pytest.mark.scenario
@pytest.mark.parametrize("make", [in_place, beside])
def test_workers_go_on_without_a_lost_one_and_with_another(make: Any) -> None:
    """Rank 0, whose process evaluates, is lost while an evaluation is pending; then another worker joins, which gets what is pending."""
    whole = train(in_place(NamedSets, length={"steps": 7}))
    run = make(NamedSets, length={"steps": 7})
    outlived = outlive(run, 3, [Fall(0, 2, "forward")], [Change(4, joining=1)])
    assert (outlived.rows, outlived.evaluations) == (whole.rows, whole.evaluations)
    for summary in outlived.summaries.values():
        assert (summary["weights_digest"], summary["workers"]) == (whole.weights_digest, 3)
        assert (summary["best_step"], summary["best_digest"]) == whole.best


@pytest.mark.scenario
def test_a_delay_under_full_sharding(pool: Pool, tmp_path: Path) -> None:
    """The pending weights are shards, in checkpoints too."""
    whole = all_of(train(in_place(NamedSets)))
    run = saved(in_place, NamedSets, tmp_path, sharding="full")
    for trained in pool.run(2, train_attempt, run, RUN, AttemptOrigin()):
        assert all_of(trained) == whole
    for trained in pool.run(2, train_attempt, run, RUN, claim(str(tmp_path), RUN, 3)):
        assert all_of(trained)[1:] == whole[1:]
        assert trained.best == whole[0].best


def test_a_process_has_no_whole_weights_to_evaluate_under_full_sharding() -> None:
    with pytest.raises(
        SpecError, match=r"^evaluate.beside: got true with sharding full, .*; set evaluate.beside=false"
    ):
        load_spec({"job": {"use": "a:B"}, "evaluate": {"beside": True}, "sharding": "full"})
