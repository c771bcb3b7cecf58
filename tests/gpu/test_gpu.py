"""The checks on a GPU, each skipped by name where there is none; and the same functions on the CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.distributed.pool import Pool
from tests.gpu.checks import CHECKS, Row, Setting
from tests.gpu.processes import Processes, backend_for
from tests.gpu.report import as_page, main

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("check", CHECKS)
def test_on_a_gpu(check: str) -> None:
    if not torch.cuda.is_available():
        pytest.skip(f"{check}: no CUDA device")
    setting = Setting("cuda", Processes(backend_for("cuda")), small=False)
    assert [row for row in CHECKS[check](setting) if row.holds is False] == []


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    pool = Pool(2)
    yield pool
    pool.close()


@pytest.mark.parametrize(
    "check",
    [
        pytest.param(name, marks=[pytest.mark.scenario] if name in {"workers", "resume"} else [])
        for name in CHECKS
        if name not in {"killed", "memory"}
    ],
)
def test_all_but_the_device_holds_on_a_cpu(pool: Pool, check: str) -> None:
    """What is left to a GPU is the device. (Memory on a CPU has tests of its own, beside the pool's.)"""
    found = list(CHECKS[check](Setting("cpu", pool, small=True)))
    assert found
    assert [row for row in found if row.holds is False] == []


@pytest.mark.exact  # tests/unit/test_failure_kinds.py kills a peer in a collective
def test_a_killed_rank_is_told_by_the_other_one() -> None:
    """The processes that a GPU run starts, on gloo."""
    (row,) = CHECKS["killed"](Setting("cpu", Processes("gloo"), small=True))
    assert row.holds
    assert " s: " in row.value


def test_the_report_needs_neither_ray_nor_mlflow(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules |= dict.fromkeys(('ray', 'mlflow', 'sklearn', 'pandas', 'boto3')); "
        "from tests.gpu.report import main; main()"
    )
    command = [
        sys.executable,
        "-c",
        code,
        "--device",
        "cpu",
        "--only",
        "norm",
        "--page",
        str(tmp_path / "gpu.md"),
    ]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT}/platform:{ROOT}"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "| norm | norms that differ, of 80 layouts | 0 | holds |" in (tmp_path / "gpu.md").read_text()


def test_the_page_names_what_does_not_hold() -> None:
    page = as_page({"norm": [Row("a", "1", True), Row("b", "2", False), Row("c", "3")]}, "a CPU")
    assert page.splitlines()[4:] == [
        "| norm | a | 1 | holds |",
        "| norm | b | 2 | **does not hold** |",
        "| norm | c | 3 |  |",
    ]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_the_report_names_what_it_skips(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["report", "--page", str(tmp_path / "gpu.md")])
    main()
    assert capsys.readouterr().out.splitlines() == [f"skipped: {name}: no CUDA device" for name in CHECKS]
    assert list(tmp_path.iterdir()) == []
