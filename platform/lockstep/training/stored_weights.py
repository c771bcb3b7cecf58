"""Weights that a run begins with, still in their files: whoever needs some rows of a tensor reads these alone.

They lie in a safetensors file, in a folder of several with an index, as Hugging Face writes them, or in a checkpoint of a run.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch import Tensor, nn

from lockstep.checkpoint.layout import manifests
from lockstep.checkpoint.reader import ByRows, Checkpoint, checkpoint_at, load
from lockstep.checkpoint.stored_tensor import StoredTensor, in_memory
from lockstep.checkpoint.tensor_file import read_locations
from lockstep.checkpoint.tree import DTYPES
from lockstep.communication.group import Group
from lockstep.errors import SpecError, StorageError
from lockstep.parsing import OtherVersionError, strict_json
from lockstep.training import problems
from lockstep.training.read_relay import Relay
from lockstep.training.start import verified_together
from lockstep.training.weights import check_weights_version

INDEX = "model.safetensors.index.json"
"""The file that says in which file of a folder each tensor lies."""

SINGLE = "model.safetensors"
"""The file of a folder that has all tensors."""

MOST_INDEX_BYTES = 100_000_000


def stored_weights(given: str, group: Group) -> dict[str, Any]:
    """The tensors of `initial_weights` by name, `StoredTensor`s but for small ones of a checkpoint. All ranks of the group call it.

    A rank reads tables of contents alone; the files of a checkpoint are verified first, by all ranks together. SpecError where it is unreadable.
    """
    path = Path(given)
    try:
        if path.is_dir() and manifests(file.name for file in path.iterdir()):
            return _of_checkpoint(checkpoint_at(given), group)
        return dict(stored_folder(path))
    except (
        OSError,
        ValueError,
        KeyError,
        StorageError,
        safetensors.SafetensorError,
        OtherVersionError,
    ) as error:
        raise unreadable(given, error) from error


def unreadable(given: object, error: Exception) -> SpecError:
    """The error for weights that cannot be read."""
    return problems.WEIGHTS_UNREADABLE(path=given, got=error)


def _files(path: Path) -> dict[Path, list[str] | None]:
    """The files that hold the tensors, with the names of those in each; None for all that are there."""
    if not path.is_dir():
        return {path: None}
    index = path / INDEX
    if not index.exists():
        return {path / SINGLE: None}
    content = strict_json(index.read_bytes(), most=MOST_INDEX_BYTES)
    files: dict[Path, list[str] | None] = {}
    for name, file in content["weight_map"].items():
        if not isinstance(file, str) or Path(file).name != file:
            raise ValueError(f"{INDEX} names the file {file!r}, wanted one of its folder")
        names = files.setdefault(path / file, [])
        assert names is not None
        names.append(name)
    return files


def stored_folder(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a safetensors file, or of a folder of several with an index. OSError, ValueError, KeyError, SafetensorError or StorageError."""
    tensors: dict[str, StoredTensor] = {}
    for file, names in _files(path).items():
        of_file = _of_file(file)
        if missing := [name for name in names or () if name not in of_file]:
            raise ValueError(f"{file.name} has no {missing[0]!r}, which the index says it has")
        tensors |= of_file if names is None else {name: of_file[name] for name in names}
    return tensors


def _of_file(path: Path) -> dict[str, StoredTensor]:
    check_weights_version(path)
    at = 0

    def next_bytes(buffer: memoryview) -> None:
        nonlocal at
        _fill(path, at, buffer)
        at += len(buffer)

    locations = read_locations(next_bytes, path.stat().st_size)
    return {
        name: StoredTensor(
            DTYPES[location.dtype], torch.Size(location.shape), partial(_fill_tensor, path, location.start)
        )
        for name, location in locations.items()
    }


def _fill_tensor(path: Path, start: int, at: int, buffer: memoryview) -> None:
    _fill(path, start + at, buffer)


def _fill(path: Path, at: int, buffer: memoryview) -> None:
    """Fill `buffer` with the bytes of a file from `at` on. ValueError where it has too few."""
    with path.open("rb", buffering=0) as file:
        file.seek(at)
        filled = 0
        while filled < len(buffer):
            count = file.readinto(buffer[filled:])
            if not count:
                raise ValueError(f"{path.name} ends before byte {at + len(buffer)}")
            filled += count


def _of_checkpoint(checkpoint: Checkpoint, group: Group) -> dict[str, Any]:
    by_rows = ByRows({"model"}, checkpoint.storage, partial(verified_together, group, checkpoint.storage))
    model: Any = load(checkpoint, only={"model"}, by_rows=by_rows).sections["model"]
    return {name: value for name, value in model["state"].items() if isinstance(value, Tensor | StoredTensor)}


def completed(model: nn.Module, weights: Mapping[str, Any]) -> dict[str, Any]:
    """`weights` with what a `state_dict` of the model has beside tensors, and each tied tensor under all of its names: a file may have it once."""
    state = model.state_dict(keep_vars=True)
    first = {id(state[name]): name for name in weights if isinstance(state.get(name), Tensor)}
    beside = {name: value for name, value in state.items() if not isinstance(value, Tensor)}
    tied = {name: weights[first[id(value)]] for name, value in state.items() if id(value) in first}
    return {**beside, **tied, **weights}


def why_not_by_rows(model: nn.Module, weights: Mapping[str, Any]) -> str:
    """Why such weights are not to be put into the model's parameters one by one; empty where they are. The model's own code may take others."""
    for name, module in model.named_modules():
        own = type(module)._load_from_state_dict is not nn.Module._load_from_state_dict
        if (
            type(module).load_state_dict is not nn.Module.load_state_dict
            or (own and not type(module).__module__.startswith("torch.nn."))
            or module._load_state_dict_pre_hooks
            or module._load_state_dict_post_hooks
        ):
            return f"{name or 'the model'!r} loads weights in a way of its own"
    shapes = {name: value.shape for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    if {
        name: value.shape for name, value in weights.items() if name in shapes
    } != shapes or weights.keys() - model.state_dict().keys():
        return "the names or shapes of initial_weights are not those of the model"
    return ""


def load_weights(model: nn.Module, given: str, group: Group | None = None) -> None:
    """Fill the whole model with weights, which rank 0 of a `group` reads for all. SpecError where they are unreadable or do not fit."""

    def read() -> dict[str, Tensor]:
        alone = Group(0, 1, torch.device("cpu"))
        try:
            return {name: in_memory(value) for name, value in stored_weights(given, alone).items()}
        except (OSError, ValueError, StorageError) as error:
            raise unreadable(given, error) from error

    weights = read() if group is None or group.size == 1 else Relay(group).tensors(given, read)
    try:
        model.load_state_dict(completed(model, weights))
    except RuntimeError as error:
        text = " ".join(str(error).split())
        raise problems.OTHER_WEIGHTS(path=given, got=text) from error
