"""A run in this process: alone, or as one rank under `torchrun`. No Ray anywhere; a debugger works."""

from __future__ import annotations

import os
import threading
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lockstep.errors import LockstepError
from lockstep.job import load_job
from lockstep.orchestration.progress import Progress
from lockstep.orchestration.result import Result, result_of
from lockstep.orchestration.signals import StopSignal
from lockstep.record.environment import git_state
from lockstep.record.ledger import EvaluationRow, StepRow
from lockstep.record.recorder import Recorder
from lockstep.spec import Spec
from lockstep.train.group import Group, distributed
from lockstep.train.loop import fit
from lockstep.train.weights import save_weights


class NoRecord:
    """The record of every rank but 0; under torchrun a rank hears of signals by itself."""

    def __init__(self, stop: StopSignal | None = None) -> None:
        self._stop = stop

    def started(self, facts: Mapping[str, Any]) -> None: ...

    def step(self, row: StepRow) -> None: ...

    def evaluation(self, row: EvaluationRow) -> None: ...

    def finished(self, summary: Mapping[str, Any], weights: Mapping[str, Mapping[str, Tensor]]) -> None: ...

    def stopping(self) -> bool:
        return self._stop is not None and self._stop.asked


class DirectRecord:
    """The record of rank 0 where the recorder lives in the same process."""

    def __init__(self, recorder: Recorder, stop: StopSignal) -> None:
        self.recorder = recorder
        self._stop = stop

    def started(self, facts: Mapping[str, Any]) -> None:
        self.recorder.started({**facts, "git": git_state(Path.cwd())})

    def step(self, row: StepRow) -> None:
        self.recorder.steps([row])

    def evaluation(self, row: EvaluationRow) -> None:
        self.recorder.evaluation(row)

    def finished(self, summary: Mapping[str, Any], weights: Mapping[str, Mapping[str, Tensor]]) -> None:
        self.recorder.finished(summary, save_weights(self.recorder.run_folder(), weights))

    def stopping(self) -> bool:
        return self._stop.asked


def under_torchrun() -> bool:
    """Whether this process was started by `torchrun` as one of several."""
    return "TORCHELASTIC_RUN_ID" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1


def train_here(
    spec: Spec, progress: Progress, stop: StopSignal, *, began_at: float, warnings: list[str]
) -> Result | None:
    """Train in this process. Under torchrun every rank calls it, and all but rank 0 get None."""
    device = _device(spec)
    if not under_torchrun():
        return _train_as(spec, Group.join(device), progress, stop, began_at=began_at, warnings=warnings)
    with distributed("nccl" if device.type == "cuda" else "gloo"):
        return _train_as(spec, Group.join(device), progress, stop, began_at=began_at, warnings=warnings)


def _device(spec: Spec) -> torch.device:
    if torch.cuda.is_available() and spec.workers.gpus_each != 0:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
        return device
    return torch.device("cpu")


def _train_as(
    spec: Spec, group: Group, progress: Progress, stop: StopSignal, *, began_at: float, warnings: list[str]
) -> Result | None:
    if group.rank > 0:
        fit(spec, load_job(spec.job.use, spec.job.params), group, NoRecord(stop))
        return None
    job = load_job(spec.job.use, spec.job.params)
    recorder = Recorder(spec)
    recorder.start()
    try:
        with _shown(recorder, progress):
            summary = fit(spec, job, group, DirectRecord(recorder, stop))
    except KeyboardInterrupt:
        recorder.failed("stopped by a signal", status="KILLED")
        raise
    except LockstepError as error:
        recorder.failed(str(error), traceback.format_exc())
        raise
    finally:
        recorder.close()
    return result_of(
        summary,
        run_id=recorder.run_id(),
        url=recorder.url(),
        tracking_uri=spec.record.uri or "",
        folder=str(recorder.run_folder()),
        began_at=began_at,
        warnings=warnings,
        signal_number=stop.number,
    )


@contextmanager
def _shown(recorder: Recorder, progress: Progress) -> Iterator[None]:
    """Show the recorder's newest rows, twice a second, from a thread of its own."""
    over = threading.Event()

    def show() -> None:
        while not over.wait(0.5):
            latest = recorder.latest
            progress.show(latest.step, latest.evaluation, None)

    thread = threading.Thread(target=show, name="lockstep-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
