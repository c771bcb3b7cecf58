"""What the loss of a micro-batch takes from all the others of its step: the rows of a loss over the whole global batch, or the weights of its terms.

A step of such a loss goes over its micro-batches twice. The first pass computes what is taken from all, and every rank gets it; with it each
micro-batch has a loss of its own in the second pass, whose gradients are added along the tree like any other. Both passes have the same seeds and
begin with the same buffers, and both build the graph of gradients: kernels without one may give other bits.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.communication.group import Group
from lockstep.data.order import Ids
from lockstep.job.interface import Job, Loss, Mean, overrides
from lockstep.plan import Plan
from lockstep.training.integrity.rehearsal.object_state import same_bits
from lockstep.training.step import problems
from lockstep.training.step.means import as_float, check_form, check_same_parts, has_form
from lockstep.training.step.phases import ModelPhase
from lockstep.training.step.precision import Precision
from lockstep.training.step.sample_rows import StepRows
from lockstep.training.step.statistics import Statistics
from lockstep.training.step.step_exchange import Totals

AtHand = Callable[[], Mapping[str, Tensor]]
"""The parameters that learn and have their values now, by name: all of them, or those that no unit gathers where they are sharded."""

Settle = Callable[[Any], Loss]
"""Makes the loss of a micro-batch from what the job has returned for it."""


class WholeBatch:
    """What is taken from all micro-batches of a step. `begin`, the first pass, `gather`, `close`, then the second pass."""

    def __init__(self, phase: ModelPhase, group: Group, plan: Plan, parts: Sequence[str]) -> None:
        self.phase, self.group, self.plan, self.parts = phase, group, plan, parts
        self._gathered = False
        self.compares = False
        """Whether the second pass is compared with the first, which waits for a CUDA device."""
        self._places: Sequence[Ids] = ()
        self._carrier = 0
        """The first micro-batch with a sample, whose row in the exchange has what belongs to the whole batch."""

    def begin(self, places: Sequence[Ids], *, compares: bool) -> None:
        """Begin a step. `places` are those of the samples of each micro-batch; `compares`: see there."""
        self._places, self.compares, self._gathered = places, compares, False
        self._carrier = next((m for m, each in enumerate(places) if len(each)), 0)

    def settle(self, m: int, where: str, *, again: bool, counts: bool = True) -> Settle:
        """Makes the loss of micro-batch `m`. `again` is whether it is the one of the step itself, and not one beside it.

        One that does not count leaves nothing: another worker computes it, or it has no sample and is computed with others.
        """
        if self._gathered:
            return partial(self._second, m, where, again, counts)
        return partial(self._first, m, where) if counts else lambda returned: self._nothing()

    def _nothing(self) -> Loss:
        return Loss(
            torch.zeros((), device=self.group.device), 0.0, {name: Mean(0.0, 0.0) for name in self.parts}
        )

    def _first(self, m: int, where: str, returned: Any) -> Loss:
        """Note what the job returned for micro-batch `m` in the first pass."""
        raise NotImplementedError

    def _second(self, m: int, where: str, again: bool, counts: bool, returned: Any) -> Loss:
        """The loss of micro-batch `m`, by what was gathered. The gradient of one that does not count is of no use, and has to flow."""
        raise NotImplementedError

    def gather(self) -> None:
        """Give every rank what the first pass has noted. All ranks call it."""
        raise NotImplementedError

    def take_none(self) -> None:
        """Note that this rank's next micro-batch has no sample."""

    def close(self, model: nn.Module, at_hand: AtHand, precision: Precision, scale_down: float) -> None:
        """Compute what all micro-batches take, for totals that are multiplied by `scale_down` before their backward."""

    @property
    def statistics(self) -> Statistics:
        """What the loss of the whole batch gives for `after_step`."""
        return {}

    def check(self, totals: Totals) -> None:
        """Compare the totals of the step with what was gathered; the same on every rank."""


class BatchLoss(WholeBatch):
    """A loss over the rows of all samples of a step: each micro-batch takes its rows' part of the gradient.

    Every rank computes it, from the same bits in the same order. Parameters that it uses by itself, such as a temperature, get their gradient
    with the first micro-batch.
    """

    def __init__(self, phase: ModelPhase, group: Group, plan: Plan, parts: Sequence[str]) -> None:
        super().__init__(phase, group, plan, parts)
        self.rows = StepRows(group, partial(plan.ranges, group.size), phase.embed_label)
        self._all: dict[str, Tensor] = {}
        self._loss: Loss | None = None
        self._gradients: dict[str, Tensor] = {}
        self._used: dict[str, Tensor] = {}
        """The gradients of the parameters that the loss itself uses, by name."""
        self._at_hand: AtHand = dict
        self._unit = 1.0

    def begin(self, places: Sequence[Ids], *, compares: bool) -> None:
        super().begin(places, compares=compares)
        self.rows.begin(places)
        self._loss, self._gradients, self._used = None, {}, {}

    def _first(self, m: int, where: str, returned: Any) -> Loss:
        self.rows.note(m, returned, where)
        return self._nothing()

    def gather(self) -> None:
        self._all = self.rows.gather()
        self._gathered = True

    def close(self, model: nn.Module, at_hand: AtHand, precision: Precision, scale_down: float) -> None:
        kinds, label = self.rows.kinds or {}, self.phase.loss_label
        leaves = {name: rows.requires_grad_() for name, rows in self._all.items() if kinds[name].learns}
        with precision.autocast():
            loss = self.phase.loss(model, self.rows.form(self._all))
        self._all = {}
        if not has_form(loss, set(self.parts)):
            check_form(loss, label)
            check_same_parts(loss, self.parts, label, "")
        if not leaves or not loss.total.requires_grad:
            raise problems.ROWS_DETACHED(label=label, embed=self.phase.embed_label)
        parameters = at_hand()
        wanted = [*leaves.values(), *parameters.values()]
        gradients = torch.autograd.grad(precision.scaled(loss.total * scale_down), wanted, allow_unused=True)
        of_rows, of_parameters = gradients[: len(leaves)], gradients[len(leaves) :]
        self._gradients = {name: g for name, g in zip(leaves, of_rows, strict=True) if g is not None}
        self._used = {name: g for name, g in zip(parameters, of_parameters, strict=True) if g is not None}
        self._at_hand = at_hand
        self._loss = Loss(loss.total.detach(), loss.weight, loss.parts, statistics=loss.statistics)
        self._unit = scale_down * precision.scale

    @property
    def statistics(self) -> Statistics:
        return {} if self._loss is None else self._loss.statistics

    def _second(self, m: int, where: str, again: bool, counts: bool, returned: Any) -> Loss:
        if not counts:
            others = {"": returned} if isinstance(returned, Tensor) else returned
            return replace(self._nothing(), total=self._given(others, None, carries=False))
        rows, first = self.rows.named(m, returned, where), self.rows.own(m)
        if again and self.compares and first is not None:
            self._check_same(first, rows, where)
        assert self._loss is not None
        carries = m == self._carrier
        total = self._given(rows, [self._of(m, name) for name in rows if name in self._gradients], carries)
        if carries:
            return Loss(total, self._loss.weight, self._loss.parts)
        return replace(self._nothing(), total=total)

    def _given(self, rows: Mapping[str, Tensor], parts: Sequence[Tensor] | None, carries: bool) -> Tensor:
        """A total whose gradients are `parts` in the rows that learn, and those of the whole batch in the parameters if it `carries` them; else zeros."""
        assert self._loss is not None
        learning = [row for name, row in rows.items() if name in self._gradients]
        if parts is None:
            parts = [torch.zeros_like(row) for row in learning]
        used = [gradient if carries else torch.zeros_like(gradient) for gradient in self._used.values()]
        value = self._loss.total if carries else torch.zeros_like(self._loss.total)
        parameters = self._at_hand()
        inputs = [*learning, *(parameters[name] for name in self._used)]
        total: Tensor = _Given.apply(value, self._unit, (*parts, *used), *inputs)  # type: ignore[no-untyped-call]
        return total

    def _of(self, m: int, name: str) -> Tensor:
        """The gradient of a micro-batch's own rows. That of the only one is passed on as it is: its strides may choose a kernel."""
        gradient = self._gradients[name]
        if len(self._places) == 1:
            return gradient
        return gradient.index_select(0, self.rows.at(m).to(gradient.device))

    def _check_same(self, first: Mapping[str, Tensor], second: Mapping[str, Tensor], where: str) -> None:
        for name, row in second.items():
            if not same_bits(first[name], row):
                what = f" in {name!r}" if name else ""
                raise problems.EMBED_DIFFERS(label=self.phase.embed_label, name=what, where=where)


class _Given(torch.autograd.Function):
    """A total whose gradient is given: backward passes it on as it is where it begins with `unit`, the factor that is in it."""

    @staticmethod
    def forward(
        ctx: Any, value: Tensor, unit: float, gradients: tuple[Tensor, ...], *inputs: Tensor
    ) -> Tensor:
        ctx.gradients, ctx.unit = gradients, unit
        return value.clone()

    @staticmethod
    def backward(ctx: Any, start: Tensor) -> tuple[Tensor | None, ...]:
        factor = start / ctx.unit
        gradients = ctx.gradients
        if factor.device.type != "cpu" or factor != 1.0:  # on a CUDA device a look would wait
            gradients = tuple(gradient.float() * factor for gradient in gradients)
        return (None, None, None, *gradients)


class TermWeights(WholeBatch):
    """Terms with denominators of their own: each micro-batch takes the weights of the whole step, and its loss is a part of the sum of means.

    The weights are what `weights` gives for a batch, where the job says so; else those of the losses of the first pass.
    """

    def __init__(
        self,
        phase: ModelPhase,
        group: Group,
        plan: Plan,
        parts: Sequence[str],
        terms: Sequence[str],
        weights: Callable[[Any], Mapping[str, Any]] | None,
    ) -> None:
        super().__init__(phase, group, plan, parts)
        self.terms, self.weights = terms, weights
        self._ranges = partial(plan.ranges, group.size)
        self._own: list[float | Tensor] = []
        self._totals: dict[str, float] = {}

    def begin(self, places: Sequence[Ids], *, compares: bool) -> None:
        super().begin(places, compares=compares)
        self._own = []

    def take(self, weights: object) -> None:
        """Note what `weights` gave for this rank's next micro-batch."""
        if not isinstance(weights, Mapping) or weights.keys() != set(self.terms):
            got = ", ".join(map(repr, weights)) if isinstance(weights, Mapping) else type(weights).__name__
            raise problems.TERM_WEIGHTS(got=got or "no weight", wanted=", ".join(map(repr, self.terms)))
        self._own += [self._as_number(name, weights[name]) for name in self.terms]

    def take_none(self) -> None:
        """Note a micro-batch of this rank that has no sample."""
        self._own += [0.0] * len(self.terms)

    def _as_number(self, name: str, weight: Any) -> float | Tensor:
        if isinstance(weight, Tensor):
            return weight.detach().reshape(()).double()
        return as_float(f"the weight of the term {name!r}", weight)

    def _first(self, m: int, where: str, returned: Any) -> Loss:
        terms = self._terms(returned, where)
        self._own += [self._as_number(name, terms[name].weight) for name in self.terms]
        return self._nothing()

    def _terms(self, returned: Any, where: str) -> Mapping[str, Any]:
        terms = returned.terms if isinstance(returned, Loss) else {}
        if terms.keys() != set(self.terms):
            got = ", ".join(map(repr, terms)) or "none"
            raise problems.OTHER_TERMS(
                label=self.phase.loss_label, got=got, where=where, wanted=", ".join(map(repr, self.terms))
            )
        return terms

    def gather(self) -> None:
        count, width = len(self._places), len(self.terms)
        device = self.group.device
        own = (
            torch.stack([torch.as_tensor(weight, dtype=torch.float64, device=device) for weight in self._own])
            if self._own
            else torch.empty(0, dtype=torch.float64, device=device)
        )
        rows = own
        if self.group.size > 1:
            lengths = [len(assigned) * width for assigned in self._ranges(count)]
            largest, lengths[self.group.rank] = max(lengths), 0
            received, wait = self.group.swap(own, lengths, largest)
            wait()
            every = list(torch.split(received, lengths))
            every[self.group.rank] = own
            rows = torch.cat(every)
        owners = [m for assigned in self._ranges(count) for m in assigned]
        by_micro_batch = dict(zip(owners, rows.view(count, width).tolist(), strict=True))
        sums = [0.0] * width
        for row in (by_micro_batch[m] for m in range(count)):  # in index order, on every rank alike
            sums = [total + weight for total, weight in zip(sums, row, strict=True)]
        self._totals = dict(zip(self.terms, sums, strict=True))
        self._gathered = True

    def _second(self, m: int, where: str, again: bool, counts: bool, returned: Any) -> Loss:
        terms = self._terms(returned, where)
        total = reduce(operator.add, [term.mean(self._totals[name]) for name, term in terms.items()])
        loss: Loss = returned
        return replace(loss, total=total, weight=1.0 if m == self._carrier else 0.0)

    def check(self, totals: Totals) -> None:
        """JobError where the losses of the second pass have other weights than those that divided them."""
        for name, weight in self._totals.items():
            _, of_losses = totals.parts[name]
            if of_losses != weight:
                source = (
                    "job.term_weights"
                    if self.weights is not None
                    else "the first pass over the step's micro-batches"
                )
                raise problems.TERM_WEIGHT_DIFFERS(
                    label=self.phase.loss_label,
                    name=name,
                    got=f"{of_losses:g}",
                    source=source,
                    wanted=f"{weight:g}",
                )


def whole_batch(
    job: Job, phase: ModelPhase, group: Group, plan: Plan, parts: Sequence[str], terms: Sequence[str]
) -> WholeBatch | None:
    """What the losses of a phase take from the whole batch; None where each is known by itself. `terms` are those of its loss."""
    if phase.embed is not None:
        return BatchLoss(phase, group, plan, parts)
    if not terms:
        return None
    weights = job.term_weights if overrides(job, "term_weights") and not phase.name else None
    return TermWeights(phase, group, plan, parts, terms, weights)
