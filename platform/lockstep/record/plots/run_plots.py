"""Figures of a run as PNG, drawn from its ledger when it ends: loss and learning rate, gradient norm, time, loss scale.

A long run is drawn in buckets: a line through their means inside a band from their minimum to their maximum, so that
a single spike stays visible. A point that is not finite is left out and mentioned in the title.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.errors import LockstepError, first_line
from lockstep.files import replacing
from lockstep.record.ledger.rows import EvaluationRow

if TYPE_CHECKING:
    import numpy as np

FOLDER = "figures"
_BUCKETS = 1500
_BLUE, _ORANGE, _GREEN, _GREY = "#1f6fb4", "#d9680c", "#2a8a4a", "#888888"


COLUMNS = (
    "step", "samples", "loss", "lr", "grad_norm", "clipped_norm", "scale", "skipped", "step_s", "data_wait_s",
)  # fmt: skip
"""The columns of the ledger that are drawn."""
Steps = Mapping[str, "np.ndarray[Any, Any]"]
"""Those columns by name, as float64."""


def draw(
    steps: Steps,
    evaluations: Sequence[EvaluationRow],
    folder: Path,
    *,
    scaled: bool,
    log: Callable[[str], None],
) -> list[Path]:
    """Draw the figures of at least two steps into `<folder>/figures`, as `save_drawn` does. Returns the files."""
    x = steps["step"]
    if len(x) < 2:
        return []
    figures = {
        "loss": lambda: _loss(x, steps, evaluations),
        "gradient_norm": lambda: _gradient_norm(x, steps),
        "time": lambda: _time(x, steps),
        **({"scale": lambda: _scale(x, steps)} if scaled else {}),
    }
    return save_drawn(figures, folder, log)


def save_drawn(
    figures: Mapping[str, Callable[[], Any]], folder: Path, log: Callable[[str], None]
) -> list[Path]:
    """Draw and write figures by their names. Returns the files. One that cannot be drawn is left out, and told to `log` with the reason.

    matplotlib refuses some numbers, such as losses near the largest float64: its axes overflow.
    """
    saved = []
    for name, figure in figures.items():
        try:
            saved.append(save(figure(), folder / FOLDER / f"{name}.png"))
        except (OSError, LockstepError):  # the disk, or the rows
            raise
        except Exception as error:  # noqa: BLE001 - a picture must not cost the run its status
            log(f"no figure {name}.png: it cannot be drawn: {first_line(error)}")
    return saved


def _loss(x: Any, steps: Steps, evaluations: Sequence[EvaluationRow]) -> Any:
    figure, (above, below) = panels("Loss and learning rate", ("loss", "learning rate"))
    _line(above, x, steps["loss"], _BLUE, "train/loss")
    evaluated = [row for row in evaluations if "eval/loss" in row.metrics]
    if evaluated:
        losses = [row.metrics["eval/loss"] for row in evaluated]
        above.plot(
            [row.step for row in evaluated], losses, "o-", color=_ORANGE, markersize=3, label="eval/loss"
        )
    above.legend(frameon=False)
    _line(below, x, steps["lr"], _GREY, "train/lr")
    below.set_ylim(bottom=0)
    return figure


def _gradient_norm(x: Any, steps: Steps) -> Any:
    figure, (above,) = panels("Gradient norm", ("global norm",))
    norms, clipped = steps["grad_norm"], steps["clipped_norm"]
    _line(above, x, norms, _ORANGE, "before clipping")
    _line(above, x, clipped, _BLUE, "after")
    if (norms > 0).any():
        _logarithmic(above)
    above.legend(frameon=False)
    return figure


def _time(x: Any, steps: Steps) -> Any:
    figure, (above, below) = panels("Throughput and where the time goes", ("samples a second", "ms a step"))
    step_ms = 1e3 * steps["step_s"]
    waiting = 1e3 * steps["data_wait_s"]
    samples = steps["samples"]
    _line(
        above,
        x[1:],
        (samples[1:] - samples[:-1]) / (step_ms[1:] / 1e3).clip(1e-9),
        _GREEN,
        "samples a second",
    )
    above.set_ylim(bottom=0)
    _line(below, x[1:], step_ms[1:], _BLUE, "whole step")  # the first one pays for warming up
    _line(below, x[1:], waiting[1:], _ORANGE, "waiting for data")
    below.set_ylim(bottom=0)
    below.legend(frameon=False)
    return figure


def _scale(x: Any, steps: Steps) -> Any:
    figure, (above, below) = panels("Loss scale and skipped steps", ("scale", "skipped so far"))
    _line(above, x, steps["scale"], _BLUE, "train/scale")
    _logarithmic(above, base=2)
    _line(below, x, steps["skipped"].cumsum(), _ORANGE, "skipped")
    return figure


def panels(title: str, labels: Sequence[str]) -> tuple[Any, Any]:
    """An empty figure with a panel for each label, above each other, over the steps."""
    from matplotlib.figure import Figure  # not pyplot: no global state, no window, any thread

    height = 2.0 + 2.2 * len(labels)
    figure = Figure(figsize=(8, height))
    axes = figure.subplots(len(labels), 1, sharex=True, squeeze=False)[:, 0]
    # Fixed margins in inches: a layout engine would draw all labels twice to measure them, at the end of every run.
    figure.subplots_adjust(
        left=0.9 / 8, right=1 - 0.15 / 8, top=1 - 0.6 / height, bottom=0.6 / height, hspace=0.12
    )
    figure.suptitle(title, y=1 - 0.12 / height, va="top")
    for ax, label in zip(axes, labels, strict=True):
        ax.set_ylabel(label)
        ax.grid(alpha=0.25)
        ax.spines[["top", "right"]].set_visible(False)
    axes[-1].set_xlabel("step")
    return figure, axes


def _logarithmic(ax: Any, base: float = 10) -> None:
    """Set a logarithmic axis with plain numbers at its ticks: formulas take as long to draw as the rest of a figure."""
    from matplotlib.ticker import LogFormatter

    ax.set_yscale("log", base=base)
    ax.yaxis.set_major_formatter(LogFormatter(base))
    ax.yaxis.set_minor_formatter(LogFormatter(base))


def _line(ax: Any, x: Any, y: Any, color: str, label: str) -> None:
    import numpy as np

    finite = np.isfinite(y)
    if not finite.all():
        label = f"{label} ({len(y) - finite.sum()} not finite)"
        ax.set_title(label, fontsize="small", loc="right")
        x, y = x[finite], y[finite]
    if len(y) <= 2 * _BUCKETS:
        ax.plot(x, y, color=color, linewidth=1, label=label)
        return
    starts = np.arange(0, len(y), math.ceil(len(y) / _BUCKETS))
    counts = np.diff(np.append(starts, len(y)))
    middle = x[np.minimum(starts + counts // 2, len(x) - 1)]
    ax.fill_between(
        middle,
        np.minimum.reduceat(y, starts),
        np.maximum.reduceat(y, starts),
        color=color,
        alpha=0.25,
        linewidth=0,
    )
    ax.plot(middle, np.add.reduceat(y, starts) / counts, color=color, linewidth=1, label=label)


def save(figure: Any, path: Path) -> Path:
    """Write a figure, whole or not at all, in the format of the file's suffix: .png or .svg."""
    with replacing(path) as file:
        figure.savefig(file, format=path.suffix[1:], dpi=110)
    return path
