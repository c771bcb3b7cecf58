"""The digest of a model's weights: two models with one digest hold the same bits."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch


def weights_digest(state: Mapping[str, Any]) -> str:
    """sha256 over a `state_dict`, sorted by name.

    Each tensor adds `name|dtype|shape`, such as `fc.weight|torch.float32|(10, 64)`, then its contiguous bytes.
    """
    digest = hashlib.sha256()
    for name in sorted(state):
        tensor = state[name]
        if not isinstance(tensor, torch.Tensor):
            continue
        digest.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}".encode())
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        digest.update(flat.view(torch.uint8).numpy().data)
    return digest.hexdigest()
