"""Verifying a recorded run: what `lockstep verify` does, for Python."""

from __future__ import annotations

import json
import random
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

from lockstep.calls.training import run_attempt
from lockstep.checkpoint.run_folder import AttemptOrigin, Replay
from lockstep.checks.preflight import find_initial_weights
from lockstep.clusters.reachability import LOCAL, cluster_address
from lockstep.driver.options import RunOptions
from lockstep.driver.progress import Silent
from lockstep.errors import JobImportError, SpecError
from lockstep.job.imports import FIELD, files_here, recorded_beside, source_fields
from lockstep.job.recorded_source import imported_from
from lockstep.job.source import job_source_digest
from lockstep.proof.recorded_run import RecordedRun, recorded_run
from lockstep.proof.replaying import Replayed, Take, Watching, replay_here, replay_spec
from lockstep.proof.stretches import Stretch, sample, stretch, whole
from lockstep.proof.verification import Verified
from lockstep.proof.verification import verify as verify_stretches
from lockstep.record.ledger import read_history
from lockstep.spec.fields import Spec
from lockstep.spec.locations import RECORD_OFF, tracking_uri


def verify(
    run_id: str,
    *,
    from_step: int | None = None,
    steps: int | None = None,
    all_steps: bool = False,
    share: float | None = None,
    seed: int | None = None,
    workers: int | None = None,
    local: bool = False,
    address: str | None = None,
    uri: str | None = None,
    storage: str | Path = "runs",
    options: RunOptions | None = None,
) -> Verified:
    """Take steps of a recorded run again and compare every deterministic column and digest with its record.

    `steps` steps from `from_step` on; without these the last 20 of the run, or `all_steps`, or a random `share` (0 to 1) of them, by
    the stretches between two checkpoints, drawn with `seed`. `local` takes them in this process, on one worker; else `address` names the Ray cluster,
    and `workers` how many are used. Nothing of the run is written to. SpecError where there is no such run; raises LockstepError.
    """
    options = options or RunOptions(local=local, address=address)
    if sum((from_step is not None or steps is not None, all_steps, share is not None)) > 1:
        raise SpecError("verify: got more than one of --from or --steps, --all and --sample; give one")
    if share is not None and not 0 < share <= 1:
        raise SpecError(f"sample: got {share:g}, wanted a share of the run's steps, above 0 and at most 1")
    if options.local and workers not in (None, 1):
        raise SpecError(
            f"workers: got {workers} with --local, which is one process; leave out one of the two"
        )
    run = recorded_run(run_id, tracking_uri(uri), Path(storage).absolute())
    if workers is not None and workers > run.spec.batch.micro_batches:
        most = run.spec.batch.micro_batches
        raise SpecError(f"workers: got {workers}, wanted at most the {most} micro-batches of a step")
    stretches = _stretches(run, from_step, steps, all_steps=all_steps, share=share, seed=seed)
    source = job_source(run, options)
    with tempfile.TemporaryDirectory(prefix="lockstep-verify-") as aside:
        take: Take = replay_here if options.local else _on_ray(options, workers, Path(aside))
        with imported_from(source) if source else nullcontext():
            return verify_stretches(run, stretches, _announced(take, run, options), Path(aside), source)


def job_source(run: RecordedRun, options: RunOptions) -> Mapping[str, bytes] | None:
    """The recorded files of the run's job; None where those on the path are the same, with what lies beside them."""
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    beside = recorded_beside(run.fields)
    try:
        here = {"job.source": job_source_digest(run.spec.job.use)}
        here |= source_fields(files_here(run.spec.job.use, beside))
    except (JobImportError, ImportError, SyntaxError, OSError):
        here = {}
    if here == {
        name: run.fields.get(name) for name in ("job.source", *(f"{FIELD}{path}" for path in beside))
    }:
        return None
    if not run.source:
        options.progress.say("the run has no source/: the job's source here is used, and it differs")
        return None
    options.progress.say("the job's source here differs: the recorded source is used")
    return run.source


def taken_again(run: RecordedRun, start: int, until: int) -> str:
    """What is said of steps before they are taken again; `start` as in a Stretch."""
    fork = run.spec.fork
    beginning = "the beginning" if fork is None else f"where run {fork.run} was forked"
    where = f"the checkpoint of step {start}" if start else beginning
    return f"steps {max(start, run.forked_at) + 1} to {until} are taken again, from {where}"


def _stretches(
    run: RecordedRun,
    first: int | None,
    steps: int | None,
    *,
    all_steps: bool,
    share: float | None,
    seed: int | None,
) -> list[Stretch]:
    if all_steps:
        return [whole(run.last_step)]
    if share is not None:
        return sample(run.checkpoints, run.last_step, share, random.Random(seed), forked_at=run.forked_at)
    if first is not None:
        run.check_step(first, "from")
    return [stretch(run.checkpoints, run.last_step, first, steps, forked_at=run.forked_at)]


def _announced(take: Take, run: RecordedRun, options: RunOptions) -> Take:
    """`take`, which says first which steps are taken again."""

    def announced(spec: Spec, replay: Replay, watch: Watching) -> Replayed:
        options.progress.say(taken_again(run, replay.step, replay.until))
        return take(spec, replay, watch)

    return announced


# --- on Ray -----------------------------------------------------------------------------------------------------


def _on_ray(options: RunOptions, workers: int | None, aside: Path) -> Take:
    """Takes steps again as a run of its own, whose folder is gone afterwards."""

    def take(spec: Spec, replay: Replay, _watch: Watching) -> Replayed:
        with _folder(spec, options, aside) as folder:
            origin = AttemptOrigin(replay=replay)
            result = run_attempt(_placed(spec, folder, workers), origin, replace(options, progress=Silent()))
            here = Path(result.folder)
            history = read_history(here)
            fields = json.loads((here / "fields.json").read_text(encoding="utf-8"))
            return Replayed(
                fields,
                {row.step: row for row in history.steps if row.step > replay.step},
                {row.step: row for row in history.evaluations if row.step > replay.step},
                result.as_dict(),
            )

    return take


def _placed(spec: Spec, folder: Path, workers: int | None) -> Spec:
    """The run's spec, with all that it leaves in `folder`, and on so many workers."""
    spec = replay_spec(find_initial_weights(spec))
    where = str(folder)
    update = {
        "record": spec.record.model_copy(update={"uri": RECORD_OFF, "folder": where}),
        "checkpoint": spec.checkpoint.model_copy(update={"storage": where, "every": None}),
    }
    if workers is not None:
        update["workers"] = spec.workers.model_copy(update={"min": workers, "max": workers})
    if spec.fork is not None and spec.fork.storage is None:
        update["fork"] = spec.fork.model_copy(update={"storage": spec.checkpoint.storage})
    return spec.model_copy(update=update)


@contextmanager
def _folder(spec: Spec, options: RunOptions, aside: Path) -> Iterator[Path]:
    """A folder that the workers can reach: on this machine anywhere, else beside the runs."""
    if cluster_address(options.address) == LOCAL:
        yield aside / "taken-again"
        return
    folder = Path(tempfile.mkdtemp(prefix=".verify-", dir=spec.folder))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)
