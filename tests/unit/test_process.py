"""A process that another one has forked ends with it, whatever it is doing and however that one ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from lockstep.process import started

BUSY = "def work():\n    print(os.getpid(), flush=True)\n    while True:\n        pass\n"
LOADS = """
class Stuck(torch.utils.data.Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        work()

batches = MicroBatches(Stuck(), list, seed=3, purpose="data")
list(Loader(batches, [MicroBatch(0, 0, [0, 1])], torch.device("cpu"), 1))
"""
FORKS = {
    "rehearsed": "from lockstep.training.integrity.rehearsal.child_process import in_child\nin_child(work, object())\n",
    "loader": (
        "import torch\nfrom lockstep.data.loader import Loader\nfrom lockstep.data.micro_batches import MicroBatches\n"
        "from lockstep.data.sampler import MicroBatch\n" + LOADS
    ),
    "not bound to it": "os.fork() or work()\nos.wait()\n",
}


@pytest.mark.every(3)
@pytest.mark.thinned(2)
@pytest.mark.parametrize("how", FORKS)
def test_a_child_ends_with_the_process_that_waits_for_it(how: str) -> None:
    """The control is a child that nothing binds to its parent."""
    with subprocess.Popen(
        [sys.executable, "-c", f"import os\n{BUSY}{FORKS[how]}"],
        stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    ) as parent:  # fmt: skip
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        parent.kill()
        parent.wait()
    until = time.monotonic() + 5.0
    while started(child) and time.monotonic() < until:
        time.sleep(0.05)
    if how != "not bound to it":
        assert not started(child)
        return
    assert started(child)
    os.kill(child, signal.SIGKILL)
