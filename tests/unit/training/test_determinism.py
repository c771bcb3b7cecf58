"""What `determinism` sets and restores, and the probe that tells one machine's bits from another's."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any, Literal

import pytest
import torch

from lockstep.training.determinism import determinism, filled_memory, fp32_products, numerics_probe
from lockstep.training.worker_environment import WORKER_ENVIRONMENT
from tests.forked import script

CPU = torch.device("cpu")


def settings() -> tuple[Any, ...]:
    return (
        torch.get_num_threads(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
        torch.backends.cudnn.benchmark,
    )


@pytest.mark.parametrize(("kind", "strict"), [("strict", True), ("fast", False)])
def test_determinism_sets_the_process_and_puts_it_back(kind: Literal["strict", "fast"], strict: bool) -> None:
    before = settings()
    with determinism(kind, threads=3):
        assert settings() == (3, strict, False, False, not strict)
    assert settings() == before


def test_determinism_puts_back_after_an_error_and_what_was_set_by_others() -> None:
    before = settings()
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.set_num_threads(2)
    try:
        changed = settings()
        with pytest.raises(ZeroDivisionError), determinism("strict", threads=1):
            raise ZeroDivisionError
        assert settings() == changed
    finally:
        torch.use_deterministic_algorithms(before[1], warn_only=before[2])
        torch.set_num_threads(before[0])


def test_environment_is_set_where_it_is_not() -> None:
    with determinism("strict", threads=1):
        assert all(os.environ[name] for name in WORKER_ENVIRONMENT)


def test_filled_memory_is_put_back() -> None:
    with determinism("strict", threads=1):
        with filled_memory(True):
            assert torch.empty(3).isnan().all()
        assert settings()[3] is False


def test_probe_is_stable() -> None:
    """In a process, whatever it drew and allocated in between."""
    with determinism("strict", threads=1):
        first = numerics_probe(CPU)
        _kept = [torch.randn(1 + 7 * i) for i in range(20)]
        torch.manual_seed(9)
        assert [numerics_probe(CPU) for _ in range(3)] == [first] * 3
    assert len(first) == 16
    assert int(first, 16) >= 0


PROBE = """
import torch
from lockstep.training.determinism import determinism, numerics_probe
with determinism("strict", 1):
    print(numerics_probe(torch.device("cpu")))
"""


def test_probe_is_that_of_the_machine_and_not_of_the_process() -> None:
    with determinism("strict", threads=1):
        here = numerics_probe(CPU)
    process = script(PROBE)
    assert process.communicate(timeout=120)[0].strip() == here


@pytest.mark.scenario
def test_probe_tells_other_instruction_sets() -> None:
    """As on an older processor: torch's own kernels without vector instructions."""
    if torch.backends.cpu.get_cpu_capability() == "DEFAULT":
        pytest.skip("this processor has no vector instructions to leave out")
    with determinism("strict", threads=1):
        here = numerics_probe(CPU)
    done = subprocess.run(
        [sys.executable, "-c", PROBE],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "ATEN_CPU_CAPABILITY": "default"},
        capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    assert len(done.stdout.strip()) == len(here)
    assert done.stdout.strip() != here


def test_products_of_fewer_digits_are_named() -> None:
    """TF32 and bf16 products give other bits, so they are part of the identity. cuDNN's convolutions use TF32 unless told otherwise."""
    assert fp32_products(CPU) == {}
    assert fp32_products(torch.device("cuda"))["fp32_products.cudnn.conv"] == "tf32"
    torch.set_float32_matmul_precision("medium")
    try:
        assert fp32_products(CPU) == {"fp32_products.mkldnn.matmul": "bf16"}
        assert fp32_products(torch.device("cuda"))["fp32_products.cuda.matmul"] == "tf32"
    finally:
        torch.set_float32_matmul_precision("highest")
    assert fp32_products(CPU) == {}
