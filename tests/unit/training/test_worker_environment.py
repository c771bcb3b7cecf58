"""The environment that a worker's process starts with: what it holds, what it does to memory, and that no bits depend on the latter."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.training.worker_environment import (
    DECISIVE,
    MEMORY,
    WORKER_ENVIRONMENT,
    kernel_variables,
    sent_environment,
)

ROOT = Path(__file__).parents[3]
_UNTUNED = {"GLIBC_TUNABLES": "glibc.malloc.tcache_count=7"}  # glibc's own way

FAULTS = """
import resource, threading
import torch

def step():
    held = [torch.full((1 << 20,), 1.0) for _ in range(24)]  # 4 MiB each

def steps():
    for _ in range(3):
        step()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(5):
        step()
    print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) // 5)

thread = threading.Thread(target=steps)  # as under Ray
thread.start()
thread.join()
"""


def test_a_cluster_gets_what_the_command_was_given_for_products_and_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """But its hashing of strings is that of every run."""
    for name in {*WORKER_ENVIRONMENT, *kernel_variables(dict(os.environ), cuda=True)}:
        monkeypatch.delenv(name, raising=False)
    assert sent_environment() == WORKER_ENVIRONMENT == {**DECISIVE, **MEMORY}
    monkeypatch.setenv("MKL_CBWR", "AVX2")
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    assert sent_environment() == {**WORKER_ENVIRONMENT, "MKL_CBWR": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2"}


@pytest.mark.scenario
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_a_thread_keeps_the_memory_of_its_steps() -> None:
    """A step takes no new page. The control, glibc's own way, takes thousands."""
    assert faults(MEMORY) < 100
    assert faults(_UNTUNED) > 1000


def faults(tunables: dict[str, str]) -> int:
    """New pages a step, of 24 blocks of 4 MiB."""
    done = subprocess.run(
        [sys.executable, "-c", FAULTS], env={**os.environ, **tunables}, capture_output=True, text=True, check=True
    )  # fmt: skip
    return int(done.stdout)


@pytest.mark.scenario
def test_no_bits_depend_on_how_a_process_gets_its_memory(tmp_path: Path) -> None:
    """Two runs, in processes of either kind."""
    found = {name: trained(tmp_path / name, given) for name, given in (("kept", MEMORY), ("glibc", _UNTUNED))}
    assert found["kept"] == found["glibc"]


def trained(folder: Path, given: dict[str, str]) -> str:
    """The digest of the weights. The tunables are in the run's record."""
    words = [
        "jobs/digits/train.yaml", "--local", "--json", "length.epochs=1", "record.uri=off", f"checkpoint.storage={folder}",
    ]  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "lockstep", "train", *words],
        cwd=ROOT,
        env={**os.environ, **given, "PYTHONPATH": str(ROOT / "platform"), "PYTHONHASHSEED": "0"},
        capture_output=True,
        text=True,
        check=True,
    )
    (facts,) = folder.glob("*/environment.json")
    assert json.loads(facts.read_text())["GLIBC_TUNABLES"] == given["GLIBC_TUNABLES"]
    return str(json.loads(done.stdout)["weights_digest"])
