"""The examples of docs/data.md for data that other libraries keep: each runs as it stands there, on a table of this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from lockstep.data.dataset import fetch_one
from lockstep.training.job_data import open_data
from tests import lake
from tests.library_jobs import Library, write_chunks
from tests.unit.test_docs import DOCS, blocks


def example(word: str, replaced: dict[str, str]) -> Any:
    """A job with the `train_data` of the page that has this word."""
    (code,) = [
        block for block in blocks(DOCS / "data.md", "python") if word in block and "train_data" in block
    ]
    for text, here in replaced.items():
        assert text in code
        code = code.replace(text, here)
    names: dict[str, Any] = {}
    exec(code, names)
    return type("Example", (Library,), {"train_data": names["train_data"]})(Library.Params())


@pytest.mark.every(3)
@pytest.mark.parametrize(
    ("kind", "replaced"),
    [
        ("delta", {"s3://bucket": "{root}"}),
        ("lance", {"s3://bucket": "{root}"}),
        ("iceberg", {'catalog="prod"': 'catalog="default", properties={properties}'}),
    ],
)
def test_a_version_of_a_table(tmp_path: Path, kind: str, replaced: dict[str, str]) -> None:
    lake.append(kind, tmp_path, lake.points(20, 1))
    here = {"root": tmp_path, "properties": lake.iceberg_properties(tmp_path)}
    job = example(f"import {kind.title()}", {text: new.format(**here) for text, new in replaced.items()})
    data = open_data(job, 0).train
    labels = data.__getitems__(np.arange(20))["label"]  # type: ignore[attr-defined]
    assert labels.tolist() == lake.points(20, 1).column("label").to_pylist()


def test_a_hub_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    pq.write_table(lake.points(20, 1), tmp_path / "0.parquet")
    data = open_data(example("import datasets", {"points/": f"{tmp_path}/"}), 0).train
    assert torch.equal(data[3]["features"], torch.tensor(lake.points(20, 1).column("features")[3].as_py()))


def test_chunks_of_litdata(tmp_path: Path) -> None:
    folder = write_chunks(tmp_path / "chunks", rows=20)
    data = open_data(example("import litdata", {"data/chunks": folder}), 0).train
    assert len(data) == 20  # type: ignore[arg-type]
    assert fetch_one(data, 3)["label"] == lake.points(20, 1).column("label")[3].as_py()
