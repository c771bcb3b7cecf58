"""The calls of Lockstep: what the command line does, for Python."""

from __future__ import annotations

import os
import re
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from lockstep.checkpoint.run_folder import Origin
from lockstep.checkpoint.storages import open_storage
from lockstep.errors import SpecError, StorageError
from lockstep.orchestration.progress import Progress, Silent
from lockstep.orchestration.result import Result
from lockstep.orchestration.signals import StopSignal
from lockstep.source import check_job_source
from lockstep.spec import Spec, load_spec


def train(
    spec: Spec | str | Path | Mapping[str, Any],
    overrides: Iterable[str] = (),
    *,
    local: bool = False,
    address: str | None = None,
    uri: str | None = None,
    progress: Progress | None = None,
    verbose: bool = False,
    began_at: float | None = None,
    on_run_id: Callable[[str], None] | None = None,
    chaos: str | None = None,
) -> Result:
    """Train one run to its end.

    `spec` is a Spec, a YAML file or plain data; `overrides` are `key=value` strings. `local` trains in this one
    process without Ray (or as one rank under torchrun); else `address` names the Ray cluster. A SIGTERM or SIGINT
    stops the run after the next step, and its result says KILLED. `on_run_id` is called once the run exists. `chaos`, such
    as `worker:0.02`, kills parts of the run on purpose. Raises LockstepError.
    """
    progress = progress or Silent()
    loaded = spec if isinstance(spec, Spec) else load_spec(spec, overrides, uri=uri)
    return run_attempt(
        loaded,
        Origin(),
        progress,
        local=local,
        address=address,
        verbose=verbose,
        began_at=began_at or time.time(),
        on_run_id=on_run_id,
        chaos=chaos,
    )


def run_attempt(
    spec: Spec,
    origin: Origin,
    progress: Progress,
    *,
    local: bool,
    address: str | None,
    verbose: bool,
    began_at: float,
    on_run_id: Callable[[str], None] | None = None,
    chaos: str | None = None,
) -> Result:
    """Train one attempt of a run, to its end or to a signal."""
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    warnings = advise(spec)
    for text in warnings:
        progress.say(f"warning: {text}")
    spec = find_initial_weights(spec)
    check_job_source(spec.job.use)
    check_storage(spec)
    if local and chaos is not None:
        raise SpecError("chaos: kills what runs on Ray; leave out --local")
    if local:
        from lockstep.orchestration.local import train_here

        with StopSignal() as stop:
            result = train_here(
                spec, progress, stop, origin, began_at=began_at, warnings=warnings, on_run_id=on_run_id
            )
        if result is None:
            raise SystemExit(0)  # a rank of torchrun that has nothing to tell
        return result
    from lockstep.orchestration.ray_trainer import train_on_ray

    with StopSignal() as stop:
        return train_on_ray(
            spec,
            progress,
            stop,
            origin,
            address=address,
            verbose=verbose,
            began_at=began_at,
            warnings=warnings,
            on_run_id=on_run_id,
            chaos=chaos,
        )


def advise(spec: Spec) -> list[str]:
    """What is allowed and likely not meant."""
    most = spec.batch.micro_batches
    if spec.workers.max > most:
        return [
            f"workers.max = {spec.workers.max} is above the {most} micro-batches of a step; "
            f"{most} workers are the most that can share it (lower batch.micro for more)"
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
    """Write and remove a file where the run's files will go. StorageError where that cannot be done."""
    folders = {"record.folder": str(spec.folder)}
    if "://" not in spec.checkpoint.storage:
        folders["checkpoint.storage"] = spec.checkpoint.storage
    else:
        check_object_storage(spec.checkpoint.storage)
    for field, name in folders.items():
        folder = Path(name)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=folder, prefix=".lockstep-"):
                pass
        except OSError as error:
            if name == spec.checkpoint.storage:
                field = "checkpoint.storage"
            reason = os.strerror(error.errno) if error.errno else str(error)
            raise StorageError(
                f"{field}: cannot write in {name!r}: {reason}; name a folder that can be written"
            ) from error


def check_object_storage(uri: str) -> None:
    """Write and remove an object. StorageError where that cannot be done."""
    storage, name = open_storage(uri), f".lockstep-{uuid.uuid4().hex}"
    storage.create(name, b"")
    storage.delete(name)
