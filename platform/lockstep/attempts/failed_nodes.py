"""Nodes whose devices have failed or computed wrong bits: they get no more workers of the run. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

MOST_DEVICE_FAILURES = 1
"""How many device failures a node may have before it is left out."""


class FailedNodes:
    """Counts the device failures of nodes. A node with more than MOST_DEVICE_FAILURES, or with wrong bits, is left out from then on."""

    def __init__(self) -> None:
        self._failures: Counter[str] = Counter()
        self._wrong = set[str]()

    @property
    def left_out(self) -> frozenset[str]:
        """The nodes that get no more workers, as long as the others have room for enough."""
        return frozenset(self._wrong).union(
            node for node, count in self._failures.items() if count > MOST_DEVICE_FAILURES
        )

    def failed(self, nodes: Iterable[str]) -> frozenset[str]:
        """Count a device failure on each of these nodes in one attempt. Returns those that are left out from now on."""
        already_left_out = self.left_out
        self._failures.update(set(nodes))
        return self.left_out - already_left_out

    def computed_wrong(self, nodes: Iterable[str]) -> frozenset[str]:
        """Note wrong bits of a worker on each of these nodes, of which one is too many. Returns those that are left out from now on."""
        already_left_out = self.left_out
        self._wrong.update(nodes)
        return self.left_out - already_left_out


def node_label(node: str) -> str:
    """A node for people, by the first eight digits of its id: enough to tell those of a cluster apart."""
    return f"node {node[:8]}"
