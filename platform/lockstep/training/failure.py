"""Errors of the job's own code, reported so that its author can act on them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from lockstep.data.loader import process_lost
from lockstep.errors import LockstepError
from lockstep.failure_kinds import GPU_MEMORY, infrastructure_error, kind_of, may_pass
from lockstep.job.frames import place_in_job
from lockstep.training import problems


def as_lockstep_error(error: BaseException, where: str, *, check: str = "") -> LockstepError:
    """A one-line error for an exception from the job's own code, with its file and line there. A LockstepError is kept as it is.

    `where` is the place in the run, such as `step 7, micro-batch 3, rank 0`; `check` is the check that it belongs to, where no other does.
    """
    if isinstance(error, LockstepError):
        lockstep_error = may_pass(error)
    else:
        lockstep_error = _error_of(error, where + place_in_job(error))
    lockstep_error.check = lockstep_error.check or check
    return lockstep_error


def _error_of(error: BaseException, where: str) -> LockstepError:
    lost = process_lost(error)  # torch raises it from a signal handler, wherever the training thread is
    if lost is not None:
        return lost
    text = " ".join(str(error).split())
    if isinstance(error, SystemExit):
        return problems.JOB_EXITED(where=where, got="" if error.code is None else repr(error.code))
    infrastructure = infrastructure_error(error, where)
    if infrastructure is not None:
        return infrastructure
    # The texts below are torch's own: it raises them as errors of no kind of their own.
    operator = re.match(r"(\S+) does not have a deterministic implementation", text)
    if operator:
        return problems.NO_DETERMINISTIC_KERNEL(got=operator[1], where=where)
    if (
        isinstance(error, IndexError) and re.search(r"Target -?\d+ is out of bounds", text)
    ) or "Assertion `t >= 0 && t < n_classes`" in text:
        return problems.LABEL_RANGE(where=where, got=text)
    if "Expected to mark a variable ready only once" in text:  # DDP's words, which speak of its own options
        return problems.GRADIENT_TWICE(where=where)
    if "Default process group has not been initialized" in text:
        return problems.NO_PROCESS_GROUP(where=where, kind=type(error).__name__)
    if isinstance(error, torch.cuda.OutOfMemoryError) or kind_of(error) == GPU_MEMORY:
        return problems.GPU_MEMORY(where=where, got=text[:200])
    in_place = "has been modified by an inplace operation" in text
    problem = problems.CHANGED_IN_PLACE if in_place else problems.JOB_FAILED
    return problem(where=where, kind=type(error).__name__, got=text or "no message")


@contextmanager
def job_at(where: str) -> Iterator[None]:
    """Raise what the job's own code raises in the block as the error of `as_lockstep_error`."""
    try:
        yield
    except LockstepError:
        raise
    except (Exception, SystemExit) as error:  # a job may call sys.exit()
        raise as_lockstep_error(error, where) from error
