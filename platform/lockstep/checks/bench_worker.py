"""One worker of a bench, in a process of its own: takes the steps, and measures what the time of each goes to.

Its request is a JSON object with `spec`, `warm_up` and `steps`, `rank` of `ranks`, and the
folder `out`, where the workers meet and rank 0 writes RESULT.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from lockstep.checks import problems
from lockstep.checks.processes import LOST
from lockstep.communication.group import Group, local_device
from lockstep.errors import LockstepError
from lockstep.job.loading import load_job, others_out_of_sight
from lockstep.plan import Position
from lockstep.printing import complain
from lockstep.record.events.union import tell_nobody
from lockstep.spec.fields import Spec
from lockstep.spec.loading import validate
from lockstep.training.determinism import determinism
from lockstep.training.elastic.recovery import is_lost_peer
from lockstep.training.integrity.probe import NoProbe
from lockstep.training.integrity.state_digest import weights_digest
from lockstep.training.setup import prepare
from lockstep.training.step.phase_step import PhaseStep

RESULT = "result.json"


class StepTimes(NamedTuple):
    """What one worker's step took, in seconds; the parts add up to the step."""

    data_s: float
    """Waiting for micro-batches, and copying them to the device."""
    compute_s: float
    """Forward and backward. On a GPU with what backward waits for the reduction: that is not known apart from it."""
    reduction_s: float
    """What backward spends in the reduction, waiting for slower workers included: no computation hides it."""
    rest_s: float
    """Norm, update, buffers and bookkeeping; with a sharded optimizer the gathering of the parameters."""


class StepClock(NoProbe):
    """Measures the parts of each step of one worker. As a probe it is told when a micro-batch is there, and when it is computed."""

    def __init__(self, device: torch.device, phases: Sequence[PhaseStep]) -> None:
        self.steps: list[StepTimes] = []
        self._cuda = device if device.type == "cuda" else None
        self._phases = phases
        self._fetched = self._data = self._computed = 0.0

    def _now(self) -> float:
        if self._cuda is not None:
            torch.cuda.synchronize(self._cuda)
        return time.perf_counter()

    @contextmanager
    def around(self, position: Position, m: int, model: torch.nn.Module, phase: str) -> Iterator[None]:
        began = self._now()
        yield
        self._data += self._fetched - began
        self._computed += self._now() - self._fetched

    def batch(self, position: Position, m: int, batch: Any) -> None:
        self._fetched = self._now()

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around one step."""
        self._data = self._computed = 0.0
        began, held_up = self._now(), self._held_up()
        yield
        # Where what learns changes, the reduction is made anew, and its clock with it.
        total_s, reduction = self._now() - began, max(0.0, self._held_up() - held_up)
        # A ragged step may leave a worker no micro-batch: it is in the reduction all the same.
        compute = max(0.0, self._computed - reduction)
        self.steps.append(
            StepTimes(self._data, compute, reduction, total_s - self._data - compute - reduction)
        )

    def _held_up(self) -> float:
        if self._cuda is not None:
            return 0.0
        reductions = (phase.reduction for phase in self._phases)
        return sum(reduction.held_up_s for reduction in reductions if reduction is not None)


def main() -> None:
    """Carry out the request among the arguments."""
    sys.exit(measure(sys.argv[1]))


def measure(request: str) -> int:
    """Take the steps that the request asks for. Returns the exit code; an error is one line on standard error."""
    settings = json.loads(request)
    try:
        _bench(settings)
    except LockstepError as error:
        complain(str(error))
        return error.exit_code
    except RuntimeError as error:
        if not is_lost_peer(error):
            raise
        complain(f"another worker was lost: {error}")
        return LOST
    return 0


def _bench(request: dict[str, Any]) -> None:
    spec, out = validate(request["spec"]), Path(request["out"])
    device = device_of(spec, request["ranks"])
    with _process_group(out, device, request["rank"], request["ranks"]):
        result = take_steps(spec, Group.join(device), request["warm_up"], request["steps"])
    if request["rank"] == 0:
        (out / RESULT).write_text(json.dumps(result), encoding="utf-8")


def device_of(spec: Spec, ranks: int) -> torch.device:
    """The device of this process of `ranks`. SpecError where the machine has fewer GPUs."""
    gpus = torch.cuda.device_count()
    if gpus and spec.workers.gpus_each != 0 and ranks > gpus:
        raise problems.GPUS_MISSING(got=ranks, available=gpus)
    return local_device(spec)


@contextmanager
def _process_group(out: Path, device: torch.device, rank: int, ranks: int) -> Iterator[None]:
    """The workers as one process group, which meets by a file; none for a worker alone."""
    import torch.distributed as dist

    if ranks == 1:
        yield
        return
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{out}/rendezvous", rank=rank, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def take_steps(spec: Spec, group: Group, warm_up: int, steps: int) -> dict[str, Any]:
    """Take `warm_up + steps` steps as training takes them; every worker of the group calls it, and gets the same.

    `losses` of every step, bit for bit, `digests` of the weights by rank, `samples` of the steps that count, and `step_times` of
    those steps, by rank.
    """
    job = load_job(spec.job.use, spec.job.params)
    job.eval_data = lambda: None  # type: ignore[method-assign]  # steps alone are looked at
    losses, samples = [], 0
    with determinism(spec.determinism, spec.threads), others_out_of_sight():
        run = prepare(spec, job, group, tell_nobody)
        clock = StepClock(group.device, run.step.each_phase)
        run.step.compute.probe = clock
        with closing(run.loader()) as batches:
            for position in run.plan.positions():
                with clock.step():
                    result = run.step(position, batches)
                losses.append(result.row.loss.hex())
                samples += position.samples if position.step >= warm_up else 0
        digest = weights_digest(run.state.model.state_dict())
        every = group.gather((digest, clock.steps[warm_up:]))
    return {
        "losses": losses,
        "digests": [digest for digest, _ in every],
        "samples": samples,
        "step_times": [rows for _, rows in every],
        "device": torch.cuda.get_device_name(group.device) if group.device.type == "cuda" else "cpu",
    }
