"""Room that a run asks its cluster for: pending placement groups, which Ray's autoscaler counts as demand.

Unlike `request_resources`, which holds one figure for a whole cluster, the requests of several runs add up, and they end with
their driver. As soon as there is room for one it is taken back: that the room is there is seen in what is free, and the run
grows into it like into any other.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from typing import Any

import ray

REST_S = 30.0
"""How long nothing more is asked for after room has come: by then the run has grown into it, or another one has taken it."""

MOST = 100
"""So many groups are asked for at once."""


class RoomRequest:
    """What one run asks for. Call `release` when nothing is wanted any more."""

    def __init__(self) -> None:
        self._groups: list[Any] = []
        self._rest_until = 0.0

    def want(self, groups: int, each: Mapping[str, float], together: int = 1) -> None:
        """Ask for so many groups of `together` workers, of `each` so much; the workers of a group are wanted together or not at all."""
        stand = ray.util.placement_group_table() if self._groups else {}
        granted = [one for one in self._groups if stand.get(one.id.hex(), {}).get("state") != "PENDING"]
        if granted:
            self._rest_until = time.monotonic() + REST_S
        self._drop(granted)
        self._drop(self._groups[groups:])
        if time.monotonic() < self._rest_until:
            return
        while len(self._groups) < min(groups, MOST):
            bundles = [dict(each) for _ in range(together)]
            self._groups.append(ray.util.placement_group(bundles))

    def release(self) -> None:
        """Ask for nothing."""
        self._drop(self._groups)

    def _drop(self, groups: Collection[Any]) -> None:
        gone = list(groups)
        self._groups = [one for one in self._groups if one not in gone]
        for one in gone:
            ray.util.remove_placement_group(one)
