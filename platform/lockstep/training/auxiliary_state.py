"""What a model computes with besides its weights, in a file beside theirs: a run's weights outlive its checkpoints.

These are the buffers and parameters that `state_dict` leaves out, the extra state of modules, the plain attributes of modules that updates
have changed, and the state of the job, which may change the model.
Averaged weights compute with those of the final ones.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from lockstep.checkpoint.errors import BadCheckpointError
from lockstep.checkpoint.tree import Tree, pack
from lockstep.checkpoint.tree_decoder import unpack
from lockstep.files import replaced
from lockstep.job.interface import Job
from lockstep.parsing import check_version, strict_json
from lockstep.training import problems
from lockstep.training.failure import job_at
from lockstep.training.module_modes import ModuleSettings, Settings

VERSION = 1
_KEY = "lockstep-beside"


def beside_weights(model: nn.Module, job: Job, settings: Settings) -> dict[str, Tree]:
    """What there is besides the weights now, by kind; empty where there is nothing. Nothing is copied."""
    with job_at("in state_dict"):
        of_job = dict(job.state_dict())
    state = model.state_dict()
    extra = {name: value for name, value in state.items() if not isinstance(value, Tensor)}
    kinds = {"buffers": unlisted_tensors(model), "extra": extra, "job": of_job, "settings": dict(settings)}
    return {kind: tree for kind, tree in kinds.items() if tree}


def unlisted_tensors(model: nn.Module) -> dict[str, Tensor]:
    """What `state_dict` leaves out: a later step may read it all the same.

    These are buffers with `persistent=False`, and parameters that a `state_dict` of the model's own drops, such as a teacher's.
    """
    listed = model.state_dict(keep_vars=True)
    there = set(map(id, listed.values()))  # it may have renamed them
    parameters = (
        (name, parameter) for name, parameter in model.named_parameters() if id(parameter) not in there
    )
    named = (*model.named_buffers(), *parameters)
    return {name: tensor.detach() for name, tensor in named if name not in listed}


def put_beside(model: nn.Module, job: Job, weights: Mapping[str, Tensor], beside: Mapping[str, Tree]) -> None:
    """Load weights, and what was beside them, into a new model and its job. Raises whatever does not fit."""
    ModuleSettings(model).load(beside.get("settings", {}))
    model.load_state_dict({**weights, **beside.get("extra", {})})
    put_unlisted(model, job, beside)


def put_unlisted(model: nn.Module, job: Job, beside: Mapping[str, Tree]) -> None:
    """Load what no `state_dict` of the model has: its other buffers, and the state of its job."""
    saved, buffers = beside.get("buffers", {}), unlisted_tensors(model)
    if missing := sorted(buffers.keys() - saved.keys()):
        raise ValueError(f"the run's model had no buffer {missing[0]!r}")
    for name, value in saved.items():
        buffer = buffers.get(name)
        if buffer is not None and (buffer.shape, buffer.dtype) == (value.shape, value.dtype):
            buffer.copy_(value)  # modules may share it
        else:  # it came, or grew, while the run trained
            module_path, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(module_path), attribute, value)
    if of_job := beside.get("job"):
        job.load_state_dict(of_job)


def copied(beside: dict[str, Tree]) -> dict[str, Tree]:
    """A copy in host memory."""
    packed = pack(beside, "job")
    tensors = {name: tensor.detach().cpu().clone() for name, tensor in packed.tensors.items()}  # type: ignore[union-attr]
    copy: dict[str, Tree] = unpack(packed.skeleton, tensors)
    return copy


def beside_path(weights: Path) -> Path:
    """The file beside a file of weights."""
    return weights.with_suffix(f".beside{weights.suffix}")


def save_beside(weights: Path, beside: Mapping[str, Tree]) -> Path:
    """Write it beside the file `weights`, whole or not at all. Returns the file."""
    path, packed = beside_path(weights), pack(dict(beside), "job")
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in packed.tensors.items()}  # type: ignore[union-attr]
    try:
        with replaced(path) as aside:
            content = {"version": VERSION, "skeleton": packed.skeleton}
            safetensors.torch.save_file(tensors, aside, {_KEY: json.dumps(content)})
    except (OSError, safetensors.SafetensorError) as error:
        raise problems.WEIGHTS_UNWRITABLE(path=path, got=error) from error
    return path


def load_beside(weights: Path) -> dict[str, Tree]:
    """What `save_beside` wrote beside the file `weights`. StorageError where it cannot be read."""
    path = beside_path(weights)
    try:
        with safetensors.safe_open(path, "pt") as file:
            names = list(file.keys())
            content = strict_json((file.metadata() or {})[_KEY].encode())
            check_version(content["version"], VERSION)
            tensors = {name: file.get_tensor(name).clone() for name in names}
            loaded: dict[str, Tree] = unpack(content["skeleton"], tensors)
    except (
        OSError, safetensors.SafetensorError, KeyError, TypeError, ValueError, BadCheckpointError
    ) as error:  # fmt: skip
        raise problems.AUXILIARY_UNREADABLE(path=path, got=error) from error
    return loaded


def give_shape(buffer: Tensor, shape: torch.Size) -> None:
    """Give a buffer a shape, with any content. Where its memory is too small it gets other memory: that of a tensor that was ever seen as an array cannot be resized."""
    memory = buffer.untyped_storage().nbytes() // buffer.element_size() - buffer.storage_offset()
    if shape.numel() <= memory:
        buffer.resize_(shape)
        return
    fresh = buffer.new_empty(shape)
    buffer.set_(fresh.untyped_storage(), 0, shape, fresh.stride())
