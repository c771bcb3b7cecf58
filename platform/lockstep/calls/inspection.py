"""One step of a recorded run under the microscope: what `lockstep replay` does, for Python."""

from __future__ import annotations

import tempfile
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep.calls.verification import job_source, taken_again
from lockstep.checkpoint.run_folder import Replay
from lockstep.driver.options import RunOptions
from lockstep.errors import SpecError
from lockstep.job.recorded_source import imported_from
from lockstep.proof.inspection import Inspection, Seat, Wanted, sample_ids
from lockstep.proof.recorded_run import recorded_run
from lockstep.proof.replaying import replay_here
from lockstep.proof.stretches import stretch
from lockstep.record.comparison import step_difference
from lockstep.spec.locations import tracking_uri


@dataclass(slots=True)
class Inspected:
    """What one step came to when it was taken again. `difference` is what its row has otherwise than recorded, or nothing."""

    run_id: str
    step: int
    difference: str
    loss: float
    grad_norm: float
    micro_batches: list[dict[str, Any]] = field(default_factory=list)
    """Of each: `micro_batch`, `samples`, `loss` (its total), and with `inspect` `modules` and `gradients`, each value with its statistics.

    Where a step has phases, of each in each `phase`.
    """
    files: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        return {
            "run_id": self.run_id,
            "step": self.step,
            "same": not self.difference,
            "difference": self.difference,
            "loss": self.loss,
            "grad_norm": self.grad_norm,
            "micro_batches": self.micro_batches,
            "files": self.files,
        }


def replay(
    run_id: str,
    step: int,
    *,
    micro_batch: int | None = None,
    inspect: bool = False,
    profile: bool = False,
    debug: bool = False,
    uri: str | None = None,
    storage: str | Path = "runs",
    folder: str | Path | None = None,
    options: RunOptions | None = None,
) -> Inspected:
    """Take one step of a recorded run again in this process, from the nearest checkpoint, and look into it.

    Files go into `folder`, by default `replay-<run>-step-<step>` in the working directory; nothing of the run is written to. SpecError
    where there is no such run, step or micro-batch; raises LockstepError.
    """
    options = options or RunOptions(local=True)
    run = recorded_run(run_id, tracking_uri(uri), Path(storage).absolute())
    run.check_step(step, "step")
    source = job_source(run, options)
    wanted = Wanted(step - 1, micro_batch, inspect, profile, debug)
    inspection = Inspection(wanted, Path(folder or f"replay-{run_id[:8]}-step-{step}").absolute())
    begin = stretch(run.checkpoints, run.last_step, step, 1, forked_at=run.forked_at).start
    with tempfile.TemporaryDirectory(prefix="lockstep-replay-") as aside:
        place = run.spec.checkpoint.storage if not begin else run.checkpoint(begin, Path(aside))[0]
        with imported_from(source) if source else nullcontext():
            ids = sample_ids(run.spec, step - 1)
            if micro_batch is not None and micro_batch not in ids:
                raise SpecError(
                    f"micro-batch: got {micro_batch}, wanted one of the {len(ids)} of step {step}, counted from 0"
                )
            options.progress.say(taken_again(run, begin, step))
            replay_here(run.spec, Replay(run_id, place, begin, step, source, inspection), inspection)
    found = inspection.row_found
    assert found is not None  # the step was taken, or an error raised
    if micro_batch is not None:
        inspection.keep_samples({micro_batch: ids[micro_batch]})
    recorded = run.steps.get(step)
    return Inspected(
        run_id,
        step,
        "the ledger has no row of it" if recorded is None else step_difference(recorded, found),
        found.loss,
        found.grad_norm,
        [_micro_batch(inspection, m, phase, ids[m]) for m, phase in _in_order(inspection)],
        [str(path) for path in inspection.files],
    )


def _in_order(inspection: Inspection) -> list[Seat]:
    """Micro-batch by micro-batch, the phases of each in the order in which they were taken."""
    return sorted(inspection.losses, key=lambda seat: seat[0])


def _micro_batch(inspection: Inspection, m: int, phase: str, ids: list[int]) -> dict[str, Any]:
    found: dict[str, Any] = {
        "micro_batch": m,
        **({"phase": phase} if phase else {}),
        "samples": ids,
        "loss": inspection.losses[m, phase],
    }
    if (m, phase) in inspection.looks:
        look = inspection.looks[m, phase]
        for name, seen in (("modules", look.modules), ("gradients", look.gradients)):
            found[name] = [{"what": one.what, **one.statistics} for one in seen]
    return found
