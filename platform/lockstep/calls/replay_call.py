"""One step of a recorded run under the microscope: what `lockstep replay` does, for Python."""

from __future__ import annotations

import math
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep.calls.executions import execution_of, taken_again
from lockstep.checkpoint.runs.run_folder import Replay
from lockstep.driver.options import RunOptions
from lockstep.proof import protocol
from lockstep.proof.execution import Execution, handed
from lockstep.proof.inspection import FILES, InspectionRequest
from lockstep.proof.recorded_run import RecordedRun, recorded_run
from lockstep.proof.step_spans import span
from lockstep.record.ledger.row_comparison import step_difference
from lockstep.record.ledger.rows import StepRow
from lockstep.spec.locations import tracking_uri

MOST_BYTES = 1 << 36
"""The largest file that is taken from the process that looks into a step."""


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
    sandboxed: bool = False,
) -> Inspected:
    """Take one step of a recorded run again from the nearest checkpoint, in a process of its own, and look into it.

    Files go into `folder`, by default `replay-<run>-step-<step>` in the working directory; nothing of the run is written to. The process
    is confined where it is `sandboxed`; with `debug` it has the terminal. SpecError where there is no such run, step or micro-batch;
    raises LockstepError.
    """
    options = options or RunOptions(local=True)
    run = recorded_run(run_id, tracking_uri(uri), Path(storage).absolute())
    run.check_step(step, "step")
    request = InspectionRequest(step - 1, micro_batch, inspect, profile, debug)
    target = Path(folder or f"replay-{run_id[:8]}-step-{step}").absolute()
    begin = span(run.checkpoints, run.last_step, step, 1, forked_at=run.forked_at).start
    with tempfile.TemporaryDirectory(prefix="lockstep-replay-") as name:
        aside = Path(name)
        origin = run.spec.checkpoint.storage if not begin else run.checkpoint(begin, aside)[0]
        with execution_of(run, options, sandboxed=sandboxed, terminal=debug) as execution:
            spec, again = handed(run.spec, Replay(run_id, origin, begin, step), execution.visible_folder)
            inspected = Inspected(run_id, step, "", math.nan, math.nan)
            for message in execution.ask("inspection", spec=spec, replay=again, request=request):
                match message["kind"]:
                    case "beginning":
                        options.progress.say(taken_again(run, begin, step))
                    case "row":
                        _tell_row(inspected, run, protocol.step_row(message.get("row")))
                    case "micro-batches":
                        inspected.micro_batches = _plain(message.get("micro_batches"))
                    case "file":
                        _keep(execution, protocol.file_sent(message), target, inspected)
                    case kind:
                        raise protocol.broken(f"a {protocol.plain_text(kind, 40)!r}")
    if math.isnan(inspected.loss) and not inspected.difference:
        raise protocol.broken("no row")
    return inspected


def _tell_row(inspected: Inspected, run: RecordedRun, row: StepRow) -> None:
    if row.step != inspected.step:
        raise protocol.broken(f"step {row.step}")
    recorded = run.steps.get(inspected.step)
    inspected.difference = (
        "the ledger has no row of it" if recorded is None else step_difference(recorded, row)
    )
    inspected.loss, inspected.grad_norm = row.loss, row.grad_norm


def _plain(value: Any) -> list[dict[str, Any]]:
    """What was seen of micro-batches, with the texts as a terminal only shows them."""
    if not (
        isinstance(value, list) and all(isinstance(entry, dict) and "micro_batch" in entry for entry in value)
    ):
        raise protocol.broken("micro-batches that are none")
    micro_batches: list[dict[str, Any]] = protocol.shown(value)
    return micro_batches


def _keep(execution: Execution, sent: protocol.FileSent, folder: Path, inspected: Inspected) -> None:
    """Write one of the files that a step may have."""
    path = folder / sent.name
    if sent.name not in FILES or str(path) in inspected.files:
        raise protocol.broken(f"a file {sent.name!r}")
    folder.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    execution.receive(sent, path, MOST_BYTES)
    inspected.files.append(str(path))
