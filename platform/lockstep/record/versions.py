"""The versions of installed packages, from their metadata: nothing is imported for it."""

from __future__ import annotations

import importlib.metadata
import platform
import sys
from functools import cache

DISTRIBUTION = "lockstep-train"
"""The name under which Lockstep is installed."""

_DISTRIBUTIONS = {
    "lockstep": DISTRIBUTION,
    **{name: name for name in ("torch", "numpy", "ray", "mlflow", "pyarrow", "pydantic", "safetensors")},
}


@cache
def versions() -> dict[str, str]:
    """The versions of Python and the libraries, by name; a library that is not installed is left out."""
    by_name = {"python": platform.python_version(), "python_implementation": sys.implementation.name}
    for name, distribution in _DISTRIBUTIONS.items():
        try:
            by_name[name] = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue  # a record needs no MLflow, and a plain process needs no Ray
    return by_name
