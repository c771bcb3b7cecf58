"""What a section of a spec is."""

from __future__ import annotations

import pydantic
from pydantic import BeforeValidator


class Section(pydantic.BaseModel):
    """Strict, immutable, without unknown keys."""

    model_config = pydantic.ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, populate_by_name=True
    )


def named(default: str) -> BeforeValidator:
    """Fill in the name that tells the kinds of a section apart, so that it may be left out."""
    return BeforeValidator(lambda value: {"name": default, **value} if isinstance(value, dict) else value)
