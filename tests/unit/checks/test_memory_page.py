"""The figures of the page on models that do not fit are those of `lockstep estimate`, to the digits that the page has."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from lockstep.checks.estimate_formulas import (
    copied_bytes,
    held_bytes,
    host_bytes,
    moving_bytes,
    optimizer_bytes,
    sent_bytes,
    total_bytes,
    with_mirror,
)
from lockstep.checks.estimate_measurement import Measured, ParameterState
from lockstep.spec.fields import Spec
from lockstep.spec.loading import load_spec
from lockstep.training.step.uncut_parameters import UnitBytes

PAGE = (Path(__file__).parents[3] / "docs" / "models-that-do-not-fit.md").read_text()
UNITS = {"M": 1e6, "B": 1e9, "GB": 1e9, "TB": 1e12}


def of_adamw(parameters: float, blocks: int, of_block: float) -> Measured:
    """What an estimate measures of so many parameters in fp32, most of them in equal blocks, but for what depends on a micro-batch."""
    sizes = [int(of_block)] * blocks
    sizes.append(int(parameters) - sum(sizes))
    state = tuple(ParameterState(size, 4, True, 4, 8 * size) for size in sizes)
    nbytes = 4 * int(parameters)
    return Measured(
        samples=1, parameters=nbytes, buffers=0, gradients=nbytes, optimizer=state, average=0, checkpoint=3 * nbytes, workspace=0,
        batch=0, activations=0, computing=nbytes, updating=0, units=blocks,
        unit_bytes=UnitBytes(nbytes, 4 * int(of_block), outside=0),
    )  # fmt: skip


def sharded(workers: int, **more: Any) -> Spec:
    batch = {"global": workers, "micro": 1}
    return load_spec({"job": {"use": "a:B"}, "batch": batch, "sharding": {"mode": "full"}, **more})


def held(spec: Spec, measured: Measured, workers: int) -> float:
    """Parameters, gradients and the optimizer's state."""
    gradients = held_bytes(spec, measured.gradients, workers)
    parameters = with_mirror(spec, measured.parameters, workers)
    return parameters + gradients + optimizer_bytes(spec, measured, workers)


def agrees(shown: str, value: float) -> bool:
    """Whether a printed number is the value, rounded to as many digits as it has."""
    decimals = len(shown.partition(".")[2])
    near: float = abs(float(shown) - value)
    return near <= 0.5 * 10**-decimals + 1e-9


def table(head: str) -> list[list[str]]:
    lines = PAGE[PAGE.index(head) :].split("\n\n")[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def models() -> list[Measured]:
    found = []
    for cell in table("| | 7 B")[0][1:]:
        match = re.fullmatch(r"(\d+) B, (\d+) blocks of ([\d.]+) (M|B)", cell)
        assert match is not None
        found.append(of_adamw(float(match[1]) * 1e9, int(match[2]), float(match[3]) * UNITS[match[4]]))
    return found


def test_the_table_of_three_models() -> None:
    rows = table("| | 7 B")[2:]
    assert [int(row[0].split()[0]) for row in rows] == [8, 64, 512, 4096]
    for row in rows:
        workers = int(row[0].split()[0])
        for cell, measured in zip(row[1:], models(), strict=True):
            match = re.fullmatch(r"([\d.]+) GB \+ ([\d.]+)", cell)
            assert match is not None
            spec = sharded(workers)
            assert agrees(match[1], held(spec, measured, workers) / 1e9), (cell, workers)
            assert agrees(match[2], moving_bytes(spec, measured, 2 * workers, workers, on_gpu=True) / 1e9), (
                cell,
                workers,
            )


def test_a_figure_that_is_another_is_noticed() -> None:
    """The control."""
    assert not agrees("15", 14.0e9 / 1e9)
    assert not agrees("2.4", moving_bytes(sharded(8), models()[0], 16, 8, on_gpu=True) / 1e9)


def test_the_figures_without_sharding_and_with_mirrors() -> None:
    match = re.search(r"without sharding it would be (\d+) GB, ([\d.]+) TB and ([\d.]+) TB", PAGE)
    assert match is not None
    for shown, unit, measured in zip(match.groups(), ("GB", "TB", "TB"), models(), strict=True):
        assert agrees(shown, held(sharded(1), measured, 1) / UNITS[unit])
    match = re.search(r"On 64 workers a model of 70 B takes (\d+) GB instead of (\d+)", PAGE)
    assert match is not None
    large, mirrored = models()[1], sharded(64, faults={"mirror": True})
    at_start = with_mirror(mirrored, large.parameters, 64)
    gradients = held_bytes(mirrored, large.gradients, 64)  # of the rows that are mirrored, in the update
    assert agrees(match[1], (held(mirrored, large, 64) + at_start + gradients) / 1e9)
    assert agrees(match[2], held(sharded(64), large, 64) / 1e9)


def test_the_figures_with_rows_in_host_memory() -> None:
    match = re.search(r"with offload +([\d.]+) GB \+ ([\d.]+) +(\d+) GB a worker, (\d+) GB for eight", PAGE)
    assert match is not None
    spec, measured = sharded(8, sharding={"mode": "full", "offload": True}), models()[0]
    in_host = host_bytes(spec, measured, 8, 8)
    assert agrees(match[1], copied_bytes(spec, measured, 8) / 1e9)
    assert agrees(match[2], moving_bytes(spec, measured, 16, 8, on_gpu=True) / 1e9)
    assert agrees(match[3], in_host / 1e9) and agrees(match[4], 8 * in_host / 1e9)
    # A GPU's start is whole. After it the device has what moves, and one gradient that is computed.
    assert total_bytes(spec, measured, 8, 8, on_gpu=True) == 2 * measured.parameters


@pytest.mark.parametrize("workers", [8, 64])
def test_the_sums_of_host_and_device_are_what_is_held_without(workers: int) -> None:
    """What goes to host memory is no longer on the device, to the byte."""
    measured, offload = models()[1], {"mode": "full", "offload": True}
    spec, micro_batches = sharded(workers), 4 * workers
    on_device = total_bytes(spec, measured, micro_batches, workers)
    moved = host_bytes(sharded(workers, sharding=offload), measured, micro_batches, workers)
    beside = total_bytes(sharded(workers, sharding=offload), measured, micro_batches, workers, on_gpu=True)
    moving = moving_bytes(spec, measured, micro_batches, workers)
    assert beside == 2 * measured.parameters
    assert on_device == moved + moving
    assert host_bytes(spec, measured, micro_batches, workers) == 0


def test_the_bytes_that_a_step_sends() -> None:
    """About 3 N for each pass over the workers."""
    measured = models()[0]
    for micro_batches, passes in ((8, 1), (64, 8)):
        assert sent_bytes(sharded(8), measured, micro_batches, 8) == passes * 3 * measured.parameters * 7 // 8
