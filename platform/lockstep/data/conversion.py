"""What a job's collation gives, with its NumPy arrays as tensors; torch's own conversion would change more than that.

torch fills a copy of each mapping by `update`, which adds in a `Counter`. It also ends with a TypeError at an array of a kind that
it has no tensors of.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, MutableMapping, MutableSequence, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.job.collation import with_items


def converted(value: Any) -> Any:
    """`value` with the arrays and numbers of NumPy as tensors, in containers as well; a plain tuple becomes a list, as with torch's loader.

    Dates, text, records and objects, of which there are no tensors, stay arrays.
    """
    if isinstance(value, Tensor | str | bytes):
        return value
    if type(value).__module__ == "numpy":
        return _tensor(value)
    if isinstance(value, Mapping):
        return _converted_mapping(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(converted, value))
    if isinstance(value, tuple):
        return list(map(converted, value))
    if isinstance(value, Sequence):
        return _converted_sequence(value)
    return value


def _tensor(value: Any) -> Any:
    with suppress(TypeError, RuntimeError):
        try:
            return torch.as_tensor(value)
        except ValueError:  # a negative stride, or the other byte order: the same numbers are laid out anew
            return torch.as_tensor(np.array(value, value.dtype.newbyteorder("="), order="C"))
    return value


def _converted_mapping(value: Mapping[Any, Any]) -> Any:
    inner = {key: converted(value[key]) for key in value}
    if isinstance(value, MutableMapping):
        return with_items(value, inner)
    try:
        return type(value)(inner)  # type: ignore[call-arg]
    except TypeError:
        return inner


def _converted_sequence(value: Sequence[Any]) -> Any:
    inner = [converted(element) for element in value]
    try:
        if not isinstance(value, MutableSequence):
            return type(value)(inner)  # type: ignore[call-arg]
        clone = copy.copy(value)
        for i, new in enumerate(inner):
            clone[i] = new
        return clone
    except TypeError:  # such as a range
        return inner
