"""Ray Train's configuration for a group of workers whose nodes Lockstep chooses. Workers get a copy, so this module imports little."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ray.train import ScalingConfig

Choose = Callable[[Mapping[str, Mapping[str, float]]], list[dict[str, str]] | None]
"""Takes what is free on each node; returns for each worker a label selector of one node."""


@dataclass
class ChosenNodes(ScalingConfig):  # type: ignore[misc]  # an untyped base
    """Ray Train's configuration of a group, and the function that chooses a node for each worker; without it, or without room, Ray chooses.

    Choosing avoids a loop in Ray: if Ray chose a place and its node is lost while the other workers go on, Ray tries the place for ever,
    100,000 times a second, as long as it would fit a node that others fill. That takes a core of the head node. A place on a named node
    waits for that node alone.
    """

    choose: Choose | None = None
