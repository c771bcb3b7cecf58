"""A notebook's cells, run by a kernel: a class that a cell defines trains, exactly as the same class in a file (G1)."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import lockstep
from lockstep.calls.verify import verify

ROOT = Path(__file__).parents[3]

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

    def __init__(self, client: Any, interrupt: Callable[[], None]) -> None:
        self._client, self._interrupt = client, interrupt

    def run(self, cell: str, look: Callable[[str], None] = lambda text: None) -> list[Any]:
        """What a cell shows: its texts, and its data by their kinds. AssertionError where it raises. `look` sees each as it comes."""
        shown: list[Any] = []

        def show(message: Any) -> None:
            content = message["content"]
            look(str(content))
            if message["msg_type"] == "stream":
                shown.append(content["text"])
            elif "data" in content:
                shown.append(content["data"])

        reply = self._client.execute_interactive(cell, timeout=120, output_hook=show)["content"]
        assert reply["status"] == "ok", reply
        return shown

    def interrupted(self, cell: str, at: str) -> list[Any]:
        """The same of a cell that is interrupted once it shows `at`."""
        waiting = [self._interrupt]
        return self.run(cell, lambda text: waiting.pop()() if waiting and at in text else None)


@pytest.fixture
def kernel(tmp_path: Path) -> Iterator[Kernel]:
    """A kernel in an empty folder, whose interpreter hashes strings at random as any notebook's does."""
    client_of = pytest.importorskip("jupyter_client.manager").start_new_kernel
    env = {**os.environ, "PYTHONPATH": str(ROOT / "platform"), "IPYTHONDIR": str(tmp_path / "ipython")}
    env.pop("PYTHONHASHSEED")
    manager, client = client_of(kernel_name="python3", cwd=str(tmp_path), env=env)
    try:
        yield Kernel(client, manager.interrupt_kernel)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


@pytest.mark.scenario
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


SLOW = """
import time

class Slow(Points):
    def loss(self, model, batch):
        time.sleep(0.01)
        return super().loss(model, batch)
"""


@pytest.mark.exact  # two runs of seconds
def test_a_cell_that_is_interrupted_leaves_a_run_that_goes_on_to_the_same_bits(
    kernel: Kernel, tmp_path: Path
) -> None:
    """The run stops after a step with a checkpoint, the cell ends without an error, and the kernel lives on."""
    for cell in (IMPORTS, JOB, SLOW):
        kernel.run(cell)
    spec = {**SPEC, "length": {"steps": 300}, "checkpoint": {"every": None}}
    train = f"result = lockstep.train({spec!r}, job=Slow, local=True)\nresult"
    shown = kernel.interrupted(train, "step ")
    assert "KILLED" in shown[-1]["text/html"]
    (told,) = kernel.run("import json; print(json.dumps([result.run_id, result.step]))")
    run_id, step = json.loads(told)
    assert 0 < step < 300
    assert (tmp_path / "runs" / run_id / f"step-{step:09}" / "manifest.json").exists()
    kernel.run(f"result = lockstep.resume({run_id!r}, local=True, uri='off')")
    kernel.run(f"whole = lockstep.train({spec!r}, job=Slow, local=True)")
    (told,) = kernel.run(
        "print(json.dumps([(one.status, one.step, one.weights_digest) for one in (result, whole)]))"
    )
    resumed, whole = json.loads(told)
    assert resumed == whole
    assert whole[:2] == ["FINISHED", 300]
