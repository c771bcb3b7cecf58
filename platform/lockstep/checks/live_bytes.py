"""How much memory tensors take while something is computed, at the peak: counted storage by storage, or asked of the GPU."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lockstep.training.observe.worker_memory import tensors_in


@dataclass(slots=True)
class Peak:
    """Bytes above those that were held at the start."""

    bytes: int = 0


@contextmanager
def peak_of(device: torch.device) -> Iterator[Peak]:
    """The most memory that is held within the block beyond what was held before it."""
    peak = Peak()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        baseline = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        yield peak
        torch.cuda.synchronize(device)
        peak.bytes = torch.cuda.max_memory_allocated(device) - baseline
        return
    with LiveBytes() as live:
        yield peak
    peak.bytes = live.most


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own, without types
    """Counts the storages that operators make while it is entered, and those that are let go of.

    What a kernel needs within one call is not seen: on a processor that is the workspace of a convolution, for one.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.most = 0
        self._known: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        input_ids = {id(storage) for storage in _storages((args, kwargs or {}))}
        result = func(*args, **(kwargs or {}))
        for storage in _storages(result):
            self._note(storage, input_ids)
        return result

    def _note(self, storage: Any, input_ids: set[int]) -> None:
        key = id(storage)
        if key in self._known or key in input_ids:
            return  # a view, or a tensor that was written in place
        size = storage.nbytes()

        def freed(_ref: object) -> None:
            self.now -= size
            self._known.pop(key, None)

        self._known[key] = weakref.ref(storage, freed)
        self.now += size
        self.most = max(self.most, self.now)


def _storages(value: Any) -> list[Any]:
    return [tensor.untyped_storage() for leaf in tree_leaves(value) for tensor in tensors_in(leaf)]
