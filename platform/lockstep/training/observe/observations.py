"""What a run observes while it trains, every `record.observe_every` steps, beside the rows of its steps.

`begin` and `end` are called around each step. Without an observation they cost one reading of the clock.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from lockstep.checkpoint.runs.run_folder import AttemptOrigin
from lockstep.plan import Position, is_due
from lockstep.record.diagnosis.rules import GRAPH_KEPT
from lockstep.record.events.union import Diagnosed, Document, Tell, Warned
from lockstep.record.ledger.rows import Observation, StepRow
from lockstep.training.integrity.probe import NoProbe
from lockstep.training.observe.dtype_coverage import NAME, Coverage
from lockstep.training.observe.layers import LayerFlow
from lockstep.training.observe.memory_growth import Growth
from lockstep.training.observe.precision_cost import BesideFp32, is_compared
from lockstep.training.observe.step_times import Part
from lockstep.training.run import Run
from lockstep.training.step.phase_step import PhaseStep
from lockstep.training.step.precision import underflow


class Seen(NamedTuple):
    """What one rank reports at an observation. Seconds are means per step since the previous one."""

    times: dict[Part, float]
    hook_s: float
    """Time that the reduction took within backward."""
    held_bytes: int
    peak_bytes: int
    """0 without a GPU."""
    keeps_graphs: str

    @property
    def own_s(self) -> float:
        """Time that the rank computes and fetches, without waiting for others."""
        return self.times.get("forward", 0.0) + self.times.get("backward", 0.0) - self.hook_s


class Watch:
    """Watches the steps of one worker. A replay, whose steps are recorded already, is not watched."""

    def __init__(self, run: Run, origin: AttemptOrigin | None = None) -> None:
        replays = origin is not None and origin.replay is not None
        self._every = None if replays else run.spec.record.observe_every
        self._step, self._group, self._precision = run.step, run.group, run.state.precision
        self._growth = Growth(run.group.device)
        self._history = run.history
        self._model, self._leads = run.state.model, run.group.rank == 0 and self._every is not None
        self._sees_layers = self._leads and run.state.sharding is None
        """Whether rank 0 looks at whole gradients and weights, which no worker has where they are sharded."""
        self._flows: dict[str, LayerFlow] = {}
        """By phase name, in a step that is observed."""
        self._coverage: Coverage | None = None
        self._of_precision: dict[str, float] = {}
        self._beside: BesideFp32 | None = None
        """Set in a step in which precisions are compared."""
        self._is_comparing = self._sees_layers and self._precision.name != "fp32"
        self._steps = 0
        self._whole_s = self._data_s = self._saving_s = self._hook_began = 0.0
        # The modules of a compiled loss do not run one by one.
        if self._leads and self._precision.name != "fp32" and run.state.compiled is None:
            self._coverage = run.step.compute.probe = Coverage(self._precision.name)
        self._forget()

    def begin(self, position: Position) -> None:
        """Called when the step at `position` begins."""
        if self._sees_layers and self._is_due(position):
            self._flows = {
                phase.name: self._flow_of(position, phase) for phase in self._step.each_phase if phase.names
            }
            self._of_precision = {}
            # There is one probe: in the first step the coverage has it.
            if (
                self._is_comparing
                and self._coverage is None
                and is_compared(position.number, self._every or 1)
            ):
                self._beside = self._step.compute.probe = BesideFp32(self._step)

    def _flow_of(self, position: Position, phase: PhaseStep) -> LayerFlow:
        """Observes the update of a phase. Where the step changes what learns in the phase, it sees nothing."""
        flow = LayerFlow(
            self._model, phase.names, phase.parameters, phase.norm, phase.module.conditional, phase.name
        )
        phase.norm.observe = partial(self._look, position, phase, flow)
        return flow

    def end(self, position: Position, row: StepRow, tell: Tell) -> None:
        """Called when the step is done and its row is reported. Where an observation is due, all ranks gather."""
        if self._coverage is not None:
            self._step.compute.probe = NoProbe()
            tell(Document(NAME, self._coverage.text()))
            self._coverage = None
        self._steps, self._whole_s = self._steps + 1, self._whole_s + row.step_s
        self._data_s += row.data_wait_s
        if not self._is_due(position):
            return
        self._end_comparison(tell)
        for phase in self._step.each_phase:
            if phase.names:
                phase.norm.observe = None
        every: list[Seen] = self._group.gather(self._seen(position))
        if self._leads:
            values = {**self._of_precision, **self._times(every), **_memory(every)}
            for flow in self._flows.values():
                values |= flow.taken()
            observation = Observation(position.number, values, time.time())
            self._history.add_observation(observation)
            tell(observation)
            for rank, seen in enumerate(every):
                if seen.keeps_graphs:
                    tell(_keeps_graphs(rank, position, seen.keeps_graphs))
        self._flows = {}
        self._forget()

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Time a save, for as long as the steps wait for it."""
        began = time.perf_counter()
        yield
        self._saving_s += time.perf_counter() - began

    def _is_due(self, position: Position) -> bool:
        """In the first step, and every `observe_every` steps: it follows from the plan alone."""
        return self._every is not None and (position.number == 1 or is_due(position, steps=self._every))

    def _look(
        self,
        position: Position,
        phase: PhaseStep,
        flow: LayerFlow,
        gradients: Sequence[Tensor],
        squares: Sequence[float],
    ) -> None:
        """Called just before an update."""
        if self._precision.name == "fp16":
            scale = self._precision.scale
            self._of_precision |= {"fp16/scale": scale, "fp16/underflow": underflow(gradients, scale)}
        if self._beside is not None:
            self._of_precision |= self._beside(phase, position)
        flow.note(gradients, squares)

    def _end_comparison(self, tell: Tell) -> None:
        """Drop what the comparison kept. If it failed, none is tried again."""
        if self._beside is None:
            return
        self._step.compute.probe, problem = NoProbe(), self._beside.problem
        self._beside = None
        if problem is not None:
            self._is_comparing = False
            tell(Warned(f"record.observe_every: {self._precision.name} is not compared with fp32: {problem}"))

    def _forget(self) -> None:
        """Reset the counts."""
        self._steps = 0
        self._whole_s = self._data_s = self._saving_s = 0.0
        self._hook_began = self._hook_s()
        self._step.compute.times.take()

    def _hook_s(self) -> float:
        """Seconds that the hooks of all phases have taken so far; those of a new reduction begin at 0."""
        reductions = [phase.reduction for phase in self._step.each_phase]
        return sum(reduction.held_up_s for reduction in reductions if reduction is not None)

    def _seen(self, position: Position) -> Seen:
        device = self._group.device
        hook_s = max(0.0, self._hook_s() - self._hook_began) / self._steps
        cuda = device.type == "cuda"
        held_bytes, keeps_graphs = self._growth.look(position.number)
        return Seen(
            self._step.compute.times.take(),
            0.0 if cuda else hook_s,  # on CUDA the hook only launches, and its time is part of backward's
            held_bytes,
            int(torch.cuda.max_memory_allocated(device)) if cuda else 0,
            keeps_graphs,
        )

    def _times(self, every: Sequence[Seen]) -> dict[str, float]:
        """Where the time of rank 0's steps went, in seconds per step."""
        leader = every[0]
        reduction = leader.times.get("reduction", 0.0) + leader.hook_s
        slowest = min(reduction, max(seen.own_s for seen in every) - leader.own_s)
        step_s, data = self._whole_s / self._steps, self._data_s / self._steps
        times = {
            "data": data,
            "forward": max(0.0, leader.times.get("forward", 0.0) - data),
            "backward": max(0.0, leader.times.get("backward", 0.0) - leader.hook_s),
            "slowest": slowest,
            "reduction": reduction - slowest,
            "optimizer": leader.times.get("optimizer", 0.0),
        }
        times["other"] = max(0.0, step_s - sum(times.values()))
        times["checkpoint"] = self._saving_s / self._steps
        return {f"perf/time/{name}_s": seconds for name, seconds in times.items()}


def _memory(every: Sequence[Seen]) -> dict[str, float]:
    current = {f"perf/memory/rank_{rank}_mb": seen.held_bytes / 1e6 for rank, seen in enumerate(every)}
    peaks = {
        f"perf/memory/rank_{rank}_peak_mb": seen.peak_bytes / 1e6
        for rank, seen in enumerate(every)
        if seen.peak_bytes
    }
    return {**current, **peaks}


def _keeps_graphs(rank: int, position: Position, line: str) -> Diagnosed:
    return Diagnosed(
        GRAPH_KEPT,
        position.number,
        f"rank {rank} held {line}",
        "keep loss.item() or .detach(): a tensor that has a graph keeps all of it, and what it was computed from",
    )
