"""What is done once a run is held: it goes on, or is left as it is where it is finished.

Imported when another command does not work on the run, and not before: with torch it takes seconds, in which a second
command has long been told.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

from lockstep.calls import problems
from lockstep.calls.leased_storages import leads
from lockstep.calls.lost_storage import attempts_recorded, refuse_lost
from lockstep.calls.train import run_attempt
from lockstep.checkpoint.runs.lease import Lease
from lockstep.checkpoint.runs.run_checkpoints import (
    adopt,
    aside,
    check_step,
    claim,
    clear_asides,
    on_disk,
    steps_of,
    whole_steps,
)
from lockstep.checkpoint.runs.run_folder import AttemptOrigin
from lockstep.data.table_pins import pins_of
from lockstep.driver.finished_run import refuse_doubtful
from lockstep.driver.options import RunOptions
from lockstep.driver.progress import Progress
from lockstep.driver.result import Result, result_of
from lockstep.errors import StorageError
from lockstep.files import private
from lockstep.job.identity import PARAM, changed_fields, shown
from lockstep.job.loading import check_params
from lockstep.job.recorded_source import imported_from
from lockstep.proof.recorded_run import recorded_fields, recorded_main
from lockstep.record.mirror.run_store import StoredRun
from lockstep.record.mirror.stores import find_copies, find_run
from lockstep.record.redaction import redacted_fields
from lockstep.spec.fields import Spec
from lockstep.spec.loading import load_spec


def continue_run(
    run_id: str,
    spec: Spec,
    lease: Lease | None,
    options: RunOptions,
    *,
    step: int | None = None,
) -> Result:
    """Continue a recorded run, which this process holds, as `spec` places it. SpecError where `spec` is another run."""
    store = spec.record.uri or ""
    stored_run = find_run(store, run_id, spec.folder)  # now that no other command changes it
    refuse_changes(run_id, load_spec(stored_run.spec), spec)
    if stored_run.status == "FINISHED":
        return finished(stored_run, spec, step, options)
    origin = AttemptOrigin(run_id, step=step)
    if leads():
        lost = not steps_of(spec.checkpoint.storage, run_id)
        if on_disk(spec.checkpoint.storage) is not None:
            fetch_copy(spec, store, run_id, step, options.progress)
        refuse_lost(spec, run_id, copies=False)
        used = attempts_recorded(spec, run_id, in_store=lost)  # else the storage itself knows them
        origin = claim(spec.checkpoint.storage, run_id, step, used + 1)
    newest = next(iter(steps_of(spec.checkpoint.storage, run_id)), None)
    if step is not None:
        start = f"its checkpoint of step {step}"
    elif newest is not None:  # a damaged one is passed over when it is read
        start = f"its newest good checkpoint (the newest is of step {newest})"
    else:
        start = "the beginning: it has no checkpoint"
    if newest is None:  # else a checkpoint says so
        versions = pins_of(recorded_fields(store, run_id, spec.folder / run_id))
        origin = replace(origin, table_versions=versions)
    options.progress.say(f"run {run_id} goes on from {start}")
    return run_attempt(spec, origin, options, lease=lease)


def finished(stored_run: StoredRun, spec: Spec, step: int | None, options: RunOptions) -> Result:
    """The result of a run that is left as it is. SpecError where it has no checkpoint of `step`, RecordError where it is not what it says."""
    run_id = stored_run.run_id
    refuse_doubtful(stored_run, spec.record.uri or "", spec.folder)
    if step is not None:
        copies = [copy.step for copy in find_copies(spec.record.uri or "", run_id)]
        check_step(run_id, step, [*{*steps_of(spec.checkpoint.storage, run_id), *copies}])
    options.progress.say(
        f"run {run_id} is finished; nothing is left to do (--fork starts a new run from its state)"
    )
    return result_of(
        {"first_step_at": None, "stopped": False, **stored_run.summary},
        run_id=run_id,
        url=stored_run.url,
        tracking_uri=spec.record.uri or "",
        folder=str(spec.folder / run_id),
        began_at=options.began_at,
        start={},
        warnings=[],
        attempts=int(stored_run.summary.get("attempts", 1)),
        signal_number=None,
    )


def refuse_changes(run_id: str, recorded: Spec, spec: Spec) -> None:
    """SpecError for the first field that a resume may not change, and for one whose secret the record has not and nobody gives."""
    hidden = set(redacted_fields(recorded.document()))
    for name in redacted_fields({**spec.document(), "record": {}}):
        raise problems.SECRET_FIELD(field=name, run=run_id)
    source = recorded_main(recorded, run_id)
    with imported_from(source) if source else nullcontext():
        changed = changed_fields(recorded, spec)
        if recorded.job.params != spec.job.params:
            check_params(spec.job.use, spec.job.params)
    for name, old, new in changed:
        if any(name.startswith(field) for field in hidden):
            continue  # the workers compare it with the checkpoint
        was = "not set" if old is None and name.startswith(PARAM) else shown(old)
        raise problems.FIELD_CHANGED(field=name, wanted=was, run=run_id, got=shown(new))


def fetch_copy(spec: Spec, store: str, run_id: str, step: int | None, progress: Progress) -> None:
    """Where the storage has lost the run's newest checkpoint, or that of `step`: download the newest good copy that its record has.

    Lost is what is not there and what lacks a file or a part of one.
    """
    from lockstep.checkpoint.reader import checkpoint_at, verify

    storage = spec.checkpoint.storage
    clear_asides(storage, run_id)
    newest = next(iter(steps_of(storage, run_id)), None)
    complete_step = next(
        (candidate for candidate in whole_steps(storage, run_id) if step in {None, candidate}), None
    )
    if complete_step is not None and complete_step in {step, newest}:
        return
    for copy in find_copies(store, run_id):
        if step is not None and copy.step != step:
            continue
        if step is None and complete_step is not None and copy.step <= complete_step:
            return
        with private(spec.record.private), aside(storage, run_id) as folder:
            copy.download(folder)
            try:
                verify(checkpoint_at(str(folder)))
            except StorageError as error:
                progress.say(f"warning: the copy of step {copy.step} in the record is passed over: {error}")
                continue
            adopt(storage, run_id, copy.step, folder)
        progress.say(f"the checkpoint of step {copy.step} was downloaded from the record")
        return
