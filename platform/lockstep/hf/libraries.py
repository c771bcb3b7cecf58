"""Hugging Face's libraries, imported where they are first used, and kept from the network and from the terminal."""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from lockstep.errors import SpecError
from lockstep.hf import problems

DECIDING = ("transformers", "tokenizers", "peft")
"""The libraries whose versions decide about a run's bits."""


def transformers() -> Any:
    """The module. SpecError where it is not installed."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when the library is first imported
    try:
        import transformers
    except ImportError as error:
        raise _missing("transformers", error) from error
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers


def wrong_field() -> type[Exception]:
    """What transformers raises for a field of a config whose value is of another type than the field."""
    transformers()
    from huggingface_hub.errors import StrictDataclassError

    return StrictDataclassError


def peft() -> Any:
    """The module. SpecError where it is not installed."""
    transformers()
    try:
        import peft
    except ImportError as error:
        raise _missing("peft", error) from error
    return peft


def versions() -> dict[str, str]:
    """The versions of what decides about the bits; of what is not installed, `none`."""
    by_name = {}
    for name in DECIDING:
        try:
            by_name[name] = version(name)
        except PackageNotFoundError:
            by_name[name] = "none"
    return by_name


def _missing(name: str, error: ImportError) -> SpecError:
    return problems.LIBRARY_MISSING(name=name, got=error)
