"""G1: the rehearsal leaves no trace, so a run has the same bits however far it goes, whatever its job is and whatever its module is called."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lockstep.errors import LockstepError
from lockstep.training.integrity import problems
from lockstep.training.integrity.rehearsal import step_rehearsal
from tests.distributed import further_kinds, keeping_kinds, kinds, phase_kinds, step_kinds
from tests.distributed.kinds import Kind, document, train_every
from tests.distributed.training import train
from tests.raised import raises

EVERY = [
    kind for module in (kinds, further_kinds, step_kinds, phase_kinds, keeping_kinds) for kind in module.HELD
]
EXTENTS = ("off", "quick", "full", "auto")

SOURCE = '''
import lockstep
import torch
from torch import nn
from torch.utils.data import TensorDataset


class Warming(lockstep.Job):
    """State that each step changes in place, and that the loss reads from the fifth step on."""

    def __init__(self, params):
        super().__init__(params)
        self.steps = torch.zeros(1)

    def model(self):
        return nn.Linear(4, 3)

    def train_data(self):
        g = torch.Generator().manual_seed(0)
        return TensorDataset(torch.randn(64, 4, generator=g), torch.randint(3, (64,), generator=g))

    def loss(self, model, batch):
        x, y = batch
        heat = 4.0 if self.steps < 5 else 1.0
        return lockstep.Loss(nn.functional.cross_entropy(model(x) / heat, y, reduction="sum"), len(y))

    def after_step(self, model, step):
        self.steps += 1

    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state):
        self.steps = state["steps"]


class Forgetting(Warming):
    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        raise AssertionError("there is none")


class Carrying(Warming):
    """A memory in the loss."""

    def loss(self, model, batch):
        loss = super().loss(model, batch)
        self.calls = getattr(self, "calls", 0) + 1
        return lockstep.Loss(loss.total * self.calls, loss.weight)
'''


@pytest.fixture(params=["job", "model", "data", "lockstep_job"])
def module(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    name: str = request.param
    (tmp_path / f"{name}.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    yield name
    sys.modules.pop(name, None)


def run(use: str, extent: str) -> dict[str, object]:
    return {
        "job": {"use": use},
        "length": {"epochs": 4},
        "batch": {"global": 16, "micro": 4},
        "rehearsal": extent,
        "record": {"uri": "off"},
    }


@pytest.mark.every(4)
@pytest.mark.thinned(3)
def test_every_extent_trains_the_same_bits_whatever_the_module_is_called(module: str) -> None:
    digests = {extent: train(run(f"{module}:Warming", extent)).digests for extent in EXTENTS}
    assert len({tuple(each) for each in digests.values()}) == 1


@pytest.mark.thinned(2)
@pytest.mark.every(4)
def test_what_is_kept_is_named_whatever_the_module_is_called(module: str) -> None:
    (warning,) = train(run(f"{module}:Forgetting", "full")).warnings
    assert warning.startswith("rehearsal: job.steps changes with an update, and no checkpoint keeps it")
    with raises(problems.KEPT, name="job.calls"):
        train(run(f"{module}:Carrying", "full"))


@pytest.mark.parametrize(
    "own",
    [
        pytest.param(EVERY[::12], marks=pytest.mark.scenario, id="a twelfth"),
        pytest.param(EVERY, marks=pytest.mark.exact, id="all"),
    ],
)
def test_every_extent_trains_the_same_bits_whatever_the_job(own: list[type[Kind]]) -> None:
    for kind in own:
        runs = train_every([document(kind, rehearsal=extent) for extent in EXTENTS])
        assert len({(identity, tuple(digests)) for identity, digests, *_ in runs}) == 1, kind


@pytest.mark.thinned(3)
@pytest.mark.every(4)
def test_a_rehearsal_in_the_training_process_would_be_seen(
    monkeypatch: pytest.MonkeyPatch, module: str
) -> None:
    """The negative control: the same, without another process."""
    monkeypatch.setattr(step_rehearsal, "in_child", lambda function, *_, **__: function())
    steps = {extent: train(run(f"{module}:Forgetting", extent)).digests for extent in ("off", "quick")}
    assert steps["off"] == steps["quick"]
    with pytest.raises(LockstepError):  # its histories run into each other
        train(run(f"{module}:Warming", "full"))


@pytest.mark.thinned(3)
@pytest.mark.every(4)
def test_where_no_process_can_be_forked_the_training_process_compares(
    monkeypatch: pytest.MonkeyPatch, module: str
) -> None:
    monkeypatch.setattr(step_rehearsal, "can_fork", lambda _device: False)
    digests = {extent: train(run(f"{module}:Warming", extent)).digests for extent in EXTENTS}
    assert len({tuple(each) for each in digests.values()}) == 1
    with raises(problems.KEPT, name="job.calls"):
        train(run(f"{module}:Carrying", "off"))


def test_a_first_micro_batch_that_is_left_out_is_not_compared_with_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where no process can be forked: the masks of dropout are those of the micro-batch that is computed again."""
    run = document(kinds.Dropouts, data={"shuffle": "none", "drop_last": False, "without": "0,4,8"})
    forked = train(run)
    monkeypatch.setattr(step_rehearsal, "can_fork", lambda _device: False)
    assert train(run).digests == forked.digests
