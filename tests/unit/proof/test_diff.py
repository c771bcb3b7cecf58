"""Two runs compared: what was meant to differ is told first, then the step, micro-batch, module or parameter, and operator in which they part."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from lockstep import train
from lockstep.calls import problems
from lockstep.calls.diff import diff
from lockstep.proof.run_diff import Difference, Parted
from tests.in_process import here
from tests.raised import raises
from tests.unit.proof.test_verify import drop
from tests.unit.proof.verified_jobs import PLANTED

BEFORE = """
import torch
from torch import nn
import torch.nn.functional as F
import lockstep

class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 3

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 3

class Mixer(nn.Module):
    def forward(self, x):
        return x * x.sum(1, keepdim=True).cos()

class Own(lockstep.Job):
    def model(self):
        return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), Mixer(), nn.Linear(16, 3))

    def train_data(self):
        x = torch.randn(24, 8)
        return torch.utils.data.TensorDataset(x, x[:, :3].argmax(1))

    def loss(self, model, batch):
        x, y = batch
        return lockstep.Loss(F.cross_entropy(Scaled.apply(model(x)), y, reduction="sum"), len(y))
"""
FORWARD = BEFORE.replace("x.sum(1, keepdim=True)", "x.flip(1).sum(1, keepdim=True)")
BACKWARD = BEFORE.replace("return gradient * 3", "return gradient * 2 + gradient * 1.0000001")
LAYOUT = BEFORE.replace("class Mixer(nn.Module):", "class Mixer(nn.Module):\n    # only told otherwise")


EVALUATED = (
    BEFORE
    + """
    def eval_data(self):
        x = torch.randn(10, 8, generator=torch.Generator().manual_seed(2))
        return torch.utils.data.TensorDataset(x, x[:, :3].argmax(1))
"""
)
HELD_OUT = EVALUATED.replace("manual_seed(2)", "manual_seed(77)")


def document(folder: Path, **changes: Any) -> dict[str, Any]:
    return {
        "job": {"use": "own.job:Own"},
        "length": {"steps": 6},
        "batch": {"global": 8, "micro": 2},
        "optimizer": {"name": "sgd", "lr": 0.1},
        "checkpoint": {"storage": str(folder / "runs"), "every": {"steps": 2}, "keep_last": 9},
        "record": {"uri": "off"},
        "rehearsal": "off",
        **changes,
    }


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a job and its spec, in which commands are given."""
    folder = tmp_path_factory.mktemp("place")
    (folder / "own").mkdir()
    (folder / "spec.yaml").write_text(yaml.safe_dump(document(folder)))
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(folder)
        patched.syspath_prepend(str(folder))
        yield folder
    forget_job()


@pytest.fixture(autouse=True)
def as_it_was(place: Path) -> None:
    """The job before it was changed."""
    write(place, BEFORE)


def write(place: Path, source: str) -> None:
    """Put the job's source there, to be imported anew, as another command would."""
    (place / "own" / "job.py").write_text(source)
    forget_job()


def forget_job() -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "own"]:
        del sys.modules[name]


TRAINED: dict[str, str] = {}


def trained(place: Path, source: str = BEFORE, **changes: Any) -> str:
    """The id of a run of this source, trained once for all tests."""
    key = repr((source, changes))
    if key not in TRAINED:
        write(place, source)
        TRAINED[key] = train(document(place, **changes), local=True).run_id
        write(place, BEFORE)
    return TRAINED[key]


def compared(place: Path, a: str, b: str) -> Difference:
    return diff(a, b, uri="off", storage=place / "runs", steps=6)


def parted(found: Difference) -> Parted:
    assert found.first_difference is not None
    return found.first_difference


def test_equal_runs_are_the_same_and_so_is_a_change_that_changes_no_bit(place: Path) -> None:
    a, b = trained(place), trained(place, LAYOUT)
    again = compared(place, a, a)
    assert again.same and not again.fields and not again.source
    found = compared(place, a, b)
    assert found.same
    assert [cause.field for cause in found.fields] == ["job.source"]
    assert "+    # only told otherwise\n" in found.source


@pytest.mark.scenario
def test_a_refactoring_that_adds_in_another_order_is_named_by_module_and_operator(place: Path) -> None:
    found = compared(place, trained(place), trained(place, FORWARD))
    first = parted(found)
    assert first.step == 1
    assert first.micro_batch is not None
    assert (first.quantity, first.module, first.parameter) == ("output of 2", "2", None)
    assert first.operator == "aten.sum.dim_IntList → aten.flip"
    assert first.recorded != first.found
    assert set(first.statistics["recorded"]) == {"shape", "dtype", "not_finite", "mean", "std", "min", "max"}
    assert "-        return x * x.sum(1, keepdim=True).cos()\n" in found.source
    assert "+        return x * x.flip(1).sum(1, keepdim=True).cos()\n" in found.source


@pytest.mark.scenario
def test_a_backward_that_rounds_otherwise_is_named_by_parameter_and_operator(place: Path) -> None:
    first = parted(compared(place, trained(place), trained(place, BACKWARD)))
    assert (first.step, first.micro_batch, first.module) == (1, 0, None)
    assert first.parameter in ("3.weight", "3.bias")
    assert first.quantity == f"gradient of {first.parameter}"
    assert (first.operator or "").startswith("aten.mul.Tensor")


@pytest.mark.scenario
def test_a_run_and_a_spec_that_is_not_run_yet_are_compared(place: Path) -> None:
    run = trained(place)
    assert compared(place, run, str(place / "spec.yaml")).same
    write(place, FORWARD)
    first = parted(compared(place, run, str(place / "spec.yaml")))
    assert (first.step, first.module) == (1, "2")


@pytest.mark.scenario
@pytest.mark.thinned(3)
@pytest.mark.parametrize(
    ("changes", "field", "where"),
    [
        ({"schedule": {"name": "step", "every": 4}}, "schedule.name", (5, None, "lr")),
        ({"seed": 1}, "seed", (1, 0, "batch[0]")),
        (
            {"optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9}},
            "optimizer.momentum",
            (1, None, "optimizer_digest"),
        ),
    ],
)
def test_what_differs_by_intention_is_told_with_the_first_step(
    place: Path, changes: dict[str, Any], field: str, where: tuple[int, int | None, str]
) -> None:
    found = compared(
        place, trained(place, record={"uri": "off", "digest_every": None}), trained(place, **changes)
    )
    assert field in [cause.field for cause in found.fields]
    first = parted(found)
    assert (first.step, first.micro_batch, first.quantity) == where


EVERY = {"evaluate": {"every": {"steps": 4}}}


@pytest.mark.scenario
def test_runs_that_differ_in_their_held_out_data_alone_part_at_the_first_evaluation(place: Path) -> None:
    """Every row and digest of theirs is the same."""
    a, b = trained(place, EVALUATED, **EVERY), trained(place, HELD_OUT, **EVERY)
    assert compared(place, a, a).same
    found = compared(place, a, b)
    first = parted(found)
    assert (first.step, first.micro_batch, first.quantity) == (4, None, "eval/loss")
    assert first.recorded != first.found and found.note is None
    write(place, HELD_OUT)
    assert parted(compared(place, a, str(place / "spec.yaml"))).quantity == "evaluation"


@pytest.mark.scenario
@pytest.mark.thinned(3)
@pytest.mark.parametrize(
    ("name", "lost", "told"),
    [
        ("ledger.parquet", 3, (3, "row", None, "there")),
        ("evaluations.parquet", 4, (4, "evaluation", None, "there")),
        ("evaluations.parquet", 6, (6, "evaluation", None, "there")),
    ],
)
def test_a_row_that_one_record_lacks_is_a_difference(
    place: Path, name: str, lost: int, told: tuple[Any, ...]
) -> None:
    a = trained(place, EVALUATED, **EVERY)
    b = trained(place, EVALUATED, **EVERY, name=f"{name}-{lost}")
    assert compared(place, a, b).same
    drop(place / "runs" / a, name, lost)
    try:
        found = compared(place, a, b)
    finally:
        TRAINED.pop(repr((EVALUATED, EVERY)))
    first = parted(found)
    assert (first.step, first.quantity, first.recorded, first.found) == told
    assert "both give the same bits" in (found.note or "")


@pytest.mark.scenario
def test_an_evaluation_that_comes_with_a_runs_end_is_no_difference(place: Path) -> None:
    """Where the other one goes on, or was ended before it."""
    (place / "long.yaml").write_text(yaml.safe_dump(document(place, **EVERY, length={"steps": 20})))
    short = trained(place, EVALUATED, **EVERY)
    write(place, EVALUATED)
    assert compared(place, short, str(place / "long.yaml")).same
    (place / "same.yaml").write_text(yaml.safe_dump(document(place, **EVERY)))
    assert compared(place, short, str(place / "same.yaml")).same
    cut = trained(place, EVALUATED, **EVERY, name="cut")
    run = place / "runs" / cut
    (run / "run.json").write_text(
        json.dumps({**json.loads((run / "run.json").read_text()), "status": "KILLED"})
    )
    drop(run, "evaluations.parquet", 6)
    write(place, EVALUATED)
    assert compared(place, cut, str(place / "same.yaml")).same
    drop(run, "evaluations.parquet", 4)
    assert parted(compared(place, cut, str(place / "same.yaml"))).step == 4


@pytest.mark.scenario
def test_an_average_that_only_one_keeps_and_weights_that_no_row_tells_are_differences(place: Path) -> None:
    off = {"record": {"uri": "off", "digest_every": None}}
    first = parted(compared(place, trained(place), trained(place, ema=0.9)))
    assert (first.step, first.quantity, first.recorded) == (1, "ema_digest", None)
    one = {**off, "length": {"steps": 1}}
    decayed = {"name": "sgd", "lr": 0.1, "weight_decay": 0.1}
    a, b = trained(place, **one), trained(place, **one, optimizer=decayed)
    first = parted(compared(place, a, b))
    assert (first.step, first.quantity) == (1, "weights_digest")
    assert compared(place, a, a).same


@pytest.mark.scenario
def test_a_fault_that_does_not_come_again_is_told_as_such(tmp_path: Path) -> None:
    job = {"use": "tests.unit.proof.verified_jobs:Small"}
    spec = document(
        tmp_path, job=job, batch={"global": 14, "micro": 7}, record={"uri": "off", "digest_every": 1}
    )
    a = train(spec, local=True).run_id
    PLANTED["gradient"] = (3, 1)
    try:
        b = train(spec, local=True).run_id
    finally:
        PLANTED.clear()
    found = diff(a, b, uri="off", storage=tmp_path / "runs")
    first = parted(found)
    assert (first.step, first.micro_batch, first.quantity) == (4, 1, "gradient_digest")
    assert "both give the same bits" in (found.note or "")


@pytest.mark.scenario
def test_the_command_answers_with_an_object_and_an_exit_code(
    place: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    a, b = trained(place), trained(place, FORWARD)
    words = ("--uri", "off", "--storage", str(place / "runs"))
    code, out, _ = here(monkeypatch, capfd, place, "diff", a, a, *words, "--json")
    assert (code, json.loads(out)["same"]) == (0, True)
    code, out, _ = here(monkeypatch, capfd, place, "diff", a, b, *words, "--json")
    answer = json.loads(out)
    assert (code, answer["same"], answer["first_difference"]["module"]) == (1, False, "2")
    assert answer["fields"][0]["field"] == "job.source"
    code, out, _ = here(monkeypatch, capfd, place, "diff", a, b, *words)
    assert code == 1
    assert "operator          aten.sum.dim_IntList → aten.flip\n" in out


def test_mistakes_are_told_in_one_line(place: Path) -> None:
    with raises(problems.DIFF_NO_FILE, got="other.yaml"):
        compared(place, "other.yaml", "spec.yaml")
