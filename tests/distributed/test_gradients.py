"""G1 and G3 for gradients that are not dense real numbers: complex ones, and those of tables of which a step touches few rows."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lockstep.checkpoint.runs.run_folder import AttemptOrigin
from lockstep.errors import LockstepError
from lockstep.randomness import model_key, seed_all
from lockstep.spec.loading import load_spec
from lockstep.training.determinism import determinism
from lockstep.training.integrity.state_digest import weights_digest
from lockstep.training.step.reduction import LATENCY_BYTES
from tests.distributed.gradient_kinds import (
    FourierOperator,
    FourierOperatorBySgd,
    RareFilter,
)
from tests.distributed.kinds import RUN, Kind, document, taken_up
from tests.distributed.pool import Pool
from tests.distributed.training import Document, Trained, train, train_attempt, train_sending

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
    with pytest.raises(LockstepError, match=r"'gain' is torch.complex64.* set precision: bf16 or fp32$"):
        train(document(FourierOperator, precision="fp16"))
