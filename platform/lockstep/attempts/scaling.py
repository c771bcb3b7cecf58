"""Ray Train's configuration of a group of workers, and the nodes that are tried first. Workers get a copy: this module imports little."""

from __future__ import annotations

from dataclasses import dataclass

from ray.train import ScalingConfig

from lockstep.attempts.placement import NODE_ID


@dataclass
class Scaling(ScalingConfig):  # type: ignore[misc]  # an untyped base
    """Ray Train's configuration of a group, with the nodes that are tried first."""

    first: tuple[str, ...] = ()

    def with_first(self, selectors: list[dict[str, str]] | None) -> list[dict[str, str]]:
        """Ray's selector for each worker, with those of the first ones narrowed to one node each."""
        others: list[dict[str, str]] = selectors or [{} for _ in range(self.num_workers)]
        return [{NODE_ID: node} for node in self.first] + others[len(self.first) :]
