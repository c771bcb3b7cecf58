"""What is checked of a spec before anything is started: likely mistakes, initial weights, and whether the run's files can be written."""

from __future__ import annotations

import os
import re
import sys
import tempfile
import threading
import uuid
from pathlib import Path

from lockstep.checkpoint.storages import open_storage
from lockstep.errors import JobImportError, LockstepError, SpecError, StorageError
from lockstep.spec.fields import Spec


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
    """`initial_weights` as a file: a run id stands for the final weights in that run's folder. SpecError without them."""
    given = spec.initial_weights
    if given is None:
        return spec
    of_run = Path(spec.folder, given, "weights", "final.safetensors")
    path = of_run if re.fullmatch("[0-9a-f]{32}", given) else Path(given)
    if not path.is_file():
        raise SpecError(
            f"initial_weights: there is no file {str(path)!r}; give a safetensors file or the id of a run in record.folder"
        )
    return spec.model_copy(update={"initial_weights": str(path)})


def check_storage(spec: Spec) -> None:
    """Write and remove a file where the run's files will go, and leave nothing there. StorageError where that cannot be done."""
    folders = {"record.folder": str(spec.folder)}
    if "://" not in spec.checkpoint.storage:
        folders["checkpoint.storage"] = spec.checkpoint.storage
    else:
        check_object_storage(spec.checkpoint.storage)
    for field, name in folders.items():
        folder = Path(name)
        while not folder.exists() and folder != folder.parent:
            folder = folder.parent  # what is not there is made once the run exists
        try:
            with tempfile.NamedTemporaryFile(dir=folder, prefix=".lockstep-"):
                pass
        except OSError as error:
            if name == spec.checkpoint.storage:
                field = "checkpoint.storage"
            reason = os.strerror(error.errno) if error.errno else str(error)
            raise StorageError(
                f"{field}: cannot write in {name!r}: {reason}; name a writable folder"
            ) from error


def check_object_storage(uri: str) -> None:
    """Write and remove an object. StorageError where that cannot be done."""
    storage, name = open_storage(uri), f".lockstep-{uuid.uuid4().hex}"
    storage.create(name, b"")
    storage.delete(name)


class JobCheck:
    """Loads the job in a thread of its own, so that a mistake in it is told before a run exists, and a start waits for no import."""

    def __init__(self, spec: Spec, *, elsewhere: bool) -> None:
        self._spec = spec
        self._elsewhere = elsewhere
        """Whether workers run in another environment, which may have modules that this one lacks."""
        self._error: SpecError | None = None
        self._thread = threading.Thread(target=self._load, name="lockstep-import", daemon=True)
        self._thread.start()
        if (
            "torch" in sys.modules
        ):  # then it takes little time, and nothing need be started for a job that has a mistake
            self._thread.join()
            self.raise_found()

    def wait(self) -> None:
        """Wait for the job. Raises the SpecError that every worker would meet."""
        self._thread.join()
        self.raise_found()

    def raise_found(self) -> None:
        """Raise what is wrong with the job. An import that failed in the thread is tried again here, or left to the workers."""
        if self._error is None:
            return
        if isinstance(self._error, JobImportError) and self._error.__cause__ is not None:
            if not self._elsewhere:
                self._check()
            return
        raise self._error

    def _load(self) -> None:
        try:
            self._check()
        except SpecError as error:
            self._error = error
        except LockstepError:
            pass  # the job's own __init__ broke: workers tell it with its traceback

    def _check(self) -> None:
        from lockstep.job.loading import load_job

        load_job(self._spec.job.use, self._spec.job.params)
