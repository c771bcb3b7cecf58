"""The small jobs of jobs/practice: their gradients are right, they train in seconds, and each shows what it is there for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import yaml
from torch import nn
from torch.autograd import gradcheck, gradgradcheck

from jobs.practice import initialisation, precision
from jobs.practice.gelu import Gelu, GeluFunction
from jobs.practice.glu import Glu, GluFunction
from jobs.practice.straight_through import Binary, BinaryPoints, SignFunction
from lockstep.communication.group import Group
from lockstep.job.loading import load_job
from lockstep.record.events.union import Event
from lockstep.record.ledger.rows import EvaluationRow, StepRow
from lockstep.spec.loading import load_spec
from lockstep.training.driver_requests import NoRequests
from lockstep.training.loop import fit
from tests.unit.checks.test_bench import forked

PRACTICE = Path(__file__).parents[2] / "jobs" / "practice"
JOBS = sorted(path.stem for path in PRACTICE.glob("*.yaml"))


def numbers(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(7)
    return torch.randn(*shape, generator=generator, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize(
    ("function", "inputs"),
    [(GeluFunction.apply, (numbers(3, 4),)), (GluFunction.apply, (numbers(3, 4), 2 * numbers(3, 4)))],
    ids=["gelu", "glu"],
)
def test_a_backward_of_ones_own_is_the_derivative(function: Any, inputs: Any) -> None:
    """Against differences of the forward, and once more for the derivative of the derivative."""
    inputs = tuple(one.detach().requires_grad_() for one in inputs)
    assert gradcheck(function, inputs)
    assert gradgradcheck(function, inputs)


class Wrong(torch.autograd.Function):
    """GELU whose backward forgets a term."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return F.gelu(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return gradient * (1 + torch.erf(x / 2**0.5)) / 2


def test_a_wrong_backward_is_found() -> None:
    assert not gradcheck(Wrong.apply, (numbers(3, 4),), raise_exception=False)


def test_gelu_and_glu_are_those_of_torch() -> None:
    x = numbers(5, 8)
    # no `==`: torch's kernels round the same formula in other places
    torch.testing.assert_close(Gelu()(x), F.gelu(x))
    layer = Glu(8, 3).double()
    torch.testing.assert_close(layer(x), F.glu(layer.linear(x)))


def test_the_estimator_passes_gradients_through_where_a_sign_passes_none() -> None:
    x = torch.tensor([-2.0, -0.5, 0.5, 2.0], requires_grad=True)
    y = SignFunction.apply(x)
    assert y.tolist() == [-1, -1, 1, 1]
    (gradient,) = torch.autograd.grad(y.sum(), x)
    (straight,) = torch.autograd.grad(F.hardtanh(x).sum(), x)
    assert gradient.tolist() == straight.tolist() == [0, 1, 1, 0]
    (none,) = torch.autograd.grad(Binary(straight_through=False)(x).sum(), x)
    assert not none.any()


def trained(name: str, **params: Any) -> tuple[list[StepRow], dict[str, float]]:
    """Steps and last metrics of a spec of the folder, in this process."""
    spec = load_spec(PRACTICE / f"{name}.yaml", [f"job.params.{k}={v}" for k, v in params.items()], uri="off")
    told: list[Event] = []
    fit(
        spec,
        load_job(spec.job.use, spec.job.params),
        Group.join(torch.device("cpu")),
        told.append,
        NoRequests(),
    )
    rows = [event for event in told if isinstance(event, StepRow)]
    return rows, dict([event for event in told if isinstance(event, EvaluationRow)][-1].metrics)


@pytest.mark.scenario
@pytest.mark.thinned(5)
@pytest.mark.parametrize(
    "name", [JOBS[0], *(pytest.param(name, marks=pytest.mark.scenario) for name in JOBS[1:])]
)
def test_each_job_learns(name: str) -> None:
    """Chance is one in four."""
    rows, metrics = trained(name)
    assert rows[-1].loss < 0.7 * rows[0].loss
    assert metrics["eval/accuracy"] > 0.5


def test_without_the_estimator_only_the_last_layer_learns() -> None:
    job = BinaryPoints(BinaryPoints.Params(width=16, straight_through=False))
    model, (x, y) = job.model(), job.train_data()[:32]
    job.loss(model, (x, y)).total.backward()  # type: ignore[union-attr]
    assert isinstance(model, nn.Sequential)
    moved = {name for name, p in model.named_parameters() if p.grad is not None and p.grad.any()}
    assert moved == {"3.weight", "3.bias"}


def test_the_figure_of_gradient_norms_shows_that_ones_explode(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    norms = {name: initialisation.norms_by_layer(name) for name in ("xavier", "kaiming", "ones")}  # type: ignore[arg-type]
    assert all(len(one) == 7 for one in norms.values())
    assert max(norms["xavier"]) < 10 and max(norms["kaiming"]) < 10
    assert max(norms["ones"]) > 1e4
    steps = {name: [1.0, 2.0] for name in norms}
    initialisation.draw(norms, steps, tmp_path / "norms.svg")
    assert "<svg" in (tmp_path / "norms.svg").read_text()


def test_the_specs_differ_in_nothing_but_the_job() -> None:
    """So that what is seen is the model's."""
    found = [yaml.safe_load((PRACTICE / f"{name}.yaml").read_text()) for name in JOBS]
    assert [document.pop("name") for document in found] == JOBS
    assert {document.pop("job")["use"].split(":")[0].rpartition(".")[2] for document in found} == set(JOBS)
    assert all(document == found[0] for document in found)


@pytest.mark.exact
def test_the_tables_of_the_exercises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As the README calls them."""
    monkeypatch.setattr("lockstep.checks.bench.start_python", forked)
    initialisation.main(["--plot", str(tmp_path / "norms.png")])
    assert (tmp_path / "norms.png").read_bytes().startswith(b"\x89PNG")
    assert capsys.readouterr().out.startswith("xavier ")
    rows = {(row.precision, row.workers): row for row in precision.measured([1, 2], 2)}
    assert rows.keys() == {(name, count) for name in precision.PRECISIONS for count in (1, 2)}
    assert rows["bf16", 1].activations_bytes < rows["fp32", 1].activations_bytes
    assert all(row.samples_per_s > 0 for row in rows.values())
