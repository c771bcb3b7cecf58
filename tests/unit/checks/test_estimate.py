"""The estimate against what training really holds: equal where it counts, near where it measures, on five kinds of model."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from lockstep.checkpoint.snapshot import snapshot
from lockstep.checks.estimate import (
    Estimate,
    as_text,
    estimate,
    estimated,
)
from lockstep.checks.estimate_formulas import total_bytes
from lockstep.checks.estimate_measurement import Measured, at, measured
from lockstep.checks.fixture import Fixture
from lockstep.checks.live_bytes import LiveBytes
from lockstep.communication.group import Group
from lockstep.job.loading import load_job
from lockstep.plan import Plan
from lockstep.record.events.union import Document, Event, tell_nobody
from lockstep.spec.fields import Spec
from lockstep.spec.loading import load_spec
from lockstep.training.determinism import determinism
from lockstep.training.driver_requests import NoRequests
from lockstep.training.loop import fit
from lockstep.training.observe.worker_memory import sums_held
from lockstep.training.run import Run
from lockstep.training.setup import prepare
from lockstep.training.step.phase_step import LossModule
from lockstep.training.step.reduction import TreeSum
from tests.distributed.changing_jobs import by_tokens
from tests.in_process import here

CPU = Group.join(torch.device("cpu"))

GPT = {"use": "jobs.stdlib_gpt.job:StdlibGPT", "params": {"depth": 1, "context": 64, "corpus_bytes": 100_000}}

MODELS: dict[str, dict[str, Any]] = {
    "perceptron": {"job": {"use": "tests.distributed.small_jobs:Plain", "params": {"width": 512, "samples": 256}}, "batch": {"global": 256, "micro": 32}},
    "convolutions": {"job": {"use": "jobs.digits.job:Digits", "params": {"width": 16}}, "batch": {"global": 128, "micro": 32}},
    "transformer": {"job": GPT, "batch": {"global": 32, "micro": 8}, "data": {"shuffle": "none"}},
    "transformer, activations recomputed": {"job": GPT, "batch": {"global": 32, "micro": 8}, "activation_checkpointing": True, "data": {"shuffle": "none"}},
    "embedding in bf16": {"job": {"use": "tests.distributed.small_jobs:Words", "params": {"samples": 64}}, "batch": {"global": 32, "micro": 16}, "precision": "bf16", "data": {"shuffle": "none"}},
}  # fmt: skip


def test_an_estimate_measures_a_micro_batch_that_has_samples() -> None:
    """All of the first one, and of the second, are left out."""
    run = MODELS["perceptron"] | {"data": {"shuffle": "none"}}
    run |= {"job": {"use": "tests.distributed.small_jobs:Plain", "params": {"width": 64, "samples": 256}}}
    emptied = ",".join(str(i) for i in range(256) if i % 8 < 2)
    whole = estimate(load_spec(run))
    without = estimate(load_spec(run | {"data": {"shuffle": "none", "without": emptied}}))
    assert without.total_bytes == whole.total_bytes


def each_model() -> pytest.MarkDecorator:
    return pytest.mark.parametrize("name", MODELS)


def spec_of(name: str) -> Spec:
    return load_spec({**MODELS[name], "length": {"steps": 3}, "record": {"uri": "off"}})


def step_of(run: Run, watched: Callable[[Callable[[], Any]], Any]) -> Any:
    """Two steps as training takes them, then what `watched` makes of the third. The run may take them again afterwards."""
    batches = run.loader()
    first, second, third = run.plan.positions()
    run.step(first, batches)
    run.step(second, batches)
    found = watched(lambda: run.step(third, batches))
    run.state.counters.step = 0
    return found


def allocated(action: Callable[[], Any]) -> int:
    """Bytes of what was made within, at the peak, by torch's own account of its allocator. What was there before is not seen, nor its end.

    Nor is what a kernel takes and gives back within one call, as a product of bf16 does where the processor has instructions for it.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        action()
    events = found.profiler.kineto_results.events()  # type: ignore[union-attr]
    calls = [(e.start_ns(), e.end_ns()) for e in events if e.name() != "[memory]"]
    sizes: list[tuple[int, int]] = []
    """What was made or freed, and the innermost call in which it was."""
    for moment, size in sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"):
        call = max((start for start, end in calls if start <= moment <= end), default=0)
        if call and (-size, call) in sizes:
            sizes.remove((-size, call))
        else:
            sizes.append((size, call))
    return max(accumulate((size for size, _ in sizes), initial=0))


@pytest.fixture(scope="module")
def runs() -> Iterator[Callable[[str], tuple[Estimate, Run]]]:
    """Estimate and run of a model, made once."""
    made: dict[str, tuple[Estimate, Run]] = {}

    def of(name: str) -> tuple[Estimate, Run]:
        if name not in made:
            spec = spec_of(name)
            job = load_job(spec.job.use, spec.job.params)
            with determinism("strict", 1):
                made[name] = (estimated(Fixture(spec)), prepare(spec, job, CPU, tell_nobody))
        return made[name]

    yield of


@pytest.mark.every(5)
@pytest.mark.thinned(4)
@each_model()
def test_what_is_counted_is_what_training_holds(
    name: str, runs: Callable[[str], tuple[Estimate, Run]]
) -> None:
    """Parameters, gradients, the optimizer's state, the tree's sums and a checkpoint, to the byte."""
    found, run = runs(name)
    sums = [0]
    add = TreeSum.add

    def noted(self: TreeSum, node: range, gradients: list[Tensor]) -> None:
        add(self, node, gradients)
        sums.append(sum(g.nbytes for _, total in self.sums for g in total))

    with determinism("strict", 1), mock.patch.object(TreeSum, "add", noted):
        step_of(run, lambda step: step())
    state = run.state
    assert found.parameters_bytes == sum(p.nbytes for p in state.model.parameters())
    assert found.gradients_bytes == sum(p.grad.nbytes for p in state.model.parameters() if p.grad is not None)
    held = [value for own in state.optimizer.state.values() for value in own.values()]
    assert found.optimizer_bytes == sum(value.nbytes for value in held)
    assert found.reduction_bytes == max(sums) > 0
    assert found.checkpoint_bytes == snapshot(state.sections()).nbytes


@pytest.mark.every(5)
@pytest.mark.thinned(2)
@each_model()
def test_the_peak_of_a_step_is_near_what_torch_allocates(
    name: str, runs: Callable[[str], tuple[Estimate, Run]]
) -> None:
    """Within 5 %, and activations within 1 %: activations, gradients, sums and the update, by the profiler's account of the third step."""
    found, run = runs(name)
    fixture = Fixture(spec_of(name))
    with determinism("strict", 1):
        peak = step_of(run, allocated)
        state, key = fixture.fresh(), fixture.step_keys()[0]
        module, batch = LossModule(state.job, state.model), fixture.fetch(key)
        fixture.forward(module, state, batch, key)  # whatever the first call makes for good
        forward = allocated(lambda: fixture.forward(module, state, batch, key))
    # An estimate of memory, and no value of training: torch's allocator rounds, and temporary tensors come and go.
    assert found.activations_bytes == pytest.approx(forward, rel=0.01)
    standing = found.parameters_bytes + 2 * found.buffers_bytes + found.optimizer_bytes + (1 << 19)
    assert found.total_bytes - standing == pytest.approx(peak, rel=0.05)


def test_what_a_run_used_is_in_its_record_by_the_names_of_its_estimate() -> None:
    spec = spec_of("perceptron").model_copy(update={"ema": 0.9})
    told: list[Event] = []
    fit(spec, load_job(spec.job.use, spec.job.params), CPU, told.append, NoRequests())
    (document,) = [event for event in told if isinstance(event, Document)]
    used = json.loads(document.text)
    with determinism("strict", 1):
        found = estimated(Fixture(spec)).as_dict()
    peaks = used.pop("peak_bytes_by_rank")
    assert document.name == "memory.json"
    assert used == {name: found[name] for name in used}
    assert used.keys() >= {
        f"{part}_bytes"
        for part in ("parameters", "gradients", "optimizer", "checkpoint", "reduction", "communication")
    }
    assert used["average_bytes"] == used["parameters_bytes"]
    assert len(peaks) == 1
    assert peaks[0] > found["total_bytes"], "the whole process, which torch itself is part of"


def test_live_bytes_are_those_of_the_allocator() -> None:
    """Views and writes in place count nothing, and what is let go of is taken off."""
    weight = torch.randn(300, 200, requires_grad=True)
    inputs = torch.randn(50, 200)

    def work() -> None:
        hidden = (inputs @ weight.t()).relu_().view(25, 600)
        (hidden.tanh() * 2).sum().backward()  # type: ignore[no-untyped-call]
        weight.grad = None

    work()
    with LiveBytes() as live:
        work()
    assert live.most == allocated(work)
    assert live.now == 0


def test_the_sums_that_a_worker_holds_are_those_of_its_tree() -> None:
    """For every M to 40 and every number of workers."""
    for leaves in range(1, 41):
        plan = Plan.of(leaves, leaves, 1, drop_last=True, steps=1)
        for workers in range(1, leaves + 1):
            for own in plan.ranges(workers):
                tree, most = TreeSum(leaves), 0
                for m in own[:-1]:
                    tree.add(range(m, m + 1), [torch.zeros(1)])
                    most = max(most, len(tree.sums))
                assert sums_held(own, leaves) == most


def test_another_micro_batch_lies_on_the_line_and_the_largest_that_fits_is_proposed() -> None:
    spec = spec_of("convolutions")
    with determinism("strict", 1):
        found = estimated(Fixture(spec))
        larger = estimated(
            Fixture(spec.model_copy(update={"batch": spec.batch.model_copy(update={"micro": 64})}))
        )
    assert found.largest_micro_batch == 128
    # An estimate, not a value of training: what does not grow with the batch is in both.
    assert larger.activations_bytes == pytest.approx(2 * found.activations_bytes, rel=0.05)
    whole = Measured(8, 0, 0, 100, (), 0, 0, 0, 80, 800, 900, 0)
    half = Measured(4, 0, 0, 100, (), 0, 0, 0, 40, 500, 500, 0)
    assert at(whole, half, 16) == Measured(16, 0, 0, 100, (), 0, 0, 0, 160, 1400, 1700, 0)
    assert total_bytes(spec, at(whole, half, 16), 2, 1) == 160 + 1700 + 100, "one sum waits for the second"


def test_the_command_prints_the_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "spec.yaml").write_text(
        "job: {use: 'tests.faulty_jobs.jobs:Sound'}\nbatch: {global: 32, micro: 8}\nworkers: {max: 2}\n"
    )
    code, out, _ = here(monkeypatch, capfd, tmp_path, "estimate", "spec.yaml", "--json")
    told = json.loads(out)
    parts = ("parameters", "gradients", "optimizer", "activations", "reduction", "checkpoint", "total")
    assert code == 0
    assert all(told[f"{part}_bytes"] > 0 for part in parts)
    assert [v["precision"] for v in told["variants"]] == ["bf16", "fp16"]
    code, out, _ = here(monkeypatch, capfd, tmp_path, "estimate", "spec.yaml")
    assert code == 0
    assert "largest micro" in out
    code, _, err = here(
        monkeypatch, capfd, tmp_path, "estimate", "spec.yaml", "job.use=tests.faulty_jobs.jobs:Detached"
    )
    assert (code, err.count("\n")) == (1, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["spec.yaml"]


@pytest.mark.scenario
def test_an_estimate_tells_what_other_settings_would_need() -> None:
    found = estimate(spec_of("transformer"))
    by_setting = {(v["precision"], v["activation_checkpointing"]): v for v in found.variants}
    assert set(by_setting) == {(p, c) for p in ("fp32", "bf16", "fp16") for c in (False, True)} - {
        ("fp32", False)
    }
    assert by_setting["fp32", True]["activations_bytes"] < 0.5 * found.activations_bytes


def test_micro_batches_that_tokens_bound_are_measured_by_the_largest_of_them() -> None:
    """No micro-batch of the run needs more, some need less, and no other number of samples is proposed: it would be another run."""
    fixture = Fixture(load_spec({**by_tokens(), "record": {"uri": "off"}}))
    with determinism("strict", 1):
        found = estimated(fixture)
        keys = [key for step in range(4) for key in fixture.step_keys(step)]
        activations = [measured(fixture, key._replace(due=())).activations for key in keys]
    assert max(activations) <= found.activations_bytes
    assert min(activations) < found.activations_bytes
    assert (found.tokens, found.largest_micro_batch) == (64, None)
    assert "largest micro" not in as_text(found)
    assert "the one measured that needs most" in as_text(found)
