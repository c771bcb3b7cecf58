"""A forked child leaves alone what it inherits."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import lockstep
from lockstep.training import determinism as determinism_module
from lockstep.training.determinism import determinism
from lockstep.training.integrity.rehearsal.child_process import can_fork, in_child


class Nothing(lockstep.Job):
    def model(self) -> nn.Module:
        return nn.Identity()

    def train_data(self) -> Any:
        return range(4)

    def loss(self, model: nn.Module, batch: Any) -> lockstep.Loss:
        raise AssertionError("nobody trains it")


@pytest.fixture
def garbage() -> Iterator[None]:
    """A process group that nothing refers to but itself, not collected yet. Its destructor joins its threads."""
    gc.collect()
    gc.disable()
    cycle: list[Any] = [dist.ProcessGroupGloo(dist.HashStore(), 0, 1)]
    cycle.append(cycle)
    del cycle
    yield
    gc.enable()
    gc.collect()


@pytest.mark.scenario
@pytest.mark.usefixtures("garbage")
def test_a_child_does_not_collect_the_garbage_of_its_parent() -> None:
    def collect() -> str:
        gc.enable()
        gc.collect()
        return "at its end"

    assert in_child(collect, Nothing({}), limit_s=20) == "at its end"


def test_a_child_collects_its_own_garbage() -> None:
    ended = list[str]()

    class Own:
        def __del__(self) -> None:
            ended.append("collected")

    def collect() -> list[str]:
        cycle: list[Any] = [Own()]
        cycle.append(cycle)
        del cycle
        gc.collect()
        return ended

    assert in_child(collect, Nothing({})) == ["collected"]
    assert not ended
    assert gc.isenabled()


def test_nothing_is_forked_beside_threads_of_autograd() -> None:
    """On a machine without a device a build for CUDA starts them too, once a fake tensor was made before the first backward."""
    cpu = torch.device("cpu")
    assert can_fork(cpu)
    ready, ended = threading.Event(), threading.Event()

    def named_like_autograds() -> None:
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text("pt_autograd_0")
        ready.set()
        ended.wait()

    thread = threading.Thread(target=named_like_autograds)
    thread.start()
    try:
        assert ready.wait(60)
        assert not can_fork(cpu)
    finally:
        ended.set()
        thread.join()


@pytest.mark.scenario
def test_a_process_of_a_run_can_be_forked_after_fake_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Autograd starts its threads before a job can make one: those of the devices that are there."""
    started: list[bool] = []
    monkeypatch.setattr(determinism_module, "start_autograd", lambda: started.append(True))
    with determinism("strict", 1):
        assert started == [True]
    code = "; ".join(
        [
            "import os, torch",
            "from lockstep.training.determinism import determinism",
            "from torch._subclasses.fake_tensor import FakeTensorMode",
            "context = determinism('strict', 1); context.__enter__()",
            "fake = FakeTensorMode(); fake.__enter__(); torch.empty(1); fake.__exit__(None, None, None)",
            "backward = lambda: torch.ones(1, requires_grad=True).sum().backward()",
            "backward(); child = os.fork()",
            "child or (backward(), os._exit(0))",
            "assert os.waitpid(child, 0)[1] == 0",
        ]
    )
    subprocess.run([sys.executable, "-c", code], check=True)
