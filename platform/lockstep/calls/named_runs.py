"""Runs that whoever starts them gives a name: the same command begins the run, and later goes on with it.

What retries a command, Kubernetes or a queue, can't know the run id that the first try was given. So the name is kept
beside the checkpoints, `<storage>/named-<name>/run_id`, as soon as the run exists.
"""

from __future__ import annotations

import re
from typing import Any

from lockstep.calls.resumption import continue_run
from lockstep.calls.training import train
from lockstep.checkpoint.names import give_name, run_of_name
from lockstep.checkpoint.storages import open_storage
from lockstep.driver.result import Result
from lockstep.errors import SpecError
from lockstep.record.stores import find_run
from lockstep.spec.fields import Spec


def train_named(spec: Spec, name: str | None, **options: Any) -> Result:
    """Go on with the run of this name in `spec`'s storage, or begin it; without a name begin one. `options` are those of `train`.

    A run that is finished is left as it is. SpecError where the run that has the name is another one than `spec` says.
    """
    if name is None:
        return train(spec, **options)
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", name):
        raise SpecError(f"run: got {name!r}, wanted a name of letters, digits, dots, dashes and underscores")
    storage = open_storage(spec.checkpoint.storage)
    run_id = run_of_name(storage, name)
    if run_id is None:
        return train(spec, on_run_id=lambda found: give_name(storage, name, found), **options)
    found = find_run(spec.record.uri or "", run_id, spec.folder)
    return continue_run(found, spec, step=None, **options)
