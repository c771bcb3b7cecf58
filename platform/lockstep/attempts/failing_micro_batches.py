"""Failures that repeat at the same micro-batch on another worker: they are the job's or its data's, whatever they look like. Pure."""

from __future__ import annotations

from typing import NamedTuple

from lockstep.attempts import problems
from lockstep.attempts.failed_nodes import node_label
from lockstep.errors import FailedAt, JobError, LockstepError


class Repeat(NamedTuple):
    """A repeated failure: the error that ends the run, and the name and text of a file that reproduces it."""

    error: JobError
    name: str
    text: str


class Repeats:
    """The failures within micro-batches in a run's attempts. A `worker` is identified by its node and its rank."""

    def __init__(self) -> None:
        self._failures: dict[tuple[str, int, int], dict[tuple[str, int], int]] = {}

    def failed(self, failed_at: FailedAt, worker: tuple[str, int], attempt: int) -> str:
        """Note a failure. Returns which workers failed alike at the same place, and in which attempts; empty if no other did."""
        workers = self._failures.setdefault((failed_at.failure, failed_at.step, failed_at.micro_batch), {})
        others = [
            f"{_shown(earlier)} in attempt {number}"
            for earlier, number in workers.items()
            if earlier != worker
        ]
        workers[worker] = attempt
        return f"{', '.join(others)} and {_shown(worker)} in attempt {attempt}" if others else ""


def repeat(
    error: LockstepError, failed_at: FailedAt, who: str, run_id: str, storage: str, start: int
) -> Repeat:
    """The error and the script for a failure that `who` had alike; the script starts at `start`, the step of the newest checkpoint."""
    name = f"reproduce-step-{failed_at.step}.py"
    repeated = problems.REPEATED(
        step=failed_at.step, micro_batch=failed_at.micro_batch, workers=who, got=error, file=name
    )
    text = _SCRIPT.format(
        failed_at=failed_at,
        samples=", ".join(map(str, failed_at.samples)),
        error=str(error).replace("\\", "/").replace('"', "'"),
        run=run_id,
        storage=storage,
        start=start,
        first=start + 1,
        begun=f"the checkpoint of step {start}" if start else "the beginning",
        name=name,
    )
    return Repeat(repeated, name, text)


def _shown(worker: tuple[str, int]) -> str:
    node, rank = worker
    return f"rank {rank} on {node_label(node)}"


_SCRIPT = '''"""Takes steps {first} to {failed_at.step} of run {run} again in this process, from {begun}.

Step {failed_at.step}, micro-batch {failed_at.micro_batch} failed there on different workers:
{error}
Its samples: {samples}

In the folder that the run was started in:

    PYTHONHASHSEED=0 python {name}
"""

from pathlib import Path

from lockstep.checkpoint.runs.run_folder import Replay
from lockstep.proof.replaying import replay_here
from lockstep.spec.loading import load_spec


class Unwatched:
    """Looks at no row, and wants all steps."""

    def row(self, found):
        pass

    def enough(self):
        return False


spec = load_spec(Path(__file__).with_name("spec.yaml"))
replay_here(spec, Replay({run!r}, {storage!r}, {start}, {failed_at.step}), Unwatched())
'''
