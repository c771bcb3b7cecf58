"""A run as it would be had it never learnt from some samples: what `lockstep resume RUN --without` does, for Python."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from lockstep.calls import problems
from lockstep.calls.continuation import fetch_copy, refuse_changes
from lockstep.calls.leased_storages import leads
from lockstep.calls.resume import recorded_and_asked
from lockstep.calls.train import run_attempt
from lockstep.checkpoint.runs.run_checkpoints import on_disk, whole_steps
from lockstep.checkpoint.runs.run_folder import AttemptOrigin
from lockstep.data.sampler import FirstUse, LeftOut
from lockstep.data.table_pins import pinned, pins_of
from lockstep.driver.options import RunOptions
from lockstep.driver.result import Result
from lockstep.job.job_folder import search_job_folder
from lockstep.job.loading import load_job
from lockstep.proof.recorded_run import recorded_fields
from lockstep.record.mirror.stores import find_copies, find_history
from lockstep.spec.fields import Fork, Spec
from lockstep.spec.id_ranges import parse, written
from lockstep.training.job_data import make_sampler, open_data
from lockstep.training.planning import check_ids, make_plan


def resume_without(
    options: RunOptions, run_id: str, ids: Path, overrides: Sequence[str] = (), *, uri: str | None = None
) -> Result:
    """Train the run again from its newest checkpoint before it first used one of the samples whose ids the file has, and without them.

    A new run, a fork, in which these samples are left out of their micro-batches. `overrides` may change placement. Where no
    checkpoint is old enough it starts over. SpecError for ids that are none, that the data do not have, or that the run never uses.
    """
    sample_ids = read_ids(ids)
    _, recorded, spec = recorded_and_asked(run_id, overrides, uri)
    refuse_changes(run_id, recorded, spec)
    previous = [] if spec.data.without is None else parse(spec.data.without)
    new = {i for i in sample_ids if not any(i in ids_range for ids_range in previous)}
    if not new:
        raise problems.LEFT_OUT_ALREADY(run=run_id, file=ids)
    versions = pins_of(recorded_fields(spec.record.uri or "", run_id, spec.folder / run_id))
    first = _first_use(spec, LeftOut(written(new)), run_id, versions)
    without = written([*new, *(i for ids_range in previous for i in ids_range)])
    spec = spec.model_copy(update={"data": spec.data.model_copy(update={"without": without})})
    options.progress.say(
        f"sample {first.sample} is the first of {len(new)} that run {run_id} uses, in step {first.step + 1}"
        + ("" if first.used == len(new) else f"; {len(new) - first.used} of them it never uses")
    )
    origin = AttemptOrigin(table_versions=versions)
    return run_attempt(_forked(options, run_id, recorded, spec, first.step), origin, options)


def read_ids(path: Path) -> set[int]:
    """The ids that a file has, one a line; empty lines and what follows a `#` are passed over. SpecError where there is something else."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise problems.IDS_UNREADABLE(file=path, got=error) from error
    sample_ids = set()
    for number, line in enumerate(lines, start=1):
        word = line.partition("#")[0].strip()
        if not word:
            continue
        if not (word.isascii() and word.isdigit()):
            raise problems.NO_ID(line=number, file=path, got=word[:40])
        sample_ids.add(int(word))
    if not sample_ids:
        raise problems.NO_IDS(file=path)
    return sample_ids


def _first_use(spec: Spec, left_out: LeftOut, run_id: str, versions: Mapping[str, str]) -> FirstUse:
    search_job_folder()
    with pinned(versions):
        job = load_job(spec.job.use, spec.job.params)
        train_data = open_data(job, spec.seed).train
        plan = make_plan(spec, job, train_data)
    check_ids(left_out, train_data, "without")
    first_use = make_sampler(spec, plan, train_data).first_use(left_out)
    if first_use is None:
        raise problems.NOT_USED(run=run_id)
    return first_use


def _forked(options: RunOptions, run_id: str, recorded: Spec, spec: Spec, first: int) -> Spec:
    """The spec of the run without the samples: from the newest checkpoint with at most `first` steps, or from where the run itself began."""
    storage, store = recorded.checkpoint.storage, spec.record.uri or ""
    complete_steps = [step for step in whole_steps(storage, run_id) if step <= first]
    local = on_disk(storage) is not None  # an object store has no copies put into it
    copies = [copy.step for copy in find_copies(store, run_id) if copy.step <= first] if local else []
    newest = max([*complete_steps, *copies], default=None)
    if newest is not None and newest not in complete_steps and leads():
        fetch_copy(recorded, store, run_id, newest, options.progress)
    if newest is not None:
        options.progress.say(f"a new run starts from step {newest} of run {run_id}")
        fork = Fork(run=run_id, step=newest, storage=storage, exact=True)
        return spec.model_copy(update={"fork": fork, "initial_weights": None})
    if spec.fork is not None:
        steps = find_history(store, run_id, recorded.folder).steps
        if not steps or steps[0].step > first + 1:
            raise problems.LEARNT_BEFORE_FORK(run=run_id, parent=spec.fork.run, step=first + 1)
    options.progress.say(
        f"run {run_id} has no checkpoint from before step {first + 1}: a new run starts over"
    )
    return spec
