"""G1 for programs whose step is more than forward, backward, update: one table of them, each executed in every way and killed in its middle.

Such a step passes over its micro-batches twice, evaluates its loss again, gathers a statistic, or updates a table by its rows. SIGKILL comes at
the place where most of it is done and nothing of it counts yet. Then the others go on in memory; or, where they cannot, the run is taken up
from its checkpoint, by other workers and under another sharding. Every bit is that of one plain process. What each program is beside its author's
own loop is in the tests of its kind.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
from torch import nn

from lockstep.checkpoint.runs.run_checkpoints import claim
from lockstep.checkpoint.runs.run_folder import AttemptOrigin
from lockstep.errors import ClusterError, LockstepError
from lockstep.training import start
from lockstep.training.elastic.recovery import is_lost_peer
from lockstep.training.state import TrainState
from tests.distributed import (
    batch_kinds,
    changing_jobs,
    closure_kinds,
    evaluation_kinds,
    gradient_kinds,
    step_kinds,
    test_groups,
    test_recipes,
)
from tests.distributed.kinds import RUN, Kind, document
from tests.distributed.pool import Pool
from tests.distributed.survivors import Fall, outlive
from tests.distributed.test_survivors import check, repeated
from tests.distributed.training import Document, Trained, train, train_attempt


class Program(NamedTuple):
    """A spec, and where worker 1 of three is killed."""

    spec: Document
    fall: Fall
    is_shardable: bool = True
    needs_whole: bool = False
    """Whether it needs whole parameters on a worker: `sharding: full` is refused."""

    def under(self, sharding: str) -> str:
        """The mode nearest to `sharding` that it may have."""
        if not self.is_shardable:
            return "none"
        return "optimizer" if self.needs_whole and sharding == "full" else sharding


def of(kind: type[Kind], **more: Any) -> Document:
    return document(kind, rehearsal="off", **more)


STEP = 3
"""The last step, ragged: the checkpoint of the first one is whole by then."""

PROGRAMS = {
    "whole batch, first pass": Program(of(batch_kinds.Clip), Fall(1, STEP, "forward")),
    "whole batch, second pass": Program(of(batch_kinds.Clip), Fall(1, STEP, "forward", 2)),
    "whole batch, scaled": Program(
        of(batch_kinds.BarlowTwins, precision="fp16"), Fall(1, STEP, "forward", 2)
    ),
    "terms, their weights are gathered": Program(of(batch_kinds.Detection), Fall(1, STEP, "forward")),
    "terms, weighed by a first pass": Program(
        of(batch_kinds.MatchedByPrediction), Fall(1, STEP, "forward", 2)
    ),
    "a queue, its rows are gathered": Program(of(batch_kinds.Moco), Fall(1, STEP, "update")),
    "a queue, weights are updated": Program(of(batch_kinds.Moco), Fall(1, STEP, "note")),
    "a codebook": Program(of(batch_kinds.Codebook), Fall(1, STEP, "update")),
    "the third evaluation of a search": Program(
        of(closure_kinds.Lbfgs), Fall(1, STEP, "forward", 3), is_shardable=False
    ),
    "the second gradient of SAM": Program(
        of(closure_kinds.PublishedSam), Fall(1, STEP, "forward", 2), is_shardable=False
    ),
    "a search over the whole batch": Program(
        of(closure_kinds.LbfgsOverTheBatch), Fall(1, STEP, "forward", 5), is_shardable=False
    ),
    "a batch that grows": Program(changing_jobs.ramp(rehearsal="off"), Fall(1, 17, "send whole")),
    "batches of tokens": Program(changing_jobs.by_tokens(rehearsal="off"), Fall(1, 5, "send whole")),
    "groups": Program(test_groups.run(rehearsal="off"), Fall(1, STEP, "send whole")),
    "named sets": Program(of(evaluation_kinds.NamedSets), Fall(1, STEP, "gather", 2)),
    "weights of its own to evaluate": Program(
        of(evaluation_kinds.StochasticAverage), Fall(1, 4, "gather"), needs_whole=True
    ),
    "a schedule by epochs": Program(
        of(step_kinds.FallsEveryEpoch, length={"epochs": 2}), Fall(1, 4, "update")
    ),
    "tables": Program(of(gradient_kinds.Recommender), Fall(1, STEP, "update")),
    "tables of one optimizer": Program(of(gradient_kinds.RecommenderBySgd), Fall(1, STEP, "send whole", 2)),
    "complex parameters": Program(of(gradient_kinds.FourierOperator), Fall(1, STEP, "update")),
    "private gradients": Program(
        test_recipes.document("Private", rehearsal="off"), Fall(1, STEP, "update"), is_shardable=False
    ),
    "quantised": Program(test_recipes.document("Quantised", rehearsal="off"), Fall(1, STEP, "send whole")),
}
SHARDABLE = [name for name, program in PROGRAMS.items() if program.is_shardable]


@cache
def undisturbed(name: str) -> Trained:
    return train(PROGRAMS[name].spec)


@pytest.mark.scenario
@pytest.mark.thinned(12)
@pytest.mark.parametrize(
    ("workers", "sharding"),
    [
        (4, "full"),
        pytest.param(3, "optimizer", marks=pytest.mark.exact),
        pytest.param(2, "none", marks=pytest.mark.exact),
        pytest.param(1, "none", marks=pytest.mark.exact),
    ],
)
@pytest.mark.parametrize("name", PROGRAMS)
def test_workers_loader_processes_and_sharding_change_no_bit(
    pool: Pool, name: str, workers: int, sharding: str
) -> None:
    """On four workers the last steps leave one without a micro-batch."""
    program = PROGRAMS[name]
    loading = {**program.spec.get("data", {}), "loader_processes": 1}
    placed = {**program.spec, "data": loading, "sharding": program.under(sharding)}
    assert pool.run(workers, train, placed) == [undisturbed(name)] * workers


@pytest.mark.scenario
@pytest.mark.thinned(12)
@pytest.mark.parametrize("name", [*PROGRAMS][1:] + [*PROGRAMS][:1])
def test_the_others_go_on_in_memory(name: str) -> None:
    """Nothing of the step under way is kept, and no other step is repeated."""
    spec, fall = PROGRAMS[name][:2]
    outlived = outlive(spec, 3, [fall])
    check(outlived, undisturbed(name), [0, 2])
    assert outlived.attempts == 2
    assert len(repeated(outlived)) <= 1


@pytest.mark.scenario
@pytest.mark.thinned(5)
@pytest.mark.parametrize(
    ("before", "after", "workers"),
    [
        ("full", "optimizer", 2),
        pytest.param("optimizer", "full", 3, marks=pytest.mark.exact),
        pytest.param("full", "none", 1, marks=pytest.mark.exact),
    ],
)
@pytest.mark.parametrize("name", ["tables", *(name for name in SHARDABLE if name != "tables")])
def test_a_sharded_run_is_taken_up_under_another_sharding(
    pool: Pool, tmp_path: Path, name: str, before: str, after: str, workers: int
) -> None:
    """Nobody has the lost worker's part, so all end; a checkpoint has every part whole."""
    program = PROGRAMS[name]
    saved = {**program.spec, "checkpoint": {"storage": str(tmp_path), "every": {"steps": 1}}}
    with pytest.raises(Exception) as lost:
        outlive({**saved, "sharding": program.under(before)}, 3, [program.fall], run_id=RUN)
    assert isinstance(lost.value, ClusterError) or is_lost_peer(lost.value)
    origin, whole = claim(str(tmp_path), RUN, None), undisturbed(name)
    for trained in pool.run(workers, train_attempt, {**saved, "sharding": program.under(after)}, RUN, origin):
        assert 0 < len(trained.digests) < len(whole.digests)
        assert trained.digests == whole.digests[-len(trained.digests) :]
        assert (trained.weights_digest, trained.identity) == (whole.weights_digest, whole.identity)
        assert (trained.rows, trained.evaluations) == (whole.rows, whole.evaluations)


@pytest.mark.scenario
def test_what_a_lost_step_has_changed_would_show() -> None:
    """The control: parameters halfway through a search are kept. That of buffers is in test_survivors.py."""
    name = "the third evaluation of a search"
    spec, fall = PROGRAMS[name][:2]
    outlived, whole = outlive(spec, 3, [fall], broken="start of the step"), undisturbed(name)
    digests = {summary["weights_digest"] for summary in outlived.summaries.values()}
    assert (outlived.rows, digests) != (whole.rows, {whole.weights_digest})


@pytest.mark.parametrize("checked", [True, False])
def test_moments_of_tables_that_are_left_out_would_show(tmp_path: Path, checked: bool) -> None:
    """The control of what is taken up: a run without them is refused, and has other bits where nobody looks."""
    saved = {**PROGRAMS["tables"].spec, "checkpoint": {"storage": str(tmp_path), "every": None}}
    train_attempt(saved, RUN, AttemptOrigin(), 2)
    restore = TrainState.restore

    def without_tables(self: TrainState, *args: Any, **more: Any) -> None:
        restore(self, *args, **more)
        for module in self.model.modules():
            if isinstance(module, nn.Embedding | nn.EmbeddingBag):
                self.optimizer.state.pop(module.weight)

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(TrainState, "restore", without_tables))
        if checked:
            stack.enter_context(pytest.raises(LockstepError, match="optimizer_digest was"))
        else:
            stack.enter_context(mock.patch.object(start, "compare_check"))
        forgetful = train_attempt(saved, RUN, claim(str(tmp_path), RUN, None))
        assert forgetful.weights_digest != undisturbed("tables").weights_digest
