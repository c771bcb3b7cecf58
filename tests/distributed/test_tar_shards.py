"""G1 and G2 for tar shards: one value of every bit on any number of workers and after a stop; tokens and proportions counted exactly."""

from __future__ import annotations

import io
import itertools
import tarfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

import lockstep
from lockstep import Loss, Mean
from lockstep.checkpoint.runs.run_folder import AttemptOrigin
from lockstep.data import Mixture, Packed, TarShards
from tests.distributed.kinds import RUN, taken_up
from tests.distributed.pool import Pool
from tests.distributed.training import Document, Trained, train, train_attempt

TOKENS, ROW = 7, 6


def write(folder: Path, shards: int, samples: int, seed: int) -> None:
    """Shards of samples: four numbers as raw floats, a class, and a document of 1 … 9 tokens."""
    folder.mkdir()
    draw = np.random.default_rng(seed)
    for number in range(shards):
        with tarfile.open(folder / f"{number:03}.tar", "w") as tar:
            for i in range(samples):
                x = draw.standard_normal(4, dtype=np.float32)
                document = draw.integers(1, TOKENS, draw.integers(1, 10)).astype(np.uint8)
                for kind, content in (
                    ("x", x.tobytes()), ("cls", b"%d" % int(x[:3].argmax())), ("doc", document.tobytes())
                ):  # fmt: skip
                    info = tarfile.TarInfo(f"{i:04}.{kind}")
                    info.size = len(content)
                    tar.addfile(info, io.BytesIO(content))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shards")
    write(folder / "train", 4, 9, 1)
    write(folder / "eval", 1, 7, 2)
    write(folder / "code", 1, 10, 3)
    return folder


class Classes(lockstep.Job):
    class Params(lockstep.Params):
        folder: lockstep.Placement[Path]

    params: Params

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Tanh(), nn.Linear(8, 3))

    def train_data(self) -> Dataset[Any]:
        return TarShards(self.params.folder / "train", {"cls": int})

    def eval_data(self) -> Dataset[Any]:
        return TarShards(self.params.folder / "eval", {"cls": int})

    def collate(self, samples: Sequence[dict[str, Any]]) -> tuple[Tensor, Tensor]:
        x = torch.stack([torch.frombuffer(bytearray(one["x"]), dtype=torch.float32) for one in samples])
        return x, torch.tensor([one["cls"] for one in samples])

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        x, y = batch
        return Loss(F.cross_entropy(model(x), y, reduction="sum"), len(y))


def spec(job: type[lockstep.Job], folder: Path, **more: Any) -> Document:
    """Two epochs of three steps, the last one ragged."""
    return {
        "job": {
            "use": f"tests.distributed.test_tar_shards:{job.__name__}",
            "params": {"folder": str(folder)},
        },
        "seed": 2,
        "length": {"epochs": 2},
        "batch": {"global": 16, "micro": 4},
        "data": {"drop_last": False, **more.pop("data", {})},
        "evaluate": {"every": {"epochs": 1}},
        **more,
    }


CASES = [
    (2, 1, "blocks"),
    *(
        pytest.param(*case, marks=pytest.mark.exact)
        for case in itertools.product((1, 2, 3), (0, 2), ("blocks", "full"))
    ),
]


@pytest.mark.parametrize(("workers", "processes", "shuffle"), CASES)
def test_workers_and_loader_processes_change_no_bit(
    pool: Pool, folder: Path, workers: int, processes: int, shuffle: str
) -> None:
    order = {"shuffle": shuffle, "window": 2}
    whole = train(spec(Classes, folder, data=order))
    for trained in pool.run(
        workers, train, spec(Classes, folder, data={**order, "loader_processes": processes})
    ):
        assert trained == whole
        assert trained.summary["metrics"] == whole.summary["metrics"]


@pytest.mark.exact
def test_a_run_that_is_stopped_goes_on_at_its_shard_and_position(folder: Path, tmp_path: Path) -> None:
    """The negative control is the run in the shards' own order."""
    order = {"shuffle": "blocks", "window": 2}
    whole = train(spec(Classes, folder, data=order))
    saving = spec(Classes, folder, data=order, checkpoint={"storage": str(tmp_path), "every": None})
    train_attempt(saving, RUN, AttemptOrigin(), 4)
    rest = train_attempt(saving, RUN, taken_up(saving))
    assert (rest.rows, rest.evaluations, rest.digests) == (whole.rows, whole.evaluations, whole.digests[4:])
    assert train(spec(Classes, folder, data={"shuffle": "none"})).digests != whole.digests


# --- tokens and proportions ------------------------------------------------------------------------------------


class Tokens(Dataset[Tensor]):
    """The documents of shards."""

    draws_nothing = True

    def __init__(self, folder: Path) -> None:
        self.shards = TarShards(folder)

    def __len__(self) -> int:
        return len(self.shards)

    def __getitem__(self, index: int) -> Tensor:
        return torch.frombuffer(bytearray(self.shards[index]["doc"]), dtype=torch.uint8)

    def fingerprint(self) -> dict[str, Any]:
        return self.shards.fingerprint()


class Named(Dataset[Any]):
    """Rows of a source, with its number beside them."""

    def __init__(self, rows: Packed, number: int) -> None:
        self.rows, self.number = rows, number

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {**self.rows[index], "source": self.number, "row": index}


class Counted(Classes):
    """A mixture of packed documents, whose tokens, rows and sources are counted in the loss's parts."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Embedding(TOKENS + 1, 4), nn.Linear(4, TOKENS + 1))

    def train_data(self) -> Dataset[Any]:
        """An epoch has each row of `train` once and each of `code` twice."""
        rows = {
            name: Packed(Tokens(self.params.folder / name), ROW, end=0, pad=TOKENS)
            for name in ("train", "code")
        }
        weights = {"train": len(rows["train"]), "code": 2 * len(rows["code"])}
        sources = {name: Named(of, number) for number, (name, of) in enumerate(rows.items())}
        return Mixture(sources, weights, samples=sum(weights.values()))

    def eval_data(self) -> Any:
        return None

    def collate(self, samples: Sequence[Any]) -> Any:
        return lockstep.Job.collate(self, samples)

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        targets = batch["tokens"].roll(-1, 1)
        total = F.cross_entropy(model(batch["tokens"]).flatten(0, 1), targets.flatten(), reduction="sum")
        real = (batch["documents"] >= 0).sum(1)
        ends = (batch["tokens"] == 0).sum(1)
        counted = {"rows": torch.ones_like(real), "tokens": real, "documents": ends}
        parts = {
            f"{name} of {source}": Mean(of[batch["source"] == source].sum(), len(real))
            for name, of in counted.items()
            for source in (0, 1)
        }
        return Loss(total, targets.numel(), parts)


def counted(trained: Trained, until: int | None = None) -> Counter[str]:
    """What a run has counted, up to a step: the ledger has means over a step's samples."""
    found, before = Counter[str](), 0
    for row in trained.steps[:until]:
        found.update({name: round(value * (row.samples - before)) for name, value in row.parts.items()})
        before = row.samples
    return found


def by_arithmetic(folder: Path, epochs: int) -> Counter[str]:
    """The same from the files."""
    found: Counter[str] = Counter()
    for number, (name, times) in enumerate((("train", epochs), ("code", 2 * epochs))):
        documents = Tokens(folder / name)
        tokens = sum(len(documents[i]) + 1 for i in range(len(documents)))
        found[f"rows of {number}"] = times * -(-tokens // ROW)
        found[f"tokens of {number}"] = times * tokens
        found[f"documents of {number}"] = times * len(documents)
    return found


@pytest.mark.scenario
@pytest.mark.parametrize(
    "workers", [2, *(pytest.param(workers, marks=pytest.mark.exact) for workers in (1, 3))]
)
def test_tokens_and_proportions_are_exact_across_a_stop(
    pool: Pool, folder: Path, tmp_path: Path, workers: int
) -> None:
    """Stopped in mid-epoch on one worker, gone on with on others. What the first epoch lacks is seen: the negative control."""
    saving = spec(Counted, folder, checkpoint={"storage": str(tmp_path), "every": None})
    train_attempt(saving, RUN, AttemptOrigin(), 3)
    trained = pool.run(workers, train_attempt, saving, RUN, taken_up(saving))[0]
    assert counted(trained) == by_arithmetic(folder, 2)
    assert counted(trained, len(trained.steps) // 2) == by_arithmetic(folder, 1)
    assert counted(trained, len(trained.steps) // 2 - 1) != by_arithmetic(folder, 1)
