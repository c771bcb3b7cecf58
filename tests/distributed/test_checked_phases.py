"""What is known before a run of a job with several phases: every check, and its estimate against what training holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from lockstep import Job, Mean
from lockstep.checks.check import check
from lockstep.checks.estimate import estimated
from lockstep.checks.findings import Finding, as_text
from lockstep.checks.fixture import Fixture
from lockstep.checks.live_bytes import LiveBytes
from lockstep.communication.group import Group
from lockstep.job.loading import load_job
from lockstep.record.events.union import tell_nobody
from lockstep.spec.loading import load_spec
from lockstep.training.determinism import determinism
from lockstep.training.setup import prepare
from lockstep.training.step.phases import optimizers_of
from lockstep.training.step.reduction import TreeSum
from tests.distributed.kinds import FEATURES, Kind, document
from tests.distributed.phase_kinds import (
    AdversarialAutoencoder,
    Gan,
    UnfrozenLayerByLayer,
    WassersteinWithPenalty,
)


class DeadJudge(Gan):
    """No unit of the judge ever fires."""

    def model(self) -> nn.Module:
        model = super().model()
        model["judge"] = nn.Sequential(nn.Linear(FEATURES, 8), nn.ReLU(), nn.Linear(8, 1))  # type: ignore[index, operator]
        nn.init.constant_(model["judge"][0].bias, -100.0)  # type: ignore[index]
        return model


class NothingToGoBy(Gan):
    """Its evaluation has metrics and no loss, by which its schedule goes."""

    more: ClassVar[dict[str, Any]] = {}
    loss = Job.loss  # type: ignore[assignment]

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, Mean]:
        return {"made": Mean(model["maker"](torch.zeros(1, 2)).sum(), 1)}  # type: ignore[index, operator]

    def schedule(self, optimizer: torch.optim.Optimizer, updates: int) -> Any:
        return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)


class Wide(AdversarialAutoencoder):
    """Wide enough for tensors to outweigh all else, and three phases of different size."""

    def model(self) -> nn.Module:
        def wide(inputs: int, hidden: int, outputs: int) -> nn.Module:
            return nn.Sequential(
                nn.Linear(inputs, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Linear(hidden, outputs)
            )

        return nn.ModuleDict(
            {"encoder": wide(FEATURES, 256, 2), "decoder": wide(2, 128, FEATURES), "judge": wide(2, 300, 1)}
        )


def found_in(kind: type[Kind], folder: Path) -> list[Finding]:
    """What is no pass. The loader is left out: on a busy machine it is slower than models of a few numbers."""
    given = document(kind, record={"uri": "off"}, checkpoint={"storage": str(folder)}, rehearsal="auto")
    report = check(load_spec(given))
    found = [one for one in report.checks if one.result != "pass" and one.name != "loader"]
    assert found or not report.not_reached, as_text(report)
    return found


@pytest.mark.scenario
@pytest.mark.parametrize(
    "kind",
    [
        Gan,
        *(
            pytest.param(one, marks=pytest.mark.exact)
            for one in (WassersteinWithPenalty, AdversarialAutoencoder, UnfrozenLayerByLayer)
        ),
    ],
)
def test_a_sound_job_with_phases_passes_every_check(kind: type[Kind], tmp_path: Path) -> None:
    assert found_in(kind, tmp_path) == []


@pytest.mark.exact
def test_a_fault_in_a_phase_is_named_by_its_check_and_by_no_other(tmp_path: Path) -> None:
    (found,) = found_in(DeadJudge, tmp_path)
    assert (found.name, found.result) == ("gradients", "failure")
    assert "'judge.0.bias'" in found.evidence


def test_a_schedule_that_has_nothing_to_go_by_is_found_as_training_finds_it(tmp_path: Path) -> None:
    (found,) = found_in(NothingToGoBy, tmp_path)
    assert "ReduceLROnPlateau goes by eval/loss" in found.evidence


def test_with_phases_an_estimate_is_what_training_holds() -> None:
    """What is counted to the byte, the tree's sums of the largest phase among it; the peak of a step within 5 %."""
    given: dict[str, Any] = {"observe_every": None, "digest_every": None, "uri": "off"}
    spec = load_spec(document(Wide, rehearsal="off", record=given))
    add, sums = TreeSum.add, [0]

    def noted(self: TreeSum, node: range, gradients: list[Tensor]) -> None:
        add(self, node, gradients)
        sums.append(sum(g.nbytes for _, total in self.sums for g in total))

    with determinism("strict", 1):
        found = estimated(Fixture(spec))
        run = prepare(
            spec, load_job(spec.job.use, spec.job.params), Group.join(torch.device("cpu")), tell_nobody
        )
        batches, (first, second, third, *_) = run.loader(), list(run.plan.positions())
        run.step(first, batches)
        with mock.patch.object(TreeSum, "add", noted):
            run.step(second, batches)
        with LiveBytes() as live:
            run.step(third, batches)
    gradients = [p.grad.nbytes for p in run.state.model.parameters() if p.grad is not None]
    states = [one for own in optimizers_of(run.state.optimizer).values() for one in own.state.values()]
    assert found.gradients_bytes == sum(gradients)
    assert found.optimizer_bytes == sum(value.nbytes for state in states for value in state.values())
    assert found.reduction_bytes == max(sums) > 0
    standing = found.parameters_bytes + 2 * found.buffers_bytes + found.optimizer_bytes + 3 * (1 << 19)
    assert found.total_bytes - standing == pytest.approx(live.most, rel=0.05)
