"""Figures of a run's observations as PNG, drawn when it ends: gradient flow by layer group."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lockstep.record import figures
from lockstep.record.events import Observation

LAYERS = "layers/"


def draw(observed: Sequence[Observation], folder: Path) -> list[Path]:
    """Draw the figures of at least two observations into `<folder>/figures`. Returns the files."""
    if len(observed) < 2:
        return []
    drawn = {}
    if any(name.startswith(LAYERS) for name in observed[-1].values):
        drawn["layers"] = _layers(observed)
    return [figures.save(figure, folder / figures.FOLDER / f"{name}.png") for name, figure in drawn.items()]


def _layers(observed: Sequence[Observation]) -> Any:
    import numpy as np
    from matplotlib import colormaps

    figure, panels = figures.panels("Gradient flow by layer group", ("gradient norm", "update / weight"))
    names = {name for row in observed for name in row.values if name.startswith(LAYERS)}
    groups = list(
        dict.fromkeys(
            name[len(LAYERS) :].rpartition("/")[0] for row in observed for name in row.values if name in names
        )
    )
    shades = colormaps["viridis"](np.linspace(0, 0.95, len(groups)))  # from the first layers to the last
    for ax, quantity in zip(panels, ("gradient_norm", "update_ratio"), strict=True):
        for group, shade in zip(groups, shades, strict=True):
            name = f"{LAYERS}{group}/{quantity}"
            points = [(row.step, row.values[name]) for row in observed if row.values.get(name, 0.0) > 0.0]
            finite = [(step, value) for step, value in points if value - value == 0.0]
            if finite:
                ax.plot(*zip(*finite, strict=True), color=shade, linewidth=1, label=group)
        if ax.lines:
            ax.set_yscale("log")  # a zero is left out
    if panels[0].lines:
        figure.legend(
            *panels[0].get_legend_handles_labels(),
            loc="outside right upper",
            frameon=False,
            fontsize="x-small",
        )
    return figure
