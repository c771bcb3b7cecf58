"""What a precision costs in memory and speed, on one device and on two.

python -m jobs.practice.precision [--workers 1,2] [--steps N]
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from pydantic import PositiveInt
from torch import nn

import lockstep
from jobs.practice.points import CLASSES, FEATURES, Points
from lockstep.calls.checking import bench_spec, estimate_spec

PRECISIONS = ("fp32", "bf16", "fp16")

SPEC: dict[str, Any] = {
    "job": {"use": "jobs.practice.precision:WidePoints"},
    "batch": {
        "global": 1024,
        "micro": 256,
    },  # of fewer rows, bf16 saves less than its copies of the weights take
    "record": {"uri": "off"},
}


class WidePoints(Points):
    """A perceptron that is wide enough for its matrix products to count."""

    class Params(lockstep.Params):
        width: PositiveInt = 256

    params: Params

    def model(self) -> nn.Module:
        width = self.params.width
        return nn.Sequential(
            nn.Linear(FEATURES, width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Linear(width, CLASSES),
        )


class Row(NamedTuple):
    """One precision on one number of workers."""

    precision: str
    workers: int
    activations_bytes: int
    total_bytes: int
    """Of one worker, at the peak of a step."""
    samples_per_s: float
    efficiency: float


def measured(workers: Sequence[int], steps: int) -> Iterator[Row]:
    """Each precision, on each number of workers."""
    for precision in PRECISIONS:
        spec = {**SPEC, "precision": precision}
        found = bench_spec(spec, workers, steps=steps, local=True)
        for speed in found.speeds:
            memory = estimate_spec({**spec, "workers": {"max": speed.workers}})
            yield Row(
                precision,
                speed.workers,
                memory.activations_bytes,
                memory.total_bytes,
                speed.samples_per_s,
                found.efficiency(speed),
            )


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m jobs.practice.precision")
    parser.add_argument("--workers", default="1,2", help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=20, help="default: %(default)s")
    given = parser.parse_args(words)
    print(f"{'':6}{'workers':>8}{'activations':>14}{'in all':>12}{'samples/s':>12}{'efficiency':>12}")
    for row in measured([int(count) for count in given.workers.split(",")], given.steps):
        memory = f"{row.activations_bytes / 2**20:>10.2f} MiB{row.total_bytes / 2**20:>8.2f} MiB"
        print(f"{row.precision:6}{row.workers:>8}{memory}{row.samples_per_s:>12.0f}{row.efficiency:>12.0%}")


if __name__ == "__main__":
    main()
