"""Gradient flow by layer: gradient norms, update-to-weight ratios and silent units of groups of parameters, in one step.

All values come from float64 sums over the fixed blocks of `training.step.norm`, added in the order of the parameters, and from counts. So they
have the same bits for every number of workers, and wherever gradients lie in memory. The weights are only read.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor, nn

from lockstep.training.step.norm import GradientNorm, added

MOST_GROUPS = 32
"""As many lines as a reader can tell apart in a figure; so many cost a store little."""

_UNITS = (nn.Linear, nn.modules.conv._ConvNd)
"""Modules whose weight has a row for each unit. A row of an embedding has no gradient where its token is not in the batch."""


def layer_groups(names: Sequence[str]) -> dict[str, list[int]]:
    """The parameters of each layer group, by their indices in `names`, in their order.

    The parameters of a group share the first levels of their module path: as many levels as give at most `MOST_GROUPS` groups. If even the
    first level gives more, neighbours are merged, as `first-last`. A parameter of the model itself is a group by its own name.
    """
    paths = [name.split(".")[:-1] or [name] for name in names]
    finest: dict[str, list[int]] = {}
    for levels in range(1, max(map(len, paths), default=0) + 1):
        groups: dict[str, list[int]] = {}
        for i, path in enumerate(paths):
            groups.setdefault(".".join(path[:levels]), []).append(i)
        if len(groups) > MOST_GROUPS and finest:
            break
        finest = groups
        if len(groups) > MOST_GROUPS:
            return _taken_together(groups)
    return finest


def _taken_together(groups: Mapping[str, list[int]]) -> dict[str, list[int]]:
    size = -(-len(groups) // MOST_GROUPS)
    names = list(groups)
    joined = [names[i : i + size] for i in range(0, len(names), size)]
    return {
        part[0] if len(part) == 1 else f"{part[0]}-{part[-1]}": [i for name in part for i in groups[name]]
        for part in joined
    }


class LayerFlow:
    """Looks at one update: `note` is called with its gradients, just before it, and `taken` after it.

    In between it holds a copy of the trainable weights; the activations are already freed by then. Silent units are not counted for parameters
    that some steps rightly leave out (`conditional`).
    """

    def __init__(
        self,
        model: nn.Module,
        names: Sequence[str],
        parameters: Sequence[Tensor],
        norm: GradientNorm,
        conditional: Collection[str] = (),
        phase: str = "",
    ) -> None:
        """`phase`, the name of a phase of the step, prefixes the names of its groups."""
        self._parameters, self._norm = parameters, norm
        self.groups = {f"{phase}/{group}" if phase else group: m for group, m in layer_groups(names).items()}
        rows = {
            f"{path}.weight" if path else "weight"
            for path, m in model.named_modules()
            if isinstance(m, _UNITS)
        }
        self._with_units = [
            i
            for i, name in enumerate(names)
            if name in rows and name not in conditional and len(parameters[i])
        ]
        self._before: list[Tensor] = []
        self._gradients: Sequence[float] = ()
        self._weights: Sequence[float] = ()
        self._silent: dict[int, int] = {}

    @torch.no_grad()
    def note(self, gradients: Sequence[Tensor], squares: Sequence[float]) -> None:
        """The gradients of the step, before they are clipped, and the sum of the squares of each."""
        self._before = [parameter.detach().clone() for parameter in self._parameters]
        self._gradients, self._weights = squares, self._norm.squares(self._before)
        counts = [(gradients[i].flatten(1).count_nonzero(1) == 0).sum() for i in self._with_units]
        counted = torch.stack(counts).tolist() if counts else []
        self._silent = dict(zip(self._with_units, counted, strict=True))

    @torch.no_grad()
    def taken(self) -> dict[str, float]:
        """The values by name, after the update. Frees the copy of the weights.

        `gradient_norm` is the norm of the mean gradient. `update_ratio` is the norm of the update over the norm of the weights before it; left
        out where these are all zero. `silent_units` is the share of units of linear and convolutional layers whose weights have a gradient of
        exactly zero.
        """
        deltas, self._before = self._before, []
        if not deltas:
            return {}
        torch._foreach_sub_(deltas, [parameter.detach() for parameter in self._parameters])
        updates, values = self._norm.squares(deltas), dict[str, float]()
        for group, members in self.groups.items():
            values[f"layers/{group}/gradient_norm"] = added(self._gradients[i] for i in members)
            weights = added(self._weights[i] for i in members)
            if weights:
                values[f"layers/{group}/update_ratio"] = added(updates[i] for i in members) / weights
            units = [i for i in members if i in self._silent]
            if units:
                silent = sum(self._silent[i] for i in units)
                values[f"layers/{group}/silent_units"] = silent / sum(len(self._parameters[i]) for i in units)
        return values
