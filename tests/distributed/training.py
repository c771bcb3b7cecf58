"""Runs of `fit` for tests, and what of a run must be one value however it was executed.

The functions here are called by name in the processes of a pool, or directly in the test's own.
"""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn

import lockstep.reduction_tree
import lockstep.training.run_facts
import lockstep.training.step.forward_backward
import lockstep.training.step.phase_step
import lockstep.training.step.reduction
from lockstep.checkpoint.runs.run_folder import AttemptOrigin
from lockstep.communication.group import Group
from lockstep.job.interface import Job
from lockstep.job.loading import load_job
from lockstep.record.events.union import CheckpointRow, Diagnosed, Event, Finished, Restored, Warned
from lockstep.record.events.union import Document as Text
from lockstep.record.ledger.rows import EvaluationRow, Observation, StepRow
from lockstep.record.ledger.tables import DETERMINISTIC
from lockstep.spec.loading import load_spec
from lockstep.training.driver_requests import NoRequests
from lockstep.training.integrity.state_digest import weights_digest
from lockstep.training.loop import fit
from lockstep.training.step.buffers import StepBuffers
from lockstep.training.step.reduction import TreeReduction

Document = dict[str, Any]


@dataclass(frozen=True)
class Trained:
    """What a run came to. Two are equal where every bit that the guarantees cover is; numbers are kept as hex."""

    weights_digest: str
    best: tuple[Any, ...]
    """Step and digest of the best weights, where early stopping keeps them."""
    identity: str
    rows: tuple[Any, ...]
    evaluations: tuple[Any, ...]
    digests: tuple[str, ...]
    """Of the model's state after each step."""
    summary: dict[str, Any] = field(compare=False)
    steps: tuple[StepRow, ...] = field(compare=False)
    buckets: int = field(compare=False)
    """DDP buckets of a step from the second on (it rebuilds them after the first); 0 without the reduction."""
    gradients: dict[str, Tensor] = field(compare=False)
    """Of the last step, by parameter."""
    checkpoints: tuple[CheckpointRow, ...] = field(compare=False)
    warnings: tuple[str, ...] = field(compare=False)
    observations: tuple[Observation, ...] = field(compare=False)
    diagnosed: tuple[Diagnosed, ...] = field(compare=False)
    precision: tuple[str, ...] = field(compare=False)
    """precision.json, where there is one."""


def whole_state(model: nn.Module) -> dict[str, Any]:
    """The model's `state_dict` with whole tensors, also of one whose parameters are sharded."""
    return {
        # Rows in host memory are gathered where the group sends from.
        name: value.to(value.device_mesh.device_type).full_tensor()
        if hasattr(value, "full_tensor")
        else value
        for name, value in model.state_dict().items()
    }


class Kept(NoRequests):
    """What a run tells, in memory, with a digest of the model after each step; it asks to stop after `stop_in` steps."""

    def __init__(
        self, model: list[nn.Module], stop_in: int | None, run_id: str = "", dies_at: int | None = None
    ) -> None:
        self.warnings: list[str] = []
        self.checkpoints: list[CheckpointRow] = []
        self._run_id = run_id
        self.steps: list[StepRow] = []
        self.evaluations: list[EvaluationRow] = []
        self.observations: list[Observation] = []
        self.diagnosed: list[Diagnosed] = []
        self.precision: list[str] = []
        self.digests: list[str] = []
        self.buckets: list[int] = []
        self._model = model
        self._stop_in, self._dies_at = stop_in, dies_at

    def tell(self, event: Event) -> None:
        match event:
            case Restored():
                self.steps, self.evaluations = list(event.steps), list(event.evaluations)
            case StepRow():
                if event.step == self._dies_at:
                    os.kill(os.getpid(), signal.SIGKILL)
                self.steps.append(event)
                self.digests.append(weights_digest(whole_state(self._model[0])))
            case EvaluationRow():
                self.evaluations.append(event)
            case Observation():
                self.observations.append(event)
            case Diagnosed():
                self.diagnosed.append(event)
            case Text(name="precision.json"):
                self.precision.append(event.text)
            case CheckpointRow():
                self.checkpoints.append(event)
            case Warned():
                self.warnings.append(event.text)
            case Finished():
                for path in event.files:
                    if path.stem == "final":
                        assert weights_digest(load_file(path)) == event.summary["weights_digest"]

    def run_id(self) -> str:
        return self._run_id

    def stop(self) -> bool:
        return len(self.steps) == self._stop_in


def set_aside() -> None:
    """Keep the garbage collector from what is there before a job is, such as modules: in the pool, to look through it for each run costs half a second."""
    if dist.is_initialized():
        gc.collect()
        gc.freeze()


def train(document: Document, device: str = "cpu") -> Trained:
    """`fit` on the job that the spec names, in the process group at hand or alone."""
    set_aside()
    spec = load_spec(document)
    return train_job(document, load_job(spec.job.use, spec.job.params), device=device)


def train_sending(document: Document, latency_bytes: int) -> Trained:
    """`train`, with another bound on the buckets that are sent whole; 0 sends all of them in slices."""
    with mock.patch.object(lockstep.training.step.reduction, "LATENCY_BYTES", latency_bytes):
        return train(document)


def train_stopped(document: Document, rank: int, step: int) -> Trained:
    """A run that rank number `rank`, and no other, asks to end after step number `step`, counted from 1."""
    spec = load_spec(document)
    here = dist.get_rank() if dist.is_initialized() else 0
    return train_job(
        document, load_job(spec.job.use, spec.job.params), stop_in=step - 1 if here == rank else None
    )


def train_attempt(
    document: Document, run_id: str, origin: AttemptOrigin, stop_after: int | None = None, device: str = "cpu"
) -> Trained:
    """One attempt of a run that is saved: the run's first where `origin` names none. It may be asked to stop after a step."""
    set_aside()
    spec = load_spec(document)
    return train_job(
        document,
        load_job(spec.job.use, spec.job.params),
        None if stop_after is None else stop_after - 1,
        run_id,
        origin,
        device,
    )


def train_and_die(document: Document, run_id: str, step: int) -> None:
    """The run's first attempt, in whose process SIGKILL comes when it tells of `step`."""
    spec = load_spec(document)
    train_job(
        document, load_job(spec.job.use, spec.job.params), run_id=run_id, origin=AttemptOrigin(), dies_at=step
    )


def train_job(
    document: Document,
    job: Job,
    stop_in: int | None = None,
    run_id: str = "",
    origin: AttemptOrigin | None = None,
    device: str = "cpu",
    dies_at: int | None = None,
) -> Trained:
    """`fit` on `job`; the spec's own job is not looked at but for its source. At step `dies_at` the process is killed."""
    made: list[nn.Module] = []
    record = Kept(made, stop_in, run_id, dies_at)
    if dist.is_initialized():
        gc.collect()  # a process here may train a hundred runs, and the open group of one wakes up a hundred times a second
    with (
        _model_seen(job, made),
        _buckets_counted(record.buckets),
        closing(Group.join(torch.device(device))) as group,
    ):
        summary = fit(load_spec(digested(document)), job, group, record.tell, record, origin)
    assert summary is not None
    return Trained(
        weights_digest=summary["weights_digest"],
        best=(summary["best_step"], summary["best_digest"]),
        identity=summary["identity"],
        rows=tuple(bits({name: getattr(row, name) for name in DETERMINISTIC}) for row in record.steps),
        checkpoints=tuple(record.checkpoints),
        warnings=tuple(record.warnings),
        observations=tuple(record.observations),
        diagnosed=tuple(record.diagnosed),
        precision=tuple(record.precision),
        evaluations=tuple((row.step, row.epoch, bits(row.metrics)) for row in record.evaluations),
        digests=tuple(record.digests),
        summary=summary,
        steps=tuple(record.steps),
        buckets=min((record.buckets.count(step) for step in set(record.buckets) if step > 1), default=0),
        gradients={
            name: p.grad.cpu().clone() for name, p in made[0].named_parameters() if p.grad is not None
        },
    )


def digested(document: Document) -> Document:
    """The spec with digests in every row, unless it says itself how many are wanted, and without a recorder."""
    return {**document, "record": {"digest_every": 1, "uri": "off", **document.get("record", {})}}


def bits(value: Any) -> Any:
    """`value` with floats as hexadecimal text, under which NaN equals itself and 0.0 is not -0.0."""
    if isinstance(value, float):
        return value.hex()
    if isinstance(value, Mapping):
        return tuple((name, bits(inner)) for name, inner in sorted(value.items()))
    if isinstance(value, tuple):
        return tuple(map(bits, value))
    return value


@contextmanager
def _model_seen(job: Job, made: list[nn.Module]) -> Iterator[None]:
    make = job.model

    def seen() -> nn.Module:
        made[:] = [make()]
        return made[0]

    with mock.patch.object(job, "model", seen):
        yield


@contextmanager
def _buckets_counted(steps: list[int]) -> Iterator[None]:
    """Note the number of its step for every bucket that the hook is called with."""

    class Counted(TreeReduction):
        begun = 0

        def begin(self, *args: Any) -> None:
            self.begun += 1
            super().begin(*args)

        def __call__(self, state: object, bucket: dist.GradBucket) -> Any:
            steps.append(self.begun)
            return super().__call__(state, bucket)

    with mock.patch.object(lockstep.training.step.phase_step, "TreeReduction", Counted):
        yield


# --- broken variants: each takes one mechanism away --------------------------------------------------------


def train_left_fold(document: Document) -> Trained:
    """Gradients summed from left to right: within a worker, then over the workers."""

    def adjoining(left: range, right: range, leaves: int) -> bool:
        return left.stop == right.start

    def one(micro_batches: range, leaves: int) -> tuple[range, ...]:
        return (micro_batches,) if micro_batches else ()

    caches = (lockstep.reduction_tree.worker_ranges, lockstep.reduction_tree.stages)
    try:
        with (
            mock.patch.object(lockstep.reduction_tree, "nodes", one),
            mock.patch.object(lockstep.training.step.reduction, "nodes", one),
            mock.patch.object(lockstep.reduction_tree, "are_siblings", adjoining),
            mock.patch.object(lockstep.training.step.reduction, "are_siblings", adjoining),
        ):
            for cache in caches:
                cache.cache_clear()
            return train(document)
    finally:
        for cache in caches:
            cache.cache_clear()


def train_rank_seeds(document: Document) -> Trained:
    """The usual recipe of one seed a rank."""
    seed_all, rank = lockstep.training.step.forward_backward.seed_all, dist.get_rank()
    with mock.patch.object(
        lockstep.training.step.forward_backward,
        "seed_all",
        lambda key, device: seed_all((rank, *key), device),
    ):
        return train(document)


def train_buffers_left(document: Document) -> Trained:
    """Each micro-batch starts from the buffers that the one before it left."""
    with mock.patch.object(StepBuffers, "restore", lambda self: None):
        return train(document)


def train_updates_forgotten(document: Document) -> Trained:
    """What a hook of the optimizer writes to buffers is not taken over: micro-batches after a worker's first see the step before."""
    with (
        mock.patch.object(StepBuffers, "take_over", lambda self: None),
        mock.patch.object(StepBuffers, "check_unseen", lambda self, where: None),
    ):
        return train(document)


def train_buffers_apart(document: Document) -> Trained:
    """Every rank keeps the buffers of its own micro-batches."""

    def keep_own(self: StepBuffers, flagged: object, resized: bool = False) -> None:
        with torch.no_grad():
            for i, buffer in enumerate(self.buffers):
                self._before[i].copy_(buffer)

    with (
        mock.patch.object(StepBuffers, "restore", lambda self: None),
        mock.patch.object(StepBuffers, "end_step", keep_own),
    ):
        return train(document)


def train_mixed_numerics(document: Document) -> Trained:
    """One rank is another kind of machine."""
    probe = f"{dist.get_rank():016x}"
    with mock.patch.object(lockstep.training.run_facts, "numerics_probe", lambda device: probe):
        return train(document)
