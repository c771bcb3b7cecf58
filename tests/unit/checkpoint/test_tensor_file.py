"""The tensor file is safetensors, both ways; whatever else is in it is refused before it costs anything."""

from __future__ import annotations

import io
import json
import pickle
from pathlib import Path

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lockstep.checkpoint import problems
from lockstep.checkpoint.errors import BadCheckpointError
from lockstep.checkpoint.tensor_file import read_tensors, tensor_pieces
from lockstep.checkpoint.tree import DTYPES
from tests.raised import raises
from tests.unit.checkpoint.states import bits, same

EVERY = {name: bits(dtype, 3, 2, seed=i) for i, (name, dtype) in enumerate(DTYPES.items())}
EVERY |= {"alone": torch.tensor(1.5), "none": torch.empty(0, 4), 'a "name" / ü': torch.ones(1)}


def written(tensors: dict[str, Tensor]) -> bytes:
    return b"".join(bytes(piece) for piece in tensor_pieces(tensors))


def read(content: bytes) -> dict[str, Tensor]:
    stream = io.BytesIO(content)

    def fill(buffer: memoryview) -> None:
        if stream.readinto(buffer) != len(buffer):
            raise BadCheckpointError("it ends too early")

    found = read_tensors(fill, len(content))
    assert stream.read() == b""
    return found


def test_the_library_reads_what_is_written() -> None:
    found = safetensors.torch.load(written(EVERY))
    assert set(found) == set(EVERY)
    assert all(same(found[name], tensor) for name, tensor in EVERY.items())


def test_what_the_library_writes_is_read() -> None:
    found = read(safetensors.torch.save(EVERY, {"format": "pt"}))
    assert set(found) == set(EVERY)
    assert all(same(found[name], tensor) for name, tensor in EVERY.items())


def test_nothing_at_all_is_a_file_too() -> None:
    assert read(written({})) == {}


def with_header(header: object, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(shape: object = (2,), offsets: object = (0, 8), dtype: object = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"1234567",
        b"\xff" * 8,
        (10**15).to_bytes(8, "little") + b"{}",
        with_header([]),
        with_header(b"{"),
        with_header({"x": 3}),
        with_header({"x": entry(dtype="OBJECT")}, bytes(8)),
        with_header({"x": entry(dtype=["F32"])}, bytes(8)),
        with_header({"x": entry(shape=(10**9, 10**9), offsets=(0, 8))}, bytes(8)),
        with_header({"x": entry(shape=(10**12,), offsets=(0, 4 * 10**12))}, bytes(8)),
        with_header({"x": entry(shape=(-2,), offsets=(0, -8))}, bytes(8)),
        with_header({"x": entry(shape=(-1, -2))}, bytes(8)),
        with_header({"x": entry(shape=(2.0,))}, bytes(8)),
        with_header({"x": entry(shape=(True, 2))}, bytes(8)),
        with_header({"x": entry(shape="ab")}, bytes(8)),
        with_header({"x": entry(offsets=(8, 16))}, bytes(16)),
        with_header({"x": entry(), "y": entry()}, bytes(8)),
        with_header({"x": entry()}, bytes(9)),
        with_header({"x": entry()}, bytes(7)),
        with_header(b'{"x": {"dtype": "F32"}}'),
        pickle.dumps({"x": 1}),
    ],
)
def test_a_file_of_another_kind_is_refused(content: bytes) -> None:
    with pytest.raises(BadCheckpointError):
        read(content)


@settings(max_examples=300)
@given(st.data())
def test_a_changed_file_is_refused_or_read_without_harm(data: st.DataObject) -> None:
    """Hashes catch every change; the reader itself must stand any bytes as well."""
    content = bytearray(written({"x": bits(torch.float32, 3), "y": bits(torch.int8, 2)}))
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    try:
        read(bytes(content))
    except BadCheckpointError as error:
        assert "\n" not in str(error)


def test_a_file_of_torch_save_is_refused(tmp_path: Path) -> None:
    torch.save({"x": torch.ones(2)}, tmp_path / "x.pt")
    with raises(problems.UNREADABLE, wanted="safetensors file"):
        read((tmp_path / "x.pt").read_bytes())
