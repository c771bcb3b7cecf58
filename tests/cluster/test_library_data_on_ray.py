"""Data that libraries give, on Ray: rows of Ray's own datasets, and tables that change while a run is disturbed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lockstep import train
from lockstep.data import Table
from lockstep.data.dataset import fetch_one
from lockstep.data.ray_rows import written_rows
from lockstep.training.job_data import open_data
from tests import lake
from tests.cluster.test_ray_train import columns
from tests.library_jobs import delayed_first, ray_rows
from tests.processes import named
from tests.unit.data.test_data_page import example

pytestmark = [
    pytest.mark.usefixtures("cluster"),
    # Ray and MLflow leave sockets and temporary folders to the garbage collector.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:ray.*"),
    pytest.mark.filterwarnings("ignore::FutureWarning:ray.*"),
]


def numbered(folder: Path) -> str:
    """Points in four files, with the number of each."""
    rows = lake.points(400, 1)
    rows = rows.append_column("number", pa.array(np.arange(400)))
    folder.mkdir()
    for i in range(4):
        pq.write_table(rows.slice(100 * i, 100), folder / f"{i}.parquet")
    return str(folder)


@pytest.mark.scenario
def test_rows_have_the_order_of_their_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though the first block is ready last; without the order that is asked for, they come as they are ready."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    rows = numbered(tmp_path / "rows")
    path = written_rows(ray_rows(rows))
    assert Table(path, {"number": "number"}).__getitems__(np.arange(400))["number"].tolist() == list(
        range(400)
    )
    assert written_rows(ray_rows(rows)) == path
    received, unordered = tmp_path / "received", list[int]()
    received.mkdir()
    for batch in delayed_first(rows, str(received), by_others=False).iter_batches(
        batch_size=100, batch_format="pyarrow", prefetch_batches=0
    ):
        unordered += batch.column("number").to_pylist()
        (received / "a block").touch()
    assert unordered != list(range(400)) == sorted(unordered)


@pytest.mark.scenario
def test_tensors_of_one_shape_are_vectors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import ray.data

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    images = np.arange(5 * 2 * 3, dtype=np.float32).reshape(5, 2, 3)
    batch = Table(written_rows(ray.data.from_numpy(images))).__getitems__([3, 1])
    assert np.array_equal(batch["data"].numpy(), images[[3, 1]].reshape(2, 6))


@pytest.mark.scenario
def test_the_example_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    pq.write_table(lake.points(20, 1), tmp_path / "0.parquet")
    data = open_data(example("import ray.data", {"s3://bucket/points": str(tmp_path / "0.parquet")}), 0).train
    assert fetch_one(data, 3)["label"].tolist() == lake.points(20, 1).column("label")[3:4].to_pylist()


def spec(folder: Path, use: str, params: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {
        "job": {
            "use": f"tests.library_jobs:{use}",
            "params": {"evaluation": None, "inputs": lake.FEATURES, "width": 8, **params},
        },
        "batch": {"global": 120, "micro": 30},
        "data": {"drop_last": False},
        "length": {"epochs": 10},
        "workers": {"min": 2, "max": 2},
        "checkpoint": {"storage": str(folder / "runs"), "every": {"steps": 4}},
        "record": {"uri": "off"},
        **changes,
    }


def killing(when: Callable[[], object]) -> threading.Thread:
    """A thread that kills a worker as soon as `when` gives something."""

    def kill_one() -> None:
        while not when():
            time.sleep(0.05)
        victim: psutil.Process = named("RayTrainWorker")[0]
        victim.kill()

    thread = threading.Thread(target=kill_one, daemon=True)
    thread.start()
    return thread


@pytest.mark.scenario
def test_a_ray_dataset_has_the_same_bits_on_two_workers_one_of_which_is_killed(tmp_path: Path) -> None:
    """G1: rows are written once, and read by index from then on."""
    params = {"train": numbered(tmp_path / "rows")}
    whole = train(spec(tmp_path / "whole", "RayRows", params), local=True)
    thread = killing(lambda: list(tmp_path.glob("runs/*/step-*/manifest.json")))
    result = train(spec(tmp_path, "RayRows", params))
    thread.join()
    assert result.attempts == 2
    assert (result.weights_digest, result.identity) == (whole.weights_digest, whole.identity)
    assert columns(result) == columns(whole)


@pytest.mark.scenario
def test_a_run_that_starts_over_reads_the_version_that_it_began_with(tmp_path: Path) -> None:
    """G1: killed before there is a checkpoint, when the table has got a newer version."""
    root = tmp_path / "table"
    root.mkdir()
    lake.append("delta", root, lake.points(400, 1))
    params = {"train": str(root)}
    unsaved = {"storage": str(tmp_path / "runs"), "every": None}
    whole = train(spec(tmp_path / "whole", "SlowLake", params, checkpoint=unsaved), local=True)

    def grown() -> bool:
        if not (set(tmp_path.glob("runs/*/fields.json")) - {Path(whole.folder, "fields.json")}):
            return False
        lake.append("delta", root, lake.points(400, 2))
        return True

    thread = killing(grown)
    result = train(spec(tmp_path, "SlowLake", params, checkpoint=unsaved))
    thread.join()
    assert result.attempts == 2
    assert (result.weights_digest, result.identity) == (whole.weights_digest, whole.identity)
    assert columns(result) == columns(whole)
    assert (
        train(spec(tmp_path / "newer", "SlowLake", params, length={"steps": 2}), local=True).identity
        != whole.identity
    )
