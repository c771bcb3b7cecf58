"""Digests of weights and of a whole state: equal digests mean equal bits."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any

import torch

from lockstep.checkpoint.tree import pack
from lockstep.tensor_bytes import bytes_of


def weights_digest(state: Mapping[str, Any], whole: Callable[[Any], Any] = lambda value: value) -> str:
    """sha256 over a `state_dict`, sorted by name; `whole` gives each value that counts, one after another in that order.

    Each tensor adds `name|dtype|shape`, such as `fc.weight|torch.float32|(10, 64)`, then its contiguous bytes.
    """
    digest = hashlib.sha256()
    for name in sorted(state):
        tensor = whole(state[name])
        if not isinstance(tensor, torch.Tensor):
            continue
        digest.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}".encode())
        digest.update(bytes_of(tensor.detach().cpu().contiguous()))
    return digest.hexdigest()


def tensor_digests(state: Mapping[str, Any]) -> dict[str, str]:
    """`weights_digest` of each tensor of a `state_dict` by itself, in its order."""
    return {
        name: weights_digest({name: value})
        for name, value in state.items()
        if isinstance(value, torch.Tensor)
    }


def tree_digest(tree: Any) -> str:
    """sha256 over a tree of tensors and plain values, as a checkpoint would hold it."""
    packed = pack(tree)
    digest = hashlib.sha256(json.dumps(packed.skeleton, sort_keys=True).encode())
    digest.update(weights_digest(packed.tensors).encode())
    return digest.hexdigest()
