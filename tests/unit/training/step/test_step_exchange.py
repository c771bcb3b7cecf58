"""What the ranks agree on in a step: totals added in index order in float64, exact for every value."""

from __future__ import annotations

import math

import pytest
import torch

from lockstep.communication.group import Group
from lockstep.job.interface import Loss, Mean
from lockstep.training.integrity.checksum import PRIME
from lockstep.training.step.step_exchange import Agreed, Exchange, Totals, _on_device

ALONE = Group(0, 1, torch.device("cpu"))


def exchanged(*losses: Loss, parts: tuple[str, ...] = ()) -> Totals:
    """The totals of a step with these micro-batches, of at most eight."""
    exchange = Exchange(ALONE, 8, parts, 0)
    for each in losses:
        exchange.put(each)
    exchange.close()
    return exchange.read(len(losses)).totals


def loss(total: float, weight: float = 1.0, **parts: Mean) -> Loss:
    return Loss(torch.tensor(total, requires_grad=True), weight, parts)


def test_totals_are_added_in_index_order_in_float64() -> None:
    """A sum in float32, or in another order, is another number."""
    values = [0.1, 1e8, -1e8, 0.3]
    wanted = 0.0
    for value in values:
        wanted += float(torch.tensor(value))
    totals = exchanged(*(loss(value, 2.5) for value in values))
    assert totals.loss == wanted
    assert totals.loss not in {float(torch.tensor(values).sum()), math.fsum(torch.tensor(values).tolist())}
    assert totals.weight == 10.0
    assert totals.first_bad is None


def test_weights_and_parts_may_be_tensors_or_numbers() -> None:
    losses = (
        loss(1.0, 3, accuracy=Mean(torch.tensor(2), torch.tensor(3))),
        Loss(torch.tensor(2.0, requires_grad=True), torch.tensor(5), {"accuracy": Mean(4.0, 5)}),
    )
    totals = exchanged(*losses, parts=("accuracy",))
    assert (totals.loss, totals.weight, totals.parts) == (3.0, 8.0, {"accuracy": (6.0, 8.0)})


def test_large_counts_are_exact() -> None:
    """Tokens of a large batch do not fit into float32."""
    totals = exchanged(loss(1.0, 2**24 + 1), Loss(torch.tensor(1.0), torch.tensor(2**40 + 1)))
    assert totals.weight == 2**40 + 2**24 + 2


def test_the_first_loss_that_is_not_finite_is_named() -> None:
    for bad in (math.nan, math.inf, -math.inf):
        totals = exchanged(loss(1.0), loss(bad), loss(math.nan), loss(1.0))
        assert totals.first_bad == 1
        assert not math.isfinite(totals.loss)


def test_empty_micro_batches_of_a_ragged_step_count_for_nothing() -> None:
    totals = exchanged(*[loss(1.0, 2.0)] * 3)
    assert (totals.loss, totals.weight) == (3.0, 6.0)


def test_flags_and_rows_are_forgotten_after_the_step() -> None:
    exchange = Exchange(ALONE, 2, (), 5)
    exchange.put(loss(1.0))
    exchange.flag([1, 4])
    exchange.close()
    assert exchange.read(1).flagged == [1, 4]
    exchange.put(loss(2.0))
    exchange.close()
    agreed = exchange.read(1)
    assert (agreed.totals.loss, agreed.flagged) == (2.0, [])


def test_a_vote_is_read_as_it_was_cast() -> None:
    exchange = Exchange(ALONE, 2, (), 5)
    for stop in (False, True, False):
        exchange.vote(stop=stop)
        exchange.put(loss(1.0))
        exchange.flag([4])
        exchange.close()
        agreed = exchange.read(1)
        assert (agreed.stop, agreed.flagged) == (stop, [4])


def test_a_loss_keeps_its_graph() -> None:
    """The exchange looks at the value and takes nothing from the backward that is to come."""
    value = loss(1.0)
    exchanged(value)
    assert value.total.requires_grad


def test_a_message_of_numbers_and_losses_is_theirs_on_any_device() -> None:
    losses = [torch.tensor(0.1), torch.tensor(2**40 + 1), torch.tensor([0.3], dtype=torch.bfloat16)]
    values = [losses[0], 3.0, losses[1], 0.0, losses[2], 0.1]
    found = _on_device(values, torch.device("cpu"))
    assert found.dtype == torch.float64
    assert found.tolist() == [float(value) for value in values]


def test_the_first_weight_that_is_no_count_is_named() -> None:
    """Whatever the others add to it."""
    for bad in (-1.0, math.nan, math.inf):
        found = exchanged(loss(1.0, 8.0), loss(1.0, bad), loss(1.0, -2.0)).bad_weight
        assert found is not None
        assert (found[0], repr(found[1])) == (1, repr(bad))
    assert exchanged(loss(1.0, 0.0), loss(1.0)).bad_weight is None


def test_what_stays_on_the_device_has_memory_of_its_own() -> None:
    """A buffer or a tensor that the next micro-batch writes anew is read when the message is built, after that."""
    given = torch.zeros((), device="meta")
    held = Exchange(ALONE, 1, (), 0)._value(given)
    assert isinstance(held, torch.Tensor)
    assert held.untyped_storage()._cdata != given.untyped_storage()._cdata


def agreed_on(*closed_with: tuple[int, int]) -> Agreed:
    """What ranks know that closed their messages with these numbers: what is compared, and the balance."""
    group, messages = Group(0, len(closed_with), torch.device("cpu")), []
    for compared, balance in closed_with:
        exchange = Exchange(group, len(closed_with), (), 2)
        exchange.put(loss(1.0))
        exchange.vote(stop=False, save=True)
        exchange.close(0.5, compared, torch.tensor(balance))
        messages.append(exchange.message)
    exchange.arrived(torch.cat(messages))
    return exchange.read(len(closed_with))


@pytest.mark.parametrize(
    ("balances", "balanced"),
    [
        ((0, 0, 0), True),
        ((5, PRIME - 7, 2), True),
        ((PRIME - 1, PRIME - 1, 2), True),
        ((5, PRIME - 7, 3), False),
    ],
)
def test_balances_add_up_to_zero(balances: tuple[int, ...], balanced: bool) -> None:
    agreed = agreed_on(*((7, balance) for balance in balances))
    assert (agreed.balanced, agreed.same_compared) == (balanced, True)
    assert (agreed.stop, agreed.save, agreed.regroup, agreed.flagged) == (False, True, False, [])
    assert agreed.pace == [0.5] * 3


def test_what_is_compared_is_the_same_on_all_ranks() -> None:
    agreed = agreed_on((7, 0), (8, 0), (7, 0))
    assert (agreed.balanced, agreed.same_compared) == (True, False)
