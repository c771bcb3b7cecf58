"""What is checked of a spec before anything is started: likely mistakes, initial weights, and whether the run's files can be written."""

from __future__ import annotations

import os
import re
import tempfile
import uuid
from contextlib import suppress
from pathlib import Path

from lockstep.checkpoint.storage.opening import open_storage
from lockstep.checks import problems
from lockstep.errors import JobError, JobImportError
from lockstep.failure_kinds import kind_of
from lockstep.spec.fields import Spec
from lockstep.spec.sweep import SweepSpec

MOST_TRIALS = 100
"""So many trials of a sweep have their params checked before it starts."""


def advise(spec: Spec) -> list[str]:
    """What is allowed and likely not meant."""
    most = spec.batch.micro_batches
    if spec.workers.max > most:
        return [
            f"workers.max = {spec.workers.max} is above the {most} micro-batches of a step; "
            f"at most {most} workers can share a step (lower batch.micro for more)"
        ]
    return []


def find_initial_weights(spec: Spec) -> Spec:
    """`initial_weights` as a path: a run id stands for the final weights in that run's folder. SpecError without them."""
    initial_weights = spec.initial_weights
    if initial_weights is None:
        return spec
    of_run = Path(spec.folder, initial_weights, "weights", "final.safetensors")
    path = of_run if re.fullmatch("[0-9a-f]{32}", initial_weights) else Path(initial_weights)
    if not path.exists():
        raise problems.NO_WEIGHTS(path=str(path))
    return spec.model_copy(update={"initial_weights": str(path)})


def check_storage(spec: Spec) -> None:
    """Write and remove a file where the run's files will go, and leave nothing there. StorageError where that cannot be done."""
    folders = {"record.folder": str(spec.folder)}
    if "://" not in spec.checkpoint.storage:
        folders["checkpoint.storage"] = spec.checkpoint.storage
    else:
        check_object_storage(spec.checkpoint.storage)
    for field, name in folders.items():
        if name == spec.checkpoint.storage:
            field = "checkpoint.storage"
        for folder in (Path(name), *Path(name).parents):
            if folder.is_symlink() and not folder.exists():
                raise problems.BROKEN_LINK(field=field, folder=str(folder), target=str(folder.readlink()))
        try:
            with tempfile.NamedTemporaryFile(dir=existing(Path(name)), prefix=".lockstep-"):
                pass
        except OSError as error:
            reason = os.strerror(error.errno) if error.errno else str(error)
            raise problems.UNWRITABLE(field=field, folder=name, got=reason) from error


def existing(folder: Path) -> Path:
    """`folder`, or the nearest one above it that is there: the rest is made once the run exists."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder


def check_object_storage(uri: str) -> None:
    """Write and remove an object. StorageError where that cannot be done."""
    storage, name = open_storage(uri), f".lockstep-{uuid.uuid4().hex}"
    storage.create(name, b"")
    storage.delete(name)


def check_sweep(sweep: SweepSpec, *, elsewhere: bool) -> None:
    """Load the job of the first trial, and check the params of all that are known, before anything is started. Raises SpecError."""
    from lockstep.job.loading import check_params

    check_job(sweep.trial(sweep.sample(0)), elsewhere=elsewhere)
    if sweep.search == "optuna" or not any(field.startswith("job.") for field in sweep.space):
        return
    for index in range(1, min(sweep.total, MOST_TRIALS)):
        job = sweep.trial(sweep.sample(index)).job
        with suppress(JobImportError):  # told of the first trial, unless the modules are elsewhere
            check_params(job.use, job.params)


def check_job(spec: Spec, *, elsewhere: bool) -> None:
    """Load the job, so that a mistake in its class or its params is told before anything is started.

    Raises SpecError or JobError. Where the workers run `elsewhere`, they may have modules that this machine lacks: an import that fails
    is left to them. So is what a machine failed at, such as a disk: an attempt is tried again, and this is not.
    """
    from lockstep.job.loading import load_job

    try:
        load_job(spec.job.use, spec.job.params)
    except (JobImportError, JobError) as error:
        missing = elsewhere and isinstance(error, JobImportError) and isinstance(error.__cause__, ImportError)
        if not missing and kind_of(error).kind == "job":
            raise
