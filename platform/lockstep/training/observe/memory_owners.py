"""What a worker's process holds, by owner: tensor by tensor, each piece of memory once.

Parameters, gradients, optimizer and the sums of the tree are known by name. Activations are what the living autograd graphs have saved: each
belongs to the module whose parameters its node uses, or, without any, to that of what the node follows. What a graph has packed by hooks, as
with activation checkpointing, is no tensor and is left out. Nothing is computed, and nothing changes.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import FrameType, FunctionType, ModuleType
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor, nn

from lockstep.training.observe.memory_growth import has_memory, kinds_of_tensors, name_of_holder
from lockstep.training.observe.worker_memory import tensors_in
from lockstep.training.state import TrainState
from lockstep.training.step.phases import optimizers_of
from lockstep.training.step.reduction import TreeSum

MOST_NODES = 100_000
"""Nodes of autograd graphs that are looked at."""

_MOST_OBJECTS = 20_000
"""Objects of a data set that are looked at."""

_NAMED = 5
"""Of the largest tensors that no part of the run holds, so many are named by what holds them: a search among all objects for each."""


class Held(NamedTuple):
    """A piece of memory: its owner, its name there, and its size."""

    owner: str
    name: str
    kind: str
    """Shape and type of a tensor."""
    bytes: int


@dataclass(slots=True)
class Holdings:
    """All pieces that were found, and the bytes of activations by module."""

    pieces: list[Held] = field(default_factory=list)
    modules: dict[str, int] = field(default_factory=dict)
    _known: set[int] = field(default_factory=set)

    def add(self, owner: str, name: str, tensor: Tensor) -> int:
        """Add a tensor, or those that it stands for, unless its memory is known. Returns the bytes that are new."""
        if not has_memory(type(tensor)):
            names = tensor.__tensor_flatten__()[0] if hasattr(tensor, "__tensor_flatten__") else ()
            return sum(self.add(owner, name, getattr(tensor, part)) for part in names)
        try:
            storage = tensor.untyped_storage()
            key, size = storage.data_ptr(), storage.nbytes()
        except (RuntimeError, NotImplementedError):  # a tensor without memory of its own
            return 0
        if key == 0 or key in self._known or tensor.is_meta:
            return 0
        self._known.add(key)
        kind = f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
        self.pieces.append(Held(owner, name, kind, size))
        return size

    def add_array(self, owner: str, name: str, array: np.ndarray[Any, Any]) -> None:
        """Add an array that owns its memory."""
        if array.base is None and id(array) not in self._known:
            self._known.add(id(array))
            self.pieces.append(Held(owner, name, f"{array.shape} {array.dtype}", array.nbytes))

    def bytes(self, owner: str) -> int:
        return sum(piece.bytes for piece in self.pieces if piece.owner == owner)


def holdings(
    state: TrainState | None, samples: Any = None, sums: Iterable[Tensor] = (), batches: Iterable[Any] = ()
) -> Holdings:
    """What is held now. `samples` is the data set, `sums` are those of the tree that no TreeSum has, `batches` what is known to be one."""
    found = Holdings()
    if state is not None:
        _add_state(found, state)
    living = gc.get_objects()
    for item in living:
        if type(item) is TreeSum:  # isinstance would ask the object, which may run its code
            for node, total in item.sums:
                for i, tensor in enumerate(total):
                    found.add("sums", f"{node.start} … {node.stop - 1}, {i}", tensor)
    for i, tensor in enumerate(sums):
        found.add("sums", f"waiting for the last micro-batch, {i}", tensor)
    for batch in batches:
        for i, tensor in enumerate(tensors_in(batch)):
            found.add("data", f"batch[{i}]", tensor)
    _add_data(found, samples)
    kinds = kinds_of_tensors()
    tensors = [item for item in living if type(item) in kinds]
    del living
    names = {} if state is None else {id(p): name for name, p in state.model.named_parameters()}
    _add_activations(found, tensors, names)
    _add_others(found, tensors)
    return found


def _add_state(found: Holdings, state: TrainState) -> None:
    model = state.model
    sharding = state.sharding
    parameters = dict(model.named_parameters()) if sharding is None else dict(sharding.local)
    for name, parameter in parameters.items():
        found.add("parameters", name, parameter)
    for name, buffer in model.named_buffers():
        found.add("buffers", name, buffer)
    for name, parameter in parameters.items():
        for tensor in tensors_in(parameter.grad):
            found.add("gradients", name, tensor)
    named = {id(parameter): name for name, parameter in parameters.items()}
    for optimizer in optimizers_of(state.optimizer).values():
        for parameter, values in getattr(optimizer, "state", {}).items():
            name = named.get(id(parameter), "")
            for key, value in values.items() if isinstance(values, Mapping) else ():
                for tensor in tensors_in(value):
                    found.add("optimizer", f"{key} of {name}" if name else str(key), tensor)
    if state.average is not None:
        for name, tensor in state.average.weights.items():
            found.add("average", name, tensor)
    for name, value in (state.best.weights or {}).items():
        for tensor in tensors_in(value):
            found.add("best weights", name, tensor)


def _add_data(found: Holdings, samples: Any) -> None:
    """What the data set has in memory: tensors and arrays that its objects lead to, and what Arrow has allocated."""
    waiting: list[Any] = [] if samples is None else [samples]
    visited: set[int] = set()
    while waiting and len(visited) < _MOST_OBJECTS:
        item = waiting.pop()
        kind = type(item)
        if id(item) in visited or issubclass(kind, ModuleType | FunctionType | type | FrameType):
            continue
        visited.add(id(item))
        if issubclass(kind, Tensor):
            found.add("data", "in the data set", item)
        elif issubclass(kind, np.ndarray):
            found.add_array("data", "in the data set", item)
        else:
            waiting += gc.get_referents(item)
    arrow = sys.modules.get("pyarrow")
    if arrow is not None and (size := int(arrow.total_allocated_bytes())):
        found.pieces.append(Held("data", "Arrow's memory pool", "", size))


# --- autograd graphs --------------------------------------------------------------------------------------


def _add_activations(found: Holdings, tensors: Sequence[Tensor], names: Mapping[int, str]) -> None:
    roots = []
    for tensor in tensors:
        with suppress(RuntimeError):  # a tensor of a mode that has no graph
            if tensor.grad_fn is not None:
                roots.append((tensor, tensor.grad_fn))
    modules = _modules_of([node for _, node in roots], names)
    for node, module in modules.items():
        for tensor in saved_by(node):
            size = found.add(
                "activations", f"{module or 'the loss'}: {node.name().removesuffix('0')}", tensor
            )
            if size:
                found.modules[module] = found.modules.get(module, 0) + size
    for tensor, node in roots:
        module = modules.get(node, "")
        size = found.add("activations", f"{module or 'the loss'}: result", tensor)
        if size:
            found.modules[module] = found.modules.get(module, 0) + size


def activation_bytes(total: Tensor, model: nn.Module, batch: Any) -> int:
    """Bytes that the graph of `total` has saved for backward beside the model's tensors and the batch: the activations of a micro-batch."""
    found = Holdings()
    for tensor in (*model.parameters(), *model.buffers(), *tensors_in(batch)):
        found.add("", "", tensor)
    return sum(
        found.add("activations", "", tensor)
        for node in _modules_of([total.grad_fn], {})
        for tensor in saved_by(node)
    )


def _modules_of(roots: Iterable[Any], names: Mapping[int, str]) -> dict[Any, str]:
    """The nodes of some graphs, each with its module: that of the parameters which it takes, else that of what it follows."""
    modules: dict[Any, str] = {}
    waiting = [node for node in roots if node is not None]
    while waiting and len(modules) < MOST_NODES:
        node = waiting[-1]
        if node in modules:
            waiting.pop()
            continue
        following = [inner for inner, _ in node.next_functions if inner is not None]
        pending = [inner for inner in following if inner not in modules]
        if pending and not any(inner is node for inner in pending):
            waiting += pending
            continue
        waiting.pop()
        modules[node] = _own_module(following, names) or next(
            (modules[inner] for inner in following if modules.get(inner)), ""
        )
    return modules


def _own_module(following: Iterable[Any], names: Mapping[int, str]) -> str:
    """The module of the parameters that a node takes, itself or transposed; empty without any."""
    for inner in following:
        for leaf in (
            (inner, *(further for further, _ in inner.next_functions)) if _passes(inner) else (inner,)
        ):
            parameter = getattr(leaf, "variable", None)
            if parameter is not None and id(parameter) in names:
                return names[id(parameter)].rpartition(".")[0] or "the model"
    return ""


def _passes(node: Any) -> bool:
    """Whether a node only shows a parameter in another form."""
    return node.name() in {
        "TBackward0",
        "TransposeBackward0",
        "ToCopyBackward0",
        "ViewBackward0",
        "PermuteBackward0",
    }


_saved_names: dict[type, tuple[str, ...]] = {}


def saved_by(node: Any) -> Iterator[Tensor]:
    """The tensors that a node has saved for its backward and still has. Those packed by a hook are left out: to unpack them may compute."""
    kind = type(node)
    if kind not in _saved_names:
        _saved_names[kind] = tuple(name for name in dir(node) if name.startswith("_raw_saved_"))
    for name in _saved_names[kind]:
        with suppress(RuntimeError):  # its backward has been, and let go of them
            value = getattr(node, name)
            for saved in value if isinstance(value, tuple | list) else (value,):
                if saved is not None and saved.unpack_hook is None and isinstance(saved.data, Tensor):
                    yield saved.data


# --- the rest ---------------------------------------------------------------------------------------------


def _add_others(found: Holdings, tensors: Sequence[Tensor]) -> None:
    """The tensors that no part of the run is known to hold; the largest with the attribute or variable that leads to them."""
    others = sorted(tensors, key=_bytes, reverse=True)
    named = 0
    for tensor in others:
        index = len(found.pieces)
        if found.add("other tensors", "", tensor) and named < _NAMED:
            named += 1
            piece = found.pieces[index]
            found.pieces[index] = piece._replace(name=name_of_holder(tensor, [tensors, others]))


def _bytes(tensor: Tensor) -> int:
    with suppress(RuntimeError, NotImplementedError):
        return 0 if tensor.is_meta else tensor.untyped_storage().nbytes()
    return 0
