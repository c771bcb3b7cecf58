"""What it costs that a spare process takes up checkpoints while a run trains.

A run of the byte-level GPT of `jobs/stdlib_gpt` in one process, with the check and without, in turn. The check comes at the first checkpoint, once in
the run. Told are the seconds of the run with it beside those without, what the spare process took of processors and of the clock, the steps beside it, and
what a run pays in the long run: a check is due each `SHARE` times its processor time.

    python -m tests.benchmarks.self_check [--steps N] [--rounds N]
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch

from lockstep.checkpoint.runs.run_folder import AttemptOrigin
from lockstep.communication.group import Group
from lockstep.job.loading import load_job
from lockstep.record.events.union import CheckpointRow, Event, ResumeChecked, Warned
from lockstep.record.ledger.rows import StepRow
from lockstep.spec.loading import load_spec
from lockstep.training.driver_requests import NoRequests
from lockstep.training.integrity.resume_check.spare_check import SHARE
from lockstep.training.loop import fit
from lockstep.training.worker_environment import WORKER_ENVIRONMENT

FIRST = 10
"""The step of the checkpoint that is tried."""


def document(storage: str, steps: int, *, checked: bool) -> dict[str, Any]:
    return {
        "job": {"use": "jobs.stdlib_gpt.job:StdlibGPT"},
        "length": {"steps": steps},
        "batch": {"global": 16, "micro": 4},
        "evaluate": {"every": {"steps": 10**6}},
        "checkpoint": {
            "storage": storage,
            "every": {"steps": FIRST},
            "keep_last": 10**6,
            "verify_after_s": 0.0 if checked else None,
        },
        "record": {"uri": "off", "digest_every": None},
        "rehearsal": "quick",
    }


@dataclass
class Told(NoRequests):
    """What a run tells that is measured."""

    rows: list[StepRow] = field(default_factory=list)
    checked: ResumeChecked | None = None
    checked_at: float = 0.0
    saved_at: float = 0.0

    def tell(self, event: Event) -> None:
        match event:
            case StepRow():
                self.rows.append(event)
            case CheckpointRow() if event.step == FIRST:
                self.saved_at = time.monotonic()
            case ResumeChecked():
                self.checked, self.checked_at = event, time.monotonic()
            case Warned():
                print(f"warning: {event.text}")

    def run_id(self) -> str:
        return "run"


def trained(steps: int, *, checked: bool) -> tuple[float, float, Told]:
    """The seconds of the steps after the first checkpoint, the processor time of this process in the run, and what was told."""
    with tempfile.TemporaryDirectory(prefix="self-check-") as storage:
        spec, told = load_spec(document(storage, steps, checked=checked)), Told()
        job = load_job(spec.job.use, spec.job.params)
        began = time.process_time()
        fit(spec, job, Group(0, 1, torch.device("cpu")), told.tell, told, AttemptOrigin())
        spent = time.process_time() - began
    return told.rows[-1].wall_clock - told.rows[FIRST - 1].wall_clock, spent, told


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--steps", type=int, default=300)
    options.add_argument("--rounds", type=int, default=3)
    given = options.parse_args()
    os.environ |= WORKER_ENVIRONMENT
    ratios, own, cpu_s, wall_s, kept_s = [], [], [], [], []
    trained(FIRST + 2, checked=False)
    for _ in range(given.rounds):
        plain, plain_s, without = trained(given.steps, checked=False)
        checked, checked_s, told = trained(given.steps, checked=True)
        if told.checked is None:
            print("the run was over before the spare process had answered: give it more --steps")
            continue
        ratios.append(checked / plain)
        own.append(checked_s / plain_s)
        cpu_s.append(told.checked.cpu_s)
        wall_s.append(told.checked_at - told.saved_at)
        usual = median(row.step_s for row in without.rows[FIRST:])
        # Two looks at what the job holds, and the digests of one step: in the rows of the save and of the step after it.
        kept_s.append(max(0.0, told.rows[FIRST].step_s - usual))
    if not ratios:
        return
    print(
        f"a run of {given.steps} steps, one check in it: {median(ratios):.3f} of the seconds without ({', '.join(f'{one:.3f}' for one in ratios)})"
    )
    print(
        f"a spare process: {median(cpu_s):.1f} s of processor time, done {median(wall_s):.1f} s after the checkpoint"
    )
    print(f"the trainer: {1e3 * median(kept_s):.0f} ms for the step that is compared")
    print(
        f"in the long run: {100 / (SHARE + 1):.2f} % of one processor, one check in {SHARE * median(cpu_s) / 60:.0f} min"
    )


if __name__ == "__main__":
    main()
