"""Runs with a name that the user gives: the same command starts the run, and later resumes it.

What retries a command, Kubernetes or a queue, can't know the run id that the first try was given. So the name is kept
beside the checkpoints, `<storage>/named-<name>/run_id`, as soon as the run exists. First the run is held, and only then
what trains it is imported.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import ExitStack

from lockstep.calls import problems
from lockstep.calls.leased_storages import leads, leased_run
from lockstep.checkpoint.runs.lease import leased
from lockstep.checkpoint.runs.names import folder_of, give_name, run_of_name
from lockstep.checkpoint.runs.run_folder import AttemptOrigin
from lockstep.checkpoint.storage.opening import open_storage
from lockstep.driver.options import RunOptions
from lockstep.driver.result import Result
from lockstep.record.mirror.stores import find_run
from lockstep.spec.fields import Spec
from lockstep.spec.loading import load_spec

NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}"
"""What the name of a run may be."""


def train_named(
    options: RunOptions,
    spec: Spec,
    name: str | None,
    *,
    takeover: bool = False,
    on_run_id: Callable[[str], None] | None = None,
) -> Result:
    """Resume the run of this name in `spec`'s storage, or start it; without a name start a new run. What trains goes through here.

    A finished run is left as it is. SpecError if the run of that name has another spec, or if another command
    holds it; with `takeover` that command is asked to end.
    """
    if name is None and takeover:
        raise problems.TAKEOVER_OF_NOTHING()
    if name is None:
        from lockstep.calls.train import run_attempt

        return run_attempt(spec, AttemptOrigin(), options, on_run_id=on_run_id)
    if not re.fullmatch(NAME, name):
        raise problems.RUN_NAME(got=name)
    storage = open_storage(spec.checkpoint.storage)
    run_id = run_of_name(storage, name)
    if run_id is None:
        with ExitStack() as stack:
            if leads():
                stack.enter_context(
                    leased(storage, folder_of(name), f"the start of run {name!r}", takeover=takeover)
                )
            run_id = run_of_name(storage, name)  # again: another command may have begun it meanwhile
            if run_id is None:
                from lockstep.calls.train import run_attempt

                def begun(new_run_id: str) -> None:
                    give_name(storage, name, new_run_id)
                    stack.close()  # from here on the run itself is held
                    if on_run_id is not None:
                        on_run_id(new_run_id)

                return run_attempt(spec, AttemptOrigin(), options, on_run_id=begun)
    if takeover:
        from lockstep.calls.continuation import refuse_changes

        # Before the one that works on it is asked to end.
        recorded = find_run(spec.record.uri or "", run_id, spec.folder)
        refuse_changes(run_id, load_spec(recorded.spec), spec)
    with leased_run(spec, run_id, options.progress, takeover=takeover) as lease:
        from lockstep.calls.continuation import continue_run

        if on_run_id is not None:
            on_run_id(run_id)
        return continue_run(run_id, spec, lease, options)
