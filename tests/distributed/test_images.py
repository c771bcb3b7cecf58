"""G1 for encoded images, augmented: one value of every bit on any number of workers, with loader processes and after a stop."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path
from typing import Any

import pytest

from jobs.images.sample import write_sample
from lockstep.checkpoint.runs.run_folder import AttemptOrigin
from lockstep.errors import DataError
from tests.distributed.kinds import RUN, taken_up
from tests.distributed.pool import Pool
from tests.distributed.training import Document, train, train_attempt


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("images")
    write_sample(folder / "train", 30, 20, seed=1)
    write_sample(folder / "eval", 7, 20, seed=2)
    return folder


def spec(folder: Path, kind: str = "", more: Any = None, **params: Any) -> Document:
    """Two epochs of two steps, on folders or, with `.parquet`, on tables."""
    table = {"classes": 3} if kind else {}
    where = {"train": f"{folder}/train{kind}", "evaluation": f"{folder}/eval{kind}"}
    return {
        "job": {
            "use": "jobs.images.job:Images",
            "params": {**where, "size": 16, "width": 2, **table, **params},
        },
        "seed": 3,
        "length": {"epochs": 2},
        "batch": {"global": 12, "micro": 4},
        "evaluate": {"every": {"epochs": 1}},
        **(more or {}),
    }


@pytest.mark.scenario
@pytest.mark.parametrize(
    ("workers", "processes", "kind"),
    [
        (2, 1, ".parquet"),
        *(
            pytest.param(*case, marks=pytest.mark.exact)
            for case in itertools.product((1, 2, 3), (0, 2), ("", ".parquet"))
        ),
    ],
)
def test_workers_and_loader_processes_change_no_bit(
    pool: Pool, folder: Path, workers: int, processes: int, kind: str
) -> None:
    whole = train(spec(folder, kind))
    for trained in pool.run(workers, train, spec(folder, kind, {"data": {"loader_processes": processes}})):
        assert trained == whole
        assert trained.summary["metrics"] == whole.summary["metrics"]


@pytest.mark.exact
def test_a_run_that_is_stopped_goes_on_with_the_same_augmentation(folder: Path, tmp_path: Path) -> None:
    """Folders and tables hold the same images here, in another order. The negative control is a run without augmentation."""
    whole = train(spec(folder))
    saving = spec(folder, more={"checkpoint": {"storage": str(tmp_path), "every": None}})
    train_attempt(saving, RUN, AttemptOrigin(), 3)
    rest = train_attempt(saving, RUN, taken_up(saving))
    assert (rest.rows, rest.evaluations, rest.digests) == (whole.rows, whole.evaluations, whole.digests[3:])
    plain = train(spec(folder, smallest=1.0, flip=False, colour=0.0))
    assert not set(plain.digests) & set(whole.digests)


@pytest.mark.parametrize("processes", [0, pytest.param(1, marks=pytest.mark.exact)])
def test_a_truncated_image_is_one_line_with_its_name(folder: Path, tmp_path: Path, processes: int) -> None:
    shutil.copytree(folder / "train", tmp_path / "train")
    broken = sorted((tmp_path / "train" / "disc").iterdir())[4]
    broken.write_bytes(broken.read_bytes()[:-40])
    document = spec(folder, train=str(tmp_path / "train"), more={"data": {"loader_processes": processes}})
    with pytest.raises(DataError, match=rf"^data: '.*/disc/{broken.name}' cannot be decoded: ") as raised:
        train({**document, "length": {"epochs": 1}, "batch": {"global": 30, "micro": 5}})
    assert "\n" not in str(raised.value)
