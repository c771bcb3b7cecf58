"""Ray Train's configuration of a group of workers, and the nodes that are tried first. Workers get a copy: this module imports little."""

from __future__ import annotations

from dataclasses import dataclass

from ray.train import ScalingConfig


@dataclass
class PreferredNodes(ScalingConfig):  # type: ignore[misc]  # an untyped base
    """Ray Train's configuration of a group, with label selectors of the nodes that are tried first: one for each of the first workers."""

    preferred: tuple[dict[str, str], ...] = ()

    def narrowed(self, selectors: list[dict[str, str]] | None) -> list[dict[str, str]]:
        """Ray's selector for each worker, with those of the first ones narrowed to one node each."""
        others: list[dict[str, str]] = selectors or [{} for _ in range(self.num_workers)]
        return [*self.preferred, *others[len(self.preferred) :]]
