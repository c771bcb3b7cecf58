"""Jobs whose step has several phases, or in whose steps some parameters rest; and what is refused of them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import lr_scheduler

import lockstep
from lockstep import Loss, Mean, Phase
from lockstep.training import problems
from lockstep.training.integrity import problems as integrity_problems
from lockstep.training.step import problems as step_problems
from tests.distributed.kinds import CLASSES, FEATURES, Kind, MixtureOfExperts, Refusal, held_in, perceptron

ADAM = partial(torch.optim.Adam, lr=2e-3, betas=(0.5, 0.999))


class Gan(Kind):
    """Both networks on one batch and one noise, as Goodfellow et al. 2014 train them; batch norm and dropout in both."""

    more: ClassVar[dict[str, Any]] = {"schedule": {"name": "cosine"}}

    def model(self) -> nn.Module:
        maker = perceptron(2, FEATURES, nn.BatchNorm1d(8))
        judge = perceptron(FEATURES, 1, nn.BatchNorm1d(8), nn.Dropout(0.2))
        return nn.ModuleDict({"maker": maker, "judge": judge})

    def phases(self) -> Sequence[Phase]:
        return [
            Phase("judge", self.judged, ["judge"], ADAM),
            Phase("maker", self.made, ["maker"], ADAM, draws_as="judge"),
        ]

    def judged(self, model: nn.Module, batch: Any) -> Loss:
        x, _ = batch
        noise = torch.randn(len(x), 2)
        made = model["maker"](noise).detach()
        real, fake = model["judge"](x.clone()), model["judge"](made)
        x.zero_()  # its batch is its own to write to
        total = (F.softplus(-real) + F.softplus(fake)).sum()
        return Loss(
            total, len(x), {"noise": Mean(noise.sum(), len(x)), "real": Mean(real.detach().sum(), len(x))}
        )

    def made(self, model: nn.Module, batch: Any) -> Loss:
        x, _ = batch
        noise = torch.randn(len(x), 2)
        made = model["maker"](noise)
        total = F.softplus(-model["judge"](made)).sum() + 0.1 * (made - x).square().sum()
        return Loss(total, len(x), {"noise": Mean(noise.sum(), len(x))})

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        return self.judged(model, batch)


class WassersteinWithPenalty(Gan):
    """Gulrajani et al. 2017: a penalty on the critic's gradient, and a generator that learns in each third step alone."""

    more: ClassVar[dict[str, Any]] = {"ema": 0.6}

    def model(self) -> nn.Module:
        return nn.ModuleDict({"maker": perceptron(2, FEATURES), "critic": perceptron(FEATURES, 1)})

    def phases(self) -> Sequence[Phase]:
        return [
            Phase("critic", self.criticised, ["critic"], ADAM),
            Phase("maker", self.made, ["maker"], ADAM),
        ]

    def frozen_parameters(self, model: nn.Module, step: int) -> Iterable[str]:
        return ["maker"] if step % 3 else []

    def criticised(self, model: nn.Module, batch: Any) -> Loss:
        x, _ = batch
        critic = model["critic"]
        made = model["maker"](torch.randn(len(x), 2)).detach()
        share = torch.rand(len(x), 1)
        with torch.enable_grad():  # in evaluation as well
            between = (share * x + (1 - share) * made).requires_grad_()
            slope = torch.autograd.grad(critic(between).sum(), between, create_graph=True)[0]
        penalty = (slope.norm(dim=1) - 1).square()
        total = (critic(made) - critic(x)).sum() + 10 * penalty.sum()
        return Loss(total, len(x), {"penalty": Mean(penalty.detach().sum(), len(x))})

    def made(self, model: nn.Module, batch: Any) -> Loss:
        x, _ = batch
        return Loss(-model["critic"](model["maker"](torch.randn(len(x), 2))).sum(), len(x))

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        return self.criticised(model, batch)


class AdversarialAutoencoder(Kind):
    """Makhzani et al. 2016: the encoder learns in two phases of three, each with an optimizer of the kind that the spec names."""

    more: ClassVar[dict[str, Any]] = {"early_stop": {"metric": "eval/distance", "patience": 5}}

    def model(self) -> nn.Module:
        return nn.ModuleDict(
            {
                "encoder": perceptron(FEATURES, 2),
                "decoder": perceptron(2, FEATURES),
                "judge": perceptron(2, 1),
            }
        )

    def phases(self) -> Sequence[Phase]:
        return (
            Phase("restore", self.restored, ["encoder", "decoder"]),
            Phase("judge", self.judged, ["judge"]),
            Phase("regularise", self.regularised, ["encoder"], partial(torch.optim.SGD, lr=0.1)),
        )

    def restored(self, model: nn.Module, batch: Any) -> Loss:
        x, _ = batch
        return Loss(F.mse_loss(model["decoder"](model["encoder"](x)), x, reduction="sum"), x.numel())

    def judged(self, model: nn.Module, batch: Any) -> Loss:
        x, _ = batch
        real = torch.from_numpy(lockstep.rng("prior").standard_normal((len(x), 2), dtype="float32"))
        codes = model["encoder"](x)
        return Loss((F.softplus(-model["judge"](real)) + F.softplus(model["judge"](codes))).sum(), len(x))

    def regularised(self, model: nn.Module, batch: Any) -> Loss:
        x, _ = batch
        return Loss(F.softplus(-model["judge"](model["encoder"](x))).sum(), len(x))

    loss = lockstep.Job.loss

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, Mean]:
        x, _ = batch
        far = F.mse_loss(model["decoder"](model["encoder"](x)), x, reduction="sum")
        return {"distance": Mean(far, x.numel())}


class PhasesWithSchedulers(Gan):
    """A scheduler of torch for each optimizer, and what follows the updates of both."""

    def schedule(self, optimizer: torch.optim.Optimizer, updates: int) -> Any:
        return lr_scheduler.StepLR(optimizer, 1, gamma=0.5)

    def after_step(self, model: nn.Module, step: int) -> None:
        for parameter in model["judge"].parameters():
            parameter.clamp_(-0.3, 0.3)


# --- parameters that rest -------------------------------------------------------------------------------------


class UnfrozenLayerByLayer(Kind):
    """Howard & Ruder 2018: first the last layer alone, then more of them; moments and decay as well."""

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Linear(FEATURES, 8),
            nn.BatchNorm1d(8),
            nn.Tanh(),
            nn.Linear(8, 8),
            nn.Tanh(),
            nn.Linear(8, CLASSES),
        )

    def frozen_parameters(self, model: nn.Module, step: int) -> Iterable[str]:
        return ["0", "1", "3.weight", "3.bias"][2 * (step - 1) :] if step < 3 else []


class RestsByChance(MixtureOfExperts):
    """Which experts rest is drawn anew for each step; those that got no token are left without a gradient beside them."""

    more: ClassVar[dict[str, Any]] = {"ema": 0.5, "optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9}}

    def frozen_parameters(self, model: nn.Module, step: int) -> Iterable[str]:
        return [f"experts.{i}" for i in torch.randperm(4)[:2].tolist()]


class TiedAndResting(Kind):
    """A layer that two places share rests under one of its names; one of the two layers learns in each step."""

    def model(self) -> nn.Module:
        tied = nn.Linear(FEATURES, FEATURES)
        return nn.Sequential(tied, nn.Tanh(), tied, nn.Linear(FEATURES, CLASSES))

    def frozen_parameters(self, model: nn.Module, step: int) -> Iterable[str]:
        return ["2" if step % 2 else "3"]


# --- refused --------------------------------------------------------------------------------------------------


class PhasesWithoutAParameter(Gan):
    def phases(self) -> Sequence[Phase]:
        return [Phase("judge", self.judged, ["judge"])]


class PhaseOfNoModule(Gan):
    def phases(self) -> Sequence[Phase]:
        return [Phase("judge", self.judged, ["juge"]), Phase("maker", self.made, ["maker"])]


class PhaseOfText(Gan):
    def phases(self) -> Sequence[Phase]:
        return [Phase("judge", self.judged, "judge"), Phase("maker", self.made, ["maker"])]


class PhasesOfOneName(Gan):
    def phases(self) -> Sequence[Phase]:
        return [Phase("gan", self.judged, ["judge"]), Phase("gan", self.made, ["maker"])]


class PhasesThatAreNone(Gan):
    def phases(self) -> Any:
        return {"judge": self.judged, "maker": self.made}


class PhaseWithASlash(Gan):
    def phases(self) -> Sequence[Phase]:
        return [Phase("gan/judge", self.judged, ["judge"]), Phase("maker", self.made, ["maker"])]


class DrawsAsNobody(Gan):
    def phases(self) -> Sequence[Phase]:
        return [Phase("judge", self.judged, ["judge"]), Phase("maker", self.made, ["maker"], None, "jugde")]


class OneOptimizerForBoth(Gan):
    def phases(self) -> Sequence[Phase]:
        shared: list[torch.optim.Optimizer] = []

        def once(own: list[nn.Parameter]) -> torch.optim.Optimizer:
            if not shared:
                shared.append(torch.optim.SGD(own, lr=0.1))
            return shared[0]

        return [Phase("judge", self.judged, ["judge"], once), Phase("maker", self.made, ["maker"], once)]


class PhaseOfWhatRests(Gan):
    def model(self) -> nn.Module:
        model = super().model()
        model.get_submodule("maker").requires_grad_(False)
        return model


class OptimizerOverTheOther(Gan):
    def phases(self) -> Sequence[Phase]:
        stolen: list[Any] = []

        def over_all(own: list[nn.Parameter]) -> torch.optim.Optimizer:
            stolen.extend(own)
            return torch.optim.SGD(list(stolen), lr=0.1)

        return [
            Phase("judge", self.judged, ["judge"], over_all),
            Phase("maker", self.made, ["maker"], over_all),
        ]


class OptimizerOfAPart(Gan):
    def phases(self) -> Sequence[Phase]:
        return [
            Phase("judge", self.judged, ["judge"], lambda own: torch.optim.SGD(own[1:], lr=0.1)),
            Phase("maker", self.made, ["maker"]),
        ]


class PhaseThatForgetsALayer(Gan):
    def made(self, model: nn.Module, batch: Any) -> Loss:
        x, _ = batch
        return Loss(model["judge"](model["maker"][0](torch.randn(len(x), 2))[:, :FEATURES]).sum(), len(x))


class PhaseOfAMean(AdversarialAutoencoder):
    def restored(self, model: nn.Module, batch: Any) -> Loss:
        loss = super().restored(model, batch)
        return Loss(loss.total / loss.weight, loss.weight)


class PhaseWithAPartOfItsLoss(Gan):
    def judged(self, model: nn.Module, batch: Any) -> Loss:
        loss = super().judged(model, batch)
        return Loss(loss.total, loss.weight, {"lr": Mean(1.0, 1.0)})


class PhaseThatRemembers(Gan):
    """The second phase reads what the first one left in the job: another worker has another micro-batch's."""

    noise: Tensor | None = None

    def judged(self, model: nn.Module, batch: Any) -> Loss:
        self.noise = torch.randn(len(batch[0]), 2)
        return super().judged(model, batch)

    def made(self, model: nn.Module, batch: Any) -> Loss:
        self.noise = torch.randn(len(batch[0]), 2) if self.noise is None else self.noise + 1
        made = model["maker"](self.noise[: len(batch[0])])
        return Loss(F.softplus(-model["judge"](made)).sum(), len(made))


class PhaseThatHandsOn(Gan):
    """One noise for both networks, handed on in the job: the second phase is given that of its worker's last micro-batch."""

    noise: Tensor

    def judged(self, model: nn.Module, batch: Any) -> Loss:
        self.noise = torch.randn(3, 2)
        return super().judged(model, batch)

    def made(self, model: nn.Module, batch: Any) -> Loss:
        made = model["maker"](self.noise[: len(batch[0])])
        return Loss(F.softplus(-model["judge"](made)).sum(), len(made))


class FreezesTheOther(Gan):
    """As GANs are often written: the discriminator asks for no gradient while the generator learns."""

    def made(self, model: nn.Module, batch: Any) -> Loss:
        model["judge"].requires_grad_(False)  # type: ignore[index]
        return super().made(model, batch)


class NothingToEvaluate(AdversarialAutoencoder):
    metrics = lockstep.Job.metrics


class RestingNobody(UnfrozenLayerByLayer):
    def frozen_parameters(self, model: nn.Module, step: int) -> Iterable[str]:
        return ["4"]


class RestingTensors(UnfrozenLayerByLayer):
    def frozen_parameters(self, model: nn.Module, step: int) -> Any:
        return model[0].parameters()  # type: ignore[index,operator]


class AllRest(UnfrozenLayerByLayer):
    def frozen_parameters(self, model: nn.Module, step: int) -> Iterable[str]:
        return [name for name, _ in model.named_parameters()] if step == 2 else []


class CountedRests(UnfrozenLayerByLayer):
    """It rests by how often it was asked."""

    calls = 0

    def frozen_parameters(self, model: nn.Module, step: int) -> Iterable[str]:
        self.calls += 1
        return ["0"] if self.calls < 3 else []


PARAMETERS_OF_JUDGE = "job.phases: the parameters of phase 'judge'"

REFUSED: dict[type[Kind], Refusal] = {
    PhasesWithoutAParameter: (step_problems.NOT_IN_PHASE, {"got": "'maker.0.weight' and 5 more"}),
    PhaseOfNoModule: (
        step_problems.NO_SUCH_NAME,
        {"label": PARAMETERS_OF_JUDGE, "got": "juge", "hint": "; did you mean 'judge'?"},
    ),
    PhaseOfText: (step_problems.NAMES_KIND, {"label": PARAMETERS_OF_JUDGE, "got": "the text 'judge'"}),
    PhasesOfOneName: (step_problems.PHASE_NAME, {"got": "the names ['gan', 'gan']", "wanted": "each once"}),
    PhasesThatAreNone: (step_problems.PHASES_KIND, {"got": "dict"}),
    PhaseWithASlash: (
        step_problems.PHASE_NAME,
        {"got": "the name 'gan/judge'", "wanted": re.compile("^letters")},
    ),
    DrawsAsNobody: (
        step_problems.DRAWS_AS,
        {"name": "maker", "got": "jugde", "hint": "; did you mean 'judge'?"},
    ),
    OneOptimizerForBoth: (
        step_problems.OPTIMIZER_TWICE,
        {"label": "job.phases: the optimizer of phase 'maker'"},
    ),
    PhaseOfWhatRests: (step_problems.PHASE_LEARNS_NOTHING, {"got": "maker"}),
    OptimizerOverTheOther: (
        step_problems.STRANGE_PARAMETER,
        {"label": "job.phases: the optimizer of phase 'maker'", "wanted": "the phase's"},
    ),
    OptimizerOfAPart: (
        step_problems.NO_GROUP,
        {"label": "job.phases: the optimizer of phase 'judge'", "got": "'judge.0.weight'"},
    ),
    PhaseThatForgetsALayer: (
        problems.NO_GRADIENT,
        {
            "got": "'maker.1.weight', 'maker.1.bias', 'maker.3.weight', 'maker.3.bias'",
            "where": re.compile("phase 'maker'$"),
        },
    ),
    PhaseOfAMean: (
        integrity_problems.MEAN_FOR_SUM,
        {"got": re.compile("^the loss of phase 'restore': total is .* for its halves$")},
    ),
    PhaseWithAPartOfItsLoss: (
        problems.PART_NAME_TAKEN,
        {"label": "the loss of phase 'judge'", "got": "lr", "recorded": "judge/lr"},
    ),
    PhaseThatRemembers: (integrity_problems.KEPT, {"name": "job.noise"}),
    PhaseThatHandsOn: (integrity_problems.KEPT, {"name": "job.noise"}),
    FreezesTheOther: (step_problems.ASKS_OTHERWISE, {"name": "judge.0.weight", "got": "no longer asks"}),
    NothingToEvaluate: (problems.NOTHING_EVALUATED, {}),
    RestingNobody: (
        step_problems.NO_SUCH_NAME,
        {
            "label": "job.frozen_parameters (step 1)",
            "got": 4,
            "hint": re.compile("^; known here: 0, 0.bias,"),
        },
    ),
    RestingTensors: (
        step_problems.NAMES_KIND,
        {"label": "job.frozen_parameters (step 1)", "got": "a Parameter"},
    ),
    AllRest: (step_problems.ALL_REST, {"step": 2}),
    CountedRests: (step_problems.FROZEN_DIFFER, {"wanted": ["0.bias", "0.weight"], "step": 1, "got": []}),
}
"""Jobs that are refused, each with the problem and facts of it."""

HELD = held_in(__name__, REFUSED)
"""Jobs whose bits do not depend on who runs them."""
