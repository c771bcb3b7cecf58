"""Metrics of the whole set: what a job may give, how outputs are joined, and what is refused in a line."""

from __future__ import annotations

import re
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import lockstep
from lockstep.communication.group import Group
from lockstep.errors import Problem
from lockstep.training import problems
from lockstep.training.evaluation.evaluation_pass import Evaluation
from lockstep.training.evaluation.whole_set_metrics import compute, joined, taken, texts
from lockstep.training.integrity import problems as integrity_problems
from lockstep.training.integrity.rehearsal.evaluation import rehearse
from lockstep.training.step import problems as step_problems
from lockstep.training.step.precision import Precision
from tests.raised import raises

CPU = torch.device("cpu")


class Given(lockstep.Job):
    """Gives whatever it was made with."""

    def __init__(self, metrics: Any = None, figures: Any = None) -> None:
        super().__init__(None)
        self.given = {} if metrics is None else metrics
        self.drawn = {} if figures is None else figures

    def loss(self, model: nn.Module, batch: Tensor) -> lockstep.Loss:
        return lockstep.Loss(batch.float().sum(), len(batch))

    def outputs(self, model: nn.Module, batch: Tensor) -> dict[str, Any]:
        return {"ids": batch}

    def whole_set_metrics(self, outputs: Any) -> Any:
        return self.given(outputs) if callable(self.given) else self.given

    def figures(self, outputs: Any) -> Any:
        return self.drawn


def metrics_of(given: Any) -> dict[str, float]:
    return dict(compute(Given(given), {"preds": torch.tensor([1.0, 3.0])}, seed=1).metrics)


def figures_of(given: Any) -> dict[str, str]:
    return dict(compute(Given(figures=given), {}, seed=1).figures)


class Total:
    def update(self, preds: Tensor) -> None:
        self.sum = getattr(self, "sum", 0.0) + float(preds.sum())

    def compute(self) -> dict[str, float]:
        return {"sum": self.sum}


class Every(Total):
    def update(self, **outputs: Tensor) -> None:  # type: ignore[override]
        super().update(outputs["preds"])


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({"a": 1, "b": torch.tensor(2.5), "c": np.float32(0.5)}, {"a": 1.0, "b": 2.5, "c": 0.5}),
        ({"f1": torch.tensor([0.5, 1.0])}, {"f1/0": 0.5, "f1/1": 1.0}),
        ({"f1": [0.5, np.int64(1)]}, {"f1/0": 0.5, "f1/1": 1.0}),
        ({"f1": {"cat": 0.5, "dog": [1.0]}}, {"f1/cat": 0.5, "f1/dog/0": 1.0}),
        ({"mine": Total()}, {"mine/sum": 4.0}),
        ({"mine": Every()}, {"mine/sum": 4.0}),
        (lambda outputs: {"sum": outputs["preds"].sum()}, {"sum": 4.0}),
        ({"f1": {0: 0.5}, "größe": 1e300, "a|b": 2**63}, {"f1/0": 0.5, "größe": 1e300, "a|b": 2.0**63}),
        ({}, {}),
    ],
)
def test_metrics_are_numbers_by_name(given: Any, wanted: dict[str, float]) -> None:
    assert metrics_of(given) == wanted


@pytest.mark.parametrize(
    ("given", "problem", "facts"),
    [
        (None.__class__, problems.WHOLE_SET_NUMBER, {"name": "x"}),
        ({"x": torch.eye(2)}, problems.WHOLE_SET_NUMBER, {"name": "x", "got": "of 2 dimensions"}),
        ({"x": "high"}, problems.WHOLE_SET_NUMBER, {"name": "x", "got": "str"}),
        ([1.0], problems.WHOLE_SET_KIND, {"name": "whole_set_metrics", "got": "list"}),
        ({"x": 10**400}, step_problems.TOO_LARGE, {"what": "job.whole_set_metrics: 'x'", "got": "int"}),
        ({"a\nb": 1}, step_problems.MEAN_NAME, {"label": "job.whole_set_metrics", "got": r"'a\nb'"}),
        ({"": 1}, step_problems.MEAN_NAME, {"label": "job.whole_set_metrics", "got": "''"}),
        ({"x": {"\x00": 1}}, step_problems.MEAN_NAME, {"label": "job.whole_set_metrics", "got": r"'x/\x00'"}),
        ({"x": [1], "x/0": 2}, problems.WHOLE_SET_NAME, {"got": "x/0", "taken": "given twice"}),
        ({5: 1, "5": 2}, problems.WHOLE_SET_NAME, {"got": "5", "taken": "given twice"}),
        (
            lambda outputs: outputs["missing"],
            problems.JOB_FAILED,
            {
                "where": re.compile("^evaluation, in whole_set_metrics, "),
                "kind": "KeyError",
                "got": "'missing'",
            },
        ),
    ],
)
def test_what_is_no_metric_is_refused(given: Any, problem: Problem[Any], facts: dict[str, object]) -> None:
    with raises(problem, **facts):
        metrics_of({"x": None} if given is type(None) else given)


def test_figures_are_texts_by_the_name_of_a_file() -> None:
    from matplotlib.figure import Figure

    figure = Figure()
    figure.subplots().plot([1, 2])
    found = figures_of({"curve": figure, "confusion": torch.eye(2).long(), "notes.md": "# notes"})
    assert found.keys() == {"curve.svg", "confusion.csv", "notes.md"}
    assert found["confusion.csv"] == "1,0\n0,1\n"
    assert found["curve.svg"].lstrip().startswith("<?xml")
    again = Figure()
    again.subplots().plot([1, 2])
    assert figures_of({"curve": again})["curve.svg"] == found["curve.svg"]


@pytest.mark.parametrize(
    ("given", "got", "wanted"),
    [
        ({"../up": "text"}, "got the name '../up'", "^the name of a file without folders$"),
        ({"x": 3}, "'x' is int", "^text, a figure of matplotlib, or numbers in rows and columns$"),
        ({"x": "y" * (4 << 20) + "y"}, "'x' has 4194305 characters", "^at most 4194304"),
    ],
)
def test_what_is_no_figure_is_refused(given: Any, got: str, wanted: str) -> None:
    with raises(problems.FIGURE, got=got, wanted=re.compile(wanted)):
        figures_of(given)


def test_outputs_are_joined_in_order() -> None:
    parts = [taken({"x": torch.arange(i, i + 2), "y": [str(i)]}) for i in (3, 0)]
    found = joined(parts)
    assert found["x"].tolist() == [3, 4, 0, 1]  # type: ignore[union-attr]
    assert found["y"] == ["3", "0"]
    assert joined([]) == {}


def test_outputs_hold_no_more_memory_than_their_own() -> None:
    """They are sent to rank 0, and a pickled view takes its whole storage with it."""
    batch = torch.zeros(1000)
    (value,) = taken({"x": batch[:2]}).values()
    batch[0] = 1.0
    assert value.tolist() == [0.0, 0.0]  # type: ignore[union-attr]
    assert value.untyped_storage().nbytes() == 8  # type: ignore[union-attr]


def test_outputs_in_a_list_are_the_micro_batchs_own() -> None:
    """As boxes of each image are: the model writes its next ones to the same memory, and they need no gradient on rank 0."""
    boxes, scores = torch.zeros(2, 4, requires_grad=True), np.zeros(2)
    rows = [{"boxes": boxes, "scores": scores}]
    (value,) = taken({"x": rows}).values()
    boxes.data.fill_(1.0)
    scores[:] = 1.0
    rows.clear()
    assert [row["boxes"].tolist() for row in value] == [[[0.0] * 4] * 2]
    assert not value[0]["boxes"].requires_grad
    assert value[0]["scores"].tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    ("one", "other", "message"),
    [
        (
            {"x": torch.zeros(2)},
            {"x": torch.zeros(2).double()},
            "'x' is torch.float32 with rows of .* torch.float64",
        ),
        (
            {"x": torch.zeros(2, 3)},
            {"x": torch.zeros(2, 4)},
            r".* with rows of \(3,\) in one micro-batch and .* \(4,\) in another",
        ),
        ({"x": [1]}, {"x": torch.zeros(1)}, "'x' is a list in one micro-batch"),
        ({"x": [1]}, {"y": [1]}, "'x' is given for some micro-batches only"),
    ],
)
def test_outputs_that_do_not_fit_together_are_refused(one: Any, other: Any, message: str) -> None:
    with raises(problems.OUTPUTS_FORM, got=re.compile(f"^{message}")):
        joined([taken(one), taken(other)])


@pytest.mark.parametrize(
    ("given", "got", "wanted"),
    [
        ([1], "returned list", "^tensors or lists by name"),
        ({"x": torch.ones(())}, "'x' is a tensor of no dimension", "^a tensor or a list"),
        ({"x": 1.0}, "'x' is float", "^a tensor or a list"),
    ],
)
def test_what_has_no_rows_is_refused(given: Any, got: str, wanted: str) -> None:
    with raises(problems.OUTPUTS_FORM, got=got, wanted=re.compile(wanted)):
        taken(given)


def test_texts_are_equal_where_outputs_are() -> None:
    one, other = {"x": torch.tensor([0.0]), "y": [1]}, {"x": torch.tensor([-0.0]), "y": [1]}
    assert texts(one)["y"] == texts(other)["y"]
    assert texts(one)["x"] != texts(other)["x"]


def evaluation(job: Given) -> Evaluation:
    return Evaluation(
        job,
        list(range(10)),
        Group(0, 1, CPU),
        Precision("fp32", CPU),
        micro_batch=4,
        global_batch=4,
        seed=5,
        processes=0,  # type: ignore[arg-type]
    )


def test_the_function_sees_every_sample_once_and_in_order() -> None:
    seen: list[list[int]] = []
    job = Given(
        lambda outputs: seen.append(outputs["ids"].tolist()) or {"count": len(seen[-1])}, {"n": "ten"}
    )
    evaluate = evaluation(job)
    assert evaluate(nn.Linear(1, 1))["eval/count"] == 10.0
    assert seen == [list(range(10))]
    assert evaluate.figures == {"n.txt": "ten"}


def test_draws_are_the_same_in_every_evaluation() -> None:
    evaluate = evaluation(Given(lambda outputs: {"draw": torch.rand(())}))
    first = evaluate(nn.Linear(1, 1))
    torch.rand(3)
    assert evaluate(nn.Linear(1, 1)) == first


def test_names_are_known_before_training_or_it_is_told_why_not() -> None:
    told: list[str] = []
    evaluate = evaluation(Given({"auroc": 0.5}))
    assert rehearse(evaluate, nn.Linear(1, 1), warn=told.append).names == ["eval/loss", "eval/auroc"]
    assert told == []
    fails = evaluation(Given(lambda outputs: {"x": 1 / (len(outputs["ids"]) - 4)}))
    assert rehearse(fails, nn.Linear(1, 1), warn=told.append).names is None
    assert "could not be tried on its first micro-batch" in told[0]
    assert "ZeroDivisionError" in told[0]
    with raises(problems.WHOLE_SET_NUMBER, name="x", got="of 2 dimensions"):
        rehearse(evaluation(Given({"x": torch.eye(2)})), nn.Linear(1, 1), warn=told.append)


def test_what_rank_0_alone_would_keep_is_refused_whenever_it_begins() -> None:
    """The rehearsal sees one micro-batch, each evaluation all outputs."""
    seen: SimpleQueue[int] = SimpleQueue()  # of an extension in C, which is not looked into

    class Keeps(Given):
        def whole_set_metrics(self, outputs: Any) -> Any:
            if len(outputs["ids"]) > 4:
                self.given["n"] = len(outputs["ids"])
            seen.put(len(outputs["ids"]))
            return {}

    evaluate = evaluation(Keeps())
    assert rehearse(evaluate, nn.Linear(1, 1), repeat=True).names == ["eval/loss"]
    with raises(integrity_problems.WHOLE_SET_KEEPS, got=re.compile("^job.given")):
        evaluate(nn.Linear(1, 1))
    unchecked = evaluation(Keeps())
    rehearse(unchecked, nn.Linear(1, 1), repeat=False)
    assert unchecked(nn.Linear(1, 1)) == {"eval/loss": 4.5}
    assert [seen.get_nowait() for _ in range(seen.qsize())] == [
        10,
        4,
        10,
    ]  # the compared rehearsal was in another process
