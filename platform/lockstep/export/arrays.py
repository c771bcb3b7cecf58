"""Files of inputs and outputs: .npy (one array), .npz and .safetensors (arrays by name). Nothing in them is executed."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

import numpy as np
import safetensors
import safetensors.torch
import torch
from torch import Tensor

from lockstep.errors import nearest
from lockstep.export import problems
from lockstep.export.artifact import Artifact, Value, dtype_name
from lockstep.export.example import Example
from lockstep.files import replacing

SUFFIXES = (".npy", ".npz", ".safetensors")


def read(path: Path) -> dict[str, Tensor]:
    """The arrays of a file by name; that of a .npy has none, which is the name "". SpecError where it cannot be read."""
    check_suffix("inputs", path)
    try:
        if path.suffix == ".safetensors":
            return dict(safetensors.torch.load_file(path))
        loaded = np.load(path, allow_pickle=False)
        arrays = {"": loaded} if isinstance(loaded, np.ndarray) else dict(loaded)
        return {name: torch.from_numpy(np.asarray(array, order="C")) for name, array in arrays.items()}
    except (
        OSError,
        ValueError,
        TypeError,
        EOFError,
        zipfile.BadZipFile,
        safetensors.SafetensorError,
    ) as error:
        raise problems.INPUTS_UNREADABLE(file=path, got=" ".join(str(error).split())) from error


def check_suffix(option: str, path: Path) -> None:
    """SpecError where a file's name does not say which kind it is."""
    if path.suffix not in SUFFIXES:
        raise problems.FILE_KIND(option=option, got=path)


def inputs_of(arrays: Mapping[str, Tensor], values: tuple[Value, ...], fixed_batch: int | None) -> Example:
    """The arrays of a file as the inputs that are described, in their order. SpecError where they do not fit."""
    names = tuple(value.name for value in values)
    if set(arrays) == {""} and len(names) == 1:
        arrays = {names[0]: arrays[""]}
    if "" in arrays:
        raise problems.INPUTS_WITHOUT_NAMES(wanted=", ".join(names))
    for name in arrays:
        if name not in names:
            raise problems.INPUT_UNKNOWN(got=name, hint=nearest(name, names))
    rows: dict[str, int] = {}
    for value in values:
        if value.name not in arrays:
            raise problems.INPUT_MISSING(name=value.name, wanted=", ".join(names))
        array = arrays[value.name]
        start = int(value.has_rows(fixed_batch))
        if dtype_name(array.dtype) != value.dtype:
            raise problems.INPUT_DTYPE(name=value.name, got=dtype_name(array.dtype), wanted=value.dtype)
        if array.dim() != len(value.shape) or tuple(array.shape[start:]) != value.shape[start:]:
            raise problems.INPUT_SHAPE(name=value.name, got=tuple(array.shape), wanted=shape_text(value))
        if start:
            rows[value.name] = len(array)
    if len(set(rows.values())) > 1 or not min(rows.values(), default=1):
        raise problems.INPUT_ROWS(got=", ".join(f"{count} rows of {name!r}" for name, count in rows.items()))
    return Example(names, tuple(arrays[name] for name in names), tuple(name in rows for name in names))


def shape_text(value: Value) -> str:
    """A shape for a person: `(batch, 1, 8, 8)`."""
    return f"({', '.join('?' if size is None else str(size) for size in value.shape)}{',' * (len(value.shape) == 1)})"


def check_outputs(path: Path, artifact: Artifact) -> None:
    """SpecError where a file cannot hold the artifact's outputs."""
    check_suffix("output", path)
    if path.suffix == ".npy" and len(artifact.outputs) > 1:
        raise problems.OUTPUT_WITHOUT_NAMES(got=", ".join(value.name for value in artifact.outputs))
    if path.suffix != ".safetensors" and any(value.dtype == "bfloat16" for value in artifact.outputs):
        raise problems.OUTPUT_BFLOAT16()


def write(path: Path, arrays: Mapping[str, Tensor]) -> None:
    """Write arrays, whole or not at all. StorageError where the file cannot be written."""
    try:
        with replacing(path) as file:
            if path.suffix == ".safetensors":
                file.write(
                    safetensors.torch.save(
                        {name: array.contiguous().clone() for name, array in arrays.items()}
                    )
                )
            elif path.suffix == ".npz":
                _write_npz(file, arrays)
            else:
                np.save(file, next(iter(arrays.values())).numpy(), allow_pickle=False)
    except OSError as error:
        raise problems.OUTPUT_UNWRITABLE(file=path, got=error.strerror or error) from error


def _write_npz(file: BinaryIO, arrays: Mapping[str, Tensor]) -> None:
    """What `np.savez` writes, of arrays with any names: its own arguments are called `file` and `allow_pickle`."""
    with zipfile.ZipFile(file, "w") as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as entry:
                np.lib.format.write_array(entry, array.numpy(), allow_pickle=False)
