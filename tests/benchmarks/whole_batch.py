"""What a step costs whose loss takes something from the whole batch, as ratios to a plain step: `python -m tests.benchmarks.whole_batch [ROUNDS]`.

Each kind trains the same network on the same micro-batches in this process, in turn, and in the other order in each second round. The fastest tenth of
its steps counts: whatever else the machine does only adds. The plain step is taken twice, which tells the noise, and a kind's ratio is to the mean of
both in the same round: the median and the range over the rounds.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep import Job, Loss, Mean, Term
from lockstep.communication.group import Group
from lockstep.record.events.union import Event
from lockstep.record.ledger.rows import StepRow
from lockstep.spec.loading import load_spec
from lockstep.training.driver_requests import NoRequests
from lockstep.training.loop import fit
from tests.benchmarks.mlp import CLASSES, MLP

STEPS = 40


class Plain(MLP):
    """A wide network: what is measured is its forward and backward."""

    class Params(MLP.Params):
        width: int = 768
        depth: int = 3
        rows: int = 8192


class WholeBatch(Plain):
    """The rows of a step are compared with each other."""

    loss = Job.loss

    def embed(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        x, y = batch
        return {"z": model(x), "y": y}

    def batch_loss(self, model: nn.Module, rows: Mapping[str, Tensor]) -> Loss:
        z = F.normalize(rows["z"], dim=1)
        alike = (z @ z.T / 0.1).log_softmax(1) * (rows["y"][:, None] == rows["y"])
        return Loss(-alike.sum(), len(z))


class Terms(Plain):
    """Two terms, whose weights the data give."""

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        x, y = batch
        logits, some = model(x), y < CLASSES // 2
        each = F.cross_entropy(logits, y, reduction="none")
        return Loss.of_terms(
            {"all": Term(each.sum(), len(y)), "some": Term((each * some).sum(), some.sum(), 0.5)}
        )

    def term_weights(self, batch: Any) -> dict[str, Any]:
        _, y = batch
        return {"all": len(y), "some": (y < CLASSES // 2).sum()}


class TermsOfTheForward(Terms):
    """The same, with weights that a first pass learns."""

    term_weights = Job.term_weights


class Statistics(Plain):
    """A queue of the step's outputs, as rows that the loss gives, and the mean of its inputs."""

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        x, y = batch
        logits = model(x)
        total = F.cross_entropy(logits, y, reduction="sum")
        return Loss(total, len(y), statistics={"outputs": logits})

    def step_statistics(self, model: nn.Module, batch: Any) -> dict[str, Mean]:
        x, _ = batch
        return {"inputs": Mean(x.sum(dim=0), len(x))}

    def after_step(self, model: nn.Module, step: int, statistics: Mapping[str, Tensor]) -> None:
        assert len(statistics["outputs"]) == 512


class PlainAgain(Plain):
    """What differs from the plain step by noise alone."""


KINDS: list[type[Plain]] = [Plain, PlainAgain, WholeBatch, Terms, TermsOfTheForward, Statistics]


def step_s(kind: type[Plain]) -> float:
    """The fastest tenth of a run's steps, in seconds."""
    run = {
        "job": {"use": f"tests.benchmarks.whole_batch:{kind.__name__}"},
        "batch": {"global": 512, "micro": 128},
        "length": {"steps": STEPS},
        "rehearsal": "off",
        "determinism": {"recheck": 0.0},
        "record": {"uri": "off", "digest_every": None},
    }
    times: list[float] = []

    def tell(event: Event) -> None:
        if isinstance(event, StepRow):
            times.append(event.step_s)

    fit(load_spec(run), kind(kind.Params()), Group.join(torch.device("cpu")), tell, NoRequests())
    return statistics.quantiles(times[5:], n=10)[0]


def main(rounds: int) -> None:
    taken = [{kind: step_s(kind) for kind in KINDS[:: 1 - 2 * (i % 2)]} for i in range(rounds)]
    for kind in KINDS[1:]:
        ratios = sorted(2 * times[kind] / (times[Plain] + times[PlainAgain]) for times in taken)
        row = {
            "median": statistics.median(ratios),
            "least": ratios[0],
            "most": ratios[-1],
        }
        print(json.dumps({"kind": kind.__name__, **{name: round(ratio, 3) for name, ratio in row.items()}}))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 9)
