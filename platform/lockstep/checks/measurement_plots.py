"""Figures of what was measured before a run: a bench, a range test of the learning rate. PNG or SVG, as the file is called."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.checks import problems
from lockstep.checks.bench import PARTS, BenchResult
from lockstep.record.plots.run_plots import save

if TYPE_CHECKING:
    from lockstep.checks.lr_finder import RateRange

FORMATS = (".png", ".svg")

_BLUE, _ORANGE, _GREY = "#1f6fb4", "#d9680c", "#888888"
_COLOURS = dict(zip(PARTS, (_ORANGE, _BLUE, "#b03a48", "#bbbbbb"), strict=True))


def destination(path: Path, name: str) -> Path:
    """The file that a figure is written to: in a folder that is there, `<name>.svg`. SpecError for another format, before anything runs."""
    file = path / f"{name}.svg" if path.is_dir() else path
    if file.suffix not in FORMATS:
        raise problems.PLOT_FILE(got=str(path))
    if not file.parent.is_dir():
        raise problems.NO_PLOT_FOLDER(folder=str(file.parent))
    return file


def draw_bench(result: BenchResult, file: Path) -> Path:
    """Samples a second over the number of workers, and what the time of all workers goes to in a step."""
    figure, (above, below) = _figure("Samples a second, and where the rest goes", 2)
    workers = [speed.workers for speed in result.speeds]
    first = result.speeds[0]
    ideal = [first.samples_per_s * count / first.workers for count in workers]
    above.plot(workers, ideal, "--", color=_GREY, label=f"as fast a worker as on {first.workers}")
    above.plot(workers, [speed.samples_per_s for speed in result.speeds], "o-", color=_BLUE, label="measured")
    above.set(ylabel="samples a second", xlabel="workers", xticks=workers)
    above.set_ylim(bottom=0)
    above.legend(frameon=False)
    places = range(len(workers))
    bottom = [0.0] * len(workers)
    for part, column in zip(
        PARTS, zip(*(speed.step_times for speed in result.speeds), strict=True), strict=True
    ):
        heights = [1e3 * count * value for count, value in zip(workers, column, strict=True)]
        below.bar(places, heights, bottom=bottom, color=_COLOURS[part], label=part, width=0.6)
        bottom = [base + height for base, height in zip(bottom, heights, strict=True)]
    below.axhline(bottom[0], linestyle="--", color=_GREY)  # what is above it is lost
    for position, top, speed in zip(places, bottom, result.speeds, strict=True):
        below.annotate(f"{result.efficiency(speed):.0%}", (position, top), ha="center", va="bottom")
    below.set_xticks(list(places), [str(count) for count in workers])
    below.margins(y=0.1)
    below.set(ylabel="ms of all workers, a step", xlabel="workers, and their efficiency")
    figure.legend(
        *below.get_legend_handles_labels(), frameon=False, ncols=len(PARTS), loc="outside lower center"
    )
    return save(figure, file)


def draw_range(test: RateRange, file: Path) -> Path:
    """The loss over the rate, smoothed, with the suggestion and what it follows from."""
    figure, (ax,) = _figure("Learning-rate range test", 1)
    ax.plot(test.rates, test.losses, color=_GREY, linewidth=0.7, alpha=0.6, label="loss")
    ax.plot(test.rates, test.smoothed, color=_BLUE, label="smoothed")
    ax.axvline(test.suggestion, color=_ORANGE, label=f"suggested: {test.suggestion:g}")
    ax.axvline(test.rises_from, color=_ORANGE, linestyle=":", label=f"rises from {test.rises_from:.2g} on")
    if test.diverged is not None:
        ax.axvline(test.diverged, color=_GREY, linestyle="--", label=f"diverged at {test.diverged:.2g}")
    ax.set_xscale("log")
    ax.set_ylim(0, 1.5 * max(test.smoothed[0], test.losses[0]))
    ax.set(xlabel="learning rate", ylabel="loss")
    ax.legend(frameon=False)
    ax.set_title("\n".join(textwrap.wrap(test.reasoning, 110)), fontsize="small", loc="left")
    return save(figure, file)


def _figure(title: str, panels: int) -> tuple[Any, Any]:
    from matplotlib.figure import Figure  # not pyplot: no state, no window, any thread

    figure = Figure(figsize=(8, 1.2 + 3.4 * panels), layout="constrained")
    axes = figure.subplots(panels, 1, squeeze=False)[:, 0]
    figure.suptitle(title)
    for ax in axes:
        ax.grid(alpha=0.25)
        ax.spines[["top", "right"]].set_visible(False)
    return figure, axes
