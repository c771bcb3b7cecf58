"""The checks on a GPU, each skipped by name where there is none; and the same functions on the CPU."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from lockstep.communication.group import Group
from tests.distributed.pool import Pool
from tests.gpu.checks import CHECKS, GLOO, UNEVEN, WAITS, Row, Setting, Way, mixed, train_each
from tests.gpu.processes import Lost, Processes, backend_for
from tests.gpu.report import as_page, main

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("check", CHECKS)
def test_on_a_gpu(check: str) -> None:
    if not torch.cuda.is_available():
        pytest.skip(f"{check}: no CUDA device")
    setting = Setting.on("cuda", Processes(backend_for("cuda")))
    assert [row for row in CHECKS[check](setting) if row.holds is False] == []


LONG = {"workers", "sharding", "offload", "resume", "compiled"}


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    pool = Pool(2)
    yield pool
    pool.close()


@pytest.mark.every(6)
@pytest.mark.thinned(5)
@pytest.mark.parametrize(
    "check",
    [
        pytest.param(name, marks=[pytest.mark.scenario] if name in LONG else [])
        for name in CHECKS
        if name not in {"killed", "memory"}
    ],
)
def test_all_but_the_device_holds_on_a_cpu(pool: Pool, check: str) -> None:
    """What is left to a GPU is the device. (Memory on a CPU has tests of its own, beside the pool's.)"""
    found = list(CHECKS[check](Setting("cpu", pool, small=True)))
    assert found
    assert [row for row in found if row.holds is False] == []


@pytest.mark.scenario
def test_runs_in_slices_exchange_them_with_single_ranks(pool: Pool) -> None:
    """On two workers as well, where each has an uneven part of the tree; all other runs send whole buckets."""
    document = {**mixed("fp32", False), "batch": UNEVEN}
    sliced, whole = (pool.run(2, exchanged, Way(document, in_slices)) for in_slices in (True, False))
    assert min(sliced) > 0
    assert whole == [0, 0]


def exchanged(way: Way) -> int:
    """How often this rank exchanges slices."""
    times, pass_on = [0], Group.pass_on

    def counted(*args: Any) -> Any:
        times[0] += 1
        return pass_on(*args)

    with mock.patch.object(Group, "pass_on", counted):
        train_each([way], "cpu")
    return times[0]


def test_over_gloo_a_gpu_sends_nothing_to_a_single_rank() -> None:
    """What would, is skipped by name: gloo reads such a tensor as if it lay in the processor's memory."""
    setting = Setting.on("cuda", Processes("gloo"))
    assert list(CHECKS["sharding"](setting)) == [Row("a sharded optimizer", GLOO)]
    assert Setting.on("cuda", Processes("nccl")).sends
    assert Setting.on("cpu", Processes("gloo")).sends


@pytest.mark.parametrize(
    ("waited", "holds"), [(WAITS, True), (WAITS - 0.5, True), (WAITS + 1, False), (0, False)]
)
def test_a_step_that_waits_more_often_than_promised_does_not_hold(waited: float, holds: bool) -> None:
    """Nor does one in which no wait is seen: then torch's count is broken."""

    class Told:
        def run(self, workers: int, function: Any, *args: Any) -> list[Any]:
            return [[waited, waited, waited]]

    rows = list(CHECKS["synchronisations"](Setting("cuda", Told(), small=False)))
    assert [row.holds for row in rows] == [holds, holds, None]


@pytest.mark.exact  # tests/unit/test_failure_kinds.py kills a peer in a collective
def test_a_killed_rank_is_told_by_the_other_one() -> None:
    """The processes that a GPU run starts, on gloo."""
    (row,) = CHECKS["killed"](Setting.on("cpu", Processes("gloo")))
    assert row.holds
    assert " s: " in row.value


@pytest.mark.scenario
def test_what_a_rank_answers_outlives_its_process() -> None:
    """Tensors too, which torch would share out of the memory of a process that has ended."""
    (found,) = Processes("gloo").run(1, rows_of, 300)
    assert all(map(torch.equal, found, rows_of(300)))


def rows_of(count: int) -> list[Tensor]:
    return [torch.full((100,), i) for i in range(count)]


@pytest.mark.scenario
def test_ranks_that_hang_cost_the_time_of_one() -> None:
    """One deadline for all of them, after which none is waited for any more. One after the other they would cost three."""
    began = time.monotonic()
    answers = Processes("gloo", answer_s=4).answers(3, time.sleep, 600)
    assert [type(answer) for answer in answers] == [Lost] * 3
    assert time.monotonic() - began < 3 * 4


def test_an_error_that_a_rank_tells_comes_before_one_that_was_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others wait for a rank that failed, until their time is over."""
    processes = Processes("gloo")
    monkeypatch.setattr(processes, "answers", lambda *_: [Lost("no answer in time"), KeyError("a")])
    with pytest.raises(KeyError):
        processes.run(2, time.sleep, 0)


@pytest.mark.scenario
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
