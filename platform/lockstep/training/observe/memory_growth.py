"""Memory over time: what a worker holds between two steps, and which objects keep autograd graphs alive where that grows.

Between two steps no tensor needs its graph any more. Where memory keeps growing, Python's objects are searched twice for tensors that still
have one. An object that held some the first time and holds more the second time is the one that collects them.
"""

from __future__ import annotations

import gc
import resource
import sys
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

LOOKS, LEAST_BYTES = 4, 1 << 20
"""Objects are searched, which takes some 0.1 s, only after memory has grown by so much over so many looks without falling."""

_MOST_NODES = 100_000
_MOST_TENSORS = 10_000
_MOST_HOLDERS = 16


def held_bytes(device: torch.device) -> int:
    """Bytes that this process holds now: on a GPU what torch has allocated, else the resident memory that is not backed by files."""
    if device.type == "cuda":
        return int(torch.cuda.memory_allocated(device))
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:  # not Linux: the peak is good enough for a trend
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    return int(fields.get("RssAnon", fields["VmRSS"]).split()[0]) * 1024


class Holding(NamedTuple):
    """An object that keeps graphs alive: the tensors in it that have one, and how many nodes these have."""

    holder: Any
    tensors: Sequence[Tensor]
    nodes: int


class Growth:
    """Watches the memory of one worker. `look` returns a line once, where something keeps graphs alive."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._looks: list[tuple[int, int]] = []
        self._least = LEAST_BYTES
        self._before: Mapping[int, int] | None = None
        """The nodes that each object kept alive at the first search, by its identity."""
        self._reported = False

    def look(self, step: int) -> tuple[int, str]:
        """The bytes held after a step, and a line about what keeps graphs alive: once, else empty."""
        bytes_now = held_bytes(self._device)
        if self._reported:
            return bytes_now, ""
        self._looks.append((step, bytes_now))
        first = self._began()
        if self._before is None and bytes_now - self._looks[first][1] < self._least:
            return bytes_now, ""
        if self._before is None and len(self._looks) - first <= LOOKS:
            return bytes_now, ""
        return bytes_now, self._searched(first)

    def _began(self) -> int:
        """The index of the look since which memory has never fallen."""
        i = len(self._looks) - 1
        while i and self._looks[i - 1][1] <= self._looks[i][1] + LEAST_BYTES // 4:  # a few pages come and go
            i -= 1
        return i

    def _searched(self, first: int) -> str:
        previous, current = self._before, holdings()
        if previous is None:
            self._before = {id(holding.holder): holding.nodes for holding in current}
            return ""
        self._before = None
        grown = [
            holding for holding in current if holding.nodes > previous.get(id(holding.holder), holding.nodes)
        ]
        (began, bytes_then), (step, bytes_now) = self._looks[first], self._looks[-1]
        if not grown:
            self._least = 2 * max(self._least, bytes_now - bytes_then)
            return ""
        most = max(grown, key=lambda holding: holding.nodes)
        self._reported = True
        return (
            f"{bytes_then / 1e6:.0f} MB after step {began} and {bytes_now / 1e6:.0f} MB after step {step}: {name_of(most, [current, grown])} keeps "
            f"{len(most.tensors)} tensors alive with their graphs, of {most.nodes} nodes, and more each time"
        )


def holdings() -> list[Holding]:
    """The objects that keep tensors alive which have a graph, those with the most first."""
    kinds = kinds_of_tensors()
    alive = [item for item in gc.get_objects() if type(item) in kinds and _has_graph(item)]
    if not alive:
        return []
    del alive[_MOST_TENSORS:]
    numbers = {id(tensor) for tensor in alive}
    result = []
    for holder in gc.get_referrers(*alive):
        if holder is alive or isinstance(holder, FrameType | Tensor):
            continue
        tensors = [item for item in _within(holder) if id(item) in numbers]
        result.append(Holding(holder, tensors, _nodes(tensors)))
    return sorted(result, key=lambda item: -item.nodes)[:_MOST_HOLDERS]


def kinds_of_tensors() -> set[type]:
    """Tensor and those of its subclasses whose tensors have memory of their own. For 300 000 objects a lookup in a set takes half as long as `issubclass`.

    A class with a `__torch_dispatch__` of its own stands for other tensors, as DTensor does, or for none at all: what torch.compile has traced
    lives on as FakeTensors of symbolic sizes, and to ask one for its bytes adds a guard to the compiled program.
    """
    kinds, waiting = set[type](), list[type]([Tensor])
    while waiting:
        kind = waiting.pop()
        kinds.add(kind)
        waiting += set(type.__subclasses__(kind)) - kinds
    return {kind for kind in kinds if has_memory(kind)}


def has_memory(kind: type) -> bool:
    """Whether the tensors of this class have memory of their own."""
    dispatch: object = getattr(kind, "__torch_dispatch__", None)
    return dispatch == Tensor.__torch_dispatch__


def _has_graph(tensor: Tensor) -> bool:
    try:
        return tensor.grad_fn is not None
    except RuntimeError:  # a tensor of a mode that has none
        return False


def _within(holder: Any) -> Iterable[Any]:
    if isinstance(holder, Mapping):
        return holder.values()
    if isinstance(holder, list | tuple | set | frozenset | deque):
        return holder
    inside: list[Any] = gc.get_referents(holder)
    return inside


def _nodes(tensors: Iterable[Tensor]) -> int:
    """The nodes of the graphs of some tensors, each once."""
    waiting = [tensor.grad_fn for tensor in tensors]
    visited: set[Any] = set()
    while waiting and len(visited) < _MOST_NODES:
        node = waiting.pop()
        if node is not None and node not in visited:
            visited.add(node)
            waiting += [following for following, _ in node.next_functions]
    return len(visited)


def name_of(holding: Holding, own: Sequence[Any]) -> str:
    """What keeps the tensors alive, as an attribute or variable of its owner where that is known. `own` are the caller's lists, to be ignored."""
    holder, tensor = holding.holder, max(holding.tensors, key=lambda item: _nodes([item]))
    kind = type(holder).__name__
    direct = _held_by(holder, tensor)
    if direct:
        return direct
    for owner in gc.get_referrers(holder):
        if owner is holding or isinstance(owner, FrameType) or any(owner is item for item in own):
            continue
        description = _held_by(owner, holder)
        if description:
            return f"the {kind} {description}"
    return f"a {kind} whose owner is not known"


def name_of_holder(tensor: Tensor, passed_by: Sequence[Any]) -> str:
    """What holds a tensor, as an attribute or variable of its owner; empty where that is not known. `passed_by` are the caller's own lists."""
    for holder in gc.get_referrers(tensor):
        if isinstance(holder, FrameType | Tensor) or any(holder is item for item in passed_by):
            continue
        if description := _held_by(holder, tensor):
            return description
        if isinstance(holder, Mapping | list | tuple | set | deque):
            for owner in gc.get_referrers(holder):
                if not isinstance(owner, FrameType) and (description := _held_by(owner, holder)):
                    return f"the {type(holder).__name__} {description}"
    return ""


def _held_by(owner: Any, held: Any) -> str:
    """`held` as an attribute of `owner`, or as a variable of what `owner` is the namespace of; empty where it is neither."""
    if not isinstance(owner, dict):
        name = next((key for key, value in _attributes(owner).items() if value is held), None)
        return "" if name is None else f"{name!r} of an object of class {type(owner).__name__!r}"
    name = next((key for key, value in owner.items() if value is held), None)
    for module in list(sys.modules.values()):
        if isinstance(module, ModuleType) and vars(module) is owner:
            return f"{name!r} of module {module.__name__!r}"
    for referrer in gc.get_referrers(owner):
        if not isinstance(referrer, FrameType) and _attributes(referrer) is owner:
            return f"{name!r} of an object of class {type(referrer).__name__!r}"
    return ""


def _attributes(owner: Any) -> dict[str, Any]:
    """The attributes of `owner`, bypassing any attribute access that its class defines."""
    try:
        attributes: dict[str, Any] = object.__getattribute__(owner, "__dict__")
    except (AttributeError, TypeError):
        return {}
    return attributes
