"""What a step costs whose loss takes something from the whole batch, as ratios to a plain step: `python -m tests.benchmarks.whole_batch [ROUNDS]`.

Each kind trains the same network on the same micro-batches in this process, in turn; the median of its steps counts, and of the rounds the least.
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

from lockstep import Job, Loss, Term
from lockstep.communication.group import Group
from lockstep.record.events.union import Event, StepRow
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


KINDS: list[type[Plain]] = [Plain, WholeBatch, Terms, TermsOfTheForward]


def step_s(kind: type[Plain]) -> float:
    """The median step of a run, in seconds."""
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
    return statistics.median(times[5:])


def main(rounds: int) -> None:
    least = dict.fromkeys(KINDS, float("inf"))
    for _ in range(rounds):
        for kind in KINDS:
            least[kind] = min(least[kind], step_s(kind))
    print(json.dumps({kind.__name__: round(least[kind] / least[Plain], 3) for kind in KINDS}))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
