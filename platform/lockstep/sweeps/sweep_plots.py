"""Figures of a sweep as PNG: the metric over each field, parallel coordinates, learning curves, rungs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from lockstep.record.plots.run_plots import save_drawn
from lockstep.spec.sweep import SweepSpec

_COLOURS = ("#1f6fb4", "#d9680c", "#2a8a4a", "#8d4bb0", "#b03a48", "#6b6b6b")
_MARKS = {"finished": "o", "pruned": "v", "reused": "s"}

Trials = Sequence[Mapping[str, Any]]


def draw(sweep: SweepSpec, trials: Trials, folder: Path, log: Callable[[str], None]) -> list[Path]:
    """Draw what the trials that have a finite value allow, into `<folder>/figures`, as `save_drawn` does. Returns the files."""
    measured = [trial for trial in trials if trial["metric"] is not None and math.isfinite(trial["metric"])]
    if not measured:
        return []
    numbers = [field for field in sweep.space if _is_number(measured, field)]
    words = [field for field in sweep.space if field not in numbers]
    drawn: dict[str, Callable[[], Any]] = {
        f"metric_by_{field}": partial(_scatter, sweep, measured, field, words) for field in numbers
    }
    if len(sweep.space) > 1:
        drawn["parallel_coordinates"] = partial(_parallel, sweep, measured)
    drawn["learning_curves"] = partial(_curves, sweep, measured)
    if any(trial["status"] == "pruned" for trial in measured):
        drawn["rungs"] = partial(_rungs, sweep, measured)
    return save_drawn(drawn, folder, log)


def _is_number(trials: Trials, field: str) -> bool:
    values = [trial["fields"][field] for trial in trials if field in trial["fields"]]
    return bool(values) and all(isinstance(v, int | float) and not isinstance(v, bool) for v in values)


def _is_log(sweep: SweepSpec, field: str) -> bool:
    domain = sweep.space[field]
    values = [v for v in domain.values or () if isinstance(v, int | float)]
    return domain.loguniform is not None or bool(
        values and min(values) > 0 and max(values) >= 30 * min(values)
    )


def _scatter(sweep: SweepSpec, trials: Trials, field: str, words: Sequence[str]) -> Any:
    """The metric over one field, a colour for each value of the first field that is no number: lr by precision."""
    figure, ax = _axes(f"{sweep.metric} by {field}")
    by = words[0] if words else None
    names = sorted({_word(trial, by) for trial in trials})
    for name, colour in zip(names, _cycle(len(names)), strict=True):
        group = [t for t in trials if _word(t, by) == name and field in t["fields"]]
        for status in sorted({t["status"] for t in group}):
            points = [t for t in group if t["status"] == status]
            label = " ".join(filter(None, [name, "" if status == "finished" else status]))
            ax.plot(
                [t["fields"][field] for t in points],
                [t["metric"] for t in points],
                _MARKS.get(status, "x"),
                color=colour,
                label=label or None,
            )
    if _is_log(sweep, field):
        ax.set_xscale("log")
    ax.set(xlabel=field, ylabel=sweep.metric)
    if ax.get_legend_handles_labels()[1]:
        ax.legend(frameon=False, title=by)
    return figure


def _word(trial: Mapping[str, Any], field: str | None) -> str:
    return "" if field is None else str(trial["fields"].get(field, "base"))


def _parallel(sweep: SweepSpec, trials: Trials) -> Any:
    """A line a trial through its values, coloured by the metric; each axis from its least to its greatest value."""
    import matplotlib

    figure, ax = _axes(f"{sweep.metric} in parallel coordinates")
    fields = list(sweep.space)
    columns = [_positions(sweep, trials, field) for field in fields]
    metrics = [trial["metric"] for trial in trials]
    low, high = min(metrics), max(metrics)
    colours = matplotlib.colormaps["viridis_r" if sweep.mode == "min" else "viridis"]
    every = list(range(len(fields) + 1))
    for i, trial in enumerate(trials):
        last = (trial["metric"] - low) / (high - low or 1.0)
        ax.plot(every, [*(column[0][i] for column in columns), last], color=colours(last), alpha=0.8)
    for x, (_, labels) in enumerate([*columns, ([], {0.0: f"{low:.4g}", 1.0: f"{high:.4g}"})]):
        ax.axvline(x, color="#888888", linewidth=0.8)
        for y, text in labels.items():
            ax.text(x + 0.02, y + 0.02, text, fontsize=8)
    ax.set_xticks(every, [*fields, sweep.metric])
    ax.set_yticks([])
    ax.set_ylim(-0.1, 1.1)
    return figure


def _positions(sweep: SweepSpec, trials: Trials, field: str) -> tuple[list[float], dict[float, str]]:
    """Each trial's place on an axis from 0 to 1, and what stands where; a trial without the field is in the middle."""
    values = [trial["fields"].get(field) for trial in trials]
    if not _is_number(trials, field):
        names = sorted({str(value) for value in values})
        places = {name: i / max(1, len(names) - 1) for i, name in enumerate(names)}
        return [places[str(value)] for value in values], {position: name for name, position in places.items()}
    scale: Callable[[float], float] = math.log if _is_log(sweep, field) else float
    numbers = [value for value in values if value is not None]
    low, high = scale(min(numbers)), scale(max(numbers))
    positions = [0.5 if value is None else (scale(value) - low) / (high - low or 1.0) for value in values]
    return positions, {0.0: f"{min(numbers):.4g}", 1.0: f"{max(numbers):.4g}"}


def _curves(sweep: SweepSpec, trials: Trials) -> Any:
    figure, ax = _axes(f"{sweep.metric} of all trials")
    ranked = sorted(trials, key=lambda t: t["metric"], reverse=sweep.mode == "max")
    for rank, trial in reversed(list(enumerate(ranked))):
        steps, values = zip(*trial["curve"], strict=True)
        colour, label = (_COLOURS[0], f"best: trial {trial['trial']}") if rank == 0 else ("#999999", None)
        ax.plot(
            steps, values, ".-", color=colour, alpha=1.0 if rank == 0 else 0.5, label=label, linewidth=1.0
        )
    ax.set(xlabel="step", ylabel=sweep.metric)
    ax.legend(frameon=False)
    return figure


def _rungs(sweep: SweepSpec, trials: Trials) -> Any:
    """Where each trial ended, by its order, and how far that is."""
    figure, ax = _axes("How far each trial was trained")
    for trial in trials:
        ended = trial["status"] != "pruned"
        ax.barh(trial["trial"], trial["step"], color=_COLOURS[0] if ended else "#bbbbbb")
    ax.set(xlabel="step", ylabel="trial")
    ax.invert_yaxis()
    return figure


def _axes(title: str) -> tuple[Any, Any]:
    from matplotlib.figure import Figure  # not pyplot: no state, no window, any thread

    figure = Figure(figsize=(8, 5), layout="constrained")
    ax = figure.subplots()
    figure.suptitle(title)
    ax.grid(alpha=0.25)
    ax.spines[["top", "right"]].set_visible(False)
    return figure, ax


def _cycle(count: int) -> list[str]:
    return [_COLOURS[i % len(_COLOURS)] for i in range(count)]
