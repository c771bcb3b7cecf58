"""A run whose folder is gone is verified from its store, its files of weights among the rest."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from lockstep import train
from lockstep.calls.verify import verify
from lockstep.cli.proofs import as_text
from lockstep.proof.verification import Verified
from tests.unit.proof.test_verify import document, first
from tests.unit.record.conftest import THIRD_PARTY

pytestmark = [pytest.mark.filterwarnings(text) for text in THIRD_PARTY]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a store and one run, whose own folder is kept aside."""
    place = tmp_path_factory.mktemp("stored")
    record = {"uri": f"sqlite:///{place}/mlflow.db", "digest_every": 1, "checkpoints": "artifact"}
    run = Path(train(document(place / "runs", record=record), local=True).folder)
    run.rename(place / "aside")
    (place / "id").write_text(run.name)
    return place


@pytest.fixture
def weights(place: Path) -> Path:
    """The folder with weights in the store, as it was recorded."""
    (folder,) = place.glob(f"**/{(place / 'id').read_text()}/artifacts/weights")
    shutil.copytree(place / "aside" / "weights", folder, dirs_exist_ok=True)
    return folder


def verified(place: Path) -> Verified:
    return verify(
        (place / "id").read_text(),
        uri=f"sqlite:///{place}/mlflow.db",
        storage=place / "runs",
        local=True,
    )


def test_weights_in_the_store_are_those_of_the_run(place: Path, weights: Path) -> None:
    """Equal where they are; another run's valid file, and none, are told."""
    sound = verified(place)
    assert sound.same and sound.weights and not sound.uncompared
    path = weights / "final.safetensors"
    save_file({name: value + 1 for name, value in load_file(path).items()}, path)
    forged = verified(place)
    assert first(forged) == (12, None, "weights/final.safetensors") and not forged.weights
    path.unlink()
    lacking = verified(place)
    assert first(lacking) == (12, None, "weights/final.safetensors") and not lacking.weights


def test_weights_that_the_store_does_not_hand_out_are_not_called_equal(place: Path, weights: Path) -> None:
    path = weights / "final.safetensors"
    path.unlink()
    path.symlink_to("/proc/self/mem")  # it is listed, and reading it fails as that of a broken disk does
    try:
        found = verified(place)
    finally:
        path.unlink()
    assert found.same and not found.weights
    assert found.uncompared.startswith("weights/final.safetensors: ")
    assert "not compared      weights/final.safetensors: " in as_text(found)
    assert found.as_dict()["uncompared"] == found.uncompared
