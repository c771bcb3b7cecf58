"""Several held-out sets, a test at the end, and weights of the job's own to evaluate: the same bits for every W, and after a stop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.optim.swa_utils import update_bn
from torch.utils.data import DataLoader

from lockstep.checkpoint.runs.run_folder import AttemptOrigin
from lockstep.data.sampler import MicroBatchSampler
from lockstep.errors import Problem, SpecError
from lockstep.plan import Plan
from lockstep.training import problems
from lockstep.training.determinism import determinism
from lockstep.training.integrity.state_digest import weights_digest
from lockstep.training.step import job_weights
from tests.distributed.evaluation_kinds import (
    WORST,
    AverageWithoutStatistics,
    DiffersByRank,
    EmptyMapping,
    NamedSets,
    NoContext,
    OnlyTested,
    SeveralTests,
    SlashInName,
    StochasticAverage,
)
from tests.distributed.kinds import RUN, document, taken_up
from tests.distributed.pool import Pool
from tests.distributed.training import Trained, bits, train, train_attempt
from tests.raised import raises


def all_of(trained: Trained) -> Any:
    """Everything that must be the same, the test and the average too."""
    return trained, bits(trained.summary.get("test", {})), trained.summary["ema_digest"]


def evaluations(trained: Trained) -> dict[int, dict[str, str]]:
    return {step: dict(metrics) for step, _, metrics in trained.evaluations}


@pytest.mark.scenario
@pytest.mark.thinned(12)
@pytest.mark.parametrize("workers", [3, 2, 4])
@pytest.mark.parametrize("kind", [NamedSets, SeveralTests, StochasticAverage, AverageWithoutStatistics])
def test_the_same_bits_for_every_number_of_workers(pool: Pool, kind: Any, workers: int) -> None:
    alone = all_of(train(document(kind)))
    for trained in pool.run(workers, train, document(kind)):
        assert all_of(trained) == alone


@pytest.mark.scenario
@pytest.mark.thinned(4)
@pytest.mark.parametrize("kind", [NamedSets, SeveralTests, StochasticAverage, AverageWithoutStatistics])
def test_the_same_bits_with_loader_processes(pool: Pool, kind: Any) -> None:
    (fetched,) = pool.run(1, train, document(kind, data={"drop_last": False, "loader_processes": 2}))
    assert all_of(fetched) == all_of(train(document(kind)))


@pytest.mark.scenario
@pytest.mark.thinned(2)
@pytest.mark.parametrize("sharding", ["optimizer", "full"])
def test_sets_and_a_test_under_sharding(pool: Pool, sharding: str) -> None:
    """The best weights are shards there."""
    alone = all_of(train(document(NamedSets)))
    for trained in pool.run(2, train, document(NamedSets, sharding=sharding)):
        assert all_of(trained) == alone


@pytest.mark.scenario
@pytest.mark.thinned(2)
@pytest.mark.parametrize("kind", [NamedSets, StochasticAverage])
def test_the_same_bits_after_a_stop(tmp_path: Path, kind: Any) -> None:
    def saved(name: str) -> dict[str, Any]:
        return document(kind, checkpoint={"storage": str(tmp_path / name), "every": None})

    whole = train_attempt(saved("whole"), RUN, AttemptOrigin())
    stopped = train_attempt(saved("stopped"), RUN, AttemptOrigin(), 3)
    assert "test" not in stopped.summary
    resumed = train_attempt(saved("stopped"), RUN, taken_up(saved("stopped")))
    assert evaluations(resumed) == evaluations(whole)
    assert all_of(resumed)[1:] == all_of(whole)[1:]
    assert resumed.weights_digest == whole.weights_digest
    assert resumed.best == whole.best


@pytest.mark.scenario
def test_each_set_has_a_cadence_and_a_limit() -> None:
    """After the last step all sets are evaluated. A limit takes the first samples."""
    rows = evaluations(train(document(NamedSets)))
    near, far = {"eval/near/loss", "eval/near/accuracy"}, {"eval/far/loss", "eval/far/accuracy"}
    assert {step: set(metrics) for step, metrics in rows.items()} == {
        1: near,
        2: near | far,
        3: near,
        4: near | far,
        5: near | far,
    }
    unlimited = train(document(NamedSets, evaluate={"every": {"steps": 1}}))
    for step, metrics in evaluations(unlimited).items():
        assert set(metrics) == near | far
        if step in (2, 4, 5):
            assert metrics["eval/far/loss"] == rows[step]["eval/far/loss"]
        assert metrics["eval/near/loss"] != rows[step]["eval/near/loss"]
    assert unlimited.identity != train(document(NamedSets)).identity
    assert unlimited.weights_digest == train(document(NamedSets)).weights_digest


def test_the_test_is_of_the_weights_that_are_kept() -> None:
    """It has the data of a set of the evaluation, so its metrics are those of that set where the weights were kept."""
    best = train(document(NamedSets))
    rows = evaluations(best)
    assert best.best[0] == 2
    assert best.summary["tested"] == "best"
    assert best.summary["tested_step"] == 2
    tested = bits(best.summary["test"])
    assert dict(tested) == {
        name.replace("eval/far/", "test/"): value
        for name, value in rows[2].items()
        if name.startswith("eval/far/")
    }
    assert dict(tested)["test/loss"] != rows[5]["eval/far/loss"]
    last = train(document(NamedSets, early_stop=None))
    assert last.summary["tested"] == "final"
    assert dict(bits(last.summary["test"]))["test/loss"] == evaluations(last)[5]["eval/far/loss"]
    assert last.weights_digest == best.weights_digest


def test_several_tests_and_a_test_alone() -> None:
    trained = train(document(SeveralTests))
    tested = dict(bits(trained.summary["test"]))
    assert set(tested) == {
        f"test/{name}/{what}" for name in ("same", "other") for what in ("loss", "accuracy")
    }
    assert tested["test/same/loss"] == evaluations(trained)[3]["eval/loss"]
    assert trained.summary["metrics"].keys().isdisjoint(tested)
    alone = train(document(OnlyTested))
    assert alone.evaluations == ()
    assert bits(alone.summary["test"])[1] == ("test/loss", tested["test/same/loss"])
    assert alone.weights_digest == trained.weights_digest


def by_hand(kind: type[StochasticAverage], tmp_path: Path, *, statistics: bool) -> str:
    """The digest of the averaged weights as torch's own loop computes them, from the weights after each update."""
    seen: list[dict[str, torch.Tensor]] = []

    class Watching(kind):  # type: ignore[valid-type, misc]
        def after_step(self, model: Any, step: int) -> None:
            super().after_step(model, step)
            seen.append({name: value.clone() for name, value in model.state_dict().items()})

    from lockstep.spec.loading import load_spec
    from tests.distributed.training import train_job

    spec = load_spec(document(kind))
    train_job(document(kind), Watching({}))
    job = kind({})
    model = job.model()
    mean: dict[str, torch.Tensor] = {}
    for count, weights in enumerate(seen, 1):
        for name, _ in model.named_parameters():
            value = mean.setdefault(name, torch.zeros_like(weights[name]))
            value += (weights[name] - value) / count
    model.load_state_dict({**seen[-1], **mean})
    if statistics:
        data = job.train_data()
        plan = Plan.of(32, 12, 3, drop_last=False, epochs=None, steps=4)
        sampler = MicroBatchSampler(data, plan, range(4), seed=spec.seed, shuffle=spec.data.shuffle)
        ids = [sampler.at(plan.position(i // 4), i % 4).ids for i in range(5)]
        for module in model.modules():  # the draws of a dropout behind it change no statistic
            module.p = 0.0 if isinstance(module, torch.nn.Dropout) else getattr(module, "p", None)  # type: ignore[assignment]
        with determinism(spec.determinism, spec.threads):  # under which torch picks its kernels
            update_bn(DataLoader(data, batch_sampler=ids), model)  # type: ignore[arg-type]
    return weights_digest(model.state_dict())


@pytest.mark.scenario
def test_an_average_with_recomputed_statistics_is_that_of_torch(tmp_path: Path) -> None:
    trained = train(document(StochasticAverage))
    assert trained.summary["ema_digest"] == by_hand(StochasticAverage, tmp_path, statistics=True)
    without = train(document(AverageWithoutStatistics))
    assert without.summary["ema_digest"] == by_hand(AverageWithoutStatistics, tmp_path, statistics=False)
    assert without.summary["ema_digest"] != trained.summary["ema_digest"]
    assert without.weights_digest == trained.weights_digest
    assert dict(evaluations(trained)[4])["eval/loss"] != dict(evaluations(without)[4])["eval/loss"]


def test_weights_of_the_jobs_own_are_kept_by_one_worker_of_several(pool: Pool, tmp_path: Path) -> None:
    """All of them compare these weights for the summary; only the first writes them, while the others may be gone."""
    storage = {"checkpoint": {"storage": str(tmp_path), "every": None}}
    spec = document(StochasticAverage, rehearsal="off", **storage)
    first, second = pool.run(2, train_attempt, spec, RUN, AttemptOrigin())
    assert first == second
    assert (
        weights_digest(load_file(tmp_path / RUN / "weights" / "ema.safetensors"))
        == first.summary["ema_digest"]
    )


def test_statistics_that_stay_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: were buffers not put back after an evaluation, training would go on from others."""
    exact = train(document(StochasticAverage))

    class Left(job_weights.KeptBuffers):
        def restore(self) -> None:
            pass

    monkeypatch.setattr(job_weights, "KeptBuffers", Left)
    assert train(document(StochasticAverage)).weights_digest != exact.weights_digest


def test_the_kept_best_weights_are_the_evaluated_ones(tmp_path: Path) -> None:
    """Their file has the recomputed statistics."""
    from lockstep.spec.loading import load_spec

    run = document(
        StochasticAverage,
        early_stop={"patience": 9},
        checkpoint={"storage": str(tmp_path), "every": None},
        record={"uri": "off"},
    )
    trained = train_attempt(run, RUN, AttemptOrigin())
    folder = load_spec(run).folder / RUN / "weights"
    best, average = load_file(folder / "best.safetensors"), load_file(folder / "ema.safetensors")
    assert weights_digest(best) == trained.best[1]
    if trained.best[0] == 4:
        assert weights_digest(best) == weights_digest(average) == trained.summary["ema_digest"]
    assert weights_digest(load_file(folder / "final.safetensors")) == trained.weights_digest


@pytest.mark.scenario
def test_a_threshold_ends_the_run() -> None:
    every = train(document(NamedSets, early_stop=None))
    values = {step: float.fromhex(metrics["eval/near/loss"]) for step, metrics in evaluations(every).items()}
    rule = {"metric": "eval/near/loss", "patience": None, "threshold": values[3]}
    first = min(step for step, value in values.items() if value <= values[3])
    ended = train(document(NamedSets, early_stop=rule))
    assert ended.summary["step"] == ended.best[0] == first
    assert ended.digests == every.digests[:first]
    beyond = train(document(NamedSets, early_stop={**rule, "threshold": -1.0}))
    assert beyond.summary["step"] == 5


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("kind", "more", "problem", "facts"),
    [
        (NamedSets, {"early_stop": {**WORST, "metric": "eval/loss"}}, problems.NO_METRIC, {"got": "eval/loss"}),
        (NamedSets, {"early_stop": {**WORST, "metric": "test/loss"}}, problems.TEST_DECIDES, {"got": "test/loss"}),
        (NamedSets, {"evaluate": {"sets": {"fat": {"limit": 1}}}}, problems.UNKNOWN_SET, {"field": "evaluate.sets.fat"}),
        (OnlyTested, {"early_stop": {"patience": 3}}, problems.NO_EVAL_DATA, {"field": "early_stop"}),
        (EmptyMapping, {}, problems.NO_SET, {"field": "job.eval_data"}),
        (SlashInName, {}, problems.SET_NAME, {"field": "job.eval_data", "got": "a/b"}),
        (NoContext, {}, problems.EVAL_WEIGHTS_KIND, {}),
        (StochasticAverage, {"ema": 0.5}, problems.EVAL_WEIGHTS_BESIDE, {"field": "ema", "got": 0.5}),
        (StochasticAverage, {"sharding": "full"}, problems.EVAL_WEIGHTS_BESIDE, {"field": "sharding", "got": "'full'"}),
    ],
)  # fmt: skip
def test_what_cannot_be_meant_is_refused(
    kind: Any, more: dict[str, Any], problem: Problem[Any], facts: dict[str, object]
) -> None:
    with raises(problem, **facts):
        train(document(kind, **more))


def test_a_rule_without_patience_needs_a_threshold() -> None:
    with pytest.raises(SpecError, match="a threshold"):
        train(document(NamedSets, early_stop={"patience": None}))


def test_weights_that_differ_between_ranks_are_refused(pool: Pool) -> None:
    with raises(problems.EVAL_WEIGHTS_DIFFER, got=[1], step=2):
        pool.run(2, train, document(DiffersByRank))
