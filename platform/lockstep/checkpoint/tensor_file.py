"""Tensors in one file, in the format of safetensors: bytes and a table of contents, nothing that can run.

Files are written and read as a stream, so that each byte is hashed as it passes: the library writes without
giving the hash, and reads into a second copy. Every tensor that is read has memory of its own, aligned as
torch aligns it: an offset within a file must never change the bits of what is computed from it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lockstep.checkpoint import problems
from lockstep.checkpoint.tree import DTYPES, METADATA, NAMES
from lockstep.parsing import one_line, strict_json
from lockstep.tensor_bytes import bytes_of

_LONGEST_HEADER = 100_000_000  # the library's own limit


def tensor_pieces(tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    """The bytes of the file. The tensors must be contiguous and in host memory, and must not change until the bytes are read."""
    yield header_of(tensors)
    for name in order_of(tensors):
        yield bytes_of(tensors[name])


def order_of(tensors: Mapping[str, Tensor]) -> list[str]:
    """The names of tensors in the order in which they lie in a file."""
    # Wide types first: then every tensor begins at a multiple of its element size, as the format requires.
    return sorted(tensors, key=lambda name: (-tensors[name].itemsize, name))


def header_of(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> bytes:
    """What precedes the bytes of the tensors, which may be without memory (meta), in their order."""
    order, end = order_of(tensors), 0
    contents: dict[str, Any] = {} if metadata is None else {METADATA: dict(metadata)}
    for name in order:
        tensor, begin = tensors[name], end
        end += tensor.nbytes
        contents[name] = {
            "dtype": NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    header = json.dumps(contents, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header


class TensorLocation(NamedTuple):
    """Where a tensor lies in a file: from byte `start` of the file on."""

    dtype: str
    """Its type by its name in safetensors."""
    shape: tuple[int, ...]
    start: int
    nbytes: int


def read_tensors(fill: Callable[[memoryview], None], size: int) -> dict[str, Tensor]:
    """The tensors of a file of `size` bytes; `fill` fills a buffer with the next bytes.

    It allocates no more memory than the file has bytes. BadCheckpointError where the file is not of this format.
    """
    tensors = {}
    locations = read_locations(fill, size)
    for name, location in sorted(locations.items(), key=lambda item: item[1].start):
        with _is_format():
            tensors[name] = torch.empty(location.shape, dtype=DTYPES[location.dtype])
        fill(bytes_of(tensors[name]))
    return {name: tensors[name] for name in locations}


def read_locations(fill: Callable[[memoryview], None], size: int) -> dict[str, TensorLocation]:
    """Where each tensor of such a file lies; `fill` fills a buffer with its first bytes. Errors as in `read_tensors`."""
    with _is_format():
        return _locations(*_contents(fill, size), size)


@contextmanager
def _is_format() -> Iterator[None]:
    try:
        yield
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise problems.UNREADABLE(wanted="safetensors file", got=one_line(error)) from error


def _contents(fill: Callable[[memoryview], None], size: int) -> tuple[dict[str, Any], int]:
    """The table of contents, and the number of bytes that follow it."""
    if size < 8:
        raise ValueError(f"{size} bytes hold no table of contents")
    front = bytearray(8)
    fill(memoryview(front))
    length = int.from_bytes(front, "little")
    if length > min(size - 8, _LONGEST_HEADER):
        raise ValueError(f"a table of contents of {length} bytes does not fit")
    header = bytearray(length)
    fill(memoryview(header))
    contents = strict_json(header, most=_LONGEST_HEADER)
    contents.pop(METADATA, None)
    return contents, size - 8 - length


def _locations(contents: dict[str, Any], remaining: int, size: int) -> dict[str, TensorLocation]:
    locations, end = {}, 0
    for name in sorted(contents, key=lambda name: contents[name]["data_offsets"]):
        entry = contents[name]
        dtype, shape = DTYPES[entry["dtype"]], entry["shape"]
        begin, stop = entry["data_offsets"]
        if not all(type(number) is int and number >= 0 for number in (begin, stop, *shape)):
            raise ValueError(f"{name!r} has no sizes")
        if begin != end or stop > remaining or stop - begin != math.prod(shape) * dtype.itemsize:
            raise ValueError(
                f"the byte range of {name!r} leaves a gap, overlaps another or has the wrong size"
            )
        end = stop
        locations[name] = TensorLocation(entry["dtype"], tuple(shape), size - remaining + begin, stop - begin)
    if end != remaining:
        raise ValueError(f"{remaining - end} bytes belong to no tensor")
    return {name: locations[name] for name in contents}
