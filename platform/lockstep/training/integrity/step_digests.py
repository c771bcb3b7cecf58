"""The digests of a run's steps, for the ledger and for checkpoints; the ranks compare them on the way."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from lockstep.communication.group import Group
from lockstep.plan import Position, is_due
from lockstep.record.ledger.rows import Digests
from lockstep.spec.fields import Spec
from lockstep.training.integrity.agreement import Agreement, Held
from lockstep.training.integrity.digests import Summed, held_optimizer_digest, resolved
from lockstep.training.state import TrainState
from lockstep.training.step.phases import sharded_of


def digest_is_due(spec: Spec, position: Position, last: int) -> bool:
    """Whether the row of a step has digests: each `record.digest_every` steps, where the plan has a checkpoint, and at the end.

    It follows from the plan alone, so the same rows have them in every execution of a run. `last` is the run's last step.
    """
    every, cadence = spec.record.digest_every, spec.checkpoint.every
    if every is None:
        return False
    at_checkpoint = cadence is not None and cadence.due(position)
    return is_due(position, steps=every) or position.number == last or at_checkpoint


class StepDigests:
    """The digests of one worker's steps. `note` takes the gradients of a step's micro-batches; then come `gather`, the update, `taken`, `compare`."""

    def __init__(
        self, spec: Spec, group: Group, state: TrainState, total_steps: int, agreement: Agreement
    ) -> None:
        self._spec, self._group, self._state, self._last = spec, group, state, total_steps
        self._agreement = agreement
        self._names: Sequence[str] = ()
        """The names of the parameters whose gradients are being noted."""
        self._summed: dict[int, list[Summed]] | None = None
        """By micro-batch, what its gradient adds to its digest; None in a step in which none is noted."""
        self._wanted: frozenset[int] | None = None
        """The micro-batches that are noted; None for all."""
        self._at_hand: list[Summed] | None = None
        self.paused = False
        """Whether gradients are passed by: those of an optimizer's further evaluations."""
        self._gradients: dict[int, int] | None = None
        self._every: tuple[int, ...] | None = None
        """The digests of all ranks' micro-batches, in order."""
        self._held: Held | None = None
        self._all_in: int | None = None

    def begin(self, position: Position, rechecked: frozenset[int] = frozenset()) -> None:
        """Begin a step. All its micro-batches are noted if the step has digests, else only those that are `rechecked`."""
        due = digest_is_due(self._spec, position, self._last)
        if position.number == self._all_in:
            rechecked = frozenset(range(position.micro_batches))
        self._summed = {} if (due or rechecked) and self._spec.reduction == "exact" else None
        self._wanted = None if due else rechecked
        self._at_hand = self._gradients = None

    def note_all_in(self, step: int) -> None:
        """Have this rank note all of its own micro-batches in step number `step`. No other rank needs to know."""
        self._all_in = step

    @property
    def notes(self) -> bool:
        """Whether gradients of this step's micro-batches are noted. `reduction: native` keeps none apart."""
        return self._summed is not None and not self.paused

    def next_micro_batch(self, m: int, names: Sequence[str]) -> None:
        """Announce that the next gradients are micro-batch `m`'s, of the parameters `names`. Those of several phases make one digest."""
        self._names, self._at_hand = names, None
        if self._summed is not None and not self.paused:
            is_wanted = self._wanted is None or m in self._wanted
            self._at_hand = self._summed.setdefault(m, []) if is_wanted else None

    def note(self, gradients: Sequence[Tensor], indices: Sequence[int] | None = None) -> None:
        """Add gradients of the current micro-batch, in logical order: those of its parameters `indices`, or of all."""
        if self._at_hand is None:
            return
        for gradient, i in zip(
            gradients, range(len(self._names)) if indices is None else indices, strict=True
        ):
            self._at_hand.append(self._agreement.digester.summed(self._names[i], gradient))

    def gradients(self) -> dict[int, int]:
        """The digests of this rank's noted micro-batches, by their numbers."""
        if self._gradients is None:
            summed = self._summed or {}
            self._gradients = dict(zip(summed, resolved(list(summed.values())), strict=True))
        return self._gradients

    def gather(self, position: Position, ranges: Sequence[range]) -> None:
        """Gather the digests of all ranks' micro-batches, which are those of `ranges`. It runs before the update: later, a lost rank's would be lost with it."""
        self._every = None
        if self._summed is None or self._wanted is not None:
            return
        every = self._group.gather(self.gradients())
        by_micro_batch = {m: every[rank][m] for rank, owned in enumerate(ranges) for m in owned}
        self._every = tuple(by_micro_batch[m] for m in range(position.micro_batches))

    def taken(self, position: Position) -> Digests | None:
        """The digests of the step that was just updated, as this rank has them; None where the step has none."""
        if not digest_is_due(self._spec, position, self._last):
            return None
        self._held = self._agreement.held()
        weights, optimizer, average = self._for_ledger(self._held)
        return Digests(weights, optimizer, self._every, average)

    def compare(self) -> None:
        """Compare what was `taken` with the other ranks. CorruptionError where their states differ."""
        digests, self._held = self._held, None
        if digests is not None:
            self._agreement.compare(self._group.gather(digests))
        elif self._agreement.awaits(self._state.counters.step):
            self._agreement.check()

    def for_checkpoint(self) -> dict[str, str]:
        """The digests that a checkpoint keeps beside the state; none where the run has none.

        CorruptionError where the ranks hold different states, so that none is saved.
        """
        digests = self._agreement.check()
        if self._spec.record.digest_every is None:
            return {}
        weights, optimizer, average = self._for_ledger(digests or self._agreement.held())
        return {
            "weights_digest": f"{weights:016x}",
            "optimizer_digest": f"{optimizer:016x}",
            **({} if average is None else {"ema_digest": f"{average:016x}"}),
        }

    def _for_ledger(self, held: Held) -> tuple[int, int, int | None]:
        """The digests of weights, optimizer and average; of a sharded optimizer, that of its whole state."""
        weights, optimizer, average, _ = held
        if sharded_of(self._state.optimizer) and self._state.mirrored is None:
            optimizer = held_optimizer_digest(self._agreement.digester, self._state.optimizer)
        return weights, optimizer, None if self._state.average is None else average
