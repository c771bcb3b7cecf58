"""Ray Train's configuration of a group of workers whose nodes are chosen here. Workers get a copy: this module imports little."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ray.train import ScalingConfig

Choose = Callable[[Mapping[str, Mapping[str, float]], bool], list[dict[str, str]] | None]
"""From what is free on each node, and whether the nodes that are to be tried first have to be among them: a label selector for each worker, of one node."""


@dataclass
class ChosenNodes(ScalingConfig):  # type: ignore[misc]  # an untyped base
    """Ray Train's configuration of a group, and what chooses a node for each worker; without it, or without room, Ray chooses.

    A place that Ray chose and whose node is lost while the other workers go on is tried for ever, 100,000 times a second,
    if it would fit a node that others fill: a core of the head node is gone. One of a named node waits for that node alone.
    """

    choose: Choose | None = None
