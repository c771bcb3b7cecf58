"""What tests call in a process of its own."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from lockstep.driver.options import RunOptions
from lockstep.driver.progress import ProgressLine
from lockstep.driver.result import Result
from lockstep.driver.signals import StopSignal
from lockstep.errors import JobError, LockstepError, SpecError


def result(status: str, step: int, number: int | None = None) -> Result:
    none = dict.fromkeys(
        ("best_digest", "best_step", "first_step_s", "steps_per_s", "samples_per_s", "data_wait_share")
    )
    return Result(
        run_id="a" * 32, status=status, identity="", step=step, epoch=1, samples=8, skipped=0, attempts=1, workers=1,
        metrics={"eval/<loss>": 0.25}, weights_digest="d1", url="", tracking_uri="off", folder="runs", signal_number=number, **none,
    )  # fmt: skip


def environment(options: RunOptions, names: list[str]) -> Result:
    """Say what these variables are."""
    for name in names:
        options.progress.say(f"{name}={os.environ.get(name)}")
    options.progress.say(f"same set {list({'a', 'b', 'c', 'd', 'e', 'f'})}")
    return result("FINISHED", 3)


def showing(options: RunOptions, line: ProgressLine, trials: list[dict[str, Any]]) -> Result:
    """Show how far a run is, and then the trials of a sweep."""
    options.progress.show(line)
    options.progress.table("1 of 2 trials", trials)
    return result("FINISHED", 3)


def until_stopped(options: RunOptions, left: Path, patient: bool) -> Result:
    """A run of a step that lasts until a signal comes; one that is not patient takes another one to end."""
    with StopSignal() as stop:
        options.progress.say(f"pid {os.getpid()}")
        while not stop.asked or not patient:
            time.sleep(0.01)
        left.write_text(f"stopped by {stop.number}")
        return result("KILLED", 1, stop.number)


def refused(options: RunOptions) -> Result:
    raise SpecError("batch.micro: got 48")


def broken(options: RunOptions) -> Result:
    raise ZeroDivisionError("by zero")


def gone(options: RunOptions) -> Result:
    os._exit(7)


class TooLong(JobError):
    def __init__(self, what: str, size: int) -> None:
        super().__init__(f"{what}: got {size}")


def derived(options: RunOptions) -> Result:
    raise TooLong("length", 5)


CALLS = {
    "refused": (refused, SpecError),
    "broken": (broken, LockstepError),
    "derived": (derived, JobError),
    "gone": (gone, LockstepError),
}
