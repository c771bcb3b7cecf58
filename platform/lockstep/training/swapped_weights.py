"""The model with other weights than those that it trains: those of an earlier step, with what it computed with besides."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from lockstep.training.auxiliary_state import beside_weights, copied, give_shape, put_unlisted
from lockstep.training.state import TrainState, tensors
from lockstep.training.step.shards import Shard


@contextmanager
def weights_shown(state: TrainState, weights: Mapping[str, Any], beside: Mapping[str, Any]) -> Iterator[None]:
    """The model with `weights`, tensors or shards, and what was `beside` them; afterwards as it was, bit for bit."""
    trained = {name: _values(value).detach().clone() for name, value in tensors(state).items()}
    own = copied(beside_weights(state.model, state.job, state.settings.changed))
    try:
        put_weights(state, {name: _values(value) for name, value in weights.items()}, beside)
        yield
    finally:
        put_weights(state, trained, own)


def put_weights(state: TrainState, weights: Mapping[str, torch.Tensor], beside: Mapping[str, Any]) -> None:
    """Load weights, and what was beside them, into the state's model and job."""
    state.settings.load(beside.get("settings", {}))
    with torch.no_grad():
        whole = {**weights, **beside.get("extra", {})}
        for name, value in tensors(state).items():
            if isinstance(value, Shard):
                value.local.copy_(whole.pop(name))
        for name, buffer in state.model.named_buffers():
            if (
                name in weights and buffer.shape != weights[name].shape
            ):  # an observer's first forward makes it grow
                give_shape(buffer, weights[name].shape)
        state.model.load_state_dict(whole, strict=state.sharding is None)
        put_unlisted(state.model, state.job, beside)


def _values(value: Any) -> torch.Tensor:
    """A tensor, or this worker's rows of one that is sharded."""
    tensor: torch.Tensor = value.local if isinstance(value, Shard) else value
    return tensor
