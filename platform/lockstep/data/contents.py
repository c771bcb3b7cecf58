"""What a value holds, bit for bit: any sample or batch as a flat, deterministic sequence of texts.

Tensors, arrays and plain values are read directly. Any other object is read as pickle reads it (`__reduce_ex__`), so
dataclasses, named tuples, `__slots__`, `__getstate__`, images and graphs all show what they hold. What pickle cannot
take, such as a lock, an open file or a lambda, cannot be read here either.
"""

from __future__ import annotations

import datetime
import enum
import functools
import hashlib
import sys
import types
from collections.abc import Iterator, Mapping
from decimal import Decimal
from fractions import Fraction
from pathlib import PurePath
from typing import Any
from uuid import UUID

import numpy as np
import torch

from lockstep.job.typed_tree import Opaque, encoded
from lockstep.tensor_bytes import bytes_of

_PLAIN = (bool, int, float, complex, str, bytes, type(None))

_SAID = (
    np.number, np.bool_, np.str_, np.bytes_, np.datetime64, PurePath, datetime.date, datetime.time, datetime.timedelta, Decimal, Fraction, UUID, enum.Enum, torch.dtype, torch.device,
)  # fmt: skip
"""Further types of which `str` gives the whole value."""

_BY_NAME = (type, types.FunctionType, types.BuiltinFunctionType, np.ufunc, torch.dtype, torch.device)
"""What is known by its name: its content is source code, which a run's identity has already."""

_DEEPEST = 100
"""Levels of nesting that are followed; Python itself gives up at about a thousand frames."""


class UnreadableError(Exception):
    """An object whose content cannot be read. `kind` names its type, `reason` says why."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(kind, reason)
        self.kind = kind
        self.reason = reason


def leaves(value: Any, path: str = "", *, opaque: bool = False) -> Iterator[tuple[str, str]]:
    """Everything in `value`: where it is, and what it is, bit for bit. Equal values give equal leaves in every process.

    Raises UnreadableError for an object that cannot be looked into; with `opaque` only the type of such an object counts.
    """
    return _Walk(opaque).leaves(value, path)


def digest(value: Any) -> bytes:
    """sha256 over the leaves of a value. Raises UnreadableError."""
    hasher = hashlib.sha256()
    for leaf in leaves(value):
        hasher.update(repr(leaf).encode())
    return hasher.digest()


def tree_of(value: Any) -> Any:
    """A value as one field of a run's identity: text, numbers and lists of them as they are, anything else as a digest. Raises UnreadableError."""
    return encoded(value if _is_plain(value) else Opaque("sha256", digest(value).hex()), _said)


def _said(value: Any) -> Opaque:
    """The text of a value of which `str` gives all."""
    if isinstance(value, torch.Size):
        return Opaque(_kind(value), list(value))
    return Opaque(_kind(value), str(value))


def _is_plain(value: Any) -> bool:
    """Whether a value can be read in full, and reads the same in every process."""
    if isinstance(value, Mapping):
        return type(value) is dict and all(_is_plain(item) for pair in value.items() for item in pair)
    if isinstance(value, list | tuple):
        return type(value) in {list, tuple, torch.Size} and all(map(_is_plain, value))
    return type(value) in _PLAIN or isinstance(value, _SAID)


class _Walk:
    """One walk over a value; it knows the objects that it is inside of, so that a cycle ends."""

    def __init__(self, opaque: bool) -> None:
        self._opaque = opaque
        self._inside: list[int] = []

    def leaves(self, value: Any, path: str) -> Iterator[tuple[str, str]]:
        if type(value) in _PLAIN:
            yield path, f"{type(value).__name__} {value!r}"
            return
        if id(value) in self._inside:
            yield path, f"the object {len(self._inside) - self._inside.index(id(value))} levels up"
            return
        if len(self._inside) >= _DEEPEST:
            raise UnreadableError(_kind(value), f"it is nested more than {_DEEPEST} levels deep")
        self._inside.append(id(value))
        try:
            yield from self._inner(value, path)
        finally:
            self._inside.pop()

    def _inner(self, value: Any, path: str) -> Iterator[tuple[str, str]]:
        match value:
            case enum.Enum():
                yield path, f"{_kind(value)}.{value.name}"
            case Mapping():
                yield from self._mapping(value, path)
                yield from self._attributes(value, path, Mapping)
            case list() | tuple():
                yield path, f"{type(value).__name__} of {len(value)}"
                for i, inner in enumerate(value):
                    yield from self.leaves(inner, f"{path}[{i}]")
                yield from self._attributes(value, path, list)
            case set() | frozenset():
                yield path, f"{type(value).__name__} {sorted(self._digest(inner) for inner in value)}"
            case torch.Tensor():
                yield from self._tensor(value, path)
                yield from self._attributes(value, path, torch.Tensor)
            case np.ndarray() | np.generic():
                yield from self._array(value, path)
                yield from self._attributes(value, path, np.ndarray)
            case bytearray() | memoryview():
                yield path, f"{type(value).__name__} {hashlib.sha256(bytes(value)).hexdigest()}"
            case functools.partial():
                yield from self._object(value, path, (value.func, value.args, value.keywords))
            case _ if isinstance(value, _BY_NAME):
                yield from self._named(value, path)
            case _:
                yield from self._reduced(value, path)

    def _mapping(self, value: Mapping[Any, Any], path: str) -> Iterator[tuple[str, str]]:
        plain = all(type(key) in _PLAIN for key in value)
        keys = list(value) if plain else [self._digest(key) for key in value]
        yield path, f"mapping of {keys}"
        for name, inner in zip(keys, value.values(), strict=True):
            yield from self.leaves(inner, f"{path}[{name!r}]")

    def _tensor(self, value: torch.Tensor, path: str) -> Iterator[tuple[str, str]]:
        tensor = value.detach()
        if tensor.layout != torch.strided:
            yield path, f"{tensor.layout} {tensor.dtype} {tuple(tensor.shape)}"
            for name in PARTS.get(tensor.layout, ()):
                yield from self.leaves(getattr(tensor, name)(), f"{path}.{name}")
            if tensor.layout not in PARTS:
                yield from self._unreadable(value, path, f"its layout is {tensor.layout}")
        elif tensor.is_quantized or tensor.is_nested or tensor.device.type == "meta":
            yield from self._reduced(value, path)
        else:
            tensor = tensor.cpu().resolve_conj().resolve_neg().contiguous()
            content_digest = hashlib.sha256(bytes_of(tensor)).hexdigest()
            yield path, f"{tensor.dtype} {tuple(tensor.shape)} {content_digest}"

    def _array(self, value: Any, path: str) -> Iterator[tuple[str, str]]:
        if value.dtype.hasobject or value.dtype.names:  # pointers, or padding between the fields
            yield path, f"{value.dtype} {value.shape}"
            yield from self.leaves(value.tolist(), path)
        else:
            yield path, f"{value.dtype} {value.shape} {hashlib.sha256(value.tobytes()).hexdigest()}"

    def _named(self, value: Any, path: str) -> Iterator[tuple[str, str]]:
        if isinstance(value, torch.dtype | torch.device):
            yield path, str(value)
            return
        module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", value.__name__)
        resolved: Any = sys.modules.get(module or "")
        for part in name.split("."):
            resolved = getattr(resolved, part, None)
        if (
            resolved is value
            or getattr(value, "__self__", None) is not None
            or isinstance(value, type | np.ufunc)
        ):
            yield path, f"{module}.{name}"
            if getattr(value, "__self__", None) is not None and not isinstance(
                value.__self__, types.ModuleType
            ):
                yield from self.leaves(value.__self__, f"{path}.__self__")
        else:
            yield from self._unreadable(value, path, f"{name} cannot be found by its name")

    def _attributes(self, value: Any, path: str, known: type) -> Iterator[tuple[str, str]]:
        """What an object of a derived type carries beside its content."""
        if type(value).__module__ in {"builtins", "torch", "numpy"}:
            return
        attributes = {
            name: inner
            for name, inner in getattr(value, "__dict__", {}).items()
            if not _is_view(inner, value)
        }
        if attributes:
            yield path, f"{_kind(value)} with {list(attributes)}"
            for name, inner in attributes.items():
                yield from self.leaves(inner, f"{path}.{name}")

    def _reduced(self, value: Any, path: str) -> Iterator[tuple[str, str]]:
        """Any other object, taken apart as pickle takes it apart."""
        try:
            parts = value.__reduce_ex__(4)
            if isinstance(parts, tuple):
                parts = [list(part) if isinstance(part, Iterator) else part for part in parts]
        except Exception as error:  # noqa: BLE001 - an object's own code, which may raise anything
            yield from self._unreadable(value, path, " ".join(str(error).split()) or type(error).__name__)
            return
        yield from self._object(value, path, parts)

    def _object(self, value: Any, path: str, parts: Any) -> Iterator[tuple[str, str]]:
        yield path, _kind(value)
        if isinstance(parts, str):  # a global, by its name
            yield path, parts
            return
        for part in parts:
            if isinstance(part, dict):  # its attributes, with paths as they are written
                yield path, f"attributes {[name if isinstance(name, str) else repr(name) for name in part]}"
                for name, inner in part.items():
                    yield from self.leaves(inner, f"{path}.{name}")
            else:
                yield from self.leaves(part, path)

    def _unreadable(self, value: Any, path: str, reason: str) -> Iterator[tuple[str, str]]:
        if not self._opaque:
            raise UnreadableError(_kind(value), reason)
        yield path, _kind(value)

    def _digest(self, value: Any) -> str:
        """The digest of a member of a set, or of a key, without its position among the others."""
        hasher = hashlib.sha256()
        for leaf in self.leaves(value, ""):
            hasher.update(repr(leaf).encode())
        return hasher.hexdigest()


PARTS = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}
"""The tensors that a sparse tensor is made of."""


def _is_view(inner: Any, value: Any) -> bool:
    """Whether an attribute is what the object was read as already: the dict inside a UserDict, an array's base."""
    return inner is value or (
        isinstance(value, Mapping) and isinstance(inner, dict) and inner.keys() == value.keys()
    )


def _kind(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
