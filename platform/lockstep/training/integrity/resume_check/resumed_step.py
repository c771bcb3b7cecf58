"""What a spare process does: it builds the run as a resume does, restores the checkpoint, and takes the next step on one worker."""

from __future__ import annotations

import resource
import time
import traceback
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from types import FunctionType
from typing import Any

import torch

from lockstep.checkpoint.errors import BadCheckpointError, LostFileError
from lockstep.checkpoint.runs.run_folder import AttemptOrigin
from lockstep.communication.group import Group
from lockstep.errors import ClusterError, DataError, LockstepError, SpecError, TransientStorageError
from lockstep.failure_kinds import kind_of
from lockstep.job.inputs.variables import reads_of, variables_noted
from lockstep.job.loading import load_job
from lockstep.record.events.union import tell_nobody
from lockstep.spec.fields import Spec
from lockstep.spec.loading import validate
from lockstep.spec.sharding import Sharding
from lockstep.training.failure import as_lockstep_error
from lockstep.training.integrity.resume_check.evidence import Evidence, held_values
from lockstep.training.integrity.resume_check.request import Answer, NotTried, Refused, Request, Taken
from lockstep.training.loop import surroundings
from lockstep.training.setup import prepare
from lockstep.training.start import restore

_ELSEWHERE = (ClusterError, DataError, SpecError, TransientStorageError)
"""Errors that say nothing about a resume, wherever they are raised: of the machine, of files, and of what has changed around the run since."""


def answered(request: Request) -> Answer:
    """What became of a request, whatever that is."""
    began = time.monotonic()
    answer = _answered(request)
    return replace(answer, cpu_s=_cpu_s() if request.device == "cpu" else time.monotonic() - began)


def _answered(request: Request) -> Answer:
    at_step: list[str] = []
    try:
        return Taken(*_taken(request, at_step.append))
    except (BadCheckpointError, LostFileError) as error:  # retention was faster: it goes by newer checkpoints
        return NotTried(f"could not read it: {error}")
    except (Exception, SystemExit) as error:  # noqa: BLE001 - the trainer decides what it means
        where = f"step {request.step + 1}" if at_step else f"resuming after step {request.step}"
        known = as_lockstep_error(error, where)
        if _is_of_a_resume(error, known, at_step):
            return Refused(str(known))
        return NotTried(f"could not try it: {known}")


def alone(spec: Spec) -> Spec:
    """The run's spec for one process that only takes a step: what is changed is placement, so no bit depends on it."""
    return spec.model_copy(
        update={
            "rehearsal": "off",
            "recheck": 0.0,
            "data": spec.data.model_copy(update={"loader_processes": 0}),
            "sharding": Sharding(),
            "record": spec.record.model_copy(update={"digest_every": None, "observe_every": None}),
        }
    )


def _taken(request: Request, at_step: Callable[[str], None]) -> tuple[Evidence, dict[str, str]]:
    spec, device = alone(validate(request.spec)), torch.device(request.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    job = load_job(spec.job.use, spec.job.params)
    with surroundings(spec), variables_noted(reads_of(job)):
        origin = AttemptOrigin(request.run_id, step=request.step)
        run = prepare(spec, job, Group(0, 1, device), tell_nobody, origin)
        values = held_values(run)
        at_step("")
        run.step.digests.note_all_in(request.step + 1)
        with closing(run.loader()) as batches:
            position = next(run.ahead(over=False))
            row = run.step(position, batches).row
        return Evidence.of(run, row), values


def _is_of_a_resume(error: BaseException, known: LockstepError, at_step: list[str]) -> bool:
    """Whether a resume would fail in the same way.

    What fails before the state is restored may fail for a reason of this process: the run holds a port or a lock that the job wants, or its
    source has been edited since.
    """
    if isinstance(known, _ELSEWHERE) or kind_of(error).kind != "job":  # a GPU without memory is a JobError
        return False
    return bool(at_step) or _passed(error, restore)


def _passed(error: BaseException, function: Any) -> bool:
    """Whether an error was raised in a call of the function."""
    assert isinstance(function, FunctionType)
    frames = traceback.walk_tb(error.__traceback__)
    return any(frame.f_code is function.__code__ for frame, _ in frames)


def _cpu_s() -> float:
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime
