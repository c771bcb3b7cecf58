"""Figures of a run's observations as PNG, drawn when it ends: gradient flow by layer group, where the time goes, memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from lockstep.record.ledger.rows import Observation
from lockstep.record.plots import run_plots

LAYERS = "layers/"
PHASES = ("data", "forward", "backward", "slowest", "reduction", "optimizer", "other", "checkpoint")
_SHOWN = {"data": "waiting for data", "slowest": "waiting for the slowest"}


def draw(observed: Sequence[Observation], folder: Path, log: Callable[[str], None]) -> list[Path]:
    """Draw the figures of at least two observations into `<folder>/figures`, as `figures.save_drawn` does. Returns the files."""
    if len(observed) < 2:
        return []
    drawn: dict[str, Callable[[], Any]] = {}
    if any(name.startswith(LAYERS) for name in observed[-1].values):
        drawn["layers"] = partial(_layers, observed)
    if any(name.startswith("perf/time/") for name in observed[-1].values):
        drawn["phases"] = partial(_phases, observed)
    if any(name.startswith("perf/memory/") for name in observed[-1].values):
        drawn["memory"] = partial(_memory, observed)
    return run_plots.save_drawn(drawn, folder, log)


def _layers(observed: Sequence[Observation]) -> Any:
    import numpy as np
    from matplotlib import colormaps

    figure, panels = run_plots.panels("Gradient flow by layer group", ("gradient norm", "update / weight"))
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


def _phases(observed: Sequence[Observation]) -> Any:
    figure, (ax,) = run_plots.panels("Where the time of a step goes", ("ms a step",))
    later = [row for row in observed if row.step > 1]  # the first step includes warming up
    times = [[1e3 * row.values.get(f"perf/time/{phase}_s", 0.0) for row in later] for phase in PHASES]
    labels = [_SHOWN.get(phase, phase) for phase in PHASES]
    ax.stackplot([row.step for row in later], times, labels=labels)
    figure.legend(*ax.get_legend_handles_labels(), loc="outside right upper", frameon=False)
    return figure


def _memory(observed: Sequence[Observation]) -> Any:
    figure, (ax,) = run_plots.panels("Memory between steps", ("MB",))
    names = [name for name in observed[-1].values if name.startswith("perf/memory/")]
    for name in names:
        points = [(row.step, row.values[name]) for row in observed if name in row.values]
        label = name.removeprefix("perf/memory/").removesuffix("_mb").replace("_", " ")
        ax.plot(*zip(*points, strict=True), linewidth=1, label=label)
    ax.set_ylim(bottom=0)
    if len(names) <= 16:
        ax.legend(frameon=False)
    return figure
