"""Where two looks at one micro-batch part."""

from __future__ import annotations

import pytest

from lockstep.proof.operator_trace import Look, ObservedValue, Phase, parting


def seen(what: str, digest: int, phase: Phase = "forward") -> ObservedValue:
    return ObservedValue(what, "", phase, digest, {})


@pytest.mark.parametrize(
    ("turned", "operator"),
    [(True, "aten.sum → aten.flip"), (False, "aten.mul")],
    ids=["in forward", "in backward"],
)
def test_a_gradient_may_show_what_the_loss_does_not(turned: bool, operator: str) -> None:
    """Another value before the loss, which is the same number all the same, or none before the backward."""
    before = [seen("aten.linear", 1), seen("aten.sum", 2)]
    one = Look(operators=[*before, seen("aten.mul", 5, "backward")], gradients=[seen("gradient of a", 5)])
    forward = [before[0], seen("aten.flip", 3), seen("aten.sum", 4)] if turned else before
    other = Look(operators=[*forward, seen("aten.mul", 6, "backward")], gradients=[seen("gradient of a", 6)])
    found = parting(one, other)
    assert found is not None
    assert (found.quantity, found.operator) == ("gradient of a", operator)
