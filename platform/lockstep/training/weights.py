"""Weights in safetensors files, from which no code can run. Those of a run have the version of their format in the metadata."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import safetensors
import safetensors.torch
from torch import Tensor

from lockstep.checkpoint.tensor_file import header_of, order_of
from lockstep.files import replaced, replacing
from lockstep.parsing import check_version
from lockstep.tensor_bytes import bytes_of
from lockstep.training import problems

VERSION = 1
_KEY = "lockstep-weights"


def save_weights(folder: Path, weights: Mapping[str, Mapping[str, Tensor]]) -> list[Path]:
    """Write each of `weights` to `<folder>/weights/<name>.safetensors`, whole or not at all. Returns the files."""
    return [_save(folder / "weights" / f"{name}.safetensors", tensors) for name, tensors in weights.items()]


def _save(path: Path, tensors: Mapping[str, Tensor]) -> Path:
    # Tied weights share memory, which safetensors refuses: give each name a tensor of its own.
    copies = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items()}
    try:
        with replaced(path) as aside:
            safetensors.torch.save_file(copies, aside, {_KEY: str(VERSION)})
    except (OSError, safetensors.SafetensorError) as error:
        raise problems.WEIGHTS_UNWRITABLE(path=path, got=error) from error
    return path


def save_streamed(
    path: Path | None, shapes: Mapping[str, Tensor], tensor: Callable[[str], Tensor | None]
) -> list[Path]:
    """Write a file of weights, one tensor after another; `shapes` has a meta tensor of each. Without a path this rank only calls `tensor`, in the same order.

    It needs the memory of the largest tensor. Returns the file. StorageError where it cannot be written, once `tensor` has been called for all.
    """
    if path is None:
        for name in order_of(shapes):
            tensor(name)
        return []
    left = iter(order_of(shapes))
    try:
        with replacing(path) as file:
            file.write(header_of(shapes, {_KEY: str(VERSION)}))
            for name in left:
                if (whole := tensor(name)) is not None:
                    file.write(bytes_of(whole.detach().cpu().contiguous()))
    except OSError as error:
        for name in left:  # the other ranks send them
            tensor(name)
        raise problems.WEIGHTS_UNWRITABLE(path=path, got=error) from error
    return [path]


def check_weights_version(path: Path) -> None:
    """OSError or SafetensorError where it is no file of weights; OtherVersionError where another Lockstep made it."""
    with safetensors.safe_open(path, "np") as file:  # "pt" would map the whole file as a tensor
        version = (file.metadata() or {}).get(_KEY)
    if version is not None:
        check_version(int(version) if version.isdecimal() else version, VERSION)


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a file of weights, from wherever it is. Errors as those of `check_weights_version`."""
    check_weights_version(path)
    found: dict[str, Tensor] = safetensors.torch.load_file(path)
    return found
