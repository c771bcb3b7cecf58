"""The optimizer's state sharded over the workers, with the bits of an optimizer that is not.

Every worker has the whole finished gradient, so norm and clipping are the same as without sharding. Each worker updates a
span of the concatenated elements of all parameters, and keeps the moments of that span; then the updated spans are
gathered. An optimizer that computes each element from that element's own numbers gives the same bits for any split.

A span begins at a multiple of `UNIT` elements of its parameter, in memory order. A parameter with gaps in its memory is not
split. In a checkpoint each tensor is whole again: its parts go to the rank that writes it, and nowhere else.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from itertools import islice, pairwise
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.checkpoint.stored_tensor import StoredTensor, in_memory
from lockstep.checkpoint.tree import Elsewhere
from lockstep.communication.group import Group
from lockstep.training.step import problems
from lockstep.training.step.joined_optimizer import JoinedOptimizer, members_of
from lockstep.training.step.norm import ELEMENT_BY_ELEMENT
from lockstep.training.step.parameters import SHORT, noted_on
from lockstep.training.step.shards import Elements, element_ranges
from lockstep.training.step.span_gathering import UNIT, SpanGathering, flat

if TYPE_CHECKING:
    from lockstep.training.step.host_memory import HostMemory

SCALARS = frozenset({"step"})
"""State that is one number per parameter, the same for every span of it."""


_BY_THEMSELVES = (*ELEMENT_BY_ELEMENT, torch.optim.SparseAdam)
"""These ask for nothing of a parameter's group but its settings, and not for its place there."""


def counts_on_device(group: Mapping[str, Any]) -> bool:
    """Whether the kernels of a group read such numbers on the device: fused and captured ones do, all others on the processor."""
    return bool(group.get("fused") or group.get("capturable"))


class Span(NamedTuple):
    """Elements `start … stop - 1` of parameter number `parameter`, which rank `owner` updates."""

    parameter: int
    start: int
    stop: int
    owner: int


class OwnValue(NamedTuple):
    """A value of an optimizer's state that a rank has."""

    parameter: int
    name: str
    value: Any
    """A tensor of which the rank has a part as `Elements`."""
    is_on_all: bool
    """Whether every rank has it; if not, this rank is the only one that tells of it."""


class Part(NamedTuple):
    """A span of this rank as its optimizer sees it: a parameter of its own, which is a view of the model's."""

    span: Span
    value: Tensor


def spans(lengths: Sequence[int], widths: Sequence[int], cut: Sequence[bool], ranks: int) -> list[Span]:
    """Split parameters, given their numbers of elements and bytes per element, into nearly equal bytes per rank. Pure: every rank finds the same.

    Where `cut` is false a parameter stays whole. A parameter without elements belongs to rank 0.
    """
    total = sum(length * width for length, width in zip(lengths, widths, strict=True))
    result, begin = [], 0
    for parameter, (length, width, may_cut) in enumerate(zip(lengths, widths, cut, strict=True)):
        ends = [0]
        for rank in range(1, ranks):
            at = (total * rank // ranks - begin) / width
            unit = UNIT if may_cut else max(1, length)
            ends.append(min(max(ends[-1], round(at / unit) * unit), length))
        ends.append(length)
        pieces = [Span(parameter, a, b, rank) for rank, (a, b) in enumerate(pairwise(ends)) if b > a]
        result += pieces or [Span(parameter, 0, 0, 0)]
        begin += length * width
    return result


def first_owners(every: Iterable[Span]) -> dict[int, int]:
    """By parameter the owner of its first span."""
    owners: dict[int, int] = {}
    for span in every:
        owners.setdefault(span.parameter, span.owner)
    return owners


def check_threads(model: nn.Module, device: torch.device, threads: int, sharding: str) -> None:
    """SpecError for parameters in a short type that several threads of a processor update.

    Each thread takes a share of a tensor, which ends elsewhere in a part than in the whole. Where one ends, torch adds short numbers one by one,
    and rounds them otherwise than its vectors do: in `add_` with an `alpha`, as SGD and a weight decay have it.
    """
    if device.type != "cpu" or threads == 1:
        return
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.dtype in SHORT:
            raise problems.SHORT_THREADS(got=sharding, threads=threads, name=name, dtype=parameter.dtype)


def over(whole: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """An optimizer with the settings of `whole`, over the parameters of other `groups`, and without state."""
    kind = type(whole)
    if kind in ELEMENT_BY_ELEMENT and groups:
        make: Callable[[Any], torch.optim.Optimizer] = kind
        return make(groups)
    # Not by its class: which arguments that takes, and what they become, the job alone knows.
    optimizer = object.__new__(kind)
    vars(optimizer).update(vars(whole))
    optimizer.state, optimizer.param_groups = defaultdict(dict), groups
    return optimizer


def _stand_in(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """An optimizer of the same kind and with the same groups, and without state."""
    stand_in: torch.optim.Optimizer = object.__new__(type(optimizer))
    vars(stand_in).update(vars(optimizer))
    stand_in.state = defaultdict(dict)
    return stand_in


def _step(optimizer: torch.optim.Optimizer, closure: Callable[[], Tensor] | None) -> None:
    if closure is None:
        optimizer.step()
    else:
        optimizer.step(closure)  # type: ignore[arg-type]


class ShardedOptimizer(torch.optim.Optimizer):
    """Stands in for the optimizer that it is made from: the same groups, whose rates may be set. It holds only this rank's state."""

    _numbers_on_all = False
    """Whether every rank has the numbers of every parameter, such as how often it was updated."""

    def __init__(self, whole: torch.optim.Optimizer, group: Group) -> None:
        super().__init__(whole.param_groups, whole.defaults)
        self.kind = type(whole)
        self.joined_members = tuple(_stand_in(member) for member in members_of(whole))
        """What says of which kinds it is: an optimizer for each that it stands for, with the groups that these have here, and without state."""
        self.made_from: Sequence[torch.optim.Optimizer] = getattr(
            whole, "made_from", (whole, *members_of(whole))
        )
        """The optimizers that the job has made, and may have kept."""
        self.group = group
        self.parameters: list[Tensor] = [p for every in self.param_groups for p in every["params"]]
        self._empties: list[Tensor] = []
        """What stands for parts that other ranks have: no state is kept of it."""
        self._built = False
        self._on_all: frozenset[int] = frozenset()
        """The numbers of the parameters that every rank updates, whole."""

    def keep_whole(self, parameters: Iterable[Tensor]) -> None:
        """Have every rank update some of the parameters whole, and keep their state. All ranks call it alike, before the first update."""
        assert not self._built
        ids = set(map(id, parameters))
        self._on_all = frozenset(i for i, parameter in enumerate(self.parameters) if id(parameter) in ids)

    @property
    def overwritten(self) -> list[Tensor]:
        """The parameters of which an update takes other ranks' parts: those that learn, without those that every rank updates whole."""
        return [p for i, p in enumerate(self.parameters) if p.requires_grad and i not in self._on_all]

    def _build(self) -> None:
        """Split the parameters, once they have their shapes: those of a lazy module get them in its first forward."""
        if self._built:
            return
        self._built = True
        views = [
            None if i in self._on_all else flat(parameter.detach())
            for i, parameter in enumerate(self.parameters)
        ]
        asking = [
            p.numel() if p.requires_grad and i not in self._on_all else 0
            for i, p in enumerate(self.parameters)
        ]
        widths = [parameter.element_size() for parameter in self.parameters]
        cut, ranks = [view is not None for view in views], self.group.size
        self._cutting = asking, widths, cut
        self.spans = self._spans(ranks)
        self._first_owners = first_owners(self.spans)
        self._orders = [sorted(range(p.dim()), key=p.stride, reverse=True) for p in self.parameters]
        self._whole = [
            parameter.detach() if view is None else view
            for parameter, view in zip(self.parameters, views, strict=True)
        ]
        self._uncut = [view is None for view in views]
        self._empties = []  # those of the group before stand in optimizers that are gone
        self._parts = {
            s.parameter: Part(s, self._of(s))
            for s in self.spans
            if s.owner == self.group.rank or s.parameter in self._on_all
        }
        self._own = self._made(self._parts)
        self._gathering = SpanGathering(self._bytes(), self.group)

    def _spans(self, ranks: int) -> list[Span]:
        """The spans of so many ranks. What every rank updates counts as rank 0's: it gives the state to the rank that writes it."""
        return [
            Span(span.parameter, 0, self.parameters[span.parameter].numel(), 0)
            if span.parameter in self._on_all
            else span
            for span in spans(*self._cutting, ranks)
        ]

    def _made(self, parts: Mapping[int, Part]) -> torch.optim.Optimizer:
        """The optimizer over a rank's parts, group by group.

        A group has those of its parameters that are here. One of the job's own has them in their places, with empty parts for the others: it may
        count them, or go through a list beside them.
        """
        every_group, made, index = iter(self.param_groups), [], 0
        for member in self.joined_members:
            groups = []
            for every in islice(every_group, len(member.param_groups)):
                in_group = range(index, index + len(every["params"]))
                here = {
                    i: parts[i].value for i in in_group if i in parts and self.parameters[i].requires_grad
                }
                in_place = here if type(member) in _BY_THEMSELVES else in_group
                params = [here[i] if i in here else self._empty(i) for i in in_place]
                groups.append({**every, "params": params})
                index = in_group.stop
            made.append(over(member, groups))
        return made[0] if len(made) == 1 else JoinedOptimizer(made)

    def _empty(self, i: int) -> Tensor:
        """A part without elements of parameter `i`, with a gradient if that learns."""
        parameter = self.parameters[i]
        empty = torch.empty(0, dtype=parameter.dtype, device=self.group.device)
        vars(empty).update(noted_on(parameter))
        if parameter.requires_grad:
            empty.grad = torch.empty_like(empty)
        self._empties.append(empty)
        return empty

    def _of(self, span: Span) -> Tensor:
        """A view of a span in its parameter's memory; a parameter with gaps as it is. It has the attributes that the job has given the parameter."""
        parameter = self._whole[span.parameter]
        part = parameter if self._uncut[span.parameter] else parameter[span.start : span.stop]
        vars(part).update(noted_on(self.parameters[span.parameter]))
        return part

    def _bytes(self) -> list[list[Tensor]]:
        """The updated tensors that each rank sends, by rank."""
        tensors_by_rank: list[list[Tensor]] = [[] for _ in range(self.group.size)]
        for span in self.spans:
            if span.stop > span.start and span.parameter not in self._on_all:
                tensors_by_rank[span.owner].append(self._of(span))
        return tensors_by_rank

    # --- the update -----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> None:  # type: ignore[override]
        """Update this rank's spans, and gather those of the other ranks. All ranks call it; a `closure` evaluates the loss again at what all have by then."""
        self._build()

        def evaluated() -> Tensor:
            assert closure is not None
            # Each time, for nothing counts what an optimizer writes through `.data`.
            self._gathering()
            loss = closure()
            self._take_gradients(self._parts)
            return loss

        self._updated(self._parts, self._own, None if closure is None else evaluated)
        self._gathering()

    def _updated(
        self,
        parts: Mapping[int, Part],
        optimizer: torch.optim.Optimizer,
        closure: Callable[[], Tensor] | None = None,
    ) -> None:
        """Update a rank's parts by the optimizer that has their state."""
        for group, every in zip(optimizer.param_groups, self.param_groups, strict=True):
            group.update({name: value for name, value in every.items() if name != "params"})
        self._take_gradients(parts)
        _step(optimizer, closure)
        self._forget_empties(optimizer)
        for part in parts.values():
            part.value.grad = None

    def _forget_empties(self, optimizer: torch.optim.Optimizer) -> None:
        for empty in self._empties:
            optimizer.state.pop(empty, None)

    def _take_gradients(self, parts: Mapping[int, Part]) -> None:
        for i, part in parts.items():
            gradient = self.parameters[i].grad
            part.value.grad = None if gradient is None else self._gradient(part.span, gradient)

    def _gradient(self, span: Span, gradient: Tensor) -> Tensor:
        if self._uncut[span.parameter]:
            return gradient
        return gradient.permute(self._orders[span.parameter]).reshape(-1)[span.start : span.stop]

    # --- the state ------------------------------------------------------------------------------------------------

    def own_state(self) -> Mapping[Tensor, Mapping[str, Any]]:
        """The state of this rank, by its spans of the parameters."""
        self._build()
        return self._own.state

    def own_values(self) -> Iterator[OwnValue]:
        """The state of this rank. Numbers of a parameter that several ranks share tells the first of them alone."""
        self._build()
        for i, part in self._parts.items():
            is_on_all = i in self._on_all
            for name, value in self._own.state.get(part.value, {}).items():
                if isinstance(value, Tensor) and name not in SCALARS and not is_on_all:
                    yield OwnValue(i, name, self.elements(part.span, value), False)
                elif is_on_all or self._numbers_on_all or self._first_owners[i] == self.group.rank:
                    yield OwnValue(i, name, value, is_on_all or self._numbers_on_all)

    def elements(self, span: Span, value: Tensor) -> Elements:
        """What the optimizer has for a span of a parameter, such as a moment."""
        i, shape = span.parameter, self.parameters[span.parameter].shape
        is_first = span.owner == self._first_owners[i]
        if self._uncut[i]:
            return Elements(value, shape, 0, is_first)
        if self._orders[i] == sorted(self._orders[i]):
            return Elements(value, shape, span.start, is_first)
        # In another order of memory they are no range: zeros in the other places add nothing to a digest.
        whole = torch.zeros_like(
            self.parameters[i], dtype=value.dtype, device=value.device, requires_grad=False
        )
        _required(flat(whole))[span.start : span.stop] = value.view(-1)
        return Elements(whole, shape, 0, is_first)

    def state_dict(self) -> dict[str, Any]:
        """The `state_dict` of the optimizer it stands for, with `Elsewhere` for every tensor. All ranks call it.

        `assembled` then fills in the tensors that a rank writes.
        """
        self._build()
        local_state = {
            i: {name: as_told(name, value) for name, value in self._own.state[part.value].items()}
            for i, part in self._parts.items()
            if part.value in self._own.state
        }
        merged: dict[int, dict[str, Any]] = {}
        for rank_state in self.group.gather(local_state):
            merged = {**rank_state, **merged}
        state = {
            i: {
                name: Elsewhere.like(self.parameters[i], value) if isinstance(value, torch.dtype) else value
                for name, value in merged[i].items()
            }
            for i in sorted(merged)
        }
        return {"state": state, "param_groups": self.groups_as_saved()}

    def groups_as_saved(self) -> list[dict[str, Any]]:
        """The parameter groups of `state_dict`, which every rank has whole."""
        groups: list[dict[str, Any]] = super().state_dict()["param_groups"]
        return groups

    def load_groups(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Load the parameter groups that `groups_as_saved` gave."""
        torch.optim.Optimizer.load_state_dict(self, {"state": {}, "param_groups": list(groups)})

    def assembled(self, saved: Mapping[str, Any], writers: Mapping[int, int]) -> dict[str, Any]:
        """What `state_dict` gave, with the tensors that this rank writes. `writers` maps the id of an `Elsewhere` to its rank.

        All ranks call it. A rank needs as much memory for it as the tensors that it writes.
        """
        state = {
            i: {
                name: self._gathered(i, name, value, writers[id(value)])
                if isinstance(value, Elsewhere)
                else value
                for name, value in every.items()
            }
            for i, every in saved["state"].items()
        }
        return {**saved, "state": state}

    def _gathered(self, i: int, name: str, place: Elsewhere, writer: int) -> Tensor | Elsewhere:
        """One tensor of parameter `i`: whole on the rank that writes it, `place` on the others."""
        rank, calls, copies = self.group.rank, [], []
        assembled = (
            torch.empty_like(
                self.parameters[i], dtype=place.dtype, device=self.group.device, requires_grad=False
            )
            if rank == writer
            else None
        )
        for span in (candidate for candidate in self.spans if candidate.parameter == i):
            source = None
            if span.owner == rank:
                source = self._own.state[self._parts[i].value][name].to(self.group.device)
            if assembled is None and source is None:
                continue
            if assembled is None:
                assert source is not None
                calls.append(dist.P2POp(dist.isend, source.contiguous().view(-1), writer, self.group.channel))
                continue
            target = assembled if self._uncut[i] else _required(flat(assembled))[span.start : span.stop]
            if source is not None:
                target.copy_(source.view(target.shape))
                continue
            received = torch.empty_like(target, memory_format=torch.contiguous_format).view(-1)
            calls.append(dist.P2POp(dist.irecv, received, span.owner, self.group.channel))
            copies.append((target, received))
        calls = [call for call in calls if call.tensor.numel()]
        if calls:
            self.group.wait_for_messages(dist.batch_isend_irecv(calls))
        for target, received in copies:
            target.copy_(received.view(target.shape))
        if assembled is None:
            return place
        # where only the optimizer is sharded, a rank may write a state of which it has no part
        part = self._parts.get(i)
        return assembled.to(self.group.device if part is None else part.value.device)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load this rank's part of a whole optimizer's state, bit for bit. ValueError where a tensor has another shape than its parameter."""
        self._build()
        super().load_state_dict({"state": {}, "param_groups": state_dict["param_groups"]})
        self._load(self._parts, self._own, state_dict["state"])

    def _load(
        self, parts: Mapping[int, Part], optimizer: torch.optim.Optimizer, state: Mapping[int, Any]
    ) -> None:
        """Load a rank's parts of a whole `state` into the optimizer that has theirs."""
        optimizer.state.clear()
        groups = [every for every in self.param_groups for _ in every["params"]]
        for i, saved in state.items():
            if (part := parts.get(i)) is not None:
                taken = {name: self._taken(part, groups[i], name, value) for name, value in saved.items()}
                optimizer.state[part.value] = taken

    def _taken(self, part: Part, group: Mapping[str, Any], name: str, value: Any) -> Any:
        if not isinstance(value, Tensor | StoredTensor):
            return value
        if name in SCALARS:
            return in_memory(value).to(part.value.device if counts_on_device(group) else "cpu", copy=True)
        i, start, stop, _ = part.span
        if value.shape != self.parameters[i].shape:
            raise ValueError(
                f"{name} of parameter {i} is {tuple(value.shape)}, wanted {tuple(self.parameters[i].shape)}"
            )
        if isinstance(value, StoredTensor) and self._orders[i] == sorted(self._orders[i]):
            return value.elements(start, stop).view(part.value.shape).to(part.value.device)
        value = in_memory(value)
        if not self._uncut[i]:
            value = value.permute(self._orders[i]).reshape(-1)[start:stop].view(part.value.shape)
        return value.to(part.value.device, copy=True)


class FullyShardedOptimizer(ShardedOptimizer):
    """Updates the rows that a worker holds of each parameter. It is whole until `take` is called, and takes no step before."""

    _numbers_on_all = True

    def take(
        self,
        names: Sequence[str],
        local: Mapping[str, Tensor],
        whole: Container[str],
        mirrors: Mapping[str, Tensor] = MappingProxyType({}),
        mirrored: int = 0,
        group: Group | None = None,
        host: HostMemory | None = None,
    ) -> None:
        """Take this worker's part of each parameter. `names` are those of the parameters, in its order; those in `whole` every worker has, and updates, whole.

        `mirrors` are the parts of rank `mirrored`, which it updates as well. In `host` are the parts that are rows, and their state.
        May be called again, with another `group`: it has no state then.
        """
        self.host = host
        self.group = self.group if group is None else group
        ranks, rank = self.group.size, self.group.rank
        self.parameters = [
            torch.empty_strided(
                parameter.shape,
                parameter.stride(),
                dtype=parameter.dtype,
                device="meta",
                requires_grad=parameter.requires_grad,
            )
            for parameter in self.parameters
        ]
        self.spans, self._parts, self._mirrors, self._empties = [], {}, {}, []
        self._on_all = frozenset(i for i, name in enumerate(names) if name in whole)
        for i, (name, parameter) in enumerate(zip(names, self.parameters, strict=True)):
            if not parameter.requires_grad:
                continue
            cut = [range(parameter.numel())] if name in whole else element_ranges(parameter.shape, ranks)
            spans = [Span(i, part.start, part.stop, owner) for owner, part in enumerate(cut)]
            self.spans += spans
            self._parts[i] = Part(spans[0 if name in whole else rank], local[name])
            if name in mirrors:
                self._mirrors[i] = Part(spans[mirrored], mirrors[name])
        self._first_owners = first_owners(self.spans)
        self._orders = [list(range(parameter.dim())) for parameter in self.parameters]
        self._uncut = [name in whole for name in names]
        name_of_next = iter(names)
        for every in self.param_groups:
            every["params"] = [local[next(name_of_next)] for _ in every["params"]]
        self.rows: list[Any] = [part.value for i, part in self._parts.items() if not self._uncut[i]]
        """What it updates of the parameters that are sharded."""
        self._own = self._made(self._parts)
        self._mirroring = self._made(self._mirrors) if self._mirrors else None

    def _build(self) -> None:
        """`take` does."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> None:  # type: ignore[override]
        """Update this worker's rows, and those that it mirrors. FSDP gathers the others' before they are needed, also where a `closure` evaluates the loss again."""
        for optimizer in (self._own, self._mirroring):
            if optimizer is None:
                continue
            for group, every in zip(optimizer.param_groups, self.param_groups, strict=True):
                group.update({name: value for name, value in every.items() if name != "params"})
            if self.host is None:
                _step(optimizer, closure)
            else:  # without mirrors, and without a closure
                self.host.update(optimizer, self.rows)
            self._forget_empties(optimizer)
        for part in self._mirrors.values():
            part.value.grad = None

    def pass_gradients_to_mirrors(self, mirrors: Sequence[int]) -> None:
        """Send the finished gradients of this worker's rows to the rank that mirrors them, and receive those of the rows that it mirrors. All ranks call it.

        `mirrors` has by rank the one that mirrors it.
        """
        rank = self.group.rank
        target, source = mirrors[rank], mirrors.index(rank)
        outgoing, incoming = [], []
        for i, part in self._mirrors.items():
            gradient = self._parts[i].value.grad
            part.value.grad = None if gradient is None else torch.empty_like(part.value)
            if gradient is not None and part.value.grad is not None:
                outgoing.append((target, gradient.contiguous().view(-1)))
                incoming.append((source, part.value.grad.view(-1)))
        self.group.pass_on(outgoing, incoming)()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load this worker's part of a whole optimizer's state, and the one that it mirrors. Errors as of a sharded optimizer."""
        super().load_state_dict(state_dict)
        if self._mirroring is not None:
            self._load(self._mirrors, self._mirroring, state_dict["state"])

    def states(self) -> Iterator[tuple[dict[int, Part], torch.optim.Optimizer]]:
        """The parts of this worker with the optimizer that has their state, then those that it mirrors, if any."""
        yield self._parts, self._own
        if self._mirroring is not None:
            yield self._mirrors, self._mirroring

    @property
    def bytes_of_mirrors(self) -> int:
        """The bytes of the state that this worker mirrors."""
        states = [] if self._mirroring is None else [*self._mirroring.state.values()]
        return sum(value.nbytes for state in states for value in state.values() if isinstance(value, Tensor))

    def state_dict(self) -> dict[str, Any]:
        """As of a sharded optimizer, in the order in which the parameters were first updated: every worker has a part of each."""
        saved = super().state_dict()
        numbers = {id(part.value): i for i, part in self._parts.items()}
        order = [numbers[id(parameter)] for parameter in self._own.state]
        return {**saved, "state": {i: saved["state"][i] for i in order}}

    def agree_on_overflow(self, flags: Iterable[Tensor]) -> None:
        """Give each of these `flags` of the loss scaler what the worker with the largest one has: one that overflowed skips the step for all."""
        for flag in flags:
            flag.fill_(max(self.group.gather(float(flag))))


def as_told(name: str, value: Any) -> Any:
    """One value of a span's state as other ranks are told it: numbers themselves, and the dtype of a larger tensor."""
    if not isinstance(value, Tensor):
        return value
    # A pickled CUDA tensor would appear on the device that has its number there.
    return value.cpu() if name in SCALARS else value.dtype


def _required(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor
