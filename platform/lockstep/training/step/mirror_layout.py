"""Which worker mirrors which, and from whom the parts of a lost worker are taken."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from typing import Any, NamedTuple

from lockstep.training.integrity.quantities import Quantity
from lockstep.training.step import problems
from lockstep.training.step.shards import Elements


def node_name() -> str:
    """What is the same for the workers of a node, and of no other: of several nodes on a machine, the one that started this process."""
    return f"{platform.node()}/{os.environ.get('RAY_RAYLET_PID', '')}"


def mirrors(nodes: Sequence[str]) -> tuple[int, ...]:
    """By rank, the rank that keeps a mirror of its spans; `nodes` are those of the ranks. Each rank keeps one mirror, a single one none.

    It is so many ranks ahead, the same for all, that as many mirrors as possible are on another node.
    """
    ranks = len(nodes)

    def crossing(shift: int) -> int:
        return sum(nodes[rank] != nodes[(rank + shift) % ranks] for rank in range(ranks))

    shift = max(range(1, ranks), key=lambda shift: (crossing(shift), -shift), default=0)
    return tuple((rank + shift) % ranks for rank in range(ranks))


class Layout(NamedTuple):
    """How a group shares out the state. `number` grows with each group that a run forms."""

    number: int
    ranks: int
    mirrors: tuple[int, ...]


class Report(NamedTuple):
    """What a rank has, as it tells the others."""

    node: str
    layouts: list[tuple[Layout, dict[int, Any]]]
    """The newest first: of each rank whose spans it has, the state of each parameter by name: numbers themselves, and the dtype of a tensor."""
    on_all: dict[int, dict[str, Any]] | None = None
    """The state of the parameters that every rank updates whole, told in the same way; None of a rank that joins."""
    is_unlike: bool = False
    """Whether it has made other weights of what it mirrors in the newest update than their owner."""


class Replica(NamedTuple):
    """Elements of a tensor that two ranks have: their owner, and its mirror."""

    quantity: Quantity
    name: str
    """By which it is digested."""
    label: str
    """By which messages call it."""
    elements: Elements
    is_mirror: bool
    """Whether this rank has them as the mirror of their owner."""


def chosen(reports: Sequence[Report]) -> tuple[Layout, dict[int, int]]:
    """The newest layout of which some rank has each span, and by owner the rank that has its spans. ClusterError where there is none."""
    layouts = sorted({layout for report in reports for layout, _ in report.layouts}, reverse=True)
    for layout in layouts:
        sources: dict[int, int] = {}
        for rank, report in enumerate(reports):
            for reported_layout, shares in report.layouts:
                if reported_layout == layout:
                    for owner in shares:
                        sources.setdefault(owner, rank)
        if len(sources) == layout.ranks:
            return layout, sources
    layout = layouts[0]
    raise problems.OPTIMIZER_MIRROR_LOST(ranks=layout.ranks)
