"""A run in this process: alone, or as one rank under `torchrun`. No Ray anywhere; a debugger works."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lockstep.checkpoint.run_folder import Origin
from lockstep.checkpoint.runs import pin_aliased
from lockstep.driver.failed import with_run
from lockstep.driver.progress import Progress
from lockstep.driver.result import Result, result_of
from lockstep.driver.signals import StopSignal
from lockstep.errors import LockstepError, RecordError
from lockstep.job.loading import load_job
from lockstep.periodic import repeated
from lockstep.record.environment import git_state
from lockstep.record.ledger import CheckpointRow, EvaluationRow, History, StepRow
from lockstep.record.recorder import Recorder
from lockstep.record.system import sampled
from lockstep.spec.fields import Spec
from lockstep.spec.places import RECORD_OFF
from lockstep.training.group import Group, distributed
from lockstep.training.loop import fit
from lockstep.training.no_record import NoRecord
from lockstep.training.weights import save_weights


class DirectRecord:
    """The record of rank 0 where the recorder lives in the same process."""

    def __init__(
        self,
        recorder: Recorder,
        stop: StopSignal,
        *,
        forks: bool,
        warn: Callable[[str], None] = lambda text: None,
        on_run_id: Callable[[str], None] | None = None,
    ) -> None:
        self.recorder = recorder
        self.warnings: list[str] = []
        self._warn = warn
        self.total_steps: int | None = None
        self._stop = stop
        self._forks = forks
        self._on_run_id = on_run_id

    def started(self, facts: Mapping[str, Any]) -> None:
        self.total_steps = facts["plan"]["total_steps"]
        if (
            self._forks
        ):  # a process forked while the recorder's thread imports MLflow could wait for that import for ever
            self.recorder.run_id()
        if self._on_run_id is not None:
            self._on_run_id(self.recorder.run_id())
        self.recorder.started({**facts, "git": git_state(Path.cwd())})

    def loaded(self) -> None: ...

    def saving(self) -> bool:
        return False

    def restored(self, history: History) -> None:
        self.recorder.restored(history)

    def step(self, row: StepRow) -> None:
        self.recorder.steps([row])

    def evaluation(self, row: EvaluationRow) -> None:
        self.recorder.evaluation(row)

    def straggling(self, text: str) -> None:
        self.warn(text)

    def finished(self, summary: Mapping[str, Any], weights: Mapping[str, Mapping[str, Tensor]]) -> None:
        self.recorder.finished(
            {**summary, "signal": self._stop.number}, save_weights(self.recorder.run_folder(), weights)
        )

    def stopping(self) -> bool:
        """A signal came, or the run cannot be recorded anywhere."""
        return self._stop.asked or (not self.recorder.opened and self.recorder.failure() is not None)

    def run_id(self) -> str:
        return self.recorder.run_id()

    def checkpoint(self, row: CheckpointRow) -> None:
        self.recorder.checkpoint(row)

    def alive(self) -> None: ...

    def warn(self, text: str) -> None:
        self.warnings.append(text)
        self._warn(f"warning: {text}")


def under_torchrun() -> bool:
    """Whether this process was started by `torchrun` as one of several."""
    return "TORCHELASTIC_RUN_ID" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1


def train_here(
    spec: Spec,
    progress: Progress,
    stop: StopSignal,
    origin: Origin,
    *,
    began_at: float,
    warnings: list[str],
    on_run_id: Callable[[str], None] | None = None,
) -> Result | None:
    """Train in this process. Under torchrun every rank calls it, and all but rank 0 get None."""
    device = _device(spec)
    backend = "nccl" if device.type == "cuda" else "gloo"
    with distributed(backend) if under_torchrun() else nullcontext():
        return _train_as(
            spec,
            Group.join(device),
            progress,
            stop,
            origin,
            began_at=began_at,
            warnings=warnings,
            on_run_id=on_run_id,
        )


def _device(spec: Spec) -> torch.device:
    if torch.cuda.is_available() and spec.workers.gpus_each != 0:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
        return device
    return torch.device("cpu")


def _train_as(
    spec: Spec,
    group: Group,
    progress: Progress,
    stop: StopSignal,
    origin: Origin,
    *,
    began_at: float,
    warnings: list[str],
    on_run_id: Callable[[str], None] | None,
) -> Result | None:
    if group.rank > 0:
        fit(spec, load_job(spec.job.use, spec.job.params), group, NoRecord(stop), origin)
        return None
    apart = spec.record.uri != RECORD_OFF  # MLflow's part would take this process some 100 ms of each second
    record = DirectRecord(
        Recorder(
            spec, run_id=origin.run_id, on_aliases=partial(pin_aliased, spec.checkpoint.storage), apart=apart
        ),
        stop,
        forks=spec.data.loader_processes > 0 and not apart,
        warn=progress.say,
        on_run_id=on_run_id,
    )
    recorder = record.recorder
    recorder.start()
    try:
        with _shown(record, progress), sampled(partial(recorder.system, "node-0")):
            summary = fit(spec, load_job(spec.job.use, spec.job.params), group, record, origin)
    except BaseException as error:
        signalled = isinstance(error, KeyboardInterrupt)
        recorder.failed(
            "ended at once by a signal" if signalled else str(error),
            traceback.format_exc(),
            status="KILLED" if signalled else "FAILED",
        )
        with suppress(RecordError):  # what ended the run is told; that it could not be recorded comes second
            recorder.close()
        if isinstance(error, LockstepError) and recorder.opened:
            raise with_run(error, recorder.run_id(), spec.folder) from error
        raise
    recorder.close()
    if recorder.violation:
        record.warn(recorder.violation)
    return result_of(
        summary,
        run_id=recorder.run_id(),
        url=recorder.url(),
        tracking_uri=spec.record.uri or "",
        folder=str(recorder.run_folder()),
        began_at=began_at,
        warnings=[*warnings, *record.warnings],
        attempts=origin.attempt,
        signal_number=stop.number,
    )


def _shown(record: DirectRecord, progress: Progress) -> AbstractContextManager[None]:
    """Show the newest rows twice a second, from a thread of its own."""

    def show() -> None:
        latest = record.recorder.latest
        progress.show(latest.step, latest.evaluation, record.total_steps)

    return repeated(lambda: show, 0.5, "lockstep-progress")
