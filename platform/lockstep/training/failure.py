"""Errors of the job's own code, reported so that its author can act on them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from lockstep.data.loader import process_lost
from lockstep.errors import DeterminismError, JobError, LockstepError
from lockstep.failure_kinds import GPU_MEMORY, infrastructure_error, kind_of, may_pass
from lockstep.job.frames import place_in_job


def as_lockstep_error(error: BaseException, where: str) -> LockstepError:
    """A one-line error for an exception from the job's own code, with its file and line there. A LockstepError is kept as it is.

    `where` is the place in the run, such as `step 7, micro-batch 3, rank 0`.
    """
    if isinstance(error, LockstepError):
        return may_pass(error)
    lost = process_lost(error)  # torch raises it from a signal handler, wherever the training thread is
    if lost is not None:
        return lost
    text = " ".join(str(error).split())
    where += place_in_job(error)
    if isinstance(error, SystemExit):
        return JobError(
            f"the job ended the process ({where}) with sys.exit({'' if error.code is None else repr(error.code)}); "
            "raise an exception instead, or return"
        )
    infrastructure = infrastructure_error(error, where)
    if infrastructure is not None:
        return infrastructure
    operator = re.match(r"(\S+) does not have a deterministic implementation", text)
    if operator:
        return DeterminismError(
            f"determinism strict: {operator[1]} has no deterministic kernel on this device ({where}); "
            "use another operator, or determinism=fast, whose runs cannot be repeated bit for bit"
        )
    if (
        isinstance(error, IndexError) and re.search(r"Target -?\d+ is out of bounds", text)
    ) or "Assertion `t >= 0 && t < n_classes`" in text:
        return JobError(
            f"job.loss: a label is out of range ({where}): {text}; labels must be 0 … classes - 1: "
            "check the labels of the data against the width of the model's output"
        )
    if "Expected to mark a variable ready only once" in text:  # DDP's words, which speak of its own options
        return JobError(
            f"a parameter's gradient came twice in one backward ({where}); where the job calls torch's checkpoint, set use_reentrant=False, "
            "and let no code of the job's call backward"
        )
    if isinstance(error, torch.cuda.OutOfMemoryError) or kind_of(error) == GPU_MEMORY:
        return JobError(
            f"out of GPU memory ({where}): lower batch.micro, or set activation_checkpointing=true; {text[:200]}"
        )
    return JobError(f"the job failed ({where}): {type(error).__name__}: {text or 'no message'}")


@contextmanager
def job_at(where: str) -> Iterator[None]:
    """Raise what the job's own code raises in the block as the error of `as_lockstep_error`."""
    try:
        yield
    except LockstepError:
        raise
    except (Exception, SystemExit) as error:  # a job may call sys.exit()
        raise as_lockstep_error(error, where) from error
