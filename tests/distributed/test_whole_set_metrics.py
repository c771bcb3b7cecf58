"""G2 and G1 for metrics of the whole set: each sample once, in order, one value on any number of workers; what is recorded."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from lockstep import Mean
from lockstep.checkpoint.runs.run_folder import AttemptOrigin
from lockstep.record.events.union import Document
from lockstep.training import problems
from lockstep.training.evaluation import whole_set_metrics
from tests.distributed.kinds import CLASSES, RUN, Kind, document
from tests.distributed.pool import Pool
from tests.distributed.step_kinds import WholeSet
from tests.distributed.training import Kept, train, train_attempt
from tests.raised import raises


class ByScikitLearn(Kind):
    """Its AUROC is scikit-learn's, over the whole set; and, as it should not be, the mean of the micro-batches'."""

    def data(self, samples: int, seed: int) -> Any:
        return super().data(40 if samples == 7 else samples, seed)

    def outputs(self, model: nn.Module, batch: Any) -> dict[str, Any]:
        x, y = batch
        return {"scores": model(x).softmax(1)[:, 0], "labels": y}

    def whole_set_metrics(self, outputs: Any) -> dict[str, Any]:
        return {"auroc": auroc(outputs["scores"], outputs["labels"])}

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, Mean]:
        scores, labels = self.outputs(model, batch).values()
        both = 0 < int((labels == 0).sum()) < len(labels)
        return {"mean of means": Mean(auroc(scores, labels) if both else 0.0, float(both))}


def auroc(scores: torch.Tensor, labels: torch.Tensor) -> float:
    from sklearn.metrics import roc_auc_score

    return float(roc_auc_score((labels == 0).numpy(), scores.numpy()))


@pytest.mark.scenario
def test_auroc_is_that_of_scikit_learn_on_any_number_of_workers(pool: Pool, tmp_path: Path) -> None:
    run = document(ByScikitLearn, checkpoint={"storage": str(tmp_path), "every": None})
    whole = train_attempt(run, RUN, AttemptOrigin())
    job = ByScikitLearn(None)
    model = job.model().eval()
    model.load_state_dict(load_file(tmp_path / RUN / "weights" / "final.safetensors"))
    data = job.eval_data()
    assert data is not None
    with torch.no_grad():
        parts = [
            job.outputs(model, job.collate([data[i] for i in range(first, min(first + 3, 40))]))
            for first in range(0, 40, 3)
        ]
    wanted = auroc(*(torch.cat([part[name] for part in parts]) for name in ("scores", "labels")))
    metrics = whole.summary["metrics"]
    assert metrics["eval/auroc"] == wanted != metrics["eval/mean of means"]
    for workers in (2, 3):
        for trained in pool.run(workers, train, document(ByScikitLearn)):
            assert trained.evaluations == whole.evaluations
            assert trained.summary["metrics"]["eval/auroc"] == wanted


class ByTorchmetrics(ByScikitLearn):
    """Its metrics are torchmetrics' own objects, which keep a state and would gather over a process group."""

    def outputs(self, model: nn.Module, batch: Any) -> dict[str, Any]:
        x, y = batch
        return {"preds": model(x).softmax(1), "target": y}

    def whole_set_metrics(self, outputs: Any) -> dict[str, Any]:
        from torchmetrics.classification import MulticlassAUROC, MulticlassCalibrationError, MulticlassF1Score

        return {
            "auroc": MulticlassAUROC(CLASSES),
            "f1": MulticlassF1Score(CLASSES, average=None),
            "calibration": MulticlassCalibrationError(CLASSES),
        }

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, Mean]:
        return {}

    def figures(self, outputs: Any) -> dict[str, Any]:
        """What torchmetrics itself makes of all outputs, called by hand."""
        found = self.whole_set_metrics(outputs)
        values = [metric(outputs["preds"], outputs["target"]) for metric in found.values()]
        return {"by_hand.txt": " ".join(value.hex() for one in values for value in one.reshape(-1).tolist())}


@pytest.mark.scenario
@pytest.mark.parametrize("workers", [1, *(pytest.param(n, marks=pytest.mark.exact) for n in (2, 3))])
def test_objects_of_torchmetrics_are_taken(pool: Pool, workers: int) -> None:
    told: list[str] = []
    tell = Kept.tell

    def heard(self: Kept, event: Any) -> None:
        if isinstance(event, Document) and event.name.endswith("by_hand.txt"):
            told.append(event.text)
        tell(self, event)

    with mock.patch.object(Kept, "tell", heard):
        whole = train(document(ByTorchmetrics))
    metrics = whole.summary["metrics"]
    names = ["auroc", *(f"f1/{i}" for i in range(CLASSES)), "calibration"]
    assert [metrics[f"eval/{name}"].hex() for name in names] == told[-1].split()
    if workers > 1:
        for trained in pool.run(workers, train, document(ByTorchmetrics)):
            assert trained.evaluations == whole.evaluations


def test_outputs_in_another_order_give_another_metric() -> None:
    """The negative control: micro-batches joined the other way round."""
    whole, joined = train(document(WholeSet)), whole_set_metrics.joined
    with mock.patch.object(whole_set_metrics, "joined", lambda parts: joined(list(parts)[::-1])):
        turned = train(document(WholeSet))
    assert whole.digests == turned.digests
    pairs = zip(whole.evaluations[-1][2], turned.evaluations[-1][2], strict=True)
    differing = {name for (name, one), (_, other) in pairs if one != other}
    assert "eval/streamed" in differing
    assert "eval/loss" not in differing


def test_figures_are_told_with_their_step() -> None:
    told: list[Document] = []
    tell = Kept.tell

    def heard(self: Kept, event: Any) -> None:
        if isinstance(event, Document) and event.name.startswith("evaluations/"):
            told.append(event)
        tell(self, event)

    with mock.patch.object(Kept, "tell", heard):
        train(document(WholeSet, evaluate={"every": {"steps": 2}}))
    assert [document.name for document in told] == [
        f"evaluations/step-{step:09}/{name}" for step in (2, 3) for name in ("confusion.csv", "notes.md")
    ]
    rows = [list(map(int, line.split(","))) for line in told[-2].text.splitlines()]
    assert sum(map(sum, rows)) == 7


class LateMetric(WholeSet):
    """One micro-batch is not enough for it."""

    def whole_set_metrics(self, outputs: Any) -> dict[str, Any]:
        return {"auroc": 1 / max(0, len(outputs["labels"]) - 6)}


@pytest.mark.scenario
def test_a_rule_by_a_metric_that_comes_late() -> None:
    trained = train(document(LateMetric, rehearsal="full"))
    assert trained.best[0] == 3
    assert any("could not be tried" in text for text in trained.warnings)
    rule = {"metric": "eval/aurok", "mode": "max"}
    refused = {"field": "early_stop.metric", "got": "eval/aurok"}
    with raises(problems.NO_METRIC, **refused, hint=re.compile("did you mean 'eval/auroc'")):
        train(document(LateMetric, early_stop=rule))
    with raises(problems.NO_METRIC, **refused):
        train(document(WholeSet, early_stop=rule))
