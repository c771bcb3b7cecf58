"""One step of a recorded run taken again to be looked at: in a debugger, under a profiler, or with the statistics of every module."""

from __future__ import annotations

import json
import pdb
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from lockstep.job.loading import load_job
from lockstep.plan import Position
from lockstep.proof.operator_trace import Look, Microscope
from lockstep.record.ledger.rows import StepRow
from lockstep.spec.fields import Spec
from lockstep.training.job_data import make_sampler, open_data
from lockstep.training.observe.worker_memory import tensors_in
from lockstep.training.planning import make_plan


@dataclass(frozen=True, slots=True)
class InspectionRequest:
    """What of a step (from 0) is wanted: of one micro-batch, or of all where `micro_batch` is None."""

    step: int
    micro_batch: int | None = None
    inspect: bool = False
    """Statistics of every module, and autograd's anomaly detection."""
    profile: bool = False
    debug: bool = False
    """A debugger before each micro-batch."""

    def covers(self, position: Position, m: int) -> bool:
        return position.step == self.step and self.micro_batch in (None, m)


Seat = tuple[int, str]
"""A micro-batch, and the phase of the step in which it is computed, or no name."""


FILES = frozenset({"batch.safetensors", "trace.json", "samples.json"})
"""What may be written out of a step."""


@dataclass(slots=True)
class Inspection:
    """Shows one step, as a probe of its micro-batches; files go into `folder`, which is made for the first of them."""

    request: InspectionRequest
    folder: Path
    looks: dict[Seat, Look] = field(default_factory=dict)
    losses: dict[Seat, float] = field(default_factory=dict)
    files: list[Path] = field(default_factory=list)
    replayed_row: StepRow | None = None
    _phase: str = ""
    _profiler: Any = None
    _microscope: Microscope | None = None

    @contextmanager
    def around(self, position: Position, m: int, model: nn.Module, phase: str) -> Iterator[None]:
        self._phase = phase
        if position.step == self.request.step and self.request.profile and self._profiler is None:
            self._profiler = torch.profiler.profile(record_shapes=True, with_stack=True)
            self._profiler.start()
        if not self.request.covers(position, m):
            yield
            return
        with ExitStack() as stack:
            if self.request.inspect:
                stack.enter_context(torch.autograd.set_detect_anomaly(True))
                self._microscope = Microscope(position.step, m, operators=False)
                self.looks[m, phase] = self._microscope.look
                stack.enter_context(self._microscope.around(position, m, model, phase))
            yield
        self._microscope = None

    def batch(self, position: Position, m: int, batch: Any) -> None:
        if not self.request.covers(position, m):
            return
        if self._microscope is not None:
            self._microscope.batch(position, m, batch)
        if self.request.micro_batch is not None:
            tensors = {
                f"batch[{i}]": leaf.cpu().contiguous().clone() for i, leaf in enumerate(tensors_in(batch))
            }
            save_file(tensors, self._file("batch.safetensors"))
        if self.request.debug:
            debugger = pdb.Pdb(nosigint=True)
            debugger.message(f"step {position.number}, micro-batch {m}: the loss is given `batch`; c goes on")
            debugger.set_trace()

    def loss(self, position: Position, m: int, total: Tensor | float) -> None:
        if self._microscope is not None:
            self._microscope.loss(position, m, total)
        if self.request.covers(position, m):
            self.losses[m, self._phase] = total.item() if isinstance(total, Tensor) else total

    def backward(self, position: Position, m: int) -> None:
        if self._microscope is not None:
            self._microscope.backward(position, m)

    def row(self, row: StepRow) -> None:
        """The step is done: its update is in the profile as well."""
        if row.step != self.request.step + 1:
            return
        self.replayed_row = row
        if self._profiler is not None:
            self._profiler.stop()
            self._profiler.export_chrome_trace(str(self._file("trace.json")))

    def enough(self) -> bool:
        return False

    def keep_samples(self, ids: Mapping[int, list[int]]) -> None:
        """Write which samples each micro-batch has."""
        self._file("samples.json").write_text(
            json.dumps({str(m): samples for m, samples in ids.items()}) + "\n"
        )

    def micro_batches(self, ids: Mapping[int, list[int]]) -> list[dict[str, Any]]:
        """Of each micro-batch in turn, the phases in the order in which they were taken: `micro_batch`, `phase` where there are several,
        `samples`, `loss`, and with `inspect` `modules` and `gradients`, each value with its statistics.
        """
        return [
            self._micro_batch(m, phase, ids[m]) for m, phase in sorted(self.losses, key=lambda seat: seat[0])
        ]

    def _micro_batch(self, m: int, phase: str, ids: list[int]) -> dict[str, Any]:
        document: dict[str, Any] = {
            "micro_batch": m,
            **({"phase": phase} if phase else {}),
            "samples": ids,
            "loss": self.losses[m, phase],
        }
        if (m, phase) in self.looks:
            look = self.looks[m, phase]
            for name, values in (("modules", look.modules), ("gradients", look.gradients)):
                document[name] = [{"what": value.what, **value.statistics} for value in values]
        return document

    def _file(self, name: str) -> Path:
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / name
        if path not in self.files:  # each phase of a step is given the same batch
            self.files.append(path)
        return path


def sample_ids(spec: Spec, step: int) -> dict[int, list[int]]:
    """The samples of each micro-batch of a step (from 0), in order."""
    job = load_job(spec.job.use, spec.job.params)
    train_data = open_data(job, spec.seed).train
    plan = make_plan(spec, job, train_data)
    ids: dict[int, list[int]] = {}
    for batch in make_sampler(spec, plan, train_data, start=step):
        if batch.step != step:
            break
        ids[batch.micro_batch] = [int(i) for i in batch.ids]
    return ids
