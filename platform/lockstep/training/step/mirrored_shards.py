"""Sharded parameters that outlive their workers: the rows of each worker are kept by another one as well, and cut anew for another group.

A mirror computes, as that of a sharded optimizer does: it has another worker's rows of the parameters, of the optimizer's state and of the average. Before an
update each worker sends the finished gradients of its rows to its mirror, which makes the same update of them. So a mirror is never behind, and no rank waits for
another in an update.

`keep` copies this worker's rows and those that it mirrors as they are before a step, for ranks that have done the step when another has not. What evaluations keep
(the best weights, and those of one that decides later) is cut and mirrored alike.

`regroup` cuts everything anew in another group, one tensor after another: only rows that change hands are sent, and no rank has a whole tensor that is cut.
Until the next update a worker also keeps its rows of the group before, which need no copy: so a loss within `regroup` leaves those.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from lockstep.communication.group import Group
from lockstep.spec.sharding import Sharding
from lockstep.training import problems
from lockstep.training.integrity.checksum import PRIME, checksum
from lockstep.training.integrity.quantities import Quantity
from lockstep.training.step.fsdp_modules import Originals, Places, check_gone, originals_of, places_of, undo
from lockstep.training.step.full_sharding import FullSharding
from lockstep.training.step.mirror_layout import Layout, Replica, Report, chosen, mirrors, node_name
from lockstep.training.step.phases import sharded_of
from lockstep.training.step.sharding import (
    SCALARS,
    FullyShardedOptimizer,
    as_told,
    counts_on_device,
)
from lockstep.training.step.sharding_units import Calls
from lockstep.training.step.shards import Shard, element_ranges

if TYPE_CHECKING:
    from lockstep.training.state import TrainState

_FACTORS = 1021
"""So many factors there are for checksums below 2**52 in words of 64 bits; of workers that many ranks apart they are the same."""

Key = tuple[Any, ...]
"""Names a value of the state: `("parameter", name)`, `("optimizer", phase, number, name)`, `("average", name)`, `("best", name)` or `("pending", name)`."""


class Cut(NamedTuple):
    """How a model is cut, on any number of workers."""

    units: tuple[str, ...]
    """The names of the modules that are units."""
    whole: frozenset[str]
    """The parameters that must stay whole whatever the number of workers."""
    fused: bool


class _Content(NamedTuple):
    """One value of the state in a layout, as a rank that has it tells the others."""

    key: Key
    dtype: torch.dtype | None
    """None for a number."""
    shape: torch.Size
    """Of the whole tensor."""
    is_cut: bool
    number: Any = None

    @classmethod
    def of(cls, key: Key, value: Any) -> _Content:
        if isinstance(value, Shard):
            return cls(key, value.local.dtype, value.shape, is_cut=True)
        if isinstance(value, Tensor) and not (key[0] == "optimizer" and key[-1] in SCALARS):
            return cls(key, value.dtype, value.shape, is_cut=False)
        return cls(key, None, torch.Size(), is_cut=False, number=as_told(key[-1], value))


class _Kept(NamedTuple):
    """What this worker has of a layout: a `Shard` of what is cut, other tensors whole, and numbers."""

    layout: Layout
    values: dict[Key, Any]

    def owners(self) -> tuple[int, ...]:
        """The ranks whose rows it has."""
        shard = next((value for value in self.values.values() if isinstance(value, Shard)), None)
        if shard is None:
            return tuple(range(self.layout.ranks))  # all is whole
        return (shard.rank,) if shard.mirror is None else (shard.rank, shard.mirror.rank)

    def elements(self, key: Key, owner: int) -> Tensor:
        """The elements that rank `owner` has of a tensor, in logical order."""
        value = self.values[key]
        if isinstance(value, Shard):
            shard = value if value.rank == owner else value.mirror
            assert shard is not None and shard.rank == owner
            value = shard.local
        flat: Tensor = value.detach().contiguous().view(-1)
        return flat


class MirroredShards:
    """The shards of a state of which each worker has its own and those of one other. A single worker has all whole, and may be joined by others."""

    def __init__(
        self,
        state: TrainState,
        group: Group,
        settings: Sharding,
        digesting: Callable[[], Callable[[str, Tensor | Shard], int]],
    ) -> None:
        """`digesting` gives what makes the digest of a tensor by its name, or the part of it that a shard adds."""
        self._state, self.group, self._settings, self._digesting = state, group, settings, digesting
        self._layout = Layout(1, group.size, mirrors(group.gather(node_name())))
        self.cut: Cut | None = None
        """Known once the first micro-batch was computed."""
        self._is_complete = True
        """Whether the state is: not while it is cut anew."""
        self._previous: list[_Kept] = []
        """What this worker had in the groups since its newest update."""
        self._before_step: int | None = None
        """The step after which `_before` is; None where that is not to be returned to."""
        self._before: dict[Key, Any] = {}
        self._averaged_before = False
        """Whether there was an average of the weights by then: it begins with the first update."""
        self._checksums_of_update: tuple[Tensor | int, Tensor | int] = 0, 0
        """Of this worker's rows and of those that it mirrors, before a job's `after_step`."""
        self._undivided: tuple[Places, dict[str, nn.Parameter]] | None = None
        """The parameters of a model that was whole, while it is cut for the first time."""
        self._originals: Originals | None = None
        """Those of them that are cut now: nobody may hold them."""

    @property
    def mirrored(self) -> int | None:
        """The rank whose rows this worker mirrors; None where it is alone."""
        return None if self.group.size == 1 else self._layout.mirrors.index(self.group.rank)

    @property
    def optimizer_bytes_before(self) -> int:
        """The bytes that are kept of the optimizer's state at the start of a step."""
        kept = [value for key, value in self._before.items() if key[0] == "optimizer"]
        return sum(tensor.nbytes for value in kept for tensor in _tensors(value))

    # --- a step ---------------------------------------------------------------------------------------------------

    def pass_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Send the finished gradients of this worker's rows to its mirror. All ranks call it, before the update."""
        if self.group.size > 1:
            assert isinstance(optimizer, FullyShardedOptimizer)
            optimizer.pass_gradients_to_mirrors(self._layout.mirrors)
        self._previous, self._checksums_of_update = [], (0, 0)

    def balance(self) -> Tensor | int:
        """The checksum of this worker's rows of the parameters, less that of those that it mirrors, each times a factor of its owner: over all ranks these add up to zero, modulo `PRIME`.

        A moment that has flipped shows here too, once its update has made other weights of it. The factors tell a change of both that a worker has.
        """
        if self.mirrored is None:
            return 0
        every = (self._checksums(), self._checksums_of_update)
        factors = self.group.rank % _FACTORS + 1, self.mirrored % _FACTORS + 1
        return (
            sum(own * factors[0] % PRIME - mirrored * factors[1] % PRIME for own, mirrored in every) % PRIME
        )

    def _checksums(self) -> tuple[Tensor | int, Tensor | int]:
        """Of this worker's rows of the parameters, and of those that it mirrors."""
        shards = () if self._state.sharding is None else self._state.sharding.shards.values()
        own = [shard.local for shard in shards if shard.local.numel()]
        mirrors = [shard.mirror.local for shard in shards if shard.mirror is not None]
        mirrored = [local for local in mirrors if local.numel()]
        return checksum(own) if own else 0, checksum(mirrored) if mirrored else 0

    def note_update(self) -> None:
        """Note the rows as an update has left them, where a job's `after_step` then gives a mirror what the owner has."""
        if self.mirrored is not None:
            self._checksums_of_update = self._checksums()

    @property
    def of_update(self) -> tuple[int, int]:
        """What tells what this worker has made of its rows in the newest update, and of those that it mirrors; zeros where these are still there. Waits for the device."""
        own, mirrored = self._checksums_of_update
        return int(own), int(mirrored)

    def replicas(self, names: Mapping[str, Sequence[str]]) -> Iterator[Replica]:
        """The rows of this worker, and those that it mirrors. `names` are those of the parameters, by phase."""
        for quantity, name, label, value in self._mirrored_values(names):
            if isinstance(value, Shard) and value.mirror is not None:
                yield Replica(quantity, name, label, value.as_elements(), is_mirror=False)
                yield Replica(quantity, name, label, value.mirror.as_elements(), is_mirror=True)

    def _mirrored_values(
        self, names: Mapping[str, Sequence[str]]
    ) -> Iterator[tuple[Quantity, str, str, Any]]:
        """What digests cover, with its name there and its label in messages."""
        for name, value in self._state.model_state().items():
            yield Quantity.WEIGHTS, name, name, value
        for phase, optimizer in self._optimizers():
            above, within = (f"{phase}/", f" in phase {phase}") if phase else ("", "")
            for (_, _, i, name), value in self._values_of_optimizer(phase, optimizer):
                label = f"{name} of {names[phase][i]}{within}"
                yield Quantity.OPTIMIZER, f"{above}state/{i}/{name}", label, value
        for name, value in self._state.average_state().items():
            yield Quantity.AVERAGE, name, f"average of {name}", value

    @torch.no_grad()
    def keep(self, step: int) -> None:
        """Copy rows and optimizers as they are after `step` steps, into the memory of the previous copy. JobError where something holds parameters that are cut by now."""
        if self._originals is not None:
            check_gone(self._originals)
            self._originals = None
        self._before_step = None
        if self.group.size == 1:  # there is no other rank that could have done less
            return
        targets: list[Tensor] = []
        sources: list[Tensor] = []
        copies = {}
        for key, value in self._values_of_step():
            if key[0] != "optimizer" and not isinstance(value, Shard):
                continue  # whole on every worker: kept with the start of the step
            memory = [*_tensors(self._before.get(key))]
            tensors = [*_tensors(value)]
            if [(each.shape, each.dtype) for each in memory] != [
                (each.shape, each.dtype) for each in tensors
            ]:
                memory = [torch.empty_like(tensor) for tensor in tensors]
            targets += memory
            sources += [tensor.detach() for tensor in tensors]
            copies[key] = _with_tensors(value, memory)
        if targets:
            torch._foreach_copy_(targets, sources)
        self._before, self._before_step = copies, step
        self._averaged_before = self._state.average is not None and bool(self._state.average.weights)

    @torch.no_grad()
    def take_back(self, step: int) -> None:
        """Return to the rows after `step` steps, if an update since then has changed them."""
        if self._before_step == step:
            average = self._state.average
            for key, value in self._values_of_step():
                if key[0] != "optimizer" and key in self._before:
                    for target, source in zip(_tensors(value), _tensors(self._before[key]), strict=True):
                        target.copy_(source)
            if average is not None and not self._averaged_before:
                average.weights, average.mirror = {}, {}
            self._checksums_of_update = 0, 0
            self._put_optimizers({key: value for key, value in self._before.items() if key[0] == "optimizer"})
            self._before = {}
        self._before_step = None

    # --- what there is --------------------------------------------------------------------------------------------

    def _values_of_step(self) -> Iterator[tuple[Key, Any]]:
        """What a step changes, by key."""
        state, sharding = self._state, self._state.sharding
        shards = {} if sharding is None else sharding.shards
        local = dict(state.model.named_parameters()) if sharding is None else sharding.local
        for name, parameter in local.items():
            yield ("parameter", name), shards.get(name, parameter.detach())
        for phase, optimizer in self._optimizers():
            yield from self._values_of_optimizer(phase, optimizer)
        for name, value in state.average_state().items():
            yield ("average", name), value

    def _values_of_optimizer(self, phase: str, optimizer: FullyShardedOptimizer) -> Iterator[tuple[Key, Any]]:
        (parts, updating), *mirroring = optimizer.states()
        numbers = {id(part.value): i for i, part in parts.items()}
        for parameter, values in updating.state.items():
            i = numbers[id(parameter)]
            for name, value in values.items():
                key = ("optimizer", phase, i, name)
                mirrors_of_it = [
                    mirror.state[mirrored_parts[i].value][name]
                    for mirrored_parts, mirror in mirroring
                    if i in mirrored_parts
                ]
                if mirrors_of_it and isinstance(value, Tensor) and name not in SCALARS:
                    yield key, self._shard(optimizer.parameters[i].shape, value, mirrors_of_it[0])
                else:
                    yield key, value

    def _values(self) -> Iterator[tuple[Key, Any]]:
        """What a step changes, and the parameters that evaluations keep."""
        yield from self._values_of_step()
        parameters = self._names_in_state_dict()
        for kind, weights in self._weights_of_evaluations().items():
            for name, value in weights.items():
                if name in parameters:
                    yield (kind, name), value

    def _weights_of_evaluations(self) -> dict[str, dict[str, Any]]:
        state = self._state
        kept = {"best": state.best.weights, "pending": state.pending and state.pending.weights}
        return {kind: weights for kind, weights in kept.items() if weights}

    def _names_in_state_dict(self) -> dict[str, str]:
        """The names of the parameters, by those of a `state_dict`."""
        names = {id(parameter): name for name, parameter in self._state.model.named_parameters()}
        listed = self._state.model.state_dict(keep_vars=True)
        return {name: names[id(value)] for name, value in listed.items() if id(value) in names}

    def _optimizers(self) -> Iterator[tuple[str, FullyShardedOptimizer]]:
        for phase, optimizer in sharded_of(self._state.optimizer).items():
            assert isinstance(optimizer, FullyShardedOptimizer)
            yield phase, optimizer

    def _shard(self, shape: torch.Size, local: Tensor, mirror: Tensor) -> Shard:
        assert self.mirrored is not None
        ranks = self.group.size
        return Shard(local, shape, self.group.rank, ranks, Shard(mirror, shape, self.mirrored, ranks))

    def _put_optimizers(self, values: Mapping[Key, Any]) -> None:
        """Have the optimizers the state of `values`, and no other."""
        for phase, optimizer in self._optimizers():
            (parts, updating), *mirroring = optimizer.states()
            for each in (updating, *(mirror for _, mirror in mirroring)):
                each.state.clear()
            of_phase = [(i, name, value) for (_, key, i, name), value in values.items() if key == phase]
            for i, name, value in of_phase:
                updating.state[parts[i].value][name] = value.local if isinstance(value, Shard) else value
            for mirrored_parts, mirror in mirroring:
                for i, name, value in of_phase:
                    if i in mirrored_parts:
                        mirror.state[mirrored_parts[i].value][name] = _of_mirror(name, value)

    # --- another group --------------------------------------------------------------------------------------------

    @torch.no_grad()
    def regroup(self, group: Group, *, holds: bool) -> None:
        """Cut the state anew in another group. All ranks of that call it; one that joins `holds` nothing.

        Raises ClusterError on all ranks where the rows of a rank are lost with its mirror, and DriftError where they are not what they were.
        """
        current = [_Kept(self._layout, dict(self._values()))] if self._is_complete else []
        kept = [*current, *self._previous] if holds else []
        reports: list[Report] = group.gather(
            Report(node_name(), [(each.layout, dict.fromkeys(each.owners())) for each in kept])
        )
        layout, sources = chosen(reports)
        first = min(sources.values())
        mine = next((each for each in kept if each.layout == layout), None)
        contents = None if mine is None else [_Content.of(key, value) for key, value in mine.values.items()]
        self.cut, contents = group.broadcast_object(
            (self.cut, contents) if group.rank == first else None, first
        )

        self.group, self._is_complete, self._previous = group, False, kept
        self._before, self._before_step, self._checksums_of_update = {}, None, (0, 0)
        number = 1 + max(each.number for report in reports for each, _ in report.layouts)
        self._layout = Layout(number, group.size, mirrors([report.node for report in reports]))
        self._cut_model()
        supplied = [] if mine is None else [owner for owner, rank in sources.items() if rank == group.rank]
        digest_before = self._digest_of(mine, supplied, whole=group.rank == first)
        held_by = [tuple(dict(report.layouts).get(layout, ())) for report in reports]
        self._take(contents, _Exchange(group, self._layout, layout.ranks, held_by, sources, mine))
        self._check(digest_before)
        self._is_complete, self._undivided = True, None

    def _digest_of(self, kept: _Kept | None, owners: Sequence[int], *, whole: bool) -> int:
        """What the rows of some ranks add to the digest of all that is kept, and with `whole` the tensors that are not cut."""
        if kept is None or not (owners or whole):
            return 0
        digest, total = self._digesting(), 0
        for key, value in kept.values.items():
            name = " ".join(map(str, key))
            if isinstance(value, Shard):
                shards = [shard for shard in (value, value.mirror) if shard is not None]
                total += sum(digest(name, shard) for shard in shards if shard.rank in owners)
            elif whole and _Content.of(key, value).dtype is not None:
                total += digest(name, value)
        return total % 2**64

    def _check(self, digest_before: int) -> None:
        """DriftError on all ranks where the state is another than before, or a mirror other than its owner."""
        kept, rank = _Kept(self._layout, dict(self._values())), self.group.rank
        rows = self._digest_of(kept, [rank], whole=False)
        whole = self._digest_of(kept, [], whole=True)
        mirror = rows if self.mirrored is None else self._digest_of(kept, [self.mirrored], whole=False)
        owner = rank if self.mirrored is None else self.mirrored
        every = self.group.gather((digest_before, rows, whole, mirror, owner))
        before_by_rank, rows_by_rank, whole_by_rank, *_ = zip(*every, strict=True)
        strays = [
            each
            for each, (_, _, whole, mirror, owner) in enumerate(every)
            if mirror != rows_by_rank[owner] or whole != whole_by_rank[0]
        ]
        if strays or (sum(rows_by_rank) + whole_by_rank[0] - sum(before_by_rank)) % 2**64:
            ranks = strays or list(range(self.group.size))
            raise problems.RESTORED_OTHERWISE(step=self._state.counters.step, ranks=ranks)

    def _cut_model(self) -> None:
        """Cut the model for the group; the rows have any content."""
        state, group, previous = self._state, self.group, self._state.sharding
        assert self.cut is not None
        if previous is not None:
            previous.release()
        elif self._undivided is not None:  # an earlier try has not come to its end
            undo(state.model, *self._undivided)
            self._originals = None
        if group.size == 1:
            if previous is not None:
                previous.fill_blank(list(previous.shards))
            state.shard(None, group)
            return
        if previous is None:
            self._originals = originals_of(state.model, state.job)
            self._undivided = places_of(state.model), dict(state.model.named_parameters())
        units, whole, fused = self.cut
        calls = Calls.of_units(state.model.get_submodule(name) for name in units)
        fill: Callable[[Sequence[str]], None] = _fill_nothing if previous is None else previous.fill_blank
        sharding = FullSharding(state.model, group, calls, whole, fused, fill, self._settings, self.mirrored)
        if self._originals is not None:
            self._originals = self._originals.of(sharding.shards)
        state.shard(sharding, group)

    def _take(self, contents: Sequence[_Content], exchange: _Exchange) -> None:
        """Fill the state from what the ranks have."""
        state, values = self._state, dict[str, dict[Key, Any]]()
        parameters: Mapping[str, Tensor] = dict(state.model.named_parameters())
        shards = {} if state.sharding is None else state.sharding.shards
        for content, name in zip(contents, self._parameters_of(contents), strict=True):
            shard, value = shards.get(name), content.number
            if content.dtype is not None:
                value = exchange.value(content, shard)
            if content.key[0] != "parameter":
                values.setdefault(content.key[0], {})[content.key] = value
                continue
            into = parameters[name] if shard is None else shard
            for target, source in zip(_tensors(into), _tensors(value), strict=True):
                if target.data_ptr() != source.data_ptr():
                    target.detach().copy_(source)
        self._put_optimizers(self._counting_where_read(values.get("optimizer", {})))
        if state.average is not None:
            average = {key[1]: value for key, value in values.get("average", {}).items()}
            state.average.weights = {
                name: value.local if isinstance(value, Shard) else value for name, value in average.items()
            }
            state.average.mirror = {
                name: value.mirror.local
                for name, value in average.items()
                if isinstance(value, Shard) and value.mirror is not None
            }
        kept = self._weights_of_evaluations()
        if best := {key[1]: value for key, value in values.get("best", {}).items()}:
            state.best.weights = {**kept.get("best", {}), **best}
        if pending := {key[1]: value for key, value in values.get("pending", {}).items()}:
            state.have_pending({**kept.get("pending", {}), **pending})

    def _parameters_of(self, contents: Sequence[_Content]) -> Iterator[str]:
        """The name of the parameter to which each value belongs."""
        names = self._names_in_state_dict()
        by_phase = self._state.names_by_phase()
        for kind, *key in (content.key for content in contents):
            if kind == "optimizer":
                yield by_phase[key[0]][key[1]]
            else:
                yield names[key[0]] if kind in ("best", "pending") else key[0]

    def _counting_where_read(self, values: Mapping[Key, Any]) -> dict[Key, Any]:
        """The optimizers' state with the numbers of updates where their kernels read them."""
        moved = dict(values)
        for phase, optimizer in self._optimizers():
            groups = [every for every in optimizer.param_groups for _ in every["params"]]
            for key, value in values.items():
                if key[1] == phase and key[3] in SCALARS and isinstance(value, Tensor):
                    on_device = counts_on_device(groups[key[2]])
                    moved[key] = value.to(self.group.device if on_device else "cpu", copy=True)
        return moved


class _Exchange:
    """Brings the values of a state to the ranks of a group, from those that have them as an earlier group had cut them."""

    def __init__(
        self,
        group: Group,
        layout: Layout,
        earlier_ranks: int,
        held_by: Sequence[Sequence[int]],
        sources: Mapping[int, int],
        mine: _Kept | None,
    ) -> None:
        """`held_by` has by rank of the group the earlier ranks whose rows it has, and `sources` by earlier rank one that has its rows."""
        self._group, self._earlier_ranks = group, earlier_ranks
        self._held_by, self._sources, self._mine = held_by, sources, mine
        self._replicas = [
            [rank, *(owner for owner, mirror in enumerate(layout.mirrors) if mirror == rank != owner)]
            for rank in range(group.size)
        ]
        """By rank those whose rows it is to have: itself, and the one that it mirrors."""

    def value(self, content: _Content, shard: Shard | None) -> Any:
        """A tensor as this rank is to have it: cut as the parameter's `shard` is, or whole without one. All ranks call it."""
        rank, shape = self._group.rank, content.shape
        if shard is not None:
            ranges = element_ranges(shape, self._group.size)
            by_rank = [[ranges[owner] for owner in owners] for owners in self._replicas]
            parts = self._elements(content, by_rank)
            local, *mirror = (
                part.view(-1, *shape[1:]) if part.numel() else part.view(0, *shape[1:]) for part in parts
            )
            return shard.like(local, *mirror)
        every = range(shape.numel())
        has_whole = [bool(owners) and not content.is_cut for owners in self._held_by]
        parts = self._elements(content, [[] if has else [every] for has in has_whole])
        if has_whole[rank]:
            assert self._mine is not None
            return self._mine.values[content.key]
        return parts[0].view(shape)

    def _elements(self, content: _Content, by_rank: Sequence[Sequence[range]]) -> list[Tensor]:
        """The elements of a tensor in this rank's ranges of `by_rank`, each in memory of its own. Those that a rank has are not sent to it."""
        rank, shape = self._group.rank, content.shape
        if content.is_cut:
            earlier = list(enumerate(element_ranges(shape, self._earlier_ranks)))
        else:
            earlier = [(owner, range(shape.numel())) for owner in list(self._sources)[:1]]
        parts = [
            torch.empty(len(new), dtype=content.dtype, device=self._group.device) for new in by_rank[rank]
        ]
        outgoing: list[tuple[int, Tensor]] = []
        incoming: list[tuple[int, Tensor]] = []
        pieces = (
            (target, number, new, owner, old)
            for target, ranges in enumerate(by_rank)
            for number, new in enumerate(ranges)
            for owner, old in earlier
        )
        for target, number, new, owner, old in pieces:
            begin, end = max(new.start, old.start), min(new.stop, old.stop)
            source = self._source(content, target, owner)
            if begin >= end or rank not in (source, target):
                continue
            into = parts[number][begin - new.start : end - new.start] if target == rank else None
            if source != rank:
                assert into is not None
                incoming.append((source, into))
                continue
            assert self._mine is not None
            elements = self._mine.elements(content.key, owner)[begin - old.start : end - old.start]
            if into is None:
                outgoing.append((target, elements))
            else:
                into.copy_(elements)
        self._group.pass_on(outgoing, incoming)()
        return parts

    def _source(self, content: _Content, target: int, owner: int) -> int:
        """The rank from which rank `target` gets what earlier rank `owner` had: itself, where it has that."""
        owners = self._held_by[target]
        has = bool(owners) and (not content.is_cut or owner in owners)
        return target if has else self._sources[owner]


def _fill_nothing(names: Sequence[str]) -> None:
    """For a model whose parameters have memory."""


def _tensors(value: Any) -> Iterator[Tensor]:
    """The tensors of a value: two of a shard that has a mirror."""
    if isinstance(value, Shard):
        yield value.local
        if value.mirror is not None:
            yield value.mirror.local
    elif isinstance(value, Tensor):
        yield value


def _of_mirror(name: str, value: Any) -> Any:
    """What the optimizer of mirrored rows has of a value: each optimizer counts by itself."""
    if isinstance(value, Shard) and value.mirror is not None:
        return value.mirror.local
    return value.clone() if name in SCALARS and isinstance(value, Tensor) else value


def _with_tensors(value: Any, tensors: Sequence[Tensor]) -> Any:
    """A value with others in the places of its tensors."""
    if isinstance(value, Shard):
        return value.like(*tensors)
    return tensors[0] if isinstance(value, Tensor) else value
