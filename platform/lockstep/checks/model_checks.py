"""Checks of the model and its loss: what the first step computes, and whether it can learn."""

from __future__ import annotations

import math
from collections import defaultdict

import torch
from torch import nn

from lockstep.checks.findings import Finding, failed, passed, warned
from lockstep.checks.first_step import FirstStep, PhaseSeen
from lockstep.checks.fixture import Fixture
from lockstep.checks.learning import FASTER, Learning
from lockstep.checks.loss_inputs import ClassLabels, LossInputs
from lockstep.training.integrity.rehearsal.names_of_objects import named
from lockstep.training.integrity.state_digest import tensor_digests

HIGH, LOW = 5.0, 0.1
"""A first loss of so many times what guessing costs is told: far above it, or far below."""

HIGH_SQUARED = 100.0
"""The same for squared errors, whose outputs may be of any size at the start."""

EXPECTED, EXPECTED_CALLS = 20.0, 8.0
"""A class of which evaluation should have so many labels, in so many calls of the loss, and has none, is told."""

FEW_LOGITS = 16
"""Of fewer logits nothing is said: that all are between 0 and 1 may be chance."""

MOVED = 0.02
"""The share by which the loss on one micro-batch has to fall."""


def model(fixture: Fixture) -> list[Finding]:
    """The model made twice from one seed, and parameters that are equal by chance in no model."""
    (_, first), (_, second) = fixture.fresh_model(), fixture.fresh_model()
    digests, second_digests = tensor_digests(first.state_dict()), tensor_digests(second.state_dict())
    differing = [name for name in digests if second_digests.get(name) != digests[name]]
    if differing:
        return [
            failed(
                "model",
                f"made twice from one seed, {named([repr(name) for name in differing])} has other values, so each rank would begin with others",
                "draw initial weights from torch's, numpy's or python's default generators",
            )
        ]
    asking = [p for p in first.parameters() if p.requires_grad]
    count = sum(p.numel() for p in asking)
    evidence = f"{count:,} trainable numbers in {len(asking)} parameters; made twice, the same bits"
    copies = _copies(first)
    if copies:
        return [
            warned(
                "model",
                f"{copies[0]!r} and {copies[1]!r} begin with the same values but are two parameters: weights tied by a copy part with the first update",
                "assign the parameter itself (a.weight = b.weight), or initialise the two apart",
            )
        ]
    return [passed("model", evidence)]


def _copies(model: nn.Module) -> tuple[str, str] | None:
    """Two trainable matrices with the same values that are not constant: no initialisation gives them by chance."""
    by_digest = defaultdict(list)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.dim() > 1 and len(torch.unique(parameter.detach())) > 2:
            digest = next(iter(tensor_digests({"": parameter.detach()}).values()))
            by_digest[digest].append(name)
    return next(((names[0], names[1]) for names in by_digest.values() if len(names) > 1), None)


def modes(first: FirstStep) -> list[Finding]:
    """Training and evaluation mode, which are the platform's to set."""
    if first.changed_mode:
        return [
            warned(
                "modes",
                f"the loss changes the mode of {first.changed_mode!r} in training and leaves it so: what it computes after that trains without "
                "dropout or batch statistics; the next micro-batch begins in training mode again",
                "take train() and eval() out of the loss: evaluation sets the mode by itself, and a part that job.model returns in evaluation mode "
                "stays in it",
            )
        ]
    if first.kept_mode:
        return [
            failed(
                "modes",
                f"{first.kept_mode!r} is in training mode during evaluation: the loss or a metric calls train()",
                "take train() and eval() out of the job; evaluation sets the mode by itself, and puts it back",
            )
        ]
    if first.drops:
        return [
            warned(
                "modes",
                f"dropout is active in evaluation: {first.drops} is called to drop although every module is in evaluation mode",
                "pass training=self.training (for attention dropout_p=self.p if self.training else 0.0); if you want the mean over draws, this is right",
            )
        ]
    return [passed("modes", "training and evaluation leave every module's mode as it was")]


def gradients(first: FirstStep, learning: Learning) -> list[Finding]:
    """Every trainable parameter has had a gradient that is not zero: in the first step, or once others had moved."""
    alive = {name.rpartition(".")[0] for name in learning.names if name not in learning.silent}
    # The bias of a layer that learns may cancel out of the loss, as in a difference of outputs.
    dead = sorted(n for n in learning.silent if n in learning.matrices or n.rpartition(".")[0] not in alive)
    if not dead:
        evidence = f"every trainable layer has a gradient within {len(learning.losses)} updates"
        out = [repr(name) for name in sorted(learning.silent)]
        return [passed("gradients", evidence + (f"; {named(out)} cancels out of the loss" if out else ""))]
    names = [repr(name) for name in dead]
    return [
        failed(
            "gradients",
            f"the gradient of {named(names)} was zero in every element, in the first step and in {len(learning.losses)} updates on one micro-batch",
            "look for a unit that is dead (a ReLU whose inputs are all negative), a mask of zeros, or a detach() before it; "
            "set requires_grad to False where it is not to learn",
        )
    ]


# --- labels -----------------------------------------------------------------------------------------------


def labels(first: PhaseSeen, train: LossInputs, held_out: LossInputs) -> list[Finding]:
    """Labels of a phase against the outputs that they are held against."""
    inputs = first.loss_inputs
    if inputs.numbers.stretched:
        return [
            failed(
                "labels",
                f"{inputs.numbers.stretched}: each output is compared with every target",
                "give both one shape: squeeze the output, or unsqueeze the target",
            )
        ]
    if inputs.binary.outside:
        return [
            failed(
                "labels",
                f"{inputs.binary.outside} of {inputs.binary.rows} labels of binary_cross_entropy_with_logits are below 0 or above 1",
                "give labels of 0 and 1",
            )
        ]
    if (
        inputs.binary.rows >= FEW_LOGITS
        and inputs.binary.probabilities == inputs.binary.rows
        and inputs.binary.spread > 0
    ):
        return [
            warned(
                "labels",
                f"all {inputs.binary.rows} logits of binary_cross_entropy_with_logits lie between 0 and 1, as probabilities do: the sigmoid may be "
                "taken twice",
                "give it the logits: take out the sigmoid, or use binary_cross_entropy",
            )
        ]
    findings = []
    for classes, noted in inputs.classes.items():
        findings += _of_classes(noted, train.classes.get(classes, noted), first.weight)
    findings += _weight(first)
    for classes, noted in train.classes.items():
        several = inputs.classes[classes].rows > first.samples if classes in inputs.classes else False
        findings += _missing(noted, held_out.classes.get(classes), several=several)
    if findings:
        return findings
    return [passed("labels", _labels_seen(train if train.classes else inputs))]


def _of_classes(noted: ClassLabels, train: ClassLabels, weight: float) -> list[Finding]:
    if noted.rows and noted.probabilities == noted.rows and noted.logs:
        return [
            failed(
                "labels",
                f"nll_loss is given probabilities without their logarithm: all {noted.rows} rows are at least 0 and add up to 1",
                "give it log_softmax of the logits, or the logits to cross_entropy",
            )
        ]
    if noted.rows and noted.logs and noted.unnormalised == noted.rows:
        return [
            failed(
                "labels",
                f"nll_loss is given numbers that are no log-probabilities of the {noted.classes} classes: in none of {noted.rows} rows do they "
                "add up to 1",
                "give it log_softmax over the classes (dim=1 of (samples, classes)), or the logits to cross_entropy",
            )
        ]
    if noted.rows and noted.probabilities == noted.rows:
        return [
            failed(
                "labels",
                f"cross_entropy is given probabilities: all {noted.rows} rows are at least 0 and add up to 1, so softmax is taken twice",
                "give it the logits: take out the softmax, or use nll_loss on log_softmax",
            )
        ]
    if noted.ignored and weight == noted.rows + noted.ignored:
        return [
            warned(
                "labels",
                f"the weight of the first step, {weight:g}, counts {noted.ignored} labels that cross_entropy ignores: padding makes the mean too small",
                "give the number of labels that are not ignore_index as the weight",
            )
        ]
    if noted.rows > 1 and int((noted.counts > 0).sum()) == 1 < int((train.counts > 0).sum()):
        return [
            warned(
                "labels",
                f"all {noted.rows} labels of the first step are {int(noted.counts.argmax())}, of {noted.classes} classes",
                "look at how labels are read; where the data are sorted by class, set data.shuffle=full",
            )
        ]
    return []


def _weight(first: PhaseSeen) -> list[Finding]:
    """A total that is the sum of the losses of all labels, and a weight that counts fewer things than there are samples."""
    rows = sum(noted.rows for noted in first.loss_inputs.classes.values())
    total = sum(noted.loss for noted in first.loss_inputs.classes.values())
    is_sum = math.isclose(first.loss * first.weight, total, rel_tol=1e-3)
    if not (is_sum and 0 < first.weight < min(rows, first.samples)):
        return []
    return [
        warned(
            "labels",
            f"the total of the first step is the sum over {rows} labels, and its weight is {first.weight:g}: the loss is no mean",
            "give the number of labels as the weight",
        )
    ]


def _missing(train: ClassLabels, held_out: ClassLabels | None, *, several: bool) -> list[Finding]:
    """Classes that evaluation should have and has not.

    Of `several` labels in a sample, as tokens are, only those that no call was without: others come and go with the text.
    """
    if held_out is None or not train.rows or not held_out.rows:
        return []
    expected = train.counts * (held_out.rows / train.rows)
    calls = train.calls_with * (held_out.calls / train.calls)
    is_expected = (expected >= EXPECTED) & (calls >= EXPECTED_CALLS)
    if several:
        is_expected &= train.calls_with == train.calls
    absent = torch.nonzero(is_expected & (held_out.counts == 0)).flatten().tolist()
    if not absent:
        return []
    return [
        warned(
            "labels",
            f"class {named([str(label) for label in absent])} is {int(train.counts[absent[0]])} of {train.rows} training labels and none of "
            f"{held_out.rows} evaluation labels",
            "hold out samples of every class, and read the labels of both parts by the same map",
        )
    ]


def _labels_seen(inputs: LossInputs) -> str:
    for noted in inputs.classes.values():
        used = torch.nonzero(noted.counts).flatten().tolist()
        if used:
            ignored = f", {noted.ignored} ignored" if noted.ignored else ""
            return (
                f"{noted.rows} labels looked at: {used[0]} … {used[-1]} of {noted.classes} classes{ignored}"
            )
    if inputs.binary.rows:
        return f"{inputs.binary.rows} labels looked at: {inputs.binary.positive / inputs.binary.rows:.0%} of them 1"
    if inputs.numbers.rows:
        return f"{inputs.numbers.rows} targets of a squared error"
    return "the loss calls none of torch's losses that have labels"


# --- the loss ---------------------------------------------------------------------------------------------


def chance(fixture: Fixture, first: PhaseSeen) -> list[Finding]:
    """The first loss of a phase beside that of one who guesses."""
    inputs = first.loss_inputs
    guesses: list[tuple[str, float, float, float]] = []
    for noted in inputs.classes.values():
        if noted.rows and noted.chance > 0:
            description = f"one of {noted.classes} classes"
            guesses.append((description, noted.loss / noted.rows, noted.chance, HIGH))
    if inputs.binary.rows:
        guesses.append(("yes or no", inputs.binary.loss / inputs.binary.rows, inputs.binary.chance, HIGH))
    if inputs.numbers.rows and inputs.numbers.chance > 0:
        numbers = inputs.numbers
        guesses.append(("the mean of the targets", numbers.loss / numbers.rows, numbers.chance, HIGH_SQUARED))
    if not guesses:
        return [
            passed(
                "chance",
                f"the first step's loss is {first.loss:.4g}; what chance gives is not known for this loss",
            )
        ]
    for description, loss, guess, high in guesses:
        evidence = f"the first step's loss is {loss:.4g}, and guessing {description} gives {guess:.4g}"
        if loss > high * guess:
            remedy = "scale the inputs or the targets, or begin with smaller weights in the last layer"
            return [warned("chance", evidence, remedy)]
        pretrained = fixture.spec.initial_weights or fixture.spec.fork
        if loss < LOW * guess and not pretrained:
            remedy = "look for the label among the inputs; where the model comes with trained weights, this is right"
            return [warned("chance", evidence, remedy)]
    return [passed("chance", evidence)]


def overfit_without_after_step(learning: Learning, still: Learning) -> list[Finding]:
    """What one micro-batch shows where the loss follows what `after_step` moves, such as a queue that fills with its samples."""
    return [
        passed(
            "overfit",
            f"on one micro-batch the loss goes from {still.start:.4g} to {still.end:.4g} in {len(still.losses)} updates at a rate of {still.rate:g} "
            f"without job.after_step, which moves {learning.followed}; with it, to {learning.end:.4g}",
        )
    ]


def overfit(learning: Learning, faster: Learning | None, clip_norm: float | None = None) -> list[Finding]:
    """Whether one micro-batch is learnt. `faster` is a second try, where the first did not move the loss."""
    if len(learning.phases) > 1 and not learning.broke:
        return [
            passed(
                "overfit",
                f"not judged: the losses of {named(learning.phases)} work upon each other; they are finite in {len(learning.losses)} updates of each",
            )
        ]
    if learning.moving:
        return [
            passed(
                "overfit", f"not judged: each forward changes {learning.moving!r}, and the loss may follow it"
            )
        ]
    losses = learning.losses
    summary = f"on one micro-batch the loss goes from {learning.start:.4g} to {learning.end:.4g} in {len(losses)} updates at a rate of {learning.rate:g}"
    if learning.broke or not math.isfinite(learning.end):
        return [
            failed(
                "overfit",
                f"{summary}, and then: {learning.broke or 'it is not finite'}",
                f"lower optimizer.lr (try {learning.rate / 10:g}, or lockstep lr-find), or set clip_norm",
            )
        ]
    if learning.skipped == len(losses):
        return [
            failed(
                "overfit",
                f"all {len(losses)} updates were skipped: the gradients overflow in fp16",
                "use precision=bf16 or fp32, or scale the loss down",
            )
        ]
    if learning.fall >= MOVED or abs(learning.start) < 1e-6:
        return [passed("overfit", summary)]
    if learning.fall < -MOVED:
        return [
            failed(
                "overfit",
                f"{summary}: it rises",
                f"lower optimizer.lr (try {learning.rate / 10:g}, or lockstep lr-find); in an optimizer of the job's own, look at the sign of its step",
            )
        ]
    if faster is not None and faster.fall >= MOVED and not faster.broke:
        return [
            warned(
                "overfit",
                f"{summary}, and to {faster.end:.4g} at {FASTER:g} times the rate: it is too low to be seen",
                "raise optimizer.lr (lockstep lr-find suggests one)",
            )
        ]
    return [
        failed(
            "overfit",
            f"{summary}, and does not fall at {FASTER:g} times the rate either",
            "look for a loss that does not depend on the trainable parameters' outputs, and for an optimizer that does not change them"
            + (f"; clip_norm is {clip_norm:g}" if clip_norm is not None else ""),
        )
    ]
