"""Dropout that is at work: calls of torch's functions for it that drop something, whatever mode the modules are in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

_DROPOUTS = frozenset(
    {F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout}
)
_P, _TRAINING, _DROPOUT_P = 1, 2, 4
"""The positions of these parameters, if they are not given by name."""


class DropoutSeen(TorchFunctionMode):
    """While it is entered, notes the name of the last function that was to drop something. It changes no result."""

    called = ""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}

        def argument(name: str, position: int, default: Any) -> Any:
            return named.get(name, args[position] if len(args) > position else default)

        if func in _DROPOUTS:
            drops = argument(
                "training", _TRAINING, func is not F.alpha_dropout and func is not F.feature_alpha_dropout
            )
            if drops and argument("p", _P, 0.5) > 0:
                self.called = func.__name__
        elif func is F.scaled_dot_product_attention and argument("dropout_p", _DROPOUT_P, 0.0) > 0:
            self.called = func.__name__
        return func(*args, **named)
