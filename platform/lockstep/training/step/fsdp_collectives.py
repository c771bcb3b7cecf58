"""The two collectives of a sharded unit as FSDP calls them: its parameters are gathered from all workers, and its gradients brought to the owners of their rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.errors import JobError
from lockstep.training.step import problems
from lockstep.training.step.parameters import missing_gradient
from lockstep.training.step.reduction import TreeSum, add_in_place
from lockstep.training.step.shards import element_ranges

if TYPE_CHECKING:
    from lockstep.training.step.full_sharding import FullSharding

Observe = Callable[[Sequence[Tensor], Sequence[int]], None]
"""Called with gradients of one micro-batch, in logical order, and the indices of their parameters."""


class Gather:
    """FSDP's gathering of a unit, on the group's channel: a lost worker ends it as it ends any other wait."""

    def __init__(self, sharding: FullSharding, number: int) -> None:
        self._sharding, self._number = sharding, number

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False
    ) -> Gathering:
        """Begin to gather. FSDP waits for what is returned when the unit is needed."""
        sharding = self._sharding
        sharding.order = (sharding.order * 1_000_003 + self._number + 1) % (1 << 48)
        if sharding._forward is not None:
            sharding._forward.append(self._number)
        sharding.free_copied()
        sharding.begun.add(self._number)
        work = all_gather(output_tensor, input_tensor, group)

        def wait() -> None:
            sharding.group.wait(work)
            sharding.begun.discard(self._number)
            if output_tensor.device.type == "cpu":
                sharding.copied.append(output_tensor)

        return Gathering(wait)


class Gathering(dist.Work):
    """A collective that is waited for as the group waits for any other."""

    def __init__(self, wait: Callable[[], None]) -> None:
        super().__init__()
        self._wait = wait

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._wait()
        return True


class Scatter:
    """Brings the rows of a unit's gradients to their workers, and adds those of W micro-batches along the tree."""

    def __init__(self, sharding: FullSharding, asking: list[str]) -> None:
        """`asking` are the parameters of the unit that ask for a gradient, in FSDP's order."""
        self._sharding, self._asking, self._host = sharding, asking, sharding.host
        self.learning: list[str] = []
        """Those that get one in the phase under way."""
        self.tree = TreeSum(0)
        self._in_host: set[int] = set()
        """The ids of its sums that are in host memory."""
        self.calls = 0

    def begin(self, leaves: int, places: Mapping[str, int]) -> None:
        """Begin a phase of a step in which the parameters of `places` learn."""
        ranks, shards = self._sharding.group.size, self._sharding.shards
        self.tree = TreeSum(leaves) if self._host is None else TreeSum(leaves, self._added)
        self._in_host = set()
        self.learning = [name for name in self._asking if name in places]
        self._shapes = [shards[name].shape for name in self.learning]
        self._elements = [element_ranges(shape, ranks) for shape in self._shapes]
        self._widths = [len(elements[0]) for elements in self._elements]
        self._indices = [places[name] for name in self.learning]

    def _added(self, left: list[Tensor], right: list[Tensor]) -> list[Tensor]:
        assert self._host is not None
        left = [self._host.on_device(total) if id(total) in self._in_host else total for total in left]
        return add_in_place(left, right)

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for what is sent, then for the sum: in host memory where the rows are, as FSDP would copy it there after each pass."""
        if self._host is not None and sum(size) == sum(self._widths):
            return self._host.empty(size, dtype)
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        """`input_tensor` has a row for each rank: its rows of the unit's gradients one after another, each filled up to the length of rank 0's."""
        sharding, ranks = self._sharding, self._sharding.group.size
        sharding.free_copied()
        self.calls += 1
        if self.calls > 1 or output_tensor.numel() != sum(self._widths):
            raise not_once(
                self.learning, self.calls if self.calls > 1 else 0, f"micro-batches {sharding.pass_}"
            )
        if sharding.empty:
            input_tensor.zero_()
        if sharding.observe is not None:
            self._show(input_tensor.view(ranks, -1), sharding.observe)
        received = torch.empty_like(input_tensor)
        sharding.group.wait(dist.all_to_all_single(received, input_tensor, group=group, async_op=True))
        rows = received.view(ranks, -1)
        for m, row in zip(sharding.pass_, rows, strict=False):
            self.tree.add(range(m, m + 1), [row])
        if sharding.last:
            output_tensor.copy_(self.tree.sums[0][1][0])
            self.tree = TreeSum(0)
        else:
            self.tree.sums = [(node, [self._remaining(total, received)]) for node, (total,) in self.tree.sums]
            if self._host is not None:
                self._in_host = {id(total) for _, (total,) in self.tree.sums}
        if (
            received.device.type == "cpu"
        ):  # a thread of gloo keeps what it has sent and received until it gets a turn to run
            for done in (received, input_tensor):
                done.untyped_storage().resize_(0)

    def _remaining(self, total: Tensor, received: Tensor) -> Tensor:
        """A sum that the next passes need, in memory of its own: what was received is W times as much."""
        if self._host is not None:
            return total if id(total) in self._in_host else self._host.in_host(total)
        start, end = received.data_ptr(), received.data_ptr() + received.nbytes
        return total.clone() if start <= total.data_ptr() < end else total

    def _show(self, rows: Tensor, observe: Observe) -> None:
        """Show the gradients of this rank's micro-batch, one parameter at a time."""
        begin = 0
        for shape, elements, width, index in zip(
            self._shapes, self._elements, self._widths, self._indices, strict=True
        ):
            parts = [row[begin : begin + len(each)] for row, each in zip(rows, elements, strict=True)]
            observe([torch.cat(parts).view(shape)], [index])
            begin += width


def all_gather(output: Tensor, rows: Tensor, channel: Any) -> Any:
    """Begin to gather the `rows` of every rank into `output`. Returns what is waited for."""
    gather = (
        getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    )  # its name since torch 2.13
    return gather(output, rows, group=channel, async_op=True)


def not_once(names: Sequence[str], times: int, where: str) -> JobError:
    """The error for parameters of a unit whose backward came so many times in a pass, and not once."""
    if times == 0:
        return missing_gradient(names, where)
    return problems.COMPUTED_AGAIN(name=names[0], got=times, where=where)
