"""A sharded optimizer that outlives its workers: the state of each worker's spans is kept by another one as well.

Every worker has the whole finished gradient. So a mirror needs no messages: a worker updates the spans of its *mirrored* rank too, in the same
update and with the same bits. Its copy is never behind. It costs the time and the memory of as many spans again.

Ranks wait for each other in an update, when the updated spans are gathered: one may have finished it while another has not. So each keeps the state of
its spans as it was before its newest update, and `take_back` returns to that. (The weights are kept with the start of the step.)

`regroup` then shares the state out anew, in another group. Invariants:

- A rank keeps its spans of the group before until the next update. All have arrived in the new group by then: the update needs the gradients of all.
  So a loss within `regroup` leaves the spans of the one group or those of the other.
- Only the ranges that change hands are sent, and only to ranks that keep them.
- What every rank updates whole (tables with sparse gradients) has no mirror: each rank has its state, and gives it to those that join.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lockstep.communication.group import Group
from lockstep.training.integrity.quantities import Quantity
from lockstep.training.step import problems
from lockstep.training.step.mirror_layout import Layout, Replica, Report, chosen, mirrors, node_name
from lockstep.training.step.sharding import (
    SCALARS,
    Part,
    ShardedOptimizer,
    Span,
    as_told,
    counts_on_device,
)


class Share(NamedTuple):
    """The spans of one rank, and the optimizer that has their state: by the rank itself, or by the one that mirrors it."""

    parts: dict[int, Part]
    optimizer: torch.optim.Optimizer


Shares = dict[int, Share]
"""What a worker has of a layout, by the rank whose spans they are."""


class MirroredOptimizer(ShardedOptimizer):
    """A sharded optimizer of which each worker has its own spans and those of one other."""

    def __init__(self, whole: torch.optim.Optimizer, group: Group) -> None:
        super().__init__(whole, group)
        self._layout = Layout(1, group.size, mirrors(group.gather(node_name())))
        self._shares: Shares = {}
        self._is_whole = True
        """Whether `_shares` have all their state: not while another group shares it out."""
        self._previous: list[tuple[Layout, Shares]] = []
        """What this worker had in the groups since its newest update."""
        self._before_step: int | None = None
        """The step after which `_before` is; None where that is not to be returned to."""
        self._before: dict[tuple[int, int], dict[str, Any]] = {}
        """The state of each span before the newest update, by the rank whose it is and the parameter."""
        self._is_unlike: Tensor | bool = False
        """Whether the owner of the mirrored spans has made other weights of them in the newest update than this rank."""

    @property
    def mirrored(self) -> int | None:
        """The rank whose spans this rank mirrors; None where it is alone."""
        return None if self.group.size == 1 else self._layout.mirrors.index(self.group.rank)

    def _build(self) -> None:
        if self._built:
            return
        super()._build()
        rank = self.group.rank
        self._shares = {rank: Share(self._parts, self._own)}
        for owner, mirror in enumerate(self._layout.mirrors):
            if mirror == rank and owner != rank:
                parts = {
                    s.parameter: Part(s, self._of(s))
                    for s in self.spans
                    if s.owner == owner and s.parameter not in self._on_all
                }
                self._shares[owner] = Share(parts, self._made(parts))

    @property
    def bytes_of_mirrors(self) -> int:
        """What this worker has besides the state of its own spans: a mirror, and the state of both before the newest update."""
        self._build()
        others = [share for owner, share in self._shares.items() if owner != self.group.rank]
        states = [state for share in others for state in share.optimizer.state.values()]
        states += self._before.values()
        return sum(value.nbytes for state in states for value in state.values() if isinstance(value, Tensor))

    # --- the update -----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update this rank's spans and those that it mirrors, and gather those of the other ranks. All ranks call it."""
        self._build()
        self._previous = []
        for share in self._shares.values():
            self._updated(*share)
        self._is_unlike = self._gathering(self.mirrored)

    def balance(self) -> Tensor | int:
        """Zero on all ranks, unless a worker and its mirror have made other weights of the same spans in the newest update."""
        unlike = self._is_unlike
        return unlike.to(torch.int64) if isinstance(unlike, Tensor) else int(unlike)

    @property
    def of_update(self) -> tuple[int, int]:
        """Zeros, unless this rank has made other weights of the spans that it mirrors than their owner. Waits for the device."""
        return 0, int(self._is_unlike)

    def replicas(self, names: Mapping[str, Sequence[str]]) -> Iterator[Replica]:
        """The part of the state that this rank owns, and the one that it mirrors. `names` are those of the parameters, by phase."""
        self._build()
        for owner, share in self._shares.items():
            for i, part in share.parts.items():
                state = {} if i in self._on_all else share.optimizer.state.get(part.value, {})
                for name, value in state.items():
                    if isinstance(value, Tensor) and name not in SCALARS:
                        yield Replica(
                            Quantity.OPTIMIZER,
                            f"state/{i}/{name}",
                            f"{name} of {names[''][i]}",
                            self.elements(part.span, value),
                            is_mirror=owner != self.group.rank,
                        )

    @torch.no_grad()
    def keep(self, step: int) -> None:
        """Copy the state as it is after `step` steps, into the memory of the previous copy."""
        self._build()
        self._before_step = None
        sources: list[Tensor] = []
        targets: list[Tensor] = []

        def copied(value: Any, memory: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            if not isinstance(memory, Tensor) or memory.shape != value.shape or memory.dtype != value.dtype:
                return value.detach().clone()
            sources.append(value.detach())
            targets.append(memory)
            return memory

        kept: dict[tuple[int, int], dict[str, Any]] = {}
        for owner, share in self._shares.items():
            for i, part in share.parts.items():
                memory = self._before.get((owner, i), {})
                state = share.optimizer.state.get(part.value, {})
                kept[owner, i] = {name: copied(value, memory.get(name)) for name, value in state.items()}
        if targets:
            torch._foreach_copy_(targets, sources)
        self._before, self._before_step = kept, step

    def take_back(self, step: int) -> None:
        """Return to the state after `step` steps, if an update since then has changed it."""
        if self._before_step == step:
            for owner, share in self._shares.items():
                for i, part in share.parts.items():
                    share.optimizer.state.pop(part.value, None)
                    if self._before[owner, i]:
                        share.optimizer.state[part.value] = self._before[owner, i]
            self._before, self._is_unlike = {}, False
        self._before_step = None

    # --- the state ------------------------------------------------------------------------------------------------

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load this rank's spans of a whole optimizer's state, and those that it mirrors."""
        super().load_state_dict(state_dict)
        for owner, share in self._shares.items():
            if owner != self.group.rank:
                self._load(*share, state_dict["state"])
        self._before_step, self._previous = None, []

    # --- another group --------------------------------------------------------------------------------------------

    @torch.no_grad()
    def regroup(self, group: Group, *, holds: bool) -> None:
        """Share the state out in another group. All ranks of that call it; one that joins `holds` nothing.

        Raises ClusterError on all ranks where the spans of a rank are lost with its mirror, or where the two had made other weights of them.
        """
        self._build()
        current = [(self._layout, self._shares)] if self._is_whole else []
        mine = [*current, *self._previous] if holds else []
        on_all = self._state_on_all([share for _, shares in mine for share in shares.values()])
        reported = [
            (layout, {owner: self._reported(share) for owner, share in shares.items()})
            for layout, shares in mine
        ]
        on_all_reported = {i: _as_reported(state) for i, state in on_all.items()} if holds else None
        report = Report(node_name(), reported, on_all_reported, bool(holds and self._is_unlike))
        reports: list[Report] = group.gather(report)
        if any(report.is_unlike for report in reports):
            raise problems.MIRROR_DIFFERS()
        layout, sources = chosen(reports)
        shares = next((shares for kept_layout, shares in mine if kept_layout == layout), {})
        old_spans = self._spans(layout.ranks)
        state = {owner: dict(reports[source].layouts)[layout][owner] for owner, source in sources.items()}

        number = 1 + max(
            reported_layout.number for report in reports for reported_layout, _ in report.layouts
        )
        self.group, self._built, self._is_whole = group, False, False
        self._layout = Layout(number, group.size, mirrors([report.node for report in reports]))
        self._build()
        self._before, self._before_step, self._previous = {}, None, mine
        self._exchange(old_spans, sources, shares, state)
        self._share_with_joining([report.on_all for report in reports], on_all)
        self._is_whole = True

    def _reported(self, share: Share) -> dict[int, dict[str, Any]]:
        return {
            i: _as_reported(share.optimizer.state[part.value])
            for i, part in share.parts.items()
            if i not in self._on_all and part.value in share.optimizer.state
        }

    def _state_on_all(self, shares: Sequence[Share]) -> dict[int, dict[str, Any]]:
        """The state of the parameters that every rank updates whole; all layouts have the same."""
        return {
            i: dict(share.optimizer.state[part.value])
            for share in shares
            for i, part in share.parts.items()
            if i in self._on_all and part.value in share.optimizer.state
        }

    def _share_with_joining(
        self, reported: Sequence[dict[int, dict[str, Any]] | None], on_all: Mapping[int, dict[str, Any]]
    ) -> None:
        """Take over this rank's state of the parameters that every rank updates whole; a rank that joins receives it from the first one that has it."""
        joining = [rank for rank, state in enumerate(reported) if state is None]
        source = next(rank for rank, state in enumerate(reported) if state is not None)
        groups = [every for every in self.param_groups for _ in every["params"]]
        for i, names in (reported[source] or {}).items():
            span, value = self._parts[i]
            state = on_all.get(i, {})
            for name, described in names.items():
                if not isinstance(described, torch.dtype):
                    state = {name: self._number(span, groups, name, described), **state}
                    continue
                if self.group.rank in joining:
                    state[name] = torch.empty_like(
                        value, dtype=described, memory_format=torch.contiguous_format
                    )
                    self.group.pass_on([], [(source, state[name].view(-1))])()
                elif self.group.rank == source:
                    sent = state[name].contiguous().view(-1)
                    self.group.pass_on([(rank, sent) for rank in joining], [])()
            self._own.state[value] = state

    def _exchange(
        self,
        old_spans: Sequence[Span],
        sources: Mapping[int, int],
        shares: Shares,
        state: Mapping[int, Mapping[int, Mapping[str, Any]]],
    ) -> None:
        """Fill the state of this rank's new spans from the `old_spans`, whose `sources` have their state."""
        rank = self.group.rank
        replicas = {owner: sorted({owner, mirror}) for owner, mirror in enumerate(self._layout.mirrors)}
        groups = [every for every in self.param_groups for _ in every["params"]]
        olds: dict[int, list[Span]] = {}
        for span in old_spans:
            olds.setdefault(span.parameter, []).append(span)
        for new in self.spans:
            if new.parameter in self._on_all:
                continue
            outgoing: list[tuple[int, Tensor]] = []
            incoming: list[tuple[int, Tensor]] = []
            filled_by_owner: list[tuple[int, dict[str, Any]]] = []
            for replica in replicas[new.owner]:
                filled: dict[str, Any] = {}
                for old in olds[new.parameter]:
                    begin, end = max(new.start, old.start), min(new.stop, old.stop)
                    names = state[old.owner].get(new.parameter, {})
                    if begin >= end and new.start < new.stop:
                        continue
                    source = sources[old.owner]
                    for name, value in names.items():
                        if not isinstance(value, torch.dtype):
                            if replica == rank:
                                filled.setdefault(name, self._number(new, groups, name, value))
                            continue
                        sent = None
                        if source == rank:
                            share = shares[old.owner]
                            values = share.optimizer.state[share.parts[new.parameter].value][name]
                            sent = values.contiguous().view(-1)[begin - old.start : end - old.start]
                        if replica != rank:
                            if sent is not None:
                                outgoing.append((replica, sent))
                            continue
                        if name not in filled:
                            filled[name] = torch.empty(
                                new.stop - new.start, dtype=value, device=self.group.device
                            )
                        target = filled[name][begin - new.start : end - new.start]
                        if sent is not None:
                            target.copy_(sent)
                        else:
                            incoming.append((source, target))
                if replica == rank and filled:
                    filled_by_owner.append((new.owner, filled))
            if outgoing or incoming:
                self.group.pass_on(outgoing, incoming)()
            for owner, filled in filled_by_owner:
                share = self._shares[owner]
                value = share.parts[new.parameter].value
                share.optimizer.state[value] = {
                    name: torch.empty_like(value, dtype=tensor.dtype).copy_(tensor.view(value.shape))
                    if isinstance(tensor, Tensor) and name not in SCALARS
                    else tensor
                    for name, tensor in filled.items()
                }

    def _number(self, span: Span, groups: Sequence[Mapping[str, Any]], name: str, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        where = self.group.device if counts_on_device(groups[span.parameter]) else "cpu"
        return value.to(where, copy=True)


def _as_reported(state: Mapping[str, Any]) -> dict[str, Any]:
    return {name: as_told(name, value) for name, value in state.items()}
