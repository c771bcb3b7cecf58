"""A run that starts from given weights is the run whose job loads them itself."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file
from torch import nn

import lockstep
from lockstep.checks.start_checks import find_initial_weights
from lockstep.spec.loading import load_spec
from tests.distributed.pool import Pool
from tests.distributed.small_jobs import Plain
from tests.distributed.training import Document, Trained, train


class Loading(Plain):
    """Loads its weights from a file itself."""

    class Params(Plain.Params):
        weights: str

    params: Params

    def model(self) -> nn.Module:
        model = super().model()
        model.load_state_dict(load_file(self.params.weights))
        return model


def document(folder: Path, use: str = "tests.distributed.small_jobs:Plain", **params: str) -> Document:
    return {
        "job": {"use": use, "params": {"norm": "batch", **params}},
        "batch": {"global": 16, "micro": 4},
        "length": {"steps": 5},
        "checkpoint": {"storage": str(folder), "every": None},
        "record": {"uri": "off"},
        "rehearsal": "off",
    }


def bits_of(run: Trained) -> tuple[object, ...]:
    """All but the identity, in which the two ways differ."""
    return run.weights_digest, run.digests, run.rows, run.summary["beside"]


@pytest.mark.scenario
@pytest.mark.thinned(2)
@pytest.mark.parametrize("workers", [1, 2])
def test_a_run_from_weights_equals_a_job_that_loads_them(pool: Pool, tmp_path: Path, workers: int) -> None:
    """G1, by a file and by the id of the run that left it. The control starts from the seed."""
    parent = lockstep.train(document(tmp_path) | {"seed": 7}, local=True)
    path = str(tmp_path / parent.run_id / "weights" / "final.safetensors")
    given = document(tmp_path, "tests.distributed.test_initial_weights:Loading", weights=path)
    (loaded, *others) = pool.run(workers, train, given)
    for start in (path, parent.run_id):
        spec = find_initial_weights(load_spec(document(tmp_path) | {"initial_weights": start}))
        for trained in pool.run(
            workers, train, document(tmp_path) | {"initial_weights": spec.initial_weights}
        ):
            assert bits_of(trained) == bits_of(loaded)
    assert all(bits_of(other) == bits_of(loaded) for other in others)
    assert bits_of(train(document(tmp_path))) != bits_of(loaded)


def test_the_command_starts_from_the_weights_of_the_run_that_it_is_given(tmp_path: Path) -> None:
    """Also where they are named by a run id, which only the command looks up."""
    parent = lockstep.train(document(tmp_path) | {"seed": 7}, local=True)
    path = str(tmp_path / parent.run_id / "weights" / "final.safetensors")
    tuned = lockstep.train(document(tmp_path) | {"initial_weights": parent.run_id}, local=True)
    given = document(tmp_path, "tests.distributed.test_initial_weights:Loading", weights=path)
    assert tuned.weights_digest == train(given).weights_digest
