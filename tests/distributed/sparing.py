"""Runs whose first checkpoint is tried by a spare process, for tests: forked from one that has the slow imports behind it, unless the start is tested."""

from __future__ import annotations

import pickle
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import lockstep.training.integrity.resume_check.spare_check
from lockstep.checkpoint.runs.run_folder import AttemptOrigin
from lockstep.communication.group import Group
from lockstep.errors import LockstepError
from lockstep.job.loading import load_job
from lockstep.record.events.union import Event, ResumeChecked
from lockstep.record.ledger.rows import StepRow
from lockstep.record.ledger.tables import DETERMINISTIC
from lockstep.spec.loading import load_spec
from lockstep.training.integrity.resume_check.request import Answer, Request
from lockstep.training.integrity.resume_check.resumed_step import answered
from lockstep.training.loop import fit
from tests.distributed.training import Document, Kept, bits
from tests.forked import Forked

RUN, STEP = "run", 20
"""The run, and the step of its first checkpoint."""

MOST_STEPS = 20_000
MOST_S = 240.0
"""A run that has heard of no check by then is asked to stop: on a crowded machine other processes wait for their turn."""

PAUSE_S = 0.01
"""What the trainer rests in each step after the one that is compared: on a busy machine the other process gets its turn."""


class ForkedSpare:
    """A spare process that is forked from one that has never seen a job."""

    def __init__(self, request: Request) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="spare-")
        self._path = Path(self._folder.name, "answer")
        self._process = Forked(_answer, request, str(self._path), env=request.context.environment)

    def ended(self) -> bool:
        return self._process.poll() is not None

    def answer(self) -> Answer | str:
        if not self._path.is_file():
            self._process.wait()
            return f"ended with {self._process.returncode}"
        answer: Answer = pickle.loads(self._path.read_bytes())
        return answer

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        self._folder.cleanup()


def _answer(request: Request, path: str) -> None:
    content = pickle.dumps(answered(request))
    Path(path).write_bytes(content)


@dataclass
class Ended:
    """What became of a run: how far it came, what was told, and the error that ended it."""

    step: int = 0
    checked: list[int] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    error: LockstepError | None = None
    rows: list[Any] = field(default_factory=list)
    """The deterministic columns of each step."""
    checkpoints: list[int] = field(default_factory=list)
    took_s: float = 0.0


class Listening(Kept):
    """Asks the run to stop once its check is through, or came to nothing, or after `most` steps."""

    def __init__(self, most: int, pause_s: float) -> None:
        super().__init__([], None, RUN)
        self.checked: list[int] = []
        self._most, self._pause_s, self._until = most, pause_s, time.monotonic() + MOST_S

    def tell(self, event: Event) -> None:
        if isinstance(event, StepRow):
            self.steps.append(event)
        else:
            super().tell(event)
        if isinstance(event, ResumeChecked):
            self.checked.append(event.step)
        if isinstance(event, StepRow) and event.step > STEP + 1:
            time.sleep(self._pause_s)

    def stop(self) -> bool:
        told = any(text.startswith("resume check") for text in self.warnings)
        return (
            bool(self.checked) or told or len(self.steps) >= self._most - 1 or time.monotonic() > self._until
        )


def document(job: Document, storage: Path, **more: Any) -> Document:
    """A spec whose first checkpoint, of step `STEP`, is tried as soon as it is there."""
    checkpoint = {
        "storage": str(storage),
        "every": {"steps": STEP},
        "keep_last": 1000,
        "verify_after_s": 0.0,
        **more.pop("checkpoint", {}),
    }
    return {
        "length": {"steps": 100_000},
        "evaluate": {"every": {"steps": 100_000}},
        **job,
        "checkpoint": checkpoint,
        "record": {"uri": "off", "digest_every": None},
        **more,
    }


def run(
    spec: Document, *, most: int = MOST_STEPS, pause_s: float = PAUSE_S, origin: AttemptOrigin | None = None
) -> Ended:
    """Train a run until its check has come to something, or for `most` steps."""
    parsed = load_spec(spec)
    record, began, ended = Listening(most, pause_s), time.monotonic(), Ended()
    job = load_job(parsed.job.use, parsed.job.params)
    group = Group.join(torch.device("cpu"))
    try:
        fit(parsed, job, group, record.tell, record, origin or AttemptOrigin())
    except LockstepError as error:
        ended.error = error
    finally:
        group.close()
    ended.step, ended.took_s = len(record.steps), time.monotonic() - began
    ended.checked, ended.warnings = record.checked, record.warnings
    ended.rows = [bits({name: getattr(row, name) for name in DETERMINISTIC}) for row in record.steps]
    ended.checkpoints = [row.step for row in record.checkpoints if row.uri is not None]
    return ended


@contextmanager
def forked() -> Iterator[None]:
    """Spare processes are forked."""
    with mock.patch.object(lockstep.training.integrity.resume_check.spare_check, "start_spare", ForkedSpare):
        yield
