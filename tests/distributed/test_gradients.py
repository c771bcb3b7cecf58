"""G1 and G3 for gradients that are not dense real numbers: complex ones, and those of tables of which a step touches few rows."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lockstep.training.step.optimizer_step as optimizer_step
from lockstep import Loss
from lockstep.checkpoint.runs.run_folder import AttemptOrigin
from lockstep.errors import Problem
from lockstep.proof.step_spans import Span
from lockstep.randomness import model_key, seed_all
from lockstep.spec.loading import load_spec
from lockstep.training import problems as training_problems
from lockstep.training.determinism import determinism
from lockstep.training.integrity import problems as integrity_problems
from lockstep.training.integrity.state_digest import weights_digest
from lockstep.training.observe.worker_memory import optimizer_bytes
from lockstep.training.step import problems
from lockstep.training.step.reduction import LATENCY_BYTES
from lockstep.training.step.sharding import ShardedOptimizer
from lockstep.training.step.sparse_gradients import TableSums
from tests.distributed.gradient_kinds import (
    ROWS,
    WIDTH,
    Bags,
    FewRows,
    FourierOperator,
    FourierOperatorBySgd,
    OnlyTables,
    RareFilter,
    RareTable,
    Recommender,
    RecommenderBySgd,
    both,
)
from tests.distributed.kinds import CLASSES, RUN, Kind, document, taken_up
from tests.distributed.pool import Pool
from tests.distributed.test_full_sharding import held as claimed
from tests.distributed.test_sharded_estimate import estimate_of
from tests.distributed.test_verify import checked
from tests.distributed.training import (
    Document,
    Trained,
    train,
    train_attempt,
    train_left_fold,
    train_sending,
)
from tests.raised import raises

COMPLEX = [FourierOperator, FourierOperatorBySgd, RareFilter]


class Alone(dict[type[Kind], Trained]):
    """What each job comes to in one plain process; trained when it is first asked for."""

    def __missing__(self, kind: type[Kind]) -> Trained:
        self[kind] = train(document(kind))
        return self[kind]


@pytest.fixture(scope="module")
def alone() -> Alone:
    return Alone()


# --- complex parameters ---------------------------------------------------------------------------------------

SHARDING = ("none", "optimizer", "full")
WAYS = [
    (FourierOperator, 2, "none", 0),
    (FourierOperator, 3, "optimizer", LATENCY_BYTES),
    (FourierOperatorBySgd, 4, "optimizer", 0),
    (FourierOperatorBySgd, 2, "full", LATENCY_BYTES),
    (RareFilter, 4, "none", LATENCY_BYTES),
]


def check_complex(
    pool: Pool, alone: Alone, kind: type[Kind], workers: int, sharding: str, latency: int
) -> None:
    found = pool.run(workers, train_sending, document(kind, sharding=sharding, rehearsal="off"), latency)
    assert found == [alone[kind]] * workers


@pytest.mark.every(5)
@pytest.mark.thinned(2)
@pytest.mark.parametrize(("kind", "workers", "sharding", "latency"), WAYS)
def test_complex_parameters_have_one_value(
    pool: Pool, alone: Alone, kind: type[Kind], workers: int, sharding: str, latency: int
) -> None:
    """G1: an average of the weights, clipping, parameters out of order, scalars, ones that are used now and then."""
    check_complex(pool, alone, kind, workers, sharding, latency)


@pytest.mark.exact
@pytest.mark.parametrize(
    ("kind", "workers", "sharding", "latency"),
    list(product(COMPLEX, (1, 2, 3, 4), SHARDING, (0, LATENCY_BYTES))),
)
def test_complex_parameters_have_one_value_in_full(
    pool: Pool, alone: Alone, kind: type[Kind], workers: int, sharding: str, latency: int
) -> None:
    check_complex(pool, alone, kind, workers, sharding, latency)


def test_the_imaginary_parts_learn(alone: Alone) -> None:
    """What the comparison above compares is there: both parts of the weights have a gradient, and clipping takes part."""
    for kind in (FourierOperator, FourierOperatorBySgd):
        gradients = [g for g in alone[kind].gradients.values() if g.is_complex()]
        assert len(gradients) == 4
        assert all(part.abs().sum() > 0 for g in gradients for part in (g.real, g.imag))
        assert any(row.grad_norm > 1.0 for row in alone[kind].steps)


@pytest.mark.scenario
@pytest.mark.parametrize(
    ("before", "after", "sharding"),
    [
        (2, 3, "optimizer"),
        *(pytest.param(*way, marks=pytest.mark.exact) for way in [(1, 2, "none"), (3, 1, "full")]),
    ],
)
def test_a_run_with_complex_parameters_is_taken_up(
    pool: Pool, alone: Alone, before: int, after: int, sharding: str, tmp_path: Path
) -> None:
    """G1: its moments are complex as well; by another number of workers."""
    run = document(
        FourierOperator, sharding=sharding, rehearsal="off", checkpoint={"storage": str(tmp_path), "every": None}
    )  # fmt: skip
    pool.run(before, train_attempt, run, RUN, AttemptOrigin(), 2)
    found = pool.run(after, train_attempt, run, RUN, taken_up(run))
    assert [one.weights_digest for one in found] == [alone[FourierOperator].weights_digest] * after


def by_hand(
    spec: Document, model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[Any]
) -> list[str]:
    """The digest of the model after each update of a plain loop: a batch, its mean loss, its update."""
    digests = []
    with determinism("strict", threads=1):
        for x, y in batches:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            digests.append(weights_digest(model.state_dict()))
    return digests


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_complex_updates_are_torchs_own(name: str) -> None:
    """G3: with a micro-batch of a power of two of samples a step, the bits are those of the loop that torch's documentation writes."""
    settings = {"lr": 0.05, "weight_decay": 0.01, **({"momentum": 0.9} if name == "sgd" else {})}
    spec = document(
        FourierOperator, batch={"global": 8, "micro": 8}, data={"shuffle": "none"}, optimizer={"name": name, **settings}, rehearsal="off", clip_norm=None
    )  # fmt: skip
    loaded = load_spec(spec)
    job = FourierOperator({})
    seed_all(model_key(loaded.seed))
    model = job.model()
    make = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[name]
    x, y = job.train_data().tensors  # type: ignore[attr-defined]
    batches = [(x[i : i + 8], y[i : i + 8]) for i in range(0, 32, 8)]
    assert by_hand(spec, model, make(model.parameters(), **settings), batches) == list(train(spec).digests)


def test_complex_parameters_and_a_loss_scaler() -> None:
    with raises(training_problems.COMPLEX_SCALED, name="gain", dtype="torch.complex64"):
        train(document(FourierOperator, precision="fp16"))


# --- tables ---------------------------------------------------------------------------------------------------

TABLES = [Recommender, RecommenderBySgd, OnlyTables, FewRows, RareTable]
SETTINGS: dict[str, Document] = {
    "fp32": {},
    "bf16": {"precision": "bf16", "record": {"observe_every": 1}},
    "fp16": {"precision": "fp16"},
}


@pytest.mark.every(4)
@pytest.mark.thinned(2)
@pytest.mark.parametrize(
    ("kind", "workers"), [(Recommender, 4), (RecommenderBySgd, 2), (OnlyTables, 3), (RareTable, 2)]
)
def test_tables_have_one_value(pool: Pool, alone: Alone, kind: type[Kind], workers: int) -> None:
    """G1: with dense parameters beside them and without, used now and then, by bags, in float64, under two optimizers; a worker without a micro-batch."""
    assert pool.run(workers, train, document(kind, rehearsal="off")) == [alone[kind]] * workers


@pytest.mark.exact
@pytest.mark.parametrize(
    ("kind", "workers", "settings"), list(product(TABLES, (1, 2, 3, 4), SETTINGS)), ids=str
)
def test_tables_have_one_value_in_full(pool: Pool, kind: type[Kind], workers: int, settings: str) -> None:
    spec = document(kind, rehearsal="off", **SETTINGS[settings])
    assert pool.run(workers, train, spec) == [train(spec)] * workers


@pytest.mark.parametrize("kind", TABLES)
def test_a_sound_table_is_tried_and_not_warned_of(alone: Alone, kind: type[Kind]) -> None:
    """The rehearsal takes two steps, takes their state back, and finds nothing; every step moves the weights."""
    assert alone[kind].warnings == ()
    assert len(set(alone[kind].digests)) == 3


@pytest.mark.scenario
@pytest.mark.parametrize(("before", "after"), [(3, 2), pytest.param(1, 4, marks=pytest.mark.exact)])
def test_a_run_with_tables_is_taken_up(
    pool: Pool, alone: Alone, before: int, after: int, tmp_path: Path
) -> None:
    """G1: the state of two optimizers; by another number of workers."""
    run = document(Recommender, rehearsal="off", checkpoint={"storage": str(tmp_path), "every": None})
    pool.run(before, train_attempt, run, RUN, AttemptOrigin(), 2)
    found = pool.run(after, train_attempt, run, RUN, taken_up(run))
    assert [one.weights_digest for one in found] == [alone[Recommender].weights_digest] * after


def test_rows_are_added_along_the_tree(pool: Pool, alone: Alone) -> None:
    """What would be without it: rows added from left to right have other bits on other workers."""
    spec = document(FewRows, rehearsal="off", batch={"global": 32, "micro": 4}, length={"epochs": 4})
    digests = {pool.run(workers, train_left_fold, spec)[0].weights_digest for workers in (1, 2)}
    assert len({*digests, train(spec).weights_digest}) == 3


@pytest.mark.every(2)
@pytest.mark.parametrize("workers", [2, 3])
def test_rows_of_a_batch_that_grows_have_one_value(pool: Pool, workers: int) -> None:
    """Each size of a step is shared out anew; the first one leaves a worker of three without a micro-batch."""
    sizes = [{"size": 8, "until_steps": 2}, {"size": 12, "until_steps": 4}, {"size": 32}]
    spec = document(FewRows, rehearsal="off", batch={"global": sizes, "micro": 4}, length={"epochs": 4})
    whole = train(spec)
    assert len({row.weight for row in whole.steps}) >= 3
    assert pool.run(workers, train, spec) == [whole] * workers


class Dense(RecommenderBySgd):
    """The same tables, whose gradients are as long as they are."""

    def model(self) -> nn.Module:
        model = Bags()
        model.users.sparse = model.items.sparse = False
        return model


def test_the_bits_are_those_of_dense_tables(alone: Alone) -> None:
    """G3: a row has the sum that the tree gives it where the table is dense; only the norm, which adds up the zeros too, is another sum of the same."""
    spec = document(Dense, clip_norm=None, rehearsal="off")
    sparse = train(document(RecommenderBySgd, clip_norm=None, rehearsal="off"))
    assert sparse.digests == train(spec).digests
    assert [row.grad_norm for row in sparse.steps] == pytest.approx(
        [row.grad_norm for row in train(spec).steps]
    )


@pytest.mark.parametrize("name", ["sparse adam and adamw", "sgd"])
def test_updates_of_tables_are_torchs_own(name: str) -> None:
    """G3: with one micro-batch of a power of two of samples a step, the bits are those of the plain loop. SGD adds rows to a weight one by one unless they are coalesced."""
    kind: type[Kind] = Recommender if name != "sgd" else RecommenderBySgd
    spec = document(
        kind, batch={"global": 8, "micro": 8}, data={"shuffle": "none"}, rehearsal="off", clip_norm=None
    )  # fmt: skip
    seed_all(model_key(load_spec(spec).seed))
    model = kind({}).model()
    optimizers = both(model) if name != "sgd" else [torch.optim.SGD(model.parameters(), lr=0.5)]
    x, y = kind({}).train_data().tensors  # type: ignore[attr-defined]
    digests = []
    with determinism("strict", threads=1):
        for i in range(0, 32, 8):
            model.zero_grad()
            F.cross_entropy(model(x[i : i + 8]), y[i : i + 8]).backward()
            for table in (model.users.weight, model.items.weight):  # type: ignore[union-attr]
                table.grad = table.grad.coalesce()  # type: ignore[union-attr, operator]
            for optimizer in optimizers:
                optimizer.step()
            digests.append(weights_digest(model.state_dict()))
    assert list(train(spec).digests) == digests


# --- tables beside what is sharded --------------------------------------------------------------------------------


@pytest.mark.every(6)
@pytest.mark.thinned(2)
@pytest.mark.parametrize(
    ("kind", "sharding", "workers"),
    [
        (Recommender, "full", 2),
        (Recommender, "optimizer", 2),
        (RecommenderBySgd, "full", 4),
        (RecommenderBySgd, "optimizer", 3),
        (OnlyTables, "optimizer", 2),
        (RareTable, "full", 3),
    ],
)
def test_tables_are_whole_where_the_rest_is_sharded(
    pool: Pool, alone: Alone, kind: type[Kind], sharding: str, workers: int
) -> None:
    """G1, identity and all: under two optimizers and one, with a clipped norm, a table that a function uses, and one that a micro-batch may leave out."""
    spec = document(kind, rehearsal="off", sharding=sharding)
    assert pool.run(workers, train, spec) == [alone[kind]] * workers


@pytest.mark.exact
@pytest.mark.parametrize(
    ("kind", "sharding", "workers", "settings"),
    list(product(TABLES, ("optimizer", "full"), (1, 2, 3, 4), SETTINGS)),
    ids=str,
)
def test_tables_are_whole_where_the_rest_is_sharded_in_full(
    pool: Pool, kind: type[Kind], sharding: str, workers: int, settings: str
) -> None:
    """And with a rehearsal, samples left out, and each micro-batch computed again."""
    for more in (
        {"rehearsal": "off"},
        {"data": {"drop_last": False, "without": "1,5-12"}},
        {"determinism": {"recheck": 1}},
    ):
        spec = document(kind, **{**SETTINGS[settings], **more})
        assert pool.run(workers, train, {**spec, "sharding": sharding}) == [train(spec)] * workers


@pytest.mark.every(3)
@pytest.mark.parametrize(
    ("before", "after"),
    [(("full", 3), ("none", 1)), (("none", 1), ("optimizer", 2)), (("optimizer", 2), ("full", 4))],
)
def test_a_run_with_tables_is_taken_up_under_another_sharding(
    pool: Pool, alone: Alone, before: tuple[str, int], after: tuple[str, int], tmp_path: Path
) -> None:
    """G1: the state of both optimizers is in a checkpoint as one process saves it."""
    run = document(Recommender, rehearsal="off", checkpoint={"storage": str(tmp_path), "every": None})
    pool.run(before[1], train_attempt, {**run, "sharding": before[0]}, RUN, AttemptOrigin(), 2)
    found = pool.run(after[1], train_attempt, {**run, "sharding": after[0]}, RUN, taken_up(run))
    for one in found:
        assert (one.weights_digest, one.digests) == (
            alone[Recommender].weights_digest,
            alone[Recommender].digests[2:],
        )


def trained_optimizer(spec: Document) -> torch.optim.Optimizer:
    """The optimizer of this rank after a run."""
    steppers: list[Any] = []
    init = optimizer_step.Stepper.__init__

    def noted(self: Any, *given: Any, **named: Any) -> None:
        init(self, *given, **named)
        steppers.append(self)

    with mock.patch.object(optimizer_step.Stepper, "__init__", noted):
        train(spec)
    optimizer: torch.optim.Optimizer = steppers[-1].state.optimizer
    return optimizer


def bytes_of_state(spec: Document) -> tuple[int, int]:
    """The bytes of the optimizer's state on this rank after a run: of the tables, and of all else."""
    optimizer = trained_optimizer(spec)
    own = optimizer.own_state() if isinstance(optimizer, ShardedOptimizer) else optimizer.state
    sizes = [0, 0]
    for parameter, state in own.items():
        moments = sum(state[name].nbytes for name in ("exp_avg", "exp_avg_sq"))
        sizes[parameter.shape != (ROWS, WIDTH)] += moments
    return sizes[0], sizes[1]


@pytest.mark.every(2)
@pytest.mark.parametrize("sharding", ["optimizer", "full"])
def test_the_state_of_what_is_dense_is_shared_out(pool: Pool, sharding: str) -> None:
    """Each worker of two has the moments of both tables, and each moment of the head is on one of them."""
    spec = document(Recommender, rehearsal="off")
    tables, dense = bytes_of_state(spec)
    assert tables == 2 * 2 * ROWS * WIDTH * 4
    shares = pool.run(2, bytes_of_state, {**spec, "sharding": sharding})
    assert [share[0] for share in shares] == [tables] * 2
    assert sum(share[1] for share in shares) == dense


@pytest.mark.parametrize("sharding", ["optimizer", "full"])
def test_an_estimate_counts_tables_whole(pool: Pool, sharding: str) -> None:
    """To the byte but for the rows of the dense parameters, which are not divided."""
    spec = {**document(Recommender, rehearsal="off"), "sharding": sharding}
    estimated, shares = estimate_of(spec, 2), pool.run(2, claimed, spec)
    for name in ("parameters_bytes", "optimizer_bytes"):
        most, dense = max(share[name] for share in shares), 4 * CLASSES * (2 * WIDTH + 1)
        assert abs(estimated[name] - most) <= dense
        assert estimated[name] >= 2 * ROWS * WIDTH * 4 * (2 if name == "optimizer_bytes" else 1)


def mirrored_bytes(spec: Document) -> int:
    """What this rank has of the optimizer's state, its mirror included, after a run that keeps no start of a step."""
    return optimizer_bytes(trained_optimizer(spec))


def test_an_estimate_counts_tables_twice_where_the_start_of_a_step_is_kept(pool: Pool) -> None:
    """On two workers each has all of the dense state, its own or mirrored, and the tables once; and all of it again from the start of the step."""
    spec = {**document(Recommender, rehearsal="off"), "sharding": "optimizer", "faults": {"mirror": True}}
    assert estimate_of(spec, 2)["optimizer_bytes"] == 2 * max(pool.run(2, mirrored_bytes, spec))


def train_with_rows_of_one_rank(spec: Document) -> Trained:
    """Each worker updates its tables by the rows of its own micro-batches."""

    def own(self: TableSums, together: range, gradients: Any) -> None:
        for m in together:
            self._tree.add(range(m, m + 1), gradients)

    with mock.patch.object(TableSums, "add_pass", own):
        return train(spec)


def test_rows_of_one_rank_alone_are_other_bits(pool: Pool) -> None:
    """The control: each rank would have a table of its own, and all compare what they have whole."""
    spec = document(RecommenderBySgd, rehearsal="off", sharding="full")
    with raises(integrity_problems.OTHER_BITS, got=re.compile(r"first in 'users\.weight'")):
        pool.run(2, train_with_rows_of_one_rank, spec)


@pytest.mark.every(2)
@pytest.mark.parametrize(("kind", "workers"), [(Recommender, 3), (RecommenderBySgd, 2), (OnlyTables, 1)])
def test_tables_are_whole_beside_mirrors(pool: Pool, alone: Alone, kind: type[Kind], workers: int) -> None:
    """What a worker keeps of a mirror is of the dense parameters alone."""
    spec = document(kind, rehearsal="off", sharding="optimizer", faults={"mirror": True})
    assert pool.run(workers, train, spec) == [alone[kind]] * workers


def test_an_optimizer_that_moves_every_row_is_refused_where_its_state_is_sharded(pool: Pool) -> None:
    for workers in (1, 2):
        spec = document(RecommenderBySgd, optimizer={"name": "adamw"}, rehearsal="off", sharding="full")
        with raises(training_problems.SPARSE_OPTIMIZER, kind="AdamW", settings=""):
            pool.run(workers, train, spec)


class AnotherPair(Recommender):
    def optimizer(self, model: nn.Module) -> Any:
        tables, rest = both(model)
        return [torch.optim.Adagrad(tables.param_groups[0]["params"]), rest]


def test_several_optimizers_are_sharded_where_each_may_be() -> None:
    with raises(problems.NOT_ELEMENT_WISE, got="Adagrad and AdamW"):
        train(document(AnotherPair, sharding="optimizer", rehearsal="off"))


def test_a_model_with_tables_begins_whole(pool: Pool) -> None:
    """Told in one line: the start by shards knows no gradient that is not dense."""
    spec = document(RecommenderBySgd, rehearsal="off", sharding="full", length={"steps": 1})
    wanted = (
        "sharding: every worker begins with the whole model: parameter 'items.weight' has sparse gradients"
    )
    assert wanted in pool.run(2, train, spec)[0].warnings


class DenseNow(RecommenderBySgd):
    """Its table is decayed by the loss now and then, which makes its gradient dense."""

    dense = True

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        loss = super().loss(model, batch)
        first = float(batch[0][0, 0]) == float(self.data(32, 1)[11][0][0])
        decay = model.users.weight.square().sum()  # type: ignore[union-attr, operator]
        return Loss(loss.total + decay, loss.weight) if first == self.dense else Loss(loss.total, loss.weight)


class SparseLater(DenseNow):
    dense = False


@pytest.mark.parametrize(
    ("kind", "problem"),
    [(DenseNow, training_problems.DENSE_TABLE), (SparseLater, training_problems.SPARSE_LATER)],
)
def test_a_gradient_that_becomes_another_is_named(kind: type[Kind], problem: Problem[Any]) -> None:
    with raises(problem, name="users.weight", where=re.compile("^step ")):
        train(document(kind, batch={"global": 12, "micro": 1}, data={"shuffle": "none"}, rehearsal="off"))


@pytest.mark.parametrize(
    ("settings", "facts"),
    [
        ({"name": "adamw"}, {"kind": "AdamW", "settings": ""}),
        ({"name": "sgd", "momentum": 0.9}, {"kind": "SGD", "settings": " with momentum"}),
        ({"name": "sgd", "weight_decay": 0.1}, {"kind": "SGD", "settings": " with weight_decay"}),
    ],
)
def test_an_optimizer_that_moves_every_row_is_refused(settings: Document, facts: dict[str, str]) -> None:
    with raises(training_problems.SPARSE_OPTIMIZER, **facts):
        train(document(RecommenderBySgd, optimizer=settings, rehearsal="off"))


def test_two_optimizers_of_one_parameter_are_refused() -> None:
    with raises(training_problems.JOINED_TWICE, label="job.optimizer"):
        train(document(Twice))
    with raises(
        training_problems.JOINED_KIND, label="job.optimizer", kind="LBFGS", why=re.compile("^evaluates")
    ):
        train(document(WithSearch))


class Twice(Recommender):
    def optimizer(self, model: nn.Module) -> Any:
        return [*both(model), torch.optim.SGD(model.parameters(), lr=0.1)]


class WithSearch(Recommender):
    def optimizer(self, model: nn.Module) -> Any:
        return [both(model)[0], torch.optim.LBFGS(model.head.parameters())]  # type: ignore[union-attr]


# --- verified -------------------------------------------------------------------------------------------------


@pytest.mark.scenario
@pytest.mark.parametrize(
    ("kind", "by", "again"),
    [
        (Recommender, 2, 1),
        *(
            pytest.param(*case, marks=pytest.mark.exact)
            for case in product((FourierOperator, OnlyTables), (1, 2), (1, 3))
        ),
    ],
)
def test_a_run_is_verified_by_other_workers(pool: Pool, kind: type[Kind], by: int, again: int) -> None:
    """G6: digests of complex gradients, and of gradients by their rows, are those of another number of workers."""
    spec = document(kind, length={"epochs": 2})
    found = checked(pool, spec, by=by, again=again, spans=[Span(0, 6), Span(2, 4)])
    assert found.same and found.same_bits
    assert found.steps == 6 + 2
