"""What one step came to, in a form that two processes can compare: the one that trained on, and the one that resumed.

The trainer keeps it for one step of thousands, and only on rank 0. All that it takes is digests of what rank 0 has anyway: no rank waits for
another, and no gradient is kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lockstep.record.ledger.row_comparison import differing
from lockstep.record.ledger.rows import StepRow
from lockstep.training.integrity.rehearsal.names_of_objects import memory_of
from lockstep.training.integrity.rehearsal.object_state import Memory
from lockstep.training.run import Run
from lockstep.training.step.phases import optimizers_of, sharded_of

LARGEST_LOOKED_AT = 1 << 16
"""The largest array, in bytes, that is looked into to name a cause: the trainer waits meanwhile."""

_SHOWN = 3
"""So many places of lost state are named."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """What a step came to, on one rank."""

    row: StepRow
    gradients: Mapping[int, int]
    """The digest of the gradient of each micro-batch that this rank computed."""
    tensors: Mapping[str, int]
    """The digest of each tensor of the state after the step, by the name that messages use."""
    values: tuple[int, int]
    """The digests of what is no tensor in it: of the optimizer, and of all else."""
    whole: bool
    """Whether it has the optimizer's whole state: a rank of a sharded one does not."""

    @classmethod
    def of(cls, run: Run, row: StepRow) -> Evidence:
        """The evidence of the step that `run` has just taken, of which it noted the gradients."""
        agreement = run.step.agreement
        return cls(
            row._replace(digests=None),
            run.step.digests.gradients(),
            agreement.tensor_digests(),
            agreement.value_digests(),
            not sharded_of(run.state.optimizer),
        )

    def first_difference(self, other: Evidence) -> str:
        """The first thing that `other` computed otherwise, in the order in which a step computes: gradients, numbers, state. Empty without one."""
        for m in sorted(self.gradients.keys() & other.gradients.keys()):
            if self.gradients[m] != other.gradients[m]:
                return f"the gradient of micro-batch {m}"
        for column in differing(self.row, other.row):
            return str(column)
        whole = self.whole and other.whole
        names = [*self.tensors, *(other.tensors.keys() - self.tensors.keys() if whole else ())]
        for name in names:
            if (whole or name in other.tensors) and self.tensors.get(name) != other.tensors.get(name):
                return f"{name!r} after the update"
        if whole and self.values[0] != other.values[0]:
            return "a value of the optimizer's state after the update"
        if self.values[1] != other.values[1]:
            return "a counter, the schedule or the loss scale after the update"
        return ""


def held_values(run: Run) -> dict[str, str]:
    """What the job, its module, its model, its data and its optimizers hold beside what a checkpoint keeps by itself, by place."""
    optimizers = list(optimizers_of(run.state.optimizer).values())
    # A state of billions of numbers is not hashed twice: checkpoints have it, and the evidence compares it.
    kept = [part for one in optimizers for part in (one.state, one.param_groups)]
    apart = [*run.state.model.parameters(), *run.state.model.buffers(), *kept]
    largest = LARGEST_LOOKED_AT
    memories = [memory_of(run.job, run.state.model, optimizers, largest=largest, datasets=True)]
    for i, one in enumerate(optimizers):
        name = "optimizer" if len(optimizers) == 1 else f"optimizer {i}"
        memories.append(Memory({name: one}, apart=apart, largest=largest))
    # Of a larger array there is only the number of writes to it, which is another one in each process.
    return {place: text for one in memories for place, text in one.values.items() if " version " not in text}


def cause_of(saved: Mapping[str, str], later: Mapping[str, str], resumed: Mapping[str, str]) -> str:
    """Why a resumed process computes otherwise, as far as it shows, with the places that hold something else in it.

    `saved` is what the trainer held when the checkpoint was saved, `later` what it held a step later. Places that change from step to step come
    first: others may be a cache, or a number that nothing reads.
    """
    differing = [place for place in {**saved, **resumed} if saved.get(place) != resumed.get(place)]
    changing = [place for place in differing if saved.get(place) != later.get(place)]
    if changing:
        return f"no checkpoint restores {_shown(changing)}"
    if differing:
        return f"no checkpoint restores all of its state; what else the two hold otherwise is {_shown(differing)}"
    return "no checkpoint restores all of its state, and what is lost is not where Lockstep looks: an iterator, a queue, a context variable"


def _shown(places: Sequence[str]) -> str:
    *some, last = places[:_SHOWN]
    if len(places) > _SHOWN:
        return f"{', '.join([*some, last])} and {len(places) - _SHOWN} more"
    return f"{', '.join(some)} and {last}" if some else last
