"""Room that a run requests from its cluster: pending placement groups, which Ray's autoscaler counts as demand.

`request_resources` holds one figure for the whole cluster. These requests of several runs add up instead, and end with
their driver. A request is withdrawn as soon as there is room for it: the run sees the room in what is free, and
grows into it as into any other.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from typing import Any

import ray

REST_S = 30.0
"""How long to request nothing after room has come: by then the run has grown into it, or another run has taken it."""

MOST = 100
"""The most groups that are requested at once."""


class RoomRequest:
    """The requests of one run. Call `release` when no more room is wanted."""

    def __init__(self) -> None:
        self._groups: list[Any] = []
        self._rest_until = 0.0

    def want(self, groups: int, each: Mapping[str, float], together: int = 1) -> None:
        """Request `groups` groups of `together` workers with the resources `each`; the workers of a group are placed together or not at all."""
        stand = ray.util.placement_group_table() if self._groups else {}
        granted = [group for group in self._groups if stand.get(group.id.hex(), {}).get("state") != "PENDING"]
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
        """Withdraw all requests."""
        self._drop(self._groups)

    def _drop(self, groups: Collection[Any]) -> None:
        gone = list(groups)
        self._groups = [group for group in self._groups if group not in gone]
        for group in gone:
            ray.util.remove_placement_group(group)
