"""Taking up a run that has ended early, or starting another one from its state."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from lockstep.calls.apart import apart, unfit
from lockstep.calls.held import held_run, leads
from lockstep.calls.training import default_progress, recorded_main, run_attempt
from lockstep.checkpoint.holder import Hold
from lockstep.checkpoint.run_folder import AttemptOrigin
from lockstep.checkpoint.runs import adopt, check_step, claim, steps_of, whole_steps
from lockstep.driver.finished_run import refuse_doubtful
from lockstep.driver.options import RunOptions
from lockstep.driver.progress import Progress
from lockstep.driver.result import Result, result_of
from lockstep.errors import SpecError, StorageError
from lockstep.job.identity import changed_fields
from lockstep.job.recorded_source import imported_from
from lockstep.record.redaction import redacted_fields
from lockstep.record.run_store import Recorded
from lockstep.record.stores import find_copies, find_run
from lockstep.spec.fields import Fork, Spec
from lockstep.spec.loading import load_spec
from lockstep.spec.locations import tracking_uri


def resume(
    run_id: str,
    overrides: Iterable[str] = (),
    *,
    step: int | None = None,
    fork: bool = False,
    local: bool = False,
    address: str | None = None,
    uri: str | None = None,
    progress: Progress | None = None,
    verbose: bool = False,
    began_at: float | None = None,
    chaos: str | None = None,
    takeover: bool = False,
    notify: str | Sequence[str] | None = None,
) -> Result:
    """Continue a run from its newest good checkpoint, or from that of `step`, as the same run in the record.

    `overrides` may change placement: workers, storage, loader processes. With `fork` they may change anything, and a
    new run starts from the state. A run that is finished is left as it is, and its result returned. The run is looked
    up in the MLflow store at `uri`; for `off` in the folder that `record.folder` or `checkpoint.storage` names.
    SpecError where another command works on the run; with `takeover` that one is asked to end after its next step, and
    stopped where it does not answer. `notify` is as for `train`. Raises LockstepError.
    """
    options = RunOptions(
        progress=progress or default_progress(),
        local=local,
        address=address,
        verbose=verbose,
        chaos=chaos,
        notify=notify,
        began_at=began_at or time.time(),
    )
    asked: dict[str, Any] = {"step": step, "fork": fork, "uri": uri, "takeover": takeover}
    if options.local and unfit():
        return apart(partial(resume_with, run_id=run_id, overrides=list(overrides), **asked), options)
    return resume_with(options, run_id, list(overrides), **asked)


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
    found, recorded_spec, spec = recorded_and_asked(run_id, overrides, uri)
    if fork:
        there = steps_of(recorded_spec.checkpoint.storage, run_id)
        if step is not None:
            check_step(run_id, step, there)
        elif not there:
            raise SpecError(
                f"resume: run {run_id} has no checkpoint in {recorded_spec.checkpoint.storage!r} to fork from; start a new run"
            )
        options.progress.say(f"a new run starts from step {step or there[0]} of run {run_id}")
        parent = Fork(run=run_id, step=step, storage=recorded_spec.checkpoint.storage)
        forked = spec.model_copy(update={"fork": parent, "initial_weights": None})
        return run_attempt(forked, AttemptOrigin(), options)
    refuse_changes(run_id, recorded_spec, spec)
    if found.status == "FINISHED":
        return finished(found, spec, step, options)
    with held_run(spec, run_id, options.progress, takeover=takeover) as hold:
        return continue_run(run_id, spec, hold, options, step=step)


def recorded_and_asked(run_id: str, overrides: Sequence[str], uri: str | None) -> tuple[Recorded, Spec, Spec]:
    """A run as its store has it, its spec, and that with overrides. SpecError where there is no such run."""
    store = tracking_uri(uri)
    where = load_spec(
        {"job": {"use": "any:Job"}}, [o for o in overrides if o.startswith(("record.", "checkpoint."))]
    )
    found = find_run(store, run_id, where.folder)
    found.spec["record"] = {**found.spec.get("record", {}), "uri": store}
    return found, load_spec(found.spec), load_spec(found.spec, overrides, uri=uri)


def continue_run(
    run_id: str,
    spec: Spec,
    hold: Hold | None,
    options: RunOptions,
    *,
    step: int | None = None,
) -> Result:
    """Continue a recorded run, which this process holds, as `spec` places it. SpecError where `spec` is another run."""
    store = spec.record.uri or ""
    found = find_run(store, run_id, spec.folder)  # now that no other command changes it
    refuse_changes(run_id, load_spec(found.spec), spec)
    if found.status == "FINISHED":
        return finished(found, spec, step, options)
    if "://" not in spec.checkpoint.storage and leads():
        fetch_copy(spec, store, run_id, step, options.progress)
    origin = claim(spec.checkpoint.storage, run_id, step) if leads() else AttemptOrigin(run_id, step=step)
    newest = next(iter(steps_of(spec.checkpoint.storage, run_id)), None)
    start = (
        f"its checkpoint of step {step or newest}"
        if step or newest
        else "the beginning: it has no checkpoint"
    )
    options.progress.say(f"run {run_id} goes on from {start}")
    return run_attempt(spec, origin, options, hold=hold)


def finished(found: Recorded, spec: Spec, step: int | None, options: RunOptions) -> Result:
    """The result of a run that is left as it is. SpecError where it has no checkpoint of `step`, RecordError where it is not what it says."""
    run_id = found.run_id
    refuse_doubtful(found, spec.record.uri or "", spec.folder)
    if step is not None:
        copies = [copy.step for copy in find_copies(spec.record.uri or "", run_id)]
        check_step(run_id, step, [*{*steps_of(spec.checkpoint.storage, run_id), *copies}])
    options.progress.say(
        f"run {run_id} is finished; nothing is left to do (--fork starts a new run from its state)"
    )
    return result_of(
        {"first_step_at": None, "stopped": False, **found.summary},
        run_id=run_id,
        url=found.url,
        tracking_uri=spec.record.uri or "",
        folder=str(spec.folder / run_id),
        began_at=options.began_at,
        warnings=[],
        attempts=int(found.summary.get("attempts", 1)),
        signal_number=None,
    )


def refuse_changes(run_id: str, before: Spec, after: Spec) -> None:
    """SpecError for the first field that a resume may not change, and for one whose secret the record has not and nobody gives."""
    hidden = set(redacted_fields(before.document()))
    for name in redacted_fields({**after.document(), "record": {}}):
        raise SpecError(
            f"resume: {name} of run {run_id} is or has a secret, which is not recorded; give it again: {name}=…"
        )
    source = recorded_main(before, run_id)
    with imported_from(source) if source else nullcontext():
        changed = changed_fields(before, after)
    for name, old, new in changed:
        if name in hidden:
            continue  # the workers compare it with the checkpoint
        raise SpecError(
            f"resume: {name} is {old!r} in run {run_id}, got {new!r}; a resumed run is the same run: leave it, "
            "or start a new run from its state with --fork"
        )


def fetch_copy(spec: Spec, store: str, run_id: str, step: int | None, progress: Progress) -> None:
    """Where the storage has lost the run's newest checkpoint, or that of `step`: download the newest good copy that its record has.

    Lost is what is not there and what lacks a file or a part of one.
    """
    from lockstep.checkpoint.reader import checkpoint_at, verify

    there = steps_of(spec.checkpoint.storage, run_id)
    whole = whole_steps(spec.checkpoint.storage, run_id)
    if step in whole or (step is None and there and there[:1] == whole[:1]):
        return
    for copy in find_copies(store, run_id):
        if step is not None and copy.step != step:
            continue
        if step is None and whole and copy.step <= whole[0]:
            return
        run_folder = Path(spec.checkpoint.storage, run_id)
        run_folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=run_folder, prefix=".download-") as folder:
            copy.download(Path(folder))
            try:
                verify(checkpoint_at(folder))
            except StorageError as error:
                progress.say(f"warning: the copy of step {copy.step} in the record is passed over: {error}")
                continue
            adopt(spec.checkpoint.storage, run_id, copy.step, Path(folder))
        progress.say(f"the checkpoint of step {copy.step} was downloaded from the record")
        return
