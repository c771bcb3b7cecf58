"""What a trainer and the process that evaluates for it tell each other. The weights are in a file without a name, which both have open."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Beginning:
    """The first that the process is told: what it is to build."""

    spec: Mapping[str, Any]
    """The document of the spec."""
    device: str
    fields: Mapping[str, Any]
    """Of the run's identity: the process must have the same."""
    table_versions: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Asked:
    """Evaluate what the file holds, on the sets with these labels."""

    step: int
    labels: Sequence[str]


@dataclass(frozen=True, slots=True)
class Measured:
    """What an evaluation gave."""

    metrics: Mapping[str, float]
    figures: Mapping[str, str]
    """The job's figures, as text by file name; on rank 0."""
    seconds: float
    at: float
    """When it was done, in Unix seconds."""


@dataclass(frozen=True, slots=True)
class Failed:
    """The process could not evaluate, and ends."""

    message: str


@dataclass(frozen=True, slots=True)
class AtWork:
    """A sign of life: the run is built, or another micro-batch is done."""


Told = Measured | Failed | AtWork
"""What the process tells."""
