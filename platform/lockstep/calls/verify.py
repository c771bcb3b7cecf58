"""Verifying a recorded run: what `lockstep verify` does, for Python."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Sequence
from pathlib import Path

from lockstep.calls import problems
from lockstep.calls.executions import execution_of, taken_again
from lockstep.checkpoint.runs.run_folder import Replay
from lockstep.driver.options import RunOptions
from lockstep.proof.execution import Execution, take_steps
from lockstep.proof.recorded_run import RecordedRun, recorded_run
from lockstep.proof.replaying import Replayed, Watching
from lockstep.proof.step_spans import Span, sample, span, whole
from lockstep.proof.verification import Take, Verified
from lockstep.proof.verification import verify as verify_spans
from lockstep.spec.fields import Spec
from lockstep.spec.locations import tracking_uri


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
    sandboxed: bool = False,
    hidden: Sequence[Path] = (),
) -> Verified:
    """Take steps of a recorded run again and compare every deterministic column and digest with its record.

    `steps` steps from `from_step` on; without these the last 20 of the run, or `all_steps`, or a random `share` (0 to 1) of them, by
    the spans between two checkpoints, drawn with `seed`. They are taken by a process of its own, which knows nothing of what they are compared with: with `local`
    by itself, on one worker; else `address` names the Ray cluster, and `workers` how many are used. With `sandboxed` that process is
    confined, and sees neither the run's record nor the files `hidden`. Nothing of the run is written to. SpecError where there is no
    such run, or nothing that confines a process; raises LockstepError.
    """
    options = options or RunOptions(local=local, address=address)
    if sum((from_step is not None or steps is not None, all_steps, share is not None)) > 1:
        raise problems.SEVERAL_CHOICES()
    if share is not None and not 0 < share <= 1:
        raise problems.SHARE(got=f"{share:g}")
    if options.local and workers not in (None, 1):
        raise problems.WORKERS_LOCAL(got=workers)
    run = recorded_run(run_id, tracking_uri(uri), Path(storage).absolute())
    if workers is not None and workers > run.spec.batch.micro_batches:
        most = run.spec.batch.micro_batches
        raise problems.WORKERS_MOST(got=workers, wanted=most)
    spans = _spans(run, from_step, steps, all_steps=all_steps, share=share, seed=seed)
    with tempfile.TemporaryDirectory(prefix="lockstep-verify-") as name:
        execution = execution_of(run, options, sandboxed=sandboxed, hidden=hidden, workers=workers)
        with execution:
            return verify_spans(run, spans, _take(run, execution, options), Path(name))


def _spans(
    run: RecordedRun,
    first: int | None,
    steps: int | None,
    *,
    all_steps: bool,
    share: float | None,
    seed: int | None,
) -> list[Span]:
    if all_steps:
        return [whole(run.last_step)]
    if share is not None:
        return sample(run.checkpoints, run.last_step, share, random.Random(seed), forked_at=run.forked_at)
    if first is not None:
        run.check_step(first, "from")
    return [span(run.checkpoints, run.last_step, first, steps, forked_at=run.forked_at)]


def _take(run: RecordedRun, execution: Execution, options: RunOptions) -> Take:
    """Has steps taken again by `execution`, and says first which."""

    def take(spec: Spec, replay: Replay, watch: Watching, weights: Path | None) -> Replayed:
        options.progress.say(taken_again(run, replay.step, replay.until))
        return take_steps(execution, spec, replay, watch, weights=weights)

    return take
