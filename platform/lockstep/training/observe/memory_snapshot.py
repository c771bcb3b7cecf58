"""What a worker held when its memory ran out, as documents of the run: written where an allocation fails, and before a limit kills the process.

A process that the kernel or Ray kills cannot say a word. So a thread compares what is used with the limits that kill, `EVERY_S` apart, and takes a
snapshot once, when `HIGH` of one is used: the run has it before it needs it. The driver's last figures would be older, and those of no owner.
"""

from __future__ import annotations

import json
import re
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from traceback import walk_tb
from types import FrameType
from typing import Any

import torch

from lockstep.data.loader import Loader
from lockstep.errors import first_line
from lockstep.failure_kinds import causes, is_out_of_memory
from lockstep.periodic import periodically
from lockstep.printing import size_text as shown
from lockstep.record.events.union import MEMORY_SNAPSHOT, Document, Tell, Warned
from lockstep.training.checkpoints import Checkpoints
from lockstep.training.evaluation.evaluation_pass import Evaluation
from lockstep.training.failure import as_lockstep_error
from lockstep.training.loop import train
from lockstep.training.observe import worker_memory
from lockstep.training.observe.memory_growth import held_bytes
from lockstep.training.observe.memory_limits import address_space, killing_limits
from lockstep.training.observe.memory_owners import holdings
from lockstep.training.run import Run
from lockstep.training.setup import prepare
from lockstep.training.state import TrainState
from lockstep.training.step.forward_backward import ForwardBackward
from lockstep.training.step.optimizer_step import Stepper
from lockstep.training.step.phase_step import LossModule

HIGH = 0.9
"""The share of a limit at which a snapshot is taken."""

EVERY_S = 0.25
"""Seconds between two looks at the limits: one takes 0.33 ms of a core, so all of them 0.13 %."""

LEAST_SHARE = 0.1
"""A process that holds less of a limit than this is not why it is reached."""

_RESERVE_BYTES = 8 << 20
"""Address space that is let go of before a snapshot is made. Nothing is written to it, so it takes no memory."""

_LARGEST = 12
"""Tensors and modules that are listed."""

OWNERS = (
    "parameters", "buffers", "gradients", "optimizer", "average", "best weights", "sums", "data", "activations", "other tensors",
)  # fmt: skip
"""What tensors belong to; the rest of the process comes after."""

ESTIMATED = {
    "parameters": "parameters", "buffers": "buffers", "gradients": "gradients", "optimizer": "optimizer", "average": "average",
    "sums": "reduction", "activations": "activations",
}  # fmt: skip
"""The line of `lockstep estimate` for an owner."""

PHASES = {
    prepare.__code__: "before the first step",
    LossModule.forward.__code__: "in forward",
    LossModule.backward.__code__: "in backward",
    Stepper._update.__code__: "in the update",
    Evaluation.__call__.__code__: "in an evaluation",
    Checkpoints.save.__code__: "in a save",
    Loader.__next__.__code__: "while data were fetched",
}
"""What a worker does, by the code of the innermost of these functions on its stack."""


@dataclass(frozen=True, slots=True)
class OwnerMemory:
    """What an owner holds in bytes, and what `lockstep estimate` counts for it; None where it counts nothing, or that is not known."""

    owner: str
    held_bytes: int
    estimate_bytes: int | None


@dataclass(frozen=True, slots=True)
class MemorySnapshot:
    """What one worker held at one moment."""

    rank: int
    attempt: int
    step: int
    why: str
    phase: str
    held_bytes: int
    asked_bytes: int
    """What the allocation that failed asked for; 0 where none has failed."""
    owners: list[OwnerMemory]
    above_estimate: str
    """The owner whose line of the estimate was furthest below what it held and asked for; empty where none was below."""
    limits: list[dict[str, Any]] = field(default_factory=list)
    modules: list[dict[str, Any]] = field(default_factory=list)
    """Activations by module, the largest first; each with the operators that follow it."""
    tensors: list[dict[str, Any]] = field(default_factory=list)
    """The largest tensors."""

    @property
    def name(self) -> str:
        """Of its document, without the ending."""
        return f"{MEMORY_SNAPSHOT}attempt-{self.attempt}-rank-{self.rank}"

    @property
    def summary(self) -> str:
        """One line: who held most."""
        largest = sorted(self.owners, key=lambda item: -item.held_bytes)[:3]
        parts = [
            f"{item.owner} {shown(item.held_bytes)}{_beside(item)}" for item in largest if item.held_bytes
        ]
        return f"rank {self.rank} held {shown(self.held_bytes)}: {', '.join(parts)}"

    def as_text(self) -> str:
        """For a person."""
        lines = [
            f"{self.why} (step {self.step}, {self.phase})",
            f"rank {self.rank} held {shown(self.held_bytes)}",
            "",
        ]
        lines += [f"{'owner':<26}{'held':>12}{'estimate':>12}"]
        for item in self.owners:
            expected = "" if item.estimate_bytes is None else shown(item.estimate_bytes)
            mark = "  <- above its estimate" if item.owner == self.above_estimate else ""
            lines.append(f"{item.owner:<26}{shown(item.held_bytes):>12}{expected:>12}{mark}")
        lines.append(f"{'the process':<26}{shown(self.held_bytes):>12}")
        if self.asked_bytes:
            lines.append(f"{'asked for':<26}{shown(self.asked_bytes):>12}")
        if self.limits:
            lines += ["", "limits"]
            lines += [
                f"  {shown(one['used']):>10} of {shown(one['bound']):>10}  {one['what']}"
                for one in self.limits
            ]
        if self.modules:
            lines += ["", "activations by module, each with the operators that follow it"]
            lines += [f"  {shown(one['bytes']):>10}  {one['module'] or 'the loss'}" for one in self.modules]
        if self.tensors:
            lines += ["", "largest tensors"]
            width = max(len(one["kind"]) for one in self.tensors)
            lines += [
                f"  {shown(one['bytes']):>10}  {one['kind']:<{width}}  {one['owner']}{': ' * bool(one['name'])}{one['name']}"
                for one in self.tensors
            ]
        return "\n".join(line.rstrip() for line in lines) + "\n"


def _beside(item: OwnerMemory) -> str:
    if item.estimate_bytes is None or item.held_bytes <= 1.1 * item.estimate_bytes:
        return ""
    return f" (estimate {shown(item.estimate_bytes)})"


@contextmanager
def memory_watched(tell: Tell, rank: int, attempt: int) -> Iterator[None]:
    """Take snapshots of what this worker holds: where the block runs out of memory, and once where a limit comes near. Call it where the worker trains."""
    watch = _Watch(tell, rank, attempt, threading.get_ident())
    try:
        with periodically(lambda: watch.look, EVERY_S, "lockstep-memory"):
            yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        lockstep_error = as_lockstep_error(error, f"rank {rank}")
        raise lockstep_error.with_message(f"{lockstep_error}; {watch.failed(error)}") from error


class _Watch:
    """The watch over one worker's memory. `thread` is the one that trains."""

    def __init__(self, tell: Tell, rank: int, attempt: int, thread: int) -> None:
        self._tell, self._rank, self._attempt, self._thread = tell, rank, attempt, thread
        self._before = held_bytes(torch.device("cpu"))
        self._reserve: bytearray | None = bytearray(_RESERVE_BYTES)
        self._near = False

    def look(self) -> None:
        """Take a snapshot where a limit that kills has come near. Called in a thread of its own."""
        if self._near:
            return
        near = [limit for limit in killing_limits() if limit.share >= HIGH]
        if not near or held_bytes(torch.device("cpu")) < LEAST_SHARE * near[0].bound:
            return
        self._near = True
        limit = max(near, key=lambda one: one.share)
        why = f"{shown(limit.used)} of {shown(limit.bound)} are used, and beyond that a process is killed: {limit.what}"
        frames = _stack(sys._current_frames().get(self._thread))
        try:
            snapshot = self._taken(why, frames, 0)
        except Exception as error:  # noqa: BLE001 - the run goes on, whatever goes wrong with a look at it
            self._tell(Warned(f"memory: {why}; what is held could not be told: {first_line(error)}"))
            return
        self._send(snapshot)
        self._tell(Warned(f"memory: {why}; {snapshot.summary}; {snapshot.name}.txt has the rest"))

    def failed(self, error: BaseException) -> str:
        """What was held as an allocation failed, as a line with the name of the document."""
        self._reserve, self._near = None, True
        try:
            frames = _frames_of(error)
            snapshot = self._taken("an allocation failed", frames, asked_bytes(error))
            self._send(snapshot)
            if torch.cuda.is_available():
                self._send_allocator(snapshot.name)
        except Exception as failure:  # noqa: BLE001 - that memory ran out is what the run has to say
            return f"what was held could not be told: {first_line(failure)}"
        return f"{snapshot.summary}; {snapshot.name}.txt has the rest"

    def _send(self, snapshot: MemorySnapshot) -> None:
        self._tell(Document(f"{snapshot.name}.json", json.dumps(asdict(snapshot), indent=1) + "\n"))
        self._tell(Document(f"{snapshot.name}.txt", snapshot.as_text()))

    def _send_allocator(self, name: str) -> None:
        """The snapshot of CUDA's allocator, in torch's own format for https://pytorch.org/memory_viz."""
        import base64
        import pickle

        pickled = pickle.dumps(torch.cuda.memory._snapshot())
        self._tell(Document(f"{name}.pickle", base64.b64encode(pickled).decode()))

    def _taken(self, why: str, frames: list[FrameType], asked: int) -> MemorySnapshot:
        run, state = _run_in(frames)
        batches = [] if run is None else _batches_in(frames)
        sums = [] if run is None else [
            tensor for phase in run.step.each_phase if phase.reduction is not None for tensor in phase.reduction.waiting()
        ]  # fmt: skip
        found = holdings(state, None if run is None else run.batches.samples, sums, batches)
        device = torch.device("cpu") if state is None else state.precision.device
        held = held_bytes(device)
        estimate = {} if run is None else _estimate(run)
        owners = [
            OwnerMemory(owner, size, estimate.get(owner))
            for owner in OWNERS
            if (size := found.bytes(owner)) or estimate.get(owner)
        ]
        known = sum(item.held_bytes for item in owners)
        before = self._before if device.type == "cpu" else 0
        rest = max(0, held - known - before)
        owners += [OwnerMemory("before the run began", before, None)] if before else []
        owners.append(OwnerMemory("the rest of the process", rest, None))
        limits = [limit for limit in (*killing_limits(), address_space()) if limit is not None]
        return MemorySnapshot(
            rank=self._rank,
            attempt=self._attempt,
            step=0 if state is None else state.counters.step + 1,
            why=why,
            phase=_phase(frames),
            held_bytes=held,
            asked_bytes=asked,
            owners=owners,
            above_estimate=_furthest(owners, asked, _phase(frames)),
            limits=[limit._asdict() for limit in limits],
            modules=[
                {"module": name, "bytes": size}
                for name, size in sorted(found.modules.items(), key=lambda item: -item[1])[:_LARGEST]
            ],
            tensors=[
                piece._asdict() for piece in sorted(found.pieces, key=lambda piece: -piece.bytes)[:_LARGEST]
            ],
        )


def _estimate(run: Run) -> dict[str, int]:
    """What `lockstep estimate` counts for each owner, by its formulas: activations are those of the run's first micro-batch."""
    state, spec, plan, workers = run.state, run.spec, run.plan, run.group.size
    learning = [p for p in state.model.parameters() if p.requires_grad]
    lines = {
        "parameters": worker_memory.nbytes(state.model.parameters()),
        "buffers": worker_memory.nbytes(state.model.buffers()),
        "gradients": sum(p.nbytes for p in learning),
        "average": worker_memory.average_bytes(state),
        "activations": run.activations_bytes,
    }
    if state.sharding is not None:
        lines |= {
            "parameters": worker_memory.nbytes(
                [*state.sharding.local.values(), *state.sharding.mirrors.values()]
            ),
            "gradients": worker_memory.nbytes(state.sharding.local.values()),
        }
        lines["sums"] = lines["gradients"] * worker_memory.sums_in_passes(plan.micro_batches, workers)
    else:
        lines["sums"] = worker_memory.reduction_bytes(spec, lines["gradients"], plan.micro_batches, workers)
    optimizer = worker_memory.optimizer_bytes(state.optimizer) + worker_memory.bytes_before(state)
    if optimizer:  # it makes its state in the first update
        lines["optimizer"] = optimizer
    return {owner: size for owner, size in lines.items() if size}


def _furthest(owners: Iterable[OwnerMemory], asked: int, phase: str) -> str:
    """The owner that was furthest above its estimate. What forward asked for is for activations."""
    above = {
        item.owner: item.held_bytes
        + (asked if item.owner == "activations" and phase == "in forward" else 0)
        - item.estimate_bytes
        for item in owners
        if item.estimate_bytes is not None
    }
    owner = max(above, key=above.__getitem__, default="")
    return owner if owner and above[owner] > 1 << 16 else ""


_ASKED = (
    re.compile(r"tried to allocate (\d+) bytes", re.I),
    re.compile(r"tried to allocate ([\d.]+) (GiB|MiB|KiB)", re.I),
    re.compile(r"unable to allocate ([\d.]+) (GiB|MiB|KiB)", re.I),
)
_UNITS = {"gib": 1 << 30, "mib": 1 << 20, "kib": 1 << 10}


def asked_bytes(error: BaseException) -> int:
    """What the allocation that failed asked for, as torch and numpy say it; 0 where nothing says it."""
    for link in causes(error):
        for pattern in _ASKED:
            if match := pattern.search(str(link)):
                unit = _UNITS[match[2].lower()] if match.re.groups > 1 else 1
                return round(float(match[1]) * unit)
    return 0


# --- stacks -----------------------------------------------------------------------------------------------


def _frames_of(error: BaseException) -> list[FrameType]:
    """The frames that an error and its causes have passed, the outermost first."""
    return [frame for link in causes(error) for frame, _ in walk_tb(link.__traceback__)]


def _stack(frame: FrameType | None) -> list[FrameType]:
    """The frames of a thread, the outermost first."""
    frames = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return frames[::-1]


def _phase(frames: Iterable[FrameType]) -> str:
    phases = [PHASES[frame.f_code] for frame in frames if frame.f_code in PHASES]
    return phases[-1] if phases else "between steps"


def _run_in(frames: Iterable[FrameType]) -> tuple[Run | None, TrainState | None]:
    """The run, or before there is one its state, in the local variables of the functions that have it.

    Of no other function on a living stack: Python keeps what it is asked for until the function returns.
    """
    run, state = None, None
    for frame in frames:
        if frame.f_code is train.__code__:
            run = frame.f_locals.get("run", run)
        elif frame.f_code is prepare.__code__:
            state = frame.f_locals.get("state", state)
    return run, state if run is None else run.state


def _batches_in(frames: Iterable[FrameType]) -> list[Any]:
    """The micro-batches that are computed."""
    return [
        frame.f_locals.get("batch") for frame in frames if frame.f_code is ForwardBackward.backward.__code__
    ]
