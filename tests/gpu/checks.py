"""What is held to on a device: each check returns rows for a table. The same functions run on a CPU in the default tests.

A runner has `run(workers, function, *args)`: what each of W processes returned, in one process group on the device.
"""

from __future__ import annotations

import os
import signal
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, NamedTuple, Protocol
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from lockstep.checkpoint.runs.run_folder import AttemptOrigin, RunFolder
from lockstep.checkpoint.storage.opening import open_storage
from lockstep.communication.group import Group
from lockstep.errors import SpecError
from lockstep.job.loading import load_job
from lockstep.record.events.union import Event
from lockstep.record.ledger.rows import StepRow
from lockstep.reduction_tree import worker_ranges
from lockstep.spec.loading import load_spec
from lockstep.training.determinism import determinism, numerics_probe
from lockstep.training.driver_requests import NoRequests
from lockstep.training.final_results import peak_memory
from lockstep.training.loop import fit
from lockstep.training.step import reduction
from lockstep.training.step.compiled import cpp_compiler
from lockstep.training.step.norm import GradientNorm
from tests.distributed.test_peak_memory import document as deep
from tests.distributed.test_peak_memory import peak
from tests.distributed.training import Document, Trained, train, train_attempt
from tests.gpu.jobs import Tokens
from tests.gpu.processes import Lost, Processes
from tests.unit.training.step.test_norm import gradients, in_buckets

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
    sends: bool = True
    """Whether a rank can send to a single other one; gloo cannot send a tensor that lies on a GPU."""

    @classmethod
    def on(cls, device: str, runner: Processes) -> Setting:
        return cls(device, runner, device == "cpu", device == "cpu" or runner.backend == "nccl")


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


UNEVEN = {"global": 30, "micro": 5}
"""Six micro-batches a step: on two workers each has a part of the tree that is no single node."""


GLOO = "skipped: gloo sends no CUDA tensor to a single rank"


def mixed(precision: str, clip: bool, job: str = "Mixed", **more: Any) -> Document:
    """Eight micro-batches a step, the last step of an epoch ragged."""
    return {
        "job": {"use": f"tests.gpu.jobs:{job}", "params": {"width": 24}},
        "seed": 3,
        "length": {"epochs": 2},
        "batch": {"global": 40, "micro": 5},
        "data": {"drop_last": False},
        "precision": precision,
        "clip_norm": 1.0 if clip else None,
        "workers": {"bucket_mb": 0.01},
        **more,
    }


def sharded(document: Document) -> Document:
    return {**document, "sharding": "optimizer"}


class Way(NamedTuple):
    """A run and how its buckets travel: `in_slices`, none is sent whole, so that single ranks exchange slices of them."""

    document: Document
    in_slices: bool = False

    def sending(self) -> AbstractContextManager[Any]:
        return mock.patch.object(reduction, "LATENCY_BYTES", 0) if self.in_slices else nullcontext()


def train_each(ways: list[Way], device: str) -> list[Trained]:
    found = []
    for way in ways:
        with way.sending():
            found.append(train(way.document, device))
    return found


def repeats(setting: Setting) -> Iterator[Row]:
    """One run twice, in two processes, in three precisions."""
    ways = [Way(mixed(precision, clip=True)) for precision in PRECISIONS]
    (first,), (second,) = (setting.runner.run(1, train_each, ways, setting.device) for _ in range(2))
    for precision, one, other in zip(PRECISIONS, first, second, strict=True):
        yield Row(f"W = 1 twice, {precision}", one.weights_digest[:12], one == other)


def workers(setting: Setting) -> Iterator[Row]:
    """Ragged steps, BatchNorm and conditional parameters on two to four workers and on one, with and without clip.

    The buckets are small, so they are sent whole; the same cases, on uneven workers, go in slices as well.
    """
    cases = [(precision, clip) for precision in PRECISIONS for clip in (False, True)]
    ways = {
        f"{precision}{', clipped' if clip else ''}": Way(mixed(precision, clip)) for precision, clip in cases
    }
    if setting.sends:
        ways |= {
            f"{what}, in slices": Way({**way.document, "batch": UNEVEN}, in_slices=True)
            for what, way in ways.items()
        }
    # The controls: `reduction: native` adds a worker's micro-batches from left to right, and there is one order only for one of each worker.
    left, one_each = mixed("fp32", False), mixed("fp32", True, batch={"global": 12, "micro": 6})
    one_each["record"] = {"digest_every": None}  # native sums keep no micro-batch's gradient apart
    (alone,) = setting.runner.run(1, train_each, [*ways.values(), Way(one_each)], setting.device)
    native = [Way({**one, "reduction": "native"}, in_slices=True) for one in (left, one_each)]
    for size in (2,) if setting.small else (2, 3, 4):
        every = [*ways.values(), *(native if size == 2 else [])]
        ranks = setting.runner.run(size, train_each, every, setting.device)
        for i, what in enumerate(ways):
            same = all(rank[i] == alone[i] for rank in ranks)
            yield Row(f"W = {size} as W = 1, {what}", alone[i].weights_digest[:12], same)
        if size == 2:
            broken = {rank[-2].weights_digest for rank in ranks}
            yield Row("another order of addition gives other bits", "", alone[0].weights_digest not in broken)
            same = all(
                (rank[-1].digests, rank[-1].rows) == (alone[-1].digests, alone[-1].rows) for rank in ranks
            )
            yield Row("W = 2, native, one micro-batch each", alone[-1].weights_digest[:12], same)
    if not setting.sends:
        yield Row("in slices", GLOO)


def sharding(setting: Setting) -> Iterator[Row]:
    """A sharded optimizer on two workers and a whole one on one worker, also for parameters that lie otherwise in memory than their shape says."""
    if not setting.sends:
        yield Row("a sharded optimizer", GLOO)
        return
    strided = {
        "job": {"use": "tests.distributed.small_jobs:Strided", "params": {"samples": 50}},
        "batch": {"global": 16, "micro": 2},
        "data": {"drop_last": False},
        "clip_norm": 0.5,
    }
    cases = {precision: mixed(precision, clip=True) for precision in PRECISIONS}
    cases |= {"fused": mixed("fp32", True, "Fused"), "strided parameters": strided}
    ways = [Way(document) for document in cases.values()]
    (alone,) = setting.runner.run(1, train_each, ways, setting.device)
    ranks = setting.runner.run(2, train_each, [Way(sharded(way.document)) for way in ways], setting.device)
    for i, what in enumerate(cases):
        same = all(rank[i] == alone[i] for rank in ranks)
        yield Row(f"W = 2, sharded, {what}", alone[i].weights_digest[:12], same)


OFFLOADED = {"mode": "full", "offload": True}


def offload(setting: Setting) -> Iterator[Row]:
    """Everything sharded on two workers, with rows on the device and in host memory, and a whole run on one; taken up from the one by the other; and what a device holds."""
    if not setting.sends:
        yield Row("everything sharded", GLOO)
        return
    cases = {precision: mixed(precision, clip=True, ema=0.9) for precision in PRECISIONS}
    units = {**gpt({**TINY, "depth": 3}, 3), "batch": {"global": 8, "micro": 2}}
    cases |= {"fused": mixed("fp32", True, "Fused"), "in units": units}
    (alone,) = setting.runner.run(1, train_each, [Way(each) for each in cases.values()], setting.device)
    for what, sharding in (("on the device", "full"), ("in host memory", OFFLOADED)):
        ways = [Way({**document, "sharding": sharding}) for document in cases.values()]
        ranks = setting.runner.run(2, train_each, ways, setting.device)
        for i, case in enumerate(cases):
            same = all(rank[i] == alone[i] for rank in ranks)
            yield Row(f"W = 2, rows {what}, {case}", alone[i].weights_digest[:12], same)
    with tempfile.TemporaryDirectory(prefix="runs-") as storage:
        saving = {**cases["bf16"], "checkpoint": {"storage": storage, "every": {"steps": 1}, "keep_every": 1}}
        origin, whole = AttemptOrigin(), alone[list(cases).index("bf16")]
        for step, sharding, size in ((0, OFFLOADED, 2), (2, "none", 1), (3, OFFLOADED, 2), (2, "full", 2)):
            ways = [Way({**saving, "sharding": sharding})]
            ranks = setting.runner.run(size, attempt_each, ways, [origin], setting.device)
            same = all(
                (rank[0].digests, rank[0].rows) == (whole.digests[step:], whole.rows) for rank in ranks
            )
            kept = "host memory" if sharding is OFFLOADED else f"sharding {sharding}"
            yield Row(f"from step {step} on W = {size}, {kept}", whole.weights_digest[:12], same)
            number = RunFolder.open(open_storage(storage), "run").claim().number
            origin = AttemptOrigin("run", number, {0: 2, 2: 3, 3: 2}[step])
    document = {**gpt(TINY if setting.small else {}, 4), "batch": {"global": 8, "micro": 2}}
    peaks = {
        what: max(setting.runner.run(2, peak_of_steps, {**document, "sharding": sharding}, setting.device))
        for what, sharding in (("full", "full"), ("offload", OFFLOADED))
    }
    shown = f"{peaks['offload'] / 1e9:.2f} GB, else {peaks['full'] / 1e9:.2f}"
    lower = None if setting.device == "cpu" else peaks["offload"] < peaks["full"]
    yield Row("memory of a device at the peak of a step, rows in host memory", shown, lower)


def peak_of_steps(document: Document, device: str) -> int:
    """The most memory that torch has on the device after two steps; 0 on a CPU."""
    spec = load_spec(document)

    class Resetting(NoRequests):
        def tell(self, event: Event) -> None:
            if isinstance(event, StepRow) and event.step == 2 and device == "cuda":
                torch.cuda.reset_peak_memory_stats()

    record = Resetting()
    job = load_job(spec.job.use, spec.job.params)
    fit(spec, job, Group.join(torch.device(device)), record.tell, record)
    return torch.cuda.max_memory_allocated() if device == "cuda" else 0


def resume(setting: Setting) -> Iterator[Row]:
    """Runs with a checkpoint after each step, taken up after some of them on other workers, which save as well."""
    even = mixed("bf16", clip=True)
    ways, of_whole = {"": Way(even)}, [Way(even)]
    if setting.sends:
        uneven, fused = {**even, "batch": UNEVEN}, mixed("bf16", True, "Fused")
        ways |= {", in slices": Way(uneven, in_slices=True), ", sharded, fused": Way(sharded(fused))}
        of_whole += [Way(uneven), Way(fused)]
    (whole,) = setting.runner.run(1, train_each, of_whole, setting.device)
    with tempfile.TemporaryDirectory(prefix="runs-") as storage:
        saving = [
            Way(
                {
                    **way.document,
                    "checkpoint": {"storage": f"{storage}/{i}", "every": {"steps": 1}, "keep_every": 1},
                },
                way.in_slices,
            )
            for i, way in enumerate(ways.values())
        ]
        origins = [AttemptOrigin()] * len(saving)
        on_two = setting.runner.run(2, attempt_each, saving, origins, setting.device)
        for i, what in enumerate(ways):
            same = all(rank[i] == whole[i] for rank in on_two)
            yield Row(f"W = 2, a checkpoint each step{what}", f"{len(whole[i].rows)} steps", same)
        folders = [RunFolder.open(open_storage(f"{storage}/{i}"), "run") for i in range(len(saving))]
        for before, size in ((False, 1), (True, 2 if setting.small else 3)):
            steps = [len(one.rows) - 1 if before else 2 for one in whole]
            origins = [
                AttemptOrigin("run", folder.claim().number, step)
                for folder, step in zip(folders, steps, strict=True)
            ]
            ranks = setting.runner.run(size, attempt_each, saving, origins, setting.device)
            for i, (what, step) in enumerate(zip(ways, steps, strict=True)):
                same = all(
                    (rank[i].digests, rank[i].rows) == (whole[i].digests[step:], whole[i].rows)
                    for rank in ranks
                )
                yield Row(
                    f"taken up after step {step} on W = {size}{what}", whole[i].weights_digest[:12], same
                )
    if not setting.sends:
        yield Row("in slices, and sharded", GLOO)


def attempt_each(ways: list[Way], origins: list[AttemptOrigin], device: str) -> list[Trained]:
    found = []
    for way, origin in zip(ways, origins, strict=True):
        with way.sending():
            found.append(train_attempt(way.document, "run", origin, None, device))
    return found


def compiled(setting: Setting) -> Iterator[Row]:
    """A compiled perceptron on one worker, and on two, which read the programs that it has compiled; the ragged tail runs eager."""
    try:
        cpp_compiler()
    except SpecError as error:
        yield Row("compiled", f"skipped: {error}")
        return
    document = {
        "job": {"use": "tests.distributed.small_jobs:Plain", "params": {"samples": 32}},
        "batch": {"global": 12, "micro": 3},
        "data": {"drop_last": False},
        "length": {"epochs": 2},
        "precision": "bf16",
        "compile": True,
    }
    with tempfile.TemporaryDirectory(prefix="programs-") as folder:
        ((alone,),) = setting.runner.run(1, train_compiled, [Way(document)], setting.device, folder)
        ranks = setting.runner.run(2, train_compiled, [Way(document)], setting.device, folder)
    same = all(rank == [alone] for rank in ranks)
    yield Row("W = 2 as W = 1, compiled", alone.weights_digest[:12], same)


def train_compiled(ways: list[Way], device: str, folder: str) -> list[Trained]:
    """With inductor's programs in this folder."""
    with mock.patch.dict(os.environ, {"TORCHINDUCTOR_CACHE_DIR": folder}):
        return train_each(ways, device)


# --- costs ----------------------------------------------------------------------------------------------------


WAITS = 2
"""How often a step of one worker may make the processor wait for the device, in fp32 and bf16: for the step's exchange, and for the
norm of its gradients. In fp16 torch's loss scaler waits as well."""


def synchronisations(setting: Setting) -> Iterator[Row]:
    """How often a step makes the processor wait for the device; the job itself never does."""
    document = {**gpt(TINY, steps=16), "batch": {"global": 8, "micro": 2}}
    document["record"] = {"digest_every": None, "observe_every": None}
    documents = [{**document, "precision": precision} for precision in PRECISIONS]
    found = setting.runner.run(1, waits, documents, setting.device)[0]
    for precision, waited in zip(PRECISIONS, found, strict=True):
        what = f"synchronisations of a step, {precision}"
        if setting.device == "cpu":
            yield Row(what, "no device")
        else:
            yield Row(what, f"{waited:g}", None if precision == "fp16" else 0 < waited <= WAITS)


def waits(documents: list[Document], device: str) -> list[float]:
    return [_waits(document, device) for document in documents]


def _waits(document: Document, device: str) -> float:
    """Of a step by torch's own count on CUDA: the median, for a few steps also fetch a micro-batch again and compare it."""
    noted: list[int] = []
    spec = load_spec(document)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")

        class Noting(NoRequests):
            def tell(self, event: Event) -> None:
                if isinstance(event, StepRow):
                    noted.append(sum("called a synchronizing" in str(one.message) for one in told))

        if device == "cuda":
            torch.cuda.set_sync_debug_mode("warn")
        try:
            record = Noting()
            job = load_job(spec.job.use, spec.job.params)
            fit(spec, job, Group.join(torch.device(device)), record.tell, record)
        finally:
            if device == "cuda":
                torch.cuda.set_sync_debug_mode("default")
    return statistics.median(after - before for before, after in pairwise(noted))


def memory(setting: Setting) -> Iterator[Row]:
    """The most gradients that a worker holds, in sets of them: at most 2 + log2 of its micro-batches."""
    for size, micro_batches in ((1, 8), (2, 16)):
        most = len(max(worker_ranges(micro_batches, size), key=len))
        # A digest's workspace of 32 MiB on CUDA is made with the first one.
        document = {**deep(micro_batches), "record": {"digest_every": None}}
        sets = max(setting.runner.run(size, peak, document, False, setting.device))
        bound = 2 + most.bit_length() - 1
        yield Row(f"sets of gradients, W = {size}, {most} micro-batches each", f"{sets:.2f}", sets <= bound)


PEAK_FLOPS = {"NVIDIA H100": 989e12, "NVIDIA H200": 989e12, "NVIDIA A100": 312e12}
"""Of dense bf16 products, by the beginning of the device's name; from the vendor's data sheets."""


TINY = {"depth": 1, "heads": 2, "width": 16, "context": 16, "vocabulary": 64, "samples": 64}


def gpt(params: dict[str, int], steps: int) -> Document:
    return {
        "job": {"use": "tests.gpu.jobs:Tokens", "params": params},
        "length": {"steps": steps},
        "precision": "bf16",
        "clip_norm": 1.0,
        "rehearsal": "off",
    }


def speed(setting: Setting) -> Iterator[Row]:
    """A GPT of 124 M parameters in bf16 beside a hand-written loop: strict and fast, exact and native; the memory at the peak."""
    params, batch, steps = (TINY, (8, 2), 4) if setting.small else ({}, (64, 8), 14)
    ways = {"Lockstep, strict, exact": ("strict", "exact"), "Lockstep, strict, native": ("strict", "native")}
    ways["Lockstep, fast, exact"] = ("fast", "exact")
    document = {**gpt(params, steps), "batch": {"global": batch[0], "micro": batch[1]}}
    spec = load_spec(document)
    job = load_job(spec.job.use, spec.job.params)
    assert isinstance(job, Tokens)
    of_step = batch[0] * job.params.context
    parameters = sum(parameter.numel() for parameter in job.model().parameters())
    flops = 6 * parameters + 12 * job.params.depth * job.params.width * job.params.context  # of a token
    name = torch.cuda.get_device_name() if setting.device == "cuda" else ""
    most = next((flops for begin, flops in PEAK_FLOPS.items() if name.startswith(begin)), None)

    def row(what: str, cost: Cost) -> Row:
        rate, used = of_step / cost.step_s, ""
        if most is not None:
            used = f", {100 * rate * flops / most:.1f} % of {most / 1e12:.0f} TFLOP/s"
        peak = f", {cost.peak_bytes / 1e9:.1f} GB"
        return Row(what, f"{1e3 * cost.step_s:.1f} ms a step, {rate:,.0f} tokens/s{used}{peak}")

    yield Row("parameters of the GPT", f"{parameters / 1e6:.1f} M")
    yield row("by hand", setting.runner.run(1, _by_hand, document, setting.device)[0])
    for what, (kind, added) in ways.items():
        given = {**document, "determinism": kind, "reduction": added}
        yield row(what, setting.runner.run(1, _by_lockstep, given, setting.device)[0])


class Cost(NamedTuple):
    """Seconds of a step, and the most memory that the process has held: on a CPU all of it."""

    step_s: float
    peak_bytes: int


class Timing(NoRequests):
    """The time of each step but the first two."""

    def __init__(self) -> None:
        self.steps: list[float] = []

    def tell(self, event: Event) -> None:
        if isinstance(event, StepRow) and event.step > 2:
            self.steps.append(event.step_s)


def _by_lockstep(document: Document, device: str) -> Cost:
    spec, record = load_spec(document), Timing()
    job = load_job(spec.job.use, spec.job.params)
    fit(spec, job, Group.join(torch.device(device)), record.tell, record)
    return Cost(statistics.median(record.steps), peak_memory(torch.device(device)))


def _by_hand(document: Document, device: str) -> Cost:
    """The loop that a person writes: autocast, accumulation, clipping, AdamW, the loss read once."""
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
    return Cost(statistics.median(times[2:]), peak_memory(torch.device(device)))


def killed(setting: Setting) -> Iterator[Row]:
    """From the death of a rank to the error that another one tells."""
    runner = setting.runner
    assert isinstance(runner, Processes)
    with tempfile.TemporaryDirectory(prefix="killed-") as folder:
        told, other = runner.answers(2, _until_killed, mixed("fp32", False), folder, setting.device)
        died = Path(folder, "died")
        if setting.device == "cuda" and isinstance(told, Lost) and isinstance(other, Lost) and died.exists():
            # The rank waits in CUDA, where no error can be raised: NCCL's watchdog ends its process.
            passed_s = time.time() - float(died.read_text())
            yield Row(
                "from a killed rank to the end of the other", f"{passed_s:.2f} s: {told}", "-6" in str(told)
            )
            return
        if isinstance(told, Exception) or not isinstance(
            other, Lost
        ):  # a process ended and told nothing, or none was killed
            yield Row("from a killed rank to an error", f"none: {told}, {other}", False)
            return
        text, at = told
        yield Row(
            "from a killed rank to an error", f"{at - float(died.read_text()):.2f} s: {text[:60]}", True
        )


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
    for check in (
        probe,
        norm,
        repeats,
        workers,
        sharding,
        offload,
        resume,
        compiled,
        synchronisations,
        memory,
        speed,
        killed,
    )
}
