"""What Python objects hold, compared by value.

The rehearsal decides by results. Where these differ, it looks at a job, its model and its optimizer's hooks before and after, to name what
was left behind.

Not seen: iterators, open files, objects of C extensions, private state of classes of torch or of the standard library,
the tail of a list of more than `LONGEST` elements, and a write that bypasses torch (`.data`, NumPy) into an array of more
than `LARGEST` bytes.
"""

from __future__ import annotations

import functools
import hashlib
import random
import sys
import types
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lockstep.tensor_bytes import bytes_of, row_of

LONGEST = 256
"""Elements of one list or mapping that are looked into."""

LARGEST = 1 << 22
"""Largest array, in bytes, that is hashed and copied; for a larger one there is only torch's count of writes."""

MOST = 50_000
"""The most objects that are looked at; a job that holds more is seen in part."""

NOTHING = "NoneType None"
"""The text of None in `values`."""

PLAIN = (bool, int, float, complex, str, bytes, type(None))
_CLOSED = (
    frozenset(sys.stdlib_module_names)
    | {"torch", "numpy", "ray", "mlflow", "pyarrow", "pydantic", "lockstep", "builtins"}
)  # fmt: skip
_OPEN = (nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler, types.SimpleNamespace)


class Memory:
    """What the `roots`, objects by their names in messages, hold at this moment.

    `values` has a text for what is at each place, such as `job.metric.total`; equal values have equal texts.
    Objects in `apart` are not looked into. Parameters and buffers of the `watched` modules, which are the model's, are left
    out: they are watched by other means. Arrays of more than `largest` bytes are not hashed. With `datasets` the plain values of datasets
    are seen too; `of_datasets` has their places.
    """

    def __init__(
        self,
        roots: Mapping[str, Any],
        *,
        apart: Iterable[Any] = (),
        watched: Iterable[nn.Module] = (),
        largest: int = LARGEST,
        datasets: bool = False,
    ) -> None:
        self.values: dict[str, str] = {}
        self.of_datasets: set[str] = set()
        self._datasets = datasets
        self._largest, self._watched = largest, {id(module) for module in watched}
        self._alive: list[Any] = list(apart)  # an id means something only while its object lives
        self._places: dict[int, str] = {}
        seen = {id(item) for item in self._alive}
        waiting = deque(roots.items())
        while waiting and len(self._alive) < MOST:
            path, value = waiting.popleft()
            if isinstance(value, PLAIN):
                self.values[path] = f"{type(value).__name__} {value!r}"
                continue
            if id(value) in seen:
                continue
            seen.add(id(value))
            self._places[id(value)] = path
            self._alive.append(value)
            waiting.extend(self._look(path, value))

    def changed_since(self, before: Memory, *, beside: Iterable[Any] = ()) -> list[str]:
        """The places whose values differ from those in `before`, in the order in which they are met; places in the objects `beside` are left out."""
        places = {**before.values, **self.values}
        roots = [root for item in beside if (root := self._places.get(id(item))) is not None]
        left_out = tuple(f"{root}{mark}" for root in roots for mark in ".[")
        return [
            path
            for path in places
            if before.values.get(path) != self.values.get(path) and not path.startswith(left_out)
        ]

    def keeps(self, place: str, *later: Mapping[str, str]) -> bool:
        """Whether a place keeps something between calls. A cache does not: it was empty before, and all `later` values are the same."""
        there = self.values.get(place, NOTHING) != NOTHING
        return there or len({values.get(place) for values in later}) > 1

    # --- one object -----------------------------------------------------------------------------------------

    def _look(self, path: str, value: Any) -> Iterator[tuple[str, Any]]:
        """Note one object, and yield what it holds."""
        if isinstance(value, Tensor):
            self._see_tensor(path, value)
        elif isinstance(value, np.ndarray):
            self._see_array(path, value)
        elif is_generator(value):
            self.values[path] = digest_of_state(generator_state(value))
        elif isinstance(value, dict):
            yield from self._see_dict(path, value)
        elif isinstance(value, list | tuple | deque | set | frozenset):
            yield from self._see_sequence(path, value)
        elif isinstance(value, types.ModuleType | type):
            if _top(value) not in _CLOSED:
                names = [name for name, child in vars(value).items() if name[:2] != "__" and is_data(child)]
                yield from ((f"{path}.{name}", getattr(value, name)) for name in names)
                yield from ((f"{path}.{name}", code) for name, code in _code_of(value))
        elif isinstance(value, types.FunctionType):
            yield from self._see_function(path, value)
        elif isinstance(value, types.MethodType):
            yield path, value.__self__
        elif isinstance(value, functools.partial):
            yield from ((path, child) for child in (value.func, *value.args, *value.keywords.values()))
        elif self._datasets and isinstance(value, Dataset):
            plain = {
                f"{path}.{name}": child for name, child in vars(value).items() if isinstance(child, PLAIN)
            }
            self.of_datasets |= plain.keys()
            yield from plain.items()
        elif is_open(value):
            yield from self._see_object(path, value)

    def _see_function(self, path: str, function: types.FunctionType) -> Iterator[tuple[str, Any]]:
        """The defaults of its arguments, which live as long as it does, its attributes, and what it closes over."""
        names, defaults = function.__code__.co_varnames, function.__defaults__ or ()
        first = function.__code__.co_argcount - len(defaults)
        yield from ((f"{path}.{names[first + i]}", child) for i, child in enumerate(defaults))
        yield from ((f"{path}.{name}", child) for name, child in (function.__kwdefaults__ or {}).items())
        yield from ((f"{path}.{name}", child) for name, child in list(vars(function).items()))
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            if cell != types.CellType():
                yield f"{path}.{name}", cell.cell_contents

    def _see_parameters(self, path: str, held: Mapping[str, Tensor | None]) -> Iterator[tuple[str, Any]]:
        """What the parameters or buffers of a module carry beside their numbers."""
        for name, tensor in held.items():
            if tensor is not None:
                yield from (
                    (f"{path}.{name}.{more}", attribute) for more, attribute in list(vars(tensor).items())
                )
                yield f"{path}.{name}", list((tensor._backward_hooks or {}).values())

    def _see_object(self, path: str, value: Any) -> Iterator[tuple[str, Any]]:
        own = getattr(value, "__dict__", None)
        if isinstance(own, dict):
            for name, attribute in list(own.items()):
                if isinstance(value, nn.Module) and name in {"_parameters", "_buffers"}:
                    yield from self._see_parameters(path, attribute)
                    if id(value) not in self._watched:
                        yield from ((f"{path}.{own}", tensor) for own, tensor in attribute.items())
                    continue
                if isinstance(value, nn.Module) and name == "_modules":
                    yield from ((f"{path}.{child}", module) for child, module in attribute.items())
                else:
                    yield f"{path}.{name}", attribute
        slots = [name for kind in type(value).__mro__ for name in vars(kind).get("__slots__", ())]
        names = [name for name in slots if name not in {"__dict__", "__weakref__"} and hasattr(value, name)]
        yield from ((f"{path}.{name}", getattr(value, name)) for name in names)

    def _see_dict(self, path: str, value: dict[Any, Any]) -> Iterator[tuple[str, Any]]:
        self.values[path] = f"mapping of {len(value)}"
        for i, (key, child) in enumerate(list(value.items())[:LONGEST]):
            yield f"{path}[{key!r}]" if isinstance(key, PLAIN) else f"{path}[#{i}]", child

    def _see_sequence(self, path: str, value: Any) -> Iterator[tuple[str, Any]]:
        self.values[path] = f"{type(value).__name__} of {len(value)}"
        if isinstance(value, set | frozenset):
            self.values[path] += (
                f" {sorted(map(repr, value))[:LONGEST]}" if all(isinstance(v, PLAIN) for v in value) else ""
            )
            return
        for i, child in enumerate(value):
            if i == LONGEST:
                return
            yield f"{path}[{i}]", child

    def _see_tensor(self, path: str, tensor: Tensor) -> None:
        if tensor.layout != torch.strided or tensor.device.type == "meta":
            return
        small = tensor.numel() * tensor.element_size() <= self._largest
        version = 0 if tensor.is_inference() else tensor._version  # torch does not count those
        self.values[path] = tensor_digest(tensor) if small else f"{tuple(tensor.shape)} version {version}"

    def _see_array(self, path: str, array: np.ndarray[Any, Any]) -> None:
        if array.dtype.hasobject or array.nbytes > self._largest:
            return
        self.values[path] = f"{array.dtype} {array.shape} {_digest(array.tobytes())}"


class HeldTensors(Memory):
    """The tensors that objects hold, by place, in `tensors`."""

    def __init__(self, roots: Mapping[str, Any], *, apart: Iterable[Any] = ()) -> None:
        self.tensors: dict[str, Tensor] = {}
        super().__init__(roots, apart=apart, largest=0)

    def _see_tensor(self, path: str, tensor: Tensor) -> None:
        if tensor.layout == torch.strided and tensor.device.type != "meta":
            self.tensors[path] = tensor


def is_open(value: Any) -> bool:
    """Whether an object is of the user's own class, or of one that is safe to look into."""
    if isinstance(value, Dataset | DataLoader):
        return False  # it may have caches, threads and files; its samples are compared instead
    return isinstance(value, _OPEN) or _top(type(value)) not in _CLOSED


def _top(value: types.ModuleType | type) -> str:
    """The package that a module or a class is from."""
    name = value.__name__ if isinstance(value, types.ModuleType) else value.__module__
    return name.partition(".")[0]


def top_is_closed(kind: type) -> bool:
    """Whether a class is from a package that is not looked into."""
    return _top(kind) in _CLOSED


def _code_of(owner: types.ModuleType | type) -> Iterator[tuple[str, Any]]:
    """The functions and classes that a module or a class defines itself, by name."""
    home = owner.__name__ if isinstance(owner, types.ModuleType) else owner.__module__
    for name, attribute in list(vars(owner).items()):
        code = getattr(attribute, "__func__", attribute)  # of a static method, or of one of the class
        if isinstance(code, types.FunctionType | type) and code.__module__ == home:
            yield name, code


def is_data(value: Any) -> bool:
    """Whether a value in a module or a class is data, not code."""
    code = (types.ModuleType, types.FunctionType, types.MethodType, type, staticmethod, classmethod, property)
    return not isinstance(value, code) and not (callable(value) and not isinstance(value, nn.Module))


def is_generator(value: Any) -> bool:
    """Whether an object is a generator of random numbers with a state: one of the operating system's has none."""
    kinds = torch.Generator | np.random.Generator | np.random.RandomState | random.Random
    return isinstance(value, kinds) and not isinstance(value, random.SystemRandom)


def generator_state(generator: Any) -> Any:
    """The state of a generator."""
    if isinstance(generator, torch.Generator):
        return generator.get_state().numpy().tobytes()
    if isinstance(generator, np.random.RandomState):
        return generator.get_state(legacy=False)
    return (
        generator.bit_generator.state if isinstance(generator, np.random.Generator) else generator.getstate()
    )


def digest_of_state(state: Any) -> str:
    """A hash of the state of a generator; equal states have equal ones."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(item) for key, item in value.items()}
        return value.tobytes() if isinstance(value, np.ndarray) else value

    return _digest(repr(plain(state)).encode())


def tensor_digest(tensor: Tensor) -> str:
    """Type, shape and a hash of the bytes of a strided tensor; of a sparse one, of its indices and of its values."""
    if tensor.is_sparse:
        parts = (
            part.clone(memory_format=torch.contiguous_format)
            for part in (tensor._indices(), tensor._values())
        )
        return " ".join([f"{tuple(tensor.shape)}", *map(tensor_digest, parts)])
    return f"{tensor.dtype} {tuple(tensor.shape)} {_digest(bytes_of(tensor.detach().cpu().contiguous()))}"


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have the same dtype, shape and bytes, so that NaN equals itself."""
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(_bytes(a), _bytes(b))


def _bytes(tensor: Tensor) -> Tensor:
    return row_of(tensor.detach().cpu()).view(torch.uint8)


def _digest(content: Any) -> str:
    return hashlib.sha256(content).hexdigest()[:32]
