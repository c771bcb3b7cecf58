"""Jobs whose data are datasets of other libraries."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch

import lockstep
from jobs.tabular.job import Tabular
from tests import lake


class Library(Tabular):
    """Trains on points of which a library makes the dataset."""

    class Params(Tabular.Params):
        train: lockstep.Placement[str] = ""
        evaluation: lockstep.Placement[str | None] = None
        inputs: int = lake.FEATURES  # type: ignore[assignment]
        width: int = 8  # type: ignore[assignment]
        rows: int = 400
        transformed: bool = False

    params: Params

    def rows(self) -> Any:
        return lake.points(self.params.rows, 1)


class Hub(Library):
    """A `datasets.Dataset` whose transform draws."""

    def train_data(self) -> Any:
        import datasets

        dataset = datasets.Dataset(self.rows()).select(range(self.params.rows - 1, -1, -1))
        dataset.set_transform(noisy if self.params.transformed else as_tensors)
        return dataset


def as_tensors(rows: dict[str, list[Any]]) -> dict[str, list[Any]]:
    return {
        "features": [torch.tensor(row) for row in rows["features"]],
        "label": [torch.tensor(label) for label in rows["label"]],
    }


def noisy(rows: dict[str, list[Any]]) -> dict[str, list[Any]]:
    return {
        **as_tensors(rows),
        "features": [torch.tensor(row) + torch.randn(len(row)) / 10 for row in rows["features"]],
    }


class Listed(Library):
    """The points as they are."""

    def train_data(self) -> Any:
        return [{name: torch.tensor(value) for name, value in row.items()} for row in self.rows().to_pylist()]


class Lit(Library):
    """A `litdata.StreamingDataset`."""

    def train_data(self) -> Any:
        import litdata

        return litdata.StreamingDataset(self.params.train)


def write_chunks(folder: Path, rows: int = 400) -> str:
    """Points in chunks of litdata, some to each."""
    from litdata.streaming.cache import Cache

    folder.mkdir()
    cache = Cache(input_dir=str(folder), chunk_size=64)
    for i, row in enumerate(lake.points(rows, 1).to_pylist()):
        cache[i] = {name: torch.tensor(value) for name, value in row.items()}
    cache.done()
    cache.merge(1)
    return str(folder)


class RayRows(Library):
    """A `ray.data.Dataset`, the first of whose blocks come last."""

    def train_data(self) -> Any:
        return ray_rows(self.params.train)

    def loss(self, model: Any, batch: Any) -> lockstep.Loss:
        time.sleep(0.02)  # so that it can be killed in the middle
        return super().loss(model, batch)


def ray_rows(path: str) -> Any:
    return delayed_first(path, tempfile.mkdtemp(dir=Path(path).parent), by_others=True)


def delayed_first(path: str, folder: str, by_others: bool) -> Any:
    """Blocks of 100 rows, the first of which waits for a file in the folder, of another block or of the caller."""
    import ray.data

    blocks = [pq.read_table(file) for file in sorted(Path(path).iterdir())]
    arguments = {"folder": folder, "by_others": by_others}
    return ray.data.from_arrow(blocks).map_batches(delayed, batch_format="pyarrow", fn_kwargs=arguments)


def delayed(rows: Any, folder: str, by_others: bool) -> Any:
    if first := rows.column("number")[0].as_py():
        if by_others:
            Path(folder, str(first)).touch()
        return rows
    # Not for ever: on a crowded cluster there may be one processor for all blocks.
    deadline = time.monotonic() + 20
    while not list(Path(folder).iterdir()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return rows


class SlowLake(lake.Lake):
    """Trains on a table that changes, slowly enough to be killed in the middle."""

    def loss(self, model: Any, batch: Any) -> lockstep.Loss:
        time.sleep(0.02)
        return super().loss(model, batch)
