"""Whether all ranks hold the same state and, where they do not, which of them is wrong.

Each rank makes digests of what it holds (`digests.py`). The ranks compare them in the steps whose rows have digests, after each evaluation
before it is reported, at every save before anything is copied, and where the checksums of weights differ that a sharded optimizer overwrites. Where they differ, the attempt ends: every checkpoint saved before holds a
state that they agreed on.

Where parts of the state have mirrors, each is compared with its mirror: moments, and of shards also weights and average. Of two that differ, nobody knows which is wrong.

With three ranks or more, those outside the majority are wrong. With two that differ, nobody knows which is wrong. Their digests go to the
next attempt, which takes the same steps again: where its ranks agree, those that had other digests were wrong.

Not compared: the job's own state (`Job.state_dict`), the best weights of early stopping, and shards without a mirror.
"""

from __future__ import annotations

import os
import socket
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lockstep.communication.group import Group
from lockstep.record.events.union import Corrupted, Tell, Witness, tell_nobody
from lockstep.training.auxiliary_state import unlisted_tensors
from lockstep.training.integrity import problems
from lockstep.training.integrity.digests import (
    Digester,
    held_digest,
    held_optimizer_digest,
    leaves,
    optimizer_digest,
    resolved,
    values_digest,
)
from lockstep.training.integrity.quantities import Quantity
from lockstep.training.state import TrainState
from lockstep.training.step.mirror_layout import Replica
from lockstep.training.step.phases import optimizers_of, sharded_of

Held = tuple[int, int, int, int]
"""The digests of what a rank holds, by `Quantity`."""


def witness(group: Group, digests: Sequence[int] = ()) -> Witness:
    """The rank of this process, as a report names it where its bits differ from the others'."""
    device, uuid = str(group.device), ""
    if group.device.type == "cuda":
        properties: Any = torch.cuda.get_device_properties(group.device)
        device, uuid = f"{device} {properties.name}", f"GPU-{properties.uuid}"
    return Witness(group.rank, socket.gethostname(), os.getpid(), device, uuid, tuple(digests))


def outvoted(values: Sequence[Any]) -> tuple[int, ...]:
    """Indices of the values that differ from the majority; none where no value has more than half."""
    value, count = Counter(values).most_common(1)[0]
    return tuple(i for i, vote in enumerate(values) if vote != value) if 2 * count > len(values) else ()


def settled(doubt: Corrupted, held: Held) -> Corrupted:
    """An undecided difference, settled: the ranks now agree on `held` after the same step, so the ranks that held other digests were wrong."""
    return replace(doubt, wrong=doubt.wrong_beside(held), how="recomputation")


class _Mirrored(NamedTuple):
    """One tensor: of which quantity, and the name that messages use."""

    quantity: Quantity
    label: str


class _ReplicaDigests(NamedTuple):
    """The digests of a rank's own part of each tensor, and of that of rank `owner` that it mirrors: what each adds to that of the whole."""

    owner: int
    local: dict[_Mirrored, int]
    of_mirror: dict[_Mirrored, int]

    @classmethod
    def of(cls, digester: Digester, owner: int, replicas: Iterable[Replica]) -> _ReplicaDigests:
        every = list(replicas)
        digests = resolved([[digester.part(each.name, each.elements)] for each in every])
        by_kind: tuple[dict[_Mirrored, int], dict[_Mirrored, int]] = {}, {}
        for each, digest in zip(every, digests, strict=True):
            by_kind[each.is_mirror][_Mirrored(each.quantity, each.label)] = digest
        return cls(owner, *by_kind)

    @staticmethod
    def totals(digests: Mapping[_Mirrored, int]) -> list[int]:
        """What they add by quantity."""
        added = [0] * len(Quantity)
        for mirrored, digest in digests.items():
            added[mirrored.quantity] = (added[mirrored.quantity] + digest) % 2**64
        return added

    def first_unlike(self, owner: _ReplicaDigests) -> _Mirrored:
        """The first tensor that the owner has otherwise; weights without a name where only those of the newest update were other ones."""
        unlike = (each for each, digest in self.of_mirror.items() if owner.local.get(each) != digest)
        return next(unlike, _Mirrored(Quantity.WEIGHTS, ""))


class _Compared(NamedTuple):
    """What a rank tells the others of its own part, and of that of rank `owner` that it mirrors: digests by quantity, and what tells the newest update of them."""

    owner: int
    local: list[int]
    of_mirror: list[int]
    update: int
    update_of_mirror: int


class Agreement:
    """Compares the states of the ranks of one attempt."""

    def __init__(self, group: Group, state: TrainState) -> None:
        self._group, self._state = group, state
        self._digester: Digester | None = None
        self.tell: Tell = tell_nobody
        self.attempt = 1
        self.began_at = 0
        """The step that the attempt starts from."""
        self._doubts: tuple[Corrupted, ...] = ()
        self._since = 0
        """The last step after which the ranks agreed, or the one that the attempt starts from."""

    def begin(
        self, tell: Tell, attempt: int, doubts: Sequence[Corrupted], *, from_checkpoint: bool = False
    ) -> None:
        """Begin attempt number `attempt`, whose ranks agree on their first state. `doubts` are the differences that are still undecided.

        `from_checkpoint`: all ranks call it with the state of a checkpoint, which may settle a doubt already.
        """
        self.tell, self.attempt = tell, attempt
        self.began_at = self._since = self._state.counters.step
        earliest = self._since if from_checkpoint else self._since + 1
        self._doubts = tuple(doubt for doubt in doubts if doubt.step >= earliest)
        if self.awaits(self._since):
            self.check()

    @property
    def digester(self) -> Digester:
        if self._digester is None:  # a run that compares nothing needs no workspace
            self._digester = Digester(self._group.device)
        return self._digester

    def held(self) -> Held:
        """The digests of what this rank holds now. An evaluation changes them only with a schedule that goes by its metrics."""
        others = self._others()
        counters = {name: value for name, value in others["counters"].items() if name != "evaluated"}
        return (
            held_digest(self.digester, self._state.model_state(), self._state.shared_by),
            self._optimizer_digest(),
            held_digest(self.digester, self._state.average_state(), self._state.shared_by),
            optimizer_digest(self.digester, {**others, "counters": counters}),
        )

    def value_digests(self) -> tuple[int, int]:
        """The digests of what is no tensor in this rank's state: of its optimizer, and of all else."""
        return values_digest(self._optimizer()), values_digest(self._others())

    def _optimizer_digest(self) -> int:
        """Of an optimizer whose parts have mirrors that of its whole state, so that a later attempt can tell which of the two was right."""
        if self._state.mirrored is None:
            return optimizer_digest(self.digester, self._optimizer())
        return held_optimizer_digest(self.digester, self._state.optimizer)

    def _optimizer(self) -> dict[str, Any]:
        """The optimizer's state. The moments of a sharded one differ by rank; its parameter groups do not."""
        optimizer = self._state.optimizer
        sharded = sharded_of(optimizer)
        groups = {phase: {"param_groups": member.groups_as_saved()} for phase, member in sharded.items()}
        return groups.get("", groups) if sharded else optimizer.state_dict()

    def _others(self) -> dict[str, Any]:
        state = self._state
        return {
            "buffer": unlisted_tensors(state.model),
            "scaler": state.precision.state_dict(),
            "counters": asdict(state.counters),
            "schedule": state.schedule.state_dict(),
        }

    def awaits(self, step: int) -> bool:
        """Whether a doubt can be settled after this step."""
        return any(doubt.step == step for doubt in self._doubts)

    def check(self) -> Held | None:
        """Compare what the ranks hold, and return it; None where there is nothing to compare. All ranks call it.

        CorruptionError where they differ.
        """
        if self._group.size == 1 and not self.awaits(self._state.counters.step):
            return None
        every = self._group.gather(self.held())
        self.compare(every)
        return every[0]  # type: ignore[no-any-return]

    def compare(self, every: Sequence[Held]) -> None:
        """`check` for digests that are gathered already, by rank."""
        if len(set(every)) > 1:
            corrupted = self._found(every)
            self.tell(corrupted)
            raise problems.OTHER_BITS(got=corrupted, since=self._since)
        self._compare_mirrors(every[0])
        step = self._state.counters.step
        for doubt in self._doubts:
            if doubt.step == step:
                self.tell(settled(doubt, every[0]))
        self._doubts = tuple(doubt for doubt in self._doubts if doubt.step > step)
        self._since = max(self._since, step)

    def _found(self, every: Sequence[Held]) -> Corrupted:
        differing = [each for each in Quantity if len({digests[each] for digests in every}) > 1]
        wrong = outvoted(every)
        return Corrupted(
            step=self._state.counters.step,
            since=self._since,
            attempt=self.attempt,
            quantity=differing[0].label,
            tensor=self._first_tensor(),
            workers=tuple(self._group.gather(witness(self._group, every[self._group.rank]))),
            wrong=wrong,
            how="majority" if wrong else "undecided",
        )

    def _compare_mirrors(self, held: Held) -> None:
        """Compare what each rank has with its mirror; `held` are the digests that all ranks have. CorruptionError where they differ."""
        mirrored = self._state.mirrored
        if mirrored is None or mirrored.mirrored is None:
            return
        replicas = _ReplicaDigests.of(
            self.digester, mirrored.mirrored, mirrored.replicas(self._state.names_by_phase())
        )
        every: list[_Compared] = self._group.gather(
            _Compared(
                replicas.owner,
                replicas.totals(replicas.local),
                replicas.totals(replicas.of_mirror),
                *mirrored.of_update,
            )
        )
        overwritten = {
            mirror
            for mirror, theirs in enumerate(every)
            if theirs.update_of_mirror != every[theirs.owner].update
        }
        pairs = {
            mirror: theirs.owner
            for mirror, theirs in enumerate(every)
            if mirror in overwritten or theirs.of_mirror != every[theirs.owner].local
        }
        if not pairs:
            return
        rank = self._group.rank
        digests = list(held)
        if rank in overwritten:
            digests = []  # the weights that it would have are gone
        elif rank in pairs:  # the whole state with its part in place of the owner's
            local = every[pairs[rank]].local
            for each in Quantity:
                digests[each] = (digests[each] + every[rank].of_mirror[each] - local[each]) % 2**64
        all_replicas: list[_ReplicaDigests] = self._group.gather(replicas)
        mirror, owner = next(iter(pairs.items()))
        first = all_replicas[mirror].first_unlike(all_replicas[owner])
        witnesses = self._group.gather(witness(self._group, digests))
        corrupted = Corrupted(
            step=self._state.counters.step,
            since=self._since,
            attempt=self.attempt,
            quantity=first.quantity.label,
            tensor=first.label,
            workers=tuple(each for each in witnesses if each.rank in {*pairs, *pairs.values()}),
            wrong=(),
            how="undecided",
        )
        self.tell(corrupted)
        raise problems.OTHER_BITS(got=corrupted, since=self._since)

    def _first_tensor(self) -> str:
        """The name of the first tensor that differs. All ranks call it."""
        digests = self.tensor_digests()
        every = self._group.gather(digests)
        return next(
            (name for name in digests if len({rank_digests.get(name) for rank_digests in every}) > 1), ""
        )

    def tensor_digests(self) -> dict[str, int]:
        """The digest of each tensor of this rank's state, by the name that messages use."""
        return {name: self.digester.digest({name: value}) for name, value in self._named().items()}

    def _named(self) -> dict[str, Tensor]:
        """The tensors that are compared, by names that a person understands."""
        state = self._state
        named = {name: value for name, value in state.model_state().items() if isinstance(value, Tensor)}
        names = {id(parameter): name for name, parameter in state.model.named_parameters()}
        if not sharded_of(state.optimizer):
            for phase, optimizer in optimizers_of(state.optimizer).items():
                within = f" in phase {phase}" if phase else ""
                for parameter, values in optimizer.state.items():
                    owner = f"{names.get(id(parameter), '?')}{within}"
                    named |= {f"{path} of {owner}": value for path, value in leaves(values, "")}
        named |= {
            f"average of {name}": value
            for name, value in state.average_state().items()
            if isinstance(value, Tensor)
        }
        named |= {path.replace("/", " ", 1): value for path, value in leaves(self._others(), "")}
        return {name: value for name, value in named.items() if isinstance(value, Tensor)}
