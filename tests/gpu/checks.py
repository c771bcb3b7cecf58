"""What is held to on a device: each check returns rows for a table. The same functions run on a CPU in the default tests.

A runner has `run(workers, function, *args)`: what each of W processes returned, in one process group on the device.
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from lockstep.checkpoint.run_folder import AttemptOrigin, RunFolder
from lockstep.checkpoint.storages import open_storage
from lockstep.communication.group import Group
from lockstep.job.loading import load_job
from lockstep.plan import worker_ranges
from lockstep.record.events import Event, StepRow
from lockstep.spec.loading import load_spec
from lockstep.training.determinism import determinism, numerics_probe
from lockstep.training.loop import fit
from lockstep.training.norm import GradientNorm
from lockstep.training.requests import NoRequests
from tests.distributed.test_peak_memory import document as deep
from tests.distributed.test_peak_memory import peak
from tests.distributed.training import Document, Trained, train, train_attempt
from tests.gpu.jobs import Tokens
from tests.gpu.processes import Lost, Processes
from tests.unit.training.test_norm import gradients, in_buckets

PRECISIONS = ("fp32", "bf16", "fp16")


class Row(NamedTuple):
    """One line of the table. `holds` is None where something is measured and nothing promised."""

    what: str
    value: str
    holds: bool | None = None


class Runner(Protocol):
    def run(self, workers: int, function: Callable[..., Any], *args: Any) -> list[Any]: ...


@dataclass(frozen=True, slots=True)
class Setting:
    """Where the checks run, and how large: `small` is what a CPU does in seconds."""

    device: str
    runner: Runner
    small: bool


# --- bits -----------------------------------------------------------------------------------------------------


def probe(setting: Setting) -> Iterator[Row]:
    """The numerics probe under strict, in two processes."""
    found = setting.runner.run(2, _probe, setting.device)
    yield Row("numerics probe of two processes", " ".join(found), len(set(found)) == 1)


def _probe(device: str) -> str:
    with determinism("strict", 1):
        return numerics_probe(torch.device(device))


def norm(setting: Setting) -> Iterator[Row]:
    """The norm of gradients in buckets of five sizes, begun at sixteen offsets; beside it, torch's own norm."""
    every = [gradient.to(setting.device) for gradient in gradients()]
    wanted = GradientNorm(every).squares(every)
    differing, by_torch = 0, set()
    for buckets in (1, 2, 3, 5, 8):
        for offset in range(16):
            views = in_buckets(every, buckets, offset)
            differing += GradientNorm(every).squares(views) != wanted
            by_torch.add(float(torch.linalg.vector_norm(views[-1])))
    yield Row("norms that differ, of 80 layouts", str(differing), differing == 0)
    yield Row("values of torch's norm of one gradient in them", str(len(by_torch)))


def mixed(precision: str, clip: bool, **more: Any) -> Document:
    """Eight micro-batches a step, the last step of an epoch ragged."""
    return {
        "job": {"use": "tests.gpu.jobs:Mixed", "params": {"width": 24}},
        "seed": 3,
        "length": {"epochs": 2},
        "batch": {"global": 40, "micro": 5},
        "data": {"drop_last": False},
        "precision": precision,
        "clip_norm": 1.0 if clip else None,
        "workers": {"bucket_mb": 0.01},
        **more,
    }


def train_each(documents: list[Document], device: str) -> list[Trained]:
    return [train(document, device) for document in documents]


def repeats(setting: Setting) -> Iterator[Row]:
    """One run twice, in two processes, in three precisions."""
    documents = [mixed(precision, clip=True) for precision in PRECISIONS]
    (first,), (second,) = (setting.runner.run(1, train_each, documents, setting.device) for _ in range(2))
    for precision, one, other in zip(PRECISIONS, first, second, strict=True):
        yield Row(f"W = 1 twice, {precision}", one.weights_digest[:12], one == other)


def workers(setting: Setting) -> Iterator[Row]:
    """Ragged steps, BatchNorm and conditional parameters on two to four workers and on one, with and without clip."""
    cases = [(precision, clip) for precision in PRECISIONS for clip in (False, True)]
    documents = [mixed(*case) for case in cases]
    (alone,) = setting.runner.run(1, train_each, documents, setting.device)
    for size in (2,) if setting.small else (2, 3, 4):
        ranks = setting.runner.run(size, train_each, documents, setting.device)
        for i, (precision, clip) in enumerate(cases):
            same = all(rank[i] == alone[i] for rank in ranks)
            what = f"W = {size} as W = 1, {precision}{', clipped' if clip else ''}"
            yield Row(what, alone[i].weights_digest[:12], same)
    shared = [{**documents[1], "optimizer": {"name": "adamw", "sharded": True}}]
    same = all(rank[0] == alone[1] for rank in setting.runner.run(2, train_each, shared, setting.device))
    yield Row("W = 2 with a sharded optimizer", alone[1].weights_digest[:12], same)
    broken = {
        rank[0].weights_digest for rank in setting.runner.run(2, _other_order, documents[0], setting.device)
    }
    yield Row("another order of addition gives other bits", "", alone[0].weights_digest not in broken)


def _other_order(document: Document, device: str) -> list[Trained]:
    """The control: `reduction: native` adds a worker's micro-batches from left to right."""
    return [train({**document, "reduction": "native"}, device)]


def resume(setting: Setting) -> Iterator[Row]:
    """A run with a checkpoint after each step, taken up after two of them on other workers, which save as well."""
    whole = setting.runner.run(1, train_each, [mixed("bf16", clip=True)], setting.device)[0][0]
    total = len(whole.rows)
    with tempfile.TemporaryDirectory(prefix="runs-") as storage:
        saving = mixed("bf16", True, checkpoint={"storage": storage, "every": {"steps": 1}, "keep_every": 1})
        on_two = setting.runner.run(2, train_attempt, saving, "run", AttemptOrigin(), None, setting.device)
        yield Row(
            "W = 2 with a checkpoint after each step", f"{total} steps", all(t == whole for t in on_two)
        )
        folder = RunFolder.open(open_storage(storage), "run")
        for step, size in ((2, 1), (total - 1, 2 if setting.small else 3)):
            origin = AttemptOrigin("run", folder.claim().number, step)
            found = setting.runner.run(size, train_attempt, saving, "run", origin, None, setting.device)
            same = all(one.digests == whole.digests[step:] and one.rows == whole.rows for one in found)
            yield Row(f"taken up after step {step} on W = {size}", whole.weights_digest[:12], same)


# --- costs ----------------------------------------------------------------------------------------------------


def synchronisations(setting: Setting) -> Iterator[Row]:
    """How often a step makes the processor wait for the device."""
    for precision in PRECISIONS:
        found = setting.runner.run(1, _waits, mixed(precision, clip=True), setting.device)[0]
        yield Row(
            f"synchronisations of a step, {precision}",
            f"{found:g}" if setting.device == "cuda" else "no device",
        )


def _waits(document: Document, device: str) -> float:
    """Of a step from the second on, by torch's own count on CUDA."""
    noted: list[int] = []
    spec = load_spec(document)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")

        class Noting(NoRequests):
            def tell(self, event: Event) -> None:
                if isinstance(event, StepRow):
                    noted.append(sum("synchronizing" in str(one.message) for one in told))

        if device == "cuda":
            torch.cuda.set_sync_debug_mode("warn")
        try:
            record = Noting()
            job = load_job(spec.job.use, spec.job.params)
            fit(spec, job, Group.join(torch.device(device)), record.tell, record)
        finally:
            if device == "cuda":
                torch.cuda.set_sync_debug_mode("default")
    return (noted[-1] - noted[0]) / (len(noted) - 1)


def memory(setting: Setting) -> Iterator[Row]:
    """The most gradients that a worker holds, in sets of them: at most 2 + log2 of its micro-batches."""
    for size, micro_batches in ((1, 8), (2, 16)):
        most = len(max(worker_ranges(micro_batches, size), key=len))
        sets = max(setting.runner.run(size, peak, deep(micro_batches), False, setting.device))
        bound = 2 + most.bit_length() - 1
        yield Row(f"sets of gradients, W = {size}, {most} micro-batches each", f"{sets:.2f}", sets <= bound)


PEAK_FLOPS = {"NVIDIA H100": 989e12, "NVIDIA H200": 989e12, "NVIDIA A100": 312e12}
"""Of dense bf16 products, by the beginning of the device's name; from the vendor's data sheets."""


def speed(setting: Setting) -> Iterator[Row]:
    """A GPT of 124 M parameters in bf16 beside a hand-written loop: strict and fast, exact and native."""
    tiny = {"depth": 1, "heads": 2, "width": 16, "context": 16, "vocabulary": 64, "samples": 64}
    params, batch, steps = (tiny, (8, 2), 4) if setting.small else ({}, (64, 8), 14)
    ways = {"Lockstep, strict, exact": ("strict", "exact"), "Lockstep, strict, native": ("strict", "native")}
    ways["Lockstep, fast, exact"] = ("fast", "exact")
    document = {
        "job": {"use": "tests.gpu.jobs:Tokens", "params": params},
        "length": {"steps": steps},
        "batch": {"global": batch[0], "micro": batch[1]},
        "precision": "bf16",
        "clip_norm": 1.0,
        "rehearsal": "off",
    }
    spec = load_spec(document)
    job = load_job(spec.job.use, spec.job.params)
    assert isinstance(job, Tokens)
    tokens = batch[0] * job.params.context
    parameters = sum(parameter.numel() for parameter in job.model().parameters())
    flops = 6 * parameters + 12 * job.params.depth * job.params.width * job.params.context  # of a token
    name = torch.cuda.get_device_name() if setting.device == "cuda" else ""
    most = next((flops for begin, flops in PEAK_FLOPS.items() if name.startswith(begin)), None)

    def row(what: str, step_s: float) -> Row:
        used = (
            ""
            if most is None
            else f", {100 * tokens / step_s * flops / most:.1f} % of {most / 1e12:.0f} TFLOP/s"
        )
        return Row(what, f"{1e3 * step_s:.1f} ms a step, {tokens / step_s:,.0f} tokens/s{used}")

    yield Row("parameters of the GPT", f"{parameters / 1e6:.1f} M")
    yield row("by hand", setting.runner.run(1, _by_hand, document, setting.device)[0])
    for what, (kind, reduction) in ways.items():
        given = {**document, "determinism": kind, "reduction": reduction}
        yield row(what, setting.runner.run(1, _step_s, given, setting.device)[0])


class Timing(NoRequests):
    """The time of each step but the first two."""

    def __init__(self) -> None:
        self.steps: list[float] = []

    def tell(self, event: Event) -> None:
        if isinstance(event, StepRow) and event.step > 2:
            self.steps.append(event.step_s)


def _step_s(document: Document, device: str) -> float:
    spec, record = load_spec(document), Timing()
    job = load_job(spec.job.use, spec.job.params)
    fit(spec, job, Group.join(torch.device(device)), record.tell, record)
    return sorted(record.steps)[len(record.steps) // 2]


def _by_hand(document: Document, device: str) -> float:
    """Seconds of a step of the loop that a person writes: autocast, accumulation, clipping, AdamW, the loss read once."""
    spec = load_spec(document)
    job = load_job(spec.job.use, spec.job.params)
    model = job.model().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = torch.utils.data.DataLoader(
        job.train_data(), spec.batch.micro, shuffle=True, pin_memory=device == "cuda"
    )
    batches, times = iter(loader), []
    on_device = torch.autocast(device, torch.bfloat16) if spec.precision == "bf16" else nullcontext()
    for _ in range(spec.length.steps or 0):
        began = time.perf_counter()
        optimizer.zero_grad()
        total = torch.zeros((), device=device)
        for (tokens,) in islice(batches, spec.batch.micro_batches):
            tokens = tokens.to(device, non_blocking=True)
            with on_device:
                logits = model(tokens[:, :-1]).flatten(0, 1)
            loss = F.cross_entropy(logits.float(), tokens[:, 1:].flatten()) / spec.batch.micro_batches
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        total.item()
        times.append(time.perf_counter() - began)
    return sorted(times[2:])[len(times[2:]) // 2]


def killed(setting: Setting) -> Iterator[Row]:
    """From the death of a rank to the error that another one tells."""
    runner = setting.runner
    assert isinstance(runner, Processes)
    with tempfile.TemporaryDirectory(prefix="killed-") as folder:
        told, other = runner.answers(2, _until_killed, mixed("fp32", False), folder, setting.device)
        if isinstance(told, Exception) or not isinstance(
            other, Lost
        ):  # a process ended and told nothing, or none was killed
            yield Row("from a killed rank to an error", f"none: {told}, {other}", False)
            return
        text, at = told
        died = float(Path(folder, "died").read_text())
        yield Row("from a killed rank to an error", f"{at - died:.2f} s: {text[:60]}", True)


def _until_killed(document: Document, folder: str, device: str) -> tuple[str, float]:
    spec, rank = load_spec(document), dist.get_rank()  # within `fit` no group is seen

    class Dying(NoRequests):
        def tell(self, event: Event) -> None:
            if isinstance(event, StepRow) and event.step == 2 and rank == 1:
                Path(folder, "died").write_text(str(time.time()))
                os.kill(os.getpid(), signal.SIGKILL)

    record = Dying()
    try:
        job = load_job(spec.job.use, spec.job.params)
        fit(spec, job, Group.join(torch.device(device)), record.tell, record)
    except Exception as error:  # noqa: BLE001 - it is what is measured
        return f"{type(error).__name__}: {error}", time.time()
    return "none", time.time()


CHECKS: dict[str, Callable[[Setting], Iterator[Row]]] = {
    check.__name__: check
    for check in (probe, norm, repeats, workers, resume, synchronisations, memory, speed, killed)
}
