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
"""The places of these parameters, where they are not given by name."""


class DropoutSeen(TorchFunctionMode):
    """While it is entered, notes the name of the last function that was to drop something. It changes no result."""

    called = ""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}

        def given(name: str, place: int, default: Any) -> Any:
            return named.get(name, args[place] if len(args) > place else default)

        if func in _DROPOUTS:
            drops = given(
                "training", _TRAINING, func is not F.alpha_dropout and func is not F.feature_alpha_dropout
            )
            if drops and given("p", _P, 0.5) > 0:
                self.called = func.__name__
        elif func is F.scaled_dot_product_attention and given("dropout_p", _DROPOUT_P, 0.0) > 0:
            self.called = func.__name__
        return func(*args, **named)
