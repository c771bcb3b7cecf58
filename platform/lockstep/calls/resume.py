"""Taking up a run that has ended early, or starting another one from its state.

The run is held before the code that continues it is imported (`continuation`), so a command that is refused has not waited for torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, Unpack

from lockstep.calls import problems
from lockstep.calls.leased_storages import leads, leased_run, lies_where, refuse_leased_run
from lockstep.calls.lost_storage import refuse_lost
from lockstep.calls.subprocess_call import apart, unfit
from lockstep.checkpoint.runs.run_checkpoints import check_step, steps_of
from lockstep.checkpoint.runs.run_folder import AttemptOrigin
from lockstep.checkpoint.storage.opening import open_storage
from lockstep.driver.options import CallOptions, RunOptions, options_of_call
from lockstep.driver.result import Result
from lockstep.record.mirror.run_store import StoredRun
from lockstep.record.mirror.stores import find_run
from lockstep.record.redaction import redacted_fields
from lockstep.spec.fields import Fork, Spec
from lockstep.spec.loading import load_spec
from lockstep.spec.locations import tracking_uri


def resume(
    run_id: str,
    overrides: Iterable[str] = (),
    *,
    step: int | None = None,
    fork: bool = False,
    uri: str | None = None,
    takeover: bool = False,
    **options: Unpack[CallOptions],
) -> Result:
    """Continue a run from its newest good checkpoint, or from that of `step`, as the same run in the record.

    `overrides` may change placement: workers, storage, loader processes. With `fork` they may change anything, and a
    new run starts from the state. A finished run is left as it is, and its result is returned. The run is looked
    up in the MLflow store at `uri`; with `off`, in the folder that `record.folder` or `checkpoint.storage` names.
    SpecError if another command holds the run; with `takeover` that command is asked to end after its next step, and is
    cut off if it does not answer. The other options are as for `train`. Raises LockstepError.
    """
    how = options_of_call(**options)
    arguments: dict[str, Any] = {"step": step, "fork": fork, "uri": uri, "takeover": takeover}
    if how.local and unfit():
        return apart(partial(resume_with, run_id=run_id, overrides=list(overrides), **arguments), how)
    return resume_with(how, run_id, list(overrides), **arguments)


def resume_with(
    options: RunOptions,
    run_id: str,
    overrides: Sequence[str],
    *,
    step: int | None,
    fork: bool,
    uri: str | None,
    takeover: bool,
) -> Result:
    """As `resume`, with the options of the call as one value."""
    if not (fork or takeover):
        refuse_leased_run(run_id, overrides)
    stored_run, recorded_spec, spec = recorded_and_asked(run_id, overrides, uri)
    if fork:
        from lockstep.calls.train import run_attempt

        steps = steps_of(recorded_spec.checkpoint.storage, run_id)
        if step is not None:
            check_step(run_id, step, steps)
        elif not steps:
            raise problems.NOTHING_TO_FORK(
                run=run_id, storage=open_storage(recorded_spec.checkpoint.storage).shown
            )
        options.progress.say(f"a new run starts from step {step or steps[0]} of run {run_id}")
        parent = Fork(run=run_id, step=step, storage=recorded_spec.checkpoint.storage)
        forked = spec.model_copy(update={"fork": parent, "initial_weights": None})
        return run_attempt(forked, AttemptOrigin(), options)
    if takeover or stored_run.status == "FINISHED":
        from lockstep.calls.continuation import finished, refuse_changes

        refuse_changes(run_id, recorded_spec, spec)  # before the one that works on it is asked to end
        if stored_run.status == "FINISHED":
            return finished(stored_run, spec, step, options)
    if leads():
        refuse_lost(spec, run_id)  # before anything is made where the storage should be
    hidden = "checkpoint.storage" in redacted_fields(stored_run.spec)
    recorded = None if hidden else recorded_spec.checkpoint.storage
    with leased_run(spec, run_id, options.progress, takeover=takeover, recorded=recorded) as lease:
        from lockstep.calls.continuation import continue_run

        return continue_run(run_id, spec, lease, options, step=step)


def recorded_and_asked(
    run_id: str, overrides: Sequence[str], uri: str | None
) -> tuple[StoredRun, Spec, Spec]:
    """A run as its store has it, its spec, and that with overrides. SpecError where there is no such run."""
    store = tracking_uri(uri)
    stored_run = find_run(store, run_id, lies_where(overrides).folder)
    stored_run.spec["record"] = {**stored_run.spec.get("record", {}), "uri": store}
    return stored_run, load_spec(stored_run.spec), load_spec(stored_run.spec, overrides, uri=uri)
