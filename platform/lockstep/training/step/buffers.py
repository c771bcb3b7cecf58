"""Buffers such as BatchNorm's statistics, as DDP treats them at world size M.

Every micro-batch of a step starts from the step's buffers, and the update of micro-batch 0 is the one that is
kept, with the shape that it gives a buffer: an observer's are empty until its first forward. Only buffers that a forward writes to are copied or
sent; constant ones cost one comparison of numbers.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from lockstep.communication.group import Group
from lockstep.tensor_bytes import row_of
from lockstep.training.auxiliary_state import give_shape
from lockstep.training.integrity.rehearsal.object_state import LARGEST, same_bits
from lockstep.training.step import problems


class StepBuffers:
    """Restores the model's buffers between micro-batches and spreads micro-batch 0's update at the step's end.

    A write shows in the tensor's version, or in another tensor in its place (`self.mean = …`). torch's batch norm and the observers of
    its quantization write their statistics without raising the version, so those, and whatever the rehearsal saw change
    (`written`), count as written in every micro-batch.
    """

    def __init__(self, model: nn.Module, group: Group, written: frozenset[int]) -> None:
        self.group = group
        self._statistics = statistics(model)
        self.written = written | self._statistics
        self.buffers: list[Tensor] = list(model.buffers())
        self._names = [name for name, _ in model.named_buffers()]
        self._owners = owners(model)
        self._before = [buffer.detach().clone() for buffer in self.buffers]
        self._versions = [buffer._version for buffer in self.buffers]
        self._kept: dict[int, Tensor] = {}
        self._by_forward = frozenset[int]()
        """The buffers whose write by micro-batch 0's forward shows."""
        modules = list(model.named_modules())
        self._places = [(f"{prefix}." if prefix else "", module._buffers) for prefix, module in modules]
        self._count, self._there = self._number(), self._all_names()
        self._empty = [(owner, name) for _, owner in self._places for name in owner if owner[name] is None]

    def _come_since(self) -> list[str]:
        """The buffers that were not there at the start. It counts: this runs for each micro-batch."""
        if self._number() == self._count and all(owner.get(name) is None for owner, name in self._empty):
            return []
        return sorted(self._all_names() - self._there)

    def _number(self) -> int:
        return sum(len(owner) for _, owner in self._places)

    def _all_names(self) -> set[str]:
        return {
            f"{prefix}{name}"
            for prefix, owner in self._places
            for name, value in owner.items()
            if value is not None
        }

    def keep(self) -> list[int]:
        """Set aside what micro-batch 0's forward wrote. Returns which buffers those are."""
        changed = self._changed()
        if not changed:
            self._by_forward, self._kept = frozenset(), {}
            return []
        self._by_forward = frozenset(filter(self._is_counted, changed))
        written = [self._written_value(i) for i in changed]
        copies = [torch.empty_like(value) for value in written]
        copy_all(copies, written)
        self._kept = dict(zip(changed, copies, strict=True))
        return changed

    def keep_start(self, values: Mapping[int, Tensor]) -> list[int]:
        """As `keep`, of a micro-batch 0 without samples, which writes nothing: what was computed in its place does not count. `values` are those of buffers that the whole batch has written."""
        kept = sorted({*self.written, *values})
        self._by_forward = frozenset()
        self._kept = {i: values.get(i, self._before[i]).clone() for i in kept}
        return kept

    def keep_late(self) -> None:
        """Set aside what micro-batch 0's backward wrote where its forward wrote nothing, as hooks on gradients do.

        Of a buffer that both write, the forward's value stays: a forward that is recomputed in backward writes a second time. JobError for one
        that the rehearsal did not see written, for no rank has been told of it.
        """
        for i in filter(self._is_counted, range(len(self.buffers))):
            if i in self._statistics or i in self._by_forward:
                continue
            if i not in self._kept:
                raise problems.BUFFER_IN_BACKWARD(name=self._names[i])
            self._kept[i] = self._written_value(i).clone()

    def resized(self) -> list[int]:
        """Which buffers micro-batch 0 has given another shape."""
        return [i for i, value in self._kept.items() if value.shape != self._before[i].shape]

    def _is_counted(self, i: int) -> bool:
        """Whether a write to a buffer shows, in its version or as another tensor in its place."""
        owner, name = self._owners[i]
        return self.buffers[i]._version != self._versions[i] or owner.get(name) is not self.buffers[i]

    def _written_value(self, i: int) -> Tensor:
        owner, name = self._owners[i]
        value, initial = owner.get(name), self._before[i]
        if value is None or value.dtype != initial.dtype:
            got = "None" if value is None else f"a tensor of {value.dtype}"
            raise problems.BUFFER_TYPE(name=self._names[i], got=got, wanted=initial.dtype)
        return value.detach()

    def restore(self) -> None:
        """Put the step's buffers back. Called after backward, which may still read what forward wrote.

        JobError for a buffer that has come since the start: only the workers whose samples asked for it would have it.
        """
        if new := self._come_since():
            raise problems.BUFFER_MADE(name=new[0])
        changed = self._changed()
        if not changed:
            return
        for i in changed:
            owner, name = self._owners[i]
            owner[name] = self.buffers[i]
        copy_all([self.buffers[i] for i in changed], [self._before[i] for i in changed])
        for i in changed:
            self._versions[i] = self.buffers[i]._version

    def _changed(self) -> list[int]:
        """Which buffers were written to since the step's start or the last restoration."""
        return [i for i in range(len(self.buffers)) if i in self.written or self._is_counted(i)]

    def written_now(self) -> dict[int, Tensor]:
        """Copies of the buffers whose values are other ones than the step's."""
        values = {i: self._written_value(i) for i in self._changed()}
        return {i: value.clone() for i, value in values.items() if not same_bits(value, self._before[i])}

    def put(self, values: Mapping[int, Tensor]) -> None:
        """Write some buffers, as a forward does; the next restoration undoes it."""
        copy_all([self.buffers[i] for i in values], list(values.values()))

    def check_unseen(self, where: str) -> None:
        """JobError where a write past torch's count (`.data`, NumPy) has changed a small buffer; `where` is the place in the run.

        Called when the step's buffers have been put back. On a CUDA device it waits for each buffer.
        """
        for i, (buffer, initial) in enumerate(zip(self.buffers, self._before, strict=True)):
            small = buffer.numel() * buffer.element_size() <= LARGEST
            if small and i not in self.written and not same_bits(buffer, initial):
                raise problems.BUFFER_UNCOUNTED(name=self._names[i], where=where)

    def end_step(self, flagged: Sequence[int], *, resized: bool = False) -> None:
        """Give every rank micro-batch 0's update of the `flagged` buffers, in one broadcast; `resized`: some have another shape."""
        if not flagged:
            return
        values = [self._kept.get(i, self._before[i]) for i in flagged]
        if self.group.size > 1:
            if resized:
                shapes = self.group.broadcast_object([value.shape for value in values], 0)
                values = [
                    v.new_empty(shape) if v.shape != shape else v
                    for v, shape in zip(values, shapes, strict=True)
                ]
            joined = torch.cat([row_of(value).view(torch.uint8) for value in values])
            self.group.broadcast(joined)
            parts = torch.split(joined, [value.numel() * value.element_size() for value in values])
            values = [_typed(part, value) for part, value in zip(parts, values, strict=True)]
        copy_all([self.buffers[i] for i in flagged], values)
        copy_all([self._before[i] for i in flagged], values)
        for i in flagged:
            self._versions[i] = self.buffers[i]._version
        self._kept = {}

    def values(self) -> list[Tensor]:
        """Copies of the buffers that a micro-batch starts from."""
        return [value.clone() for value in self._before]

    def start_from(self, values: Sequence[Tensor]) -> None:
        """Have the micro-batches start from other `values`; what micro-batch 0 has written is forgotten."""
        copy_all(self.buffers, values)
        copy_all(self._before, values)
        self._versions, self._kept = [buffer._version for buffer in self.buffers], {}

    def take_over(self) -> None:
        """Adopt the buffers as an update's hooks left them, the same on every rank: the next step starts from these."""
        replaced = [
            i for i, (owner, name) in enumerate(self._owners) if owner.get(name) is not self.buffers[i]
        ]
        copy_all([self.buffers[i] for i in replaced], [self._written_value(i) for i in replaced])
        for i in replaced:
            owner, name = self._owners[i]
            owner[name] = self.buffers[i]
        copy_all(self._before, self.buffers)
        self._versions = [buffer._version for buffer in self.buffers]


@torch.no_grad()
def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each source to its target, which takes its shape, in one launch per dtype: for small tensors on CUDA, launches are what copies cost."""
    by_type: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    for target, source in zip(targets, sources, strict=True):
        if target.shape != source.shape:
            give_shape(target, source.shape)
        into, out_of = by_type.setdefault(target.dtype, ([], []))
        into.append(target)
        out_of.append(source)
    for into, out_of in by_type.values():
        torch._foreach_copy_(into, out_of)


class KeptBuffers:
    """A snapshot of the model's buffers, both values and tensor objects, that can be restored whatever was written since."""

    def __init__(self, model: nn.Module) -> None:
        self._names = [name for name, _ in model.named_buffers()]
        self._buffers = list(model.buffers())
        self._owners = owners(model)
        self._before = [buffer.detach().clone() for buffer in self._buffers]

    def now(self) -> dict[str, Tensor]:
        """The buffers that the model has now, by name; one that was removed is missing."""
        pairs = zip(self._names, self._owners, strict=True)
        return {name: value for name, (owner, key) in pairs if (value := owner.get(key)) is not None}

    def written(self) -> frozenset[int]:
        """Indices of the buffers whose values have changed."""
        current = [owner.get(name) for owner, name in self._owners]
        pairs = enumerate(zip(current, self._before, strict=True))
        return frozenset(
            i for i, (value, initial) in pairs if value is None or not torch.equal(value, initial)
        )

    def restore(self) -> None:
        """Put back every tensor object and its value."""
        with torch.no_grad():
            for (owner, key), buffer, value in zip(self._owners, self._buffers, self._before, strict=True):
                owner[key] = buffer
                if buffer.shape != value.shape:
                    give_shape(buffer, value.shape)
                buffer.copy_(value)


def owners(model: nn.Module) -> list[tuple[dict[str, Tensor | None], str]]:
    """Where each buffer is: its module's dict of buffers and its name there, in the order of `model.buffers()`."""
    owner_by_id: dict[int, tuple[dict[str, Tensor | None], str]] = {}
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                owner_by_id.setdefault(id(buffer), (module._buffers, name))
    return list(owner_by_id.values())


def statistics(model: nn.Module) -> frozenset[int]:
    """Indices in `model.buffers()` of the buffers of torch's layers that follow statistics of their input."""
    kinds = _following_statistics()
    owned = {
        id(buffer)
        for module in model.modules()
        if isinstance(module, kinds)
        for buffer in module.buffers(recurse=False)
    }
    return frozenset(i for i, buffer in enumerate(model.buffers()) if id(buffer) in owned)


def _following_statistics() -> tuple[type, ...]:
    """Batch and instance norms, and the observers of quantization where the job has imported them."""
    classes: list[type] = [nn.modules.batchnorm._NormBase]
    for module, name in (("observer", "ObserverBase"), ("fake_quantize", "FakeQuantizeBase")):
        there = sys.modules.get(f"torch.ao.quantization.{module}")
        if there is not None:
            classes.append(getattr(there, name))
    return tuple(classes)


def _typed(part: Tensor, like: Tensor) -> Tensor:
    """Raw bytes with the dtype and shape of `like`; copied first, because a view of another dtype must start aligned."""
    return part.clone().view(like.dtype).view(like.shape)
