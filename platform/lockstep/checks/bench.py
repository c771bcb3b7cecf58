"""The same steps on several numbers of workers of this machine: how fast they are, where the rest goes, and that the bits are the same."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from lockstep.checks import bench_worker, problems
from lockstep.checks.bench_worker import StepTimes
from lockstep.checks.processes import Process, first_failure, run_together
from lockstep.errors import ClusterError, LockstepError, SpecError
from lockstep.interpreters import job_words
from lockstep.spec.fields import Length, Spec
from lockstep.spec.locations import RECORD_OFF
from lockstep.training.worker_environment import sent_environment

WARM_UP = 3
"""Steps before those that count: the first pays for what is made once, and after it DDP lays its buckets out anew."""

PARTS = ("data", "compute", "reduction", "rest")
"""What the time of a step goes to."""

Start = Callable[[str, Mapping[str, str]], Process]
"""Starts `bench_worker.measure` of a request with an environment."""


def start_python(request: str, environment: Mapping[str, str]) -> Process:
    """A new interpreter."""
    return subprocess.Popen(
        job_words(bench_worker.__name__, request),
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


@dataclass(frozen=True, slots=True)
class Speed:
    """One number of workers. `step_times` is the mean of its workers' steps."""

    workers: int
    samples_per_s: float
    step_times: StepTimes
    losses: tuple[str, ...]
    """Of every step, the first ones too, each as `float.hex` writes it."""
    digests: tuple[str, ...]
    """Of the weights after the last step, by rank."""
    device: str

    @property
    def step_s(self) -> float:
        return sum(self.step_times)


@dataclass(frozen=True, slots=True)
class BenchResult:
    """What a bench found. `first_difference` tells the first bits that were not those of the first run, or is empty."""

    steps: int
    speeds: Sequence[Speed]
    compared: bool
    """Whether the spec promises the same bits: under `determinism: strict` with `reduction: exact`."""
    first_difference: str
    cores: int
    """Cores of this machine that its processes may use."""

    @property
    def same_bits(self) -> bool | None:
        """None where nothing is promised."""
        return None if not self.compared else not self.first_difference

    def efficiency(self, speed: Speed) -> float:
        """Samples a second and worker, beside those of the first run."""
        first = self.speeds[0]
        return (speed.samples_per_s / speed.workers) / (first.samples_per_s / first.workers)

    def lost(self, speed: Speed) -> dict[str, float]:
        """Where the rest of the efficiency goes: the further time that each part takes of all workers, as a share of theirs.

        With the efficiency they add up to 1. A part that takes less than in the first run is below 0.
        """
        first = self.speeds[0]
        total_s = speed.workers * speed.step_s
        return {
            part: (speed.workers * part_s - first.workers * first_part_s) / total_s
            for part, part_s, first_part_s in zip(PARTS, speed.step_times, first.step_times, strict=True)
        }

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {
            "steps": self.steps,
            "device": self.speeds[0].device,
            "cores": self.cores,
            "same_bits": self.same_bits,
            "first_difference": self.first_difference or None,
            "weights_digest": self.speeds[0].digests[0],
            "runs": [
                {
                    "workers": speed.workers,
                    "samples_per_s": speed.samples_per_s,
                    "efficiency": self.efficiency(speed),
                    "step_s": speed.step_s,
                    **speed.step_times._asdict(),
                    "lost": self.lost(speed),
                }
                for speed in self.speeds
            ],
        }


def bench(
    spec: Spec,
    workers: Sequence[int],
    steps: int,
    say: Callable[[str], None] = lambda line: None,
    start: Start | None = None,
) -> BenchResult:
    """Take `steps` steps of the run, after WARM_UP others, with each number of `workers`, one after another.

    Each worker is a process of this machine. Nothing is recorded or saved. Raises SpecError for numbers that no step can be shared
    out among, and what a worker raises: its line.
    """
    check_workers(spec, workers, steps)
    speeds = []
    for count in workers:
        say(f"{_counted(steps, 'step')} on {_counted(count, 'worker')}")
        speeds.append(_measured(spec, count, steps, start or start_python))
    promised = spec.determinism == "strict" and spec.reduction == "exact"
    return BenchResult(steps, speeds, promised, first_difference(speeds) if promised else "", usable_cores())


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def check_workers(spec: Spec, workers: Sequence[int], steps: int) -> None:
    """SpecError for what cannot be measured."""
    most = spec.batch.micro_batches
    if not workers or min(workers) < 1 or len(set(workers)) < len(workers):
        raise problems.WORKER_COUNTS(got=", ".join(map(str, workers)) or "none")
    if max(workers) > most:
        raise problems.TOO_MANY_WORKERS(got=max(workers), most=most)
    if steps < 1:
        raise problems.STEP_COUNT(got=steps)


def usable_cores() -> int:
    """Cores that processes of this one may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def first_difference(speeds: Sequence[Speed]) -> str:
    """The first loss, or else the final weights, in which a run differs from the first one; empty where none does."""
    first = speeds[0]
    for speed in speeds:
        for step, (expected, got) in enumerate(zip(first.losses, speed.losses, strict=True), 1):
            if got != expected:
                return (
                    f"step {step}: the loss is {float.fromhex(expected)!r} on {first.workers} and "
                    f"{float.fromhex(got)!r} on {speed.workers} workers"
                )
        for rank, digest in enumerate(speed.digests):
            if digest != first.digests[0]:
                return (
                    f"after step {len(first.losses)} the weights are {first.digests[0]} on {first.workers} and {digest} on rank "
                    f"{rank} of {speed.workers} workers"
                )
    return ""


def _measured(spec: Spec, workers: int, steps: int, start: Start) -> Speed:
    """The processes of one number of workers, from their start to their end."""
    with tempfile.TemporaryDirectory(prefix="lockstep-bench-") as out:
        request = {
            "spec": shortened(spec, workers, steps).document(),
            "warm_up": WARM_UP,
            "steps": steps,
            "ranks": workers,
            "out": out,
        }
        starts = [
            partial(
                start,
                json.dumps({**request, "rank": rank}),
                {**os.environ, **sent_environment(), "LOCAL_RANK": str(rank)},
            )
            for rank in range(workers)
        ]
        failed = first_failure(run_together(starts))
        if failed is not None:
            raise _worker_error(failed.code, failed.said, workers)
        return speed_of(json.loads(Path(out, bench_worker.RESULT).read_text(encoding="utf-8")))


def speed_of(result: Mapping[str, Any]) -> Speed:
    """What `bench_worker.take_steps` gave."""
    rows = [StepTimes(*row) for rank in result["step_times"] for row in rank]
    mean_times = StepTimes(*(sum(column) / len(rows) for column in zip(*rows, strict=True)))
    return Speed(
        len(result["step_times"]),
        result["samples"] / (len(result["step_times"][0]) * sum(mean_times)),
        mean_times,
        tuple(result["losses"]),
        tuple(result["digests"]),
        result["device"],
    )


def _worker_error(code: int, said: str, workers: int) -> LockstepError:
    """The line of a worker that failed, with the exit code that it had."""
    if not said or code < 0:
        return ClusterError(f"bench: one of {workers} workers ended with exit code {code} {said}".rstrip())
    return SpecError(said) if code == SpecError.exit_code else LockstepError(said)


def shortened(spec: Spec, workers: int, steps: int) -> Spec:
    """The run's first steps alone, without what a run does beside them."""
    return spec.model_copy(
        update={
            "length": Length(steps=WARM_UP + steps),
            "workers": spec.workers.model_copy(update={"min": workers, "max": workers}),
            "rehearsal": "off",
            "early_stop": None,
            "checkpoint": spec.checkpoint.model_copy(update={"keep_best": None}),
            "record": spec.record.model_copy(update={"uri": RECORD_OFF}),
        }
    )


# --- for a person -----------------------------------------------------------------------------------------


def as_text(result: BenchResult) -> str:
    """A line for each number of workers, what the others lose to, and whether the bits are the same."""
    head = f"{'workers':>7}{'samples/s':>12}{'efficiency':>12}{'a step':>12}" + "".join(
        f"{part:>12}" for part in PARTS
    )
    lines = [head]
    for speed in result.speeds:
        times = "".join(f"{f'{1e3 * value:.1f} ms':>12}" for value in (speed.step_s, *speed.step_times))
        lines.append(
            f"{speed.workers:>7}{speed.samples_per_s:>12.1f}{result.efficiency(speed):>12.1%}{times}"
        )
    for speed in result.speeds[1:]:
        lost = ", ".join(f"{part} {share:.1%}" for part, share in result.lost(speed).items())
        lines.append(f"{speed.workers} workers lose to: {lost}")
    most = max(speed.workers for speed in result.speeds)
    if result.speeds[0].device == "cpu" and most > result.cores:
        lines.append(f"{most} workers share {result.cores} cores: what they compute takes longer for it")
    if not result.compared:
        lines.append("bits were not compared: determinism=fast and reduction=native promise none")
    elif result.first_difference:
        lines.append(f"different: {result.first_difference}")
    else:
        lines.append(
            f"same: every loss of {len(result.speeds[0].losses)} steps and the weights, {result.speeds[0].digests[0]}"
        )
    return "\n".join(lines)
