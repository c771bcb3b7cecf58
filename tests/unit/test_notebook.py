"""A notebook's cells, run by a kernel: a class that a cell defines trains, exactly as the same class in a file (G1)."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import lockstep
from lockstep.calls.verification import verify

ROOT = Path(__file__).parents[2]

IMPORTS = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
import lockstep
"""

JOB = """
class Points(lockstep.Job):
    class Params(lockstep.Params):
        width: int = 8
        where: lockstep.Placement[str] = "here"

    def model(self):
        return nn.Sequential(nn.Linear(2, self.params.width), nn.Tanh(), nn.Linear(self.params.width, 2))

    def train_data(self):
        points = torch.rand(64, 2)
        return TensorDataset(points, (points.sum(1) > 1).long())

    def loss(self, model, batch):
        points, labels = batch
        return lockstep.Loss(nn.functional.cross_entropy(model(points), labels, reduction="sum"), len(labels))
"""

SPEC = {
    "name": "points",
    "length": {"steps": 4},
    "batch": {"global": 16, "micro": 8},
    "record": {"uri": "off"},
    "checkpoint": {"every": {"steps": 2}},
}

TRAIN = f"result = lockstep.train({SPEC!r}, job=Points, local=True)\nresult"


class Kernel:
    """A running kernel."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def run(self, cell: str) -> list[Any]:
        """What a cell shows: its texts, and its data by their kinds. AssertionError where it raises."""
        shown: list[Any] = []

        def show(message: Any) -> None:
            content = message["content"]
            if message["msg_type"] == "stream":
                shown.append(content["text"])
            elif "data" in content:
                shown.append(content["data"])

        reply = self._client.execute_interactive(cell, timeout=120, output_hook=show)["content"]
        assert reply["status"] == "ok", reply
        return shown


@pytest.fixture
def kernel(tmp_path: Path) -> Iterator[Kernel]:
    """A kernel in an empty folder, whose interpreter hashes strings at random as any notebook's does."""
    client_of = pytest.importorskip("jupyter_client.manager").start_new_kernel
    env = {**os.environ, "PYTHONPATH": str(ROOT / "platform"), "IPYTHONDIR": str(tmp_path / "ipython")}
    env.pop("PYTHONHASHSEED")
    manager, client = client_of(kernel_name="python3", cwd=str(tmp_path), env=env)
    try:
        yield Kernel(client)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def test_a_class_of_a_cell_trains_as_the_same_class_in_a_file(
    kernel: Kernel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bits are those of a file's; progress and result are displayed; the record alone is enough to verify the run and to go on from it."""
    kernel.run(IMPORTS)
    kernel.run(JOB)
    shown = kernel.run(TRAIN)
    assert "step 4/4" in str(shown)
    assert "weights_digest" in shown[-1]["text/html"]
    (told,) = kernel.run(
        "import json; print(json.dumps([result.weights_digest, result.metrics, result.folder]))"
    )
    digest, metrics, folder = json.loads(told)
    (tmp_path / "points_in_a_file.py").write_text(IMPORTS + JOB)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    in_a_file = lockstep.train({**SPEC, "job": {"use": "points_in_a_file:Points"}}, local=True)
    assert (digest, metrics) == (in_a_file.weights_digest, in_a_file.metrics)
    recorded = (Path(folder) / "source" / "lockstep_main.py").read_text()
    assert JOB.strip() in recorded
    assert "TensorDataset" in recorded
    assert verify(Path(folder).name, local=True, uri="off", storage=tmp_path / "runs").same_bits
    moved = lockstep.resume(Path(folder).name, ["job.params.where=there"], local=True, uri="off")
    assert moved.status == "FINISHED"
    forked = lockstep.resume(Path(folder).name, ["length.steps=6"], fork=True, local=True, uri="off")
    assert forked.step == 6
    assert (Path(forked.folder) / "source" / "lockstep_main.py").read_text() == recorded
