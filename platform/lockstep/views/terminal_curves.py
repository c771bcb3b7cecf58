"""Curves in a terminal: characters alone, without colour. Dots of Braille where they can be shown, else plain ASCII."""

from __future__ import annotations

import fnmatch
import math
import os
import shutil
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TextIO

from lockstep.errors import nearest
from lockstep.views import problems
from lockstep.views.curves import Curves

ROWS = 10
"""Lines of one curve, without its title and its axis."""

_LEAST_COLUMNS = 40
_BRAILLE = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""The bit of each dot of a Braille character, from the top."""


class Series(NamedTuple):
    """The values of one key, by step."""

    key: str
    steps: Sequence[int]
    values: Sequence[float]


class Screen(NamedTuple):
    """What is drawn on: how many columns it has, and whether it shows Braille."""

    columns: int
    braille: bool

    @classmethod
    def of(cls, stream: TextIO) -> Screen:
        """The terminal behind standard output; 80 columns (or COLUMNS) of ASCII where that leads elsewhere."""
        terminal = stream.isatty() and os.environ.get("TERM") != "dumb"
        braille = terminal and (stream.encoding or "").lower().replace("-", "") == "utf8"
        return cls(max(_LEAST_COLUMNS, shutil.get_terminal_size().columns), braille)


def series_of(curves: Curves, keys: Sequence[str]) -> list[Series]:
    """The values of these keys, of which one with `*` stands for all that match; without any those of the loss, an evaluation and the rate.

    SpecError for a key that the run has not.
    """
    by_key: dict[str, Series] = {}
    for moment in curves.moments():
        for key, value in moment.values.items():
            steps, values = by_key.setdefault(key, Series(key, [], []))[1:]
            steps.append(moment.step)  # type: ignore[attr-defined]
            values.append(value)  # type: ignore[attr-defined]
    keys = [
        match for key in keys for match in (fnmatch.filter(by_key, key) if "*" in key else [key]) or [key]
    ]
    for key in keys:
        if key not in by_key:
            raise problems.PLOT_KEY(run=curves.run_id, got=key, hint=nearest(key, by_key))
    evaluations = sorted(
        (key for key in by_key if key.startswith("eval/")), key=lambda key: key != "eval/loss"
    )
    return [by_key[key] for key in keys or ["train/loss", *evaluations[:1], "train/lr"]]


def drawn(curves: Sequence[Series], screen: Screen) -> str:
    """The curves one below the other, over the same steps: each with its title, its scale on the left and the steps below."""
    steps = [step for series in curves for step in (series.steps[0], series.steps[-1])]
    scales = [_scale(series) for series in curves]
    margin = max(len(label) for scale in scales for label in scale.labels)
    return "\n\n".join(
        _drawn(series, scale, margin, range(min(steps), max(steps) + 1), screen)
        for series, scale in zip(curves, scales, strict=True)
    )


def drawn_together(key: str, curves: Mapping[str, Series], screen: Screen) -> str:
    """Several runs' curves of a key in one picture: each is drawn with its letter, and `*` where several are."""
    points = {
        letter: [(s, v) for s, v in zip(series.steps, series.values, strict=True) if math.isfinite(v)]
        for letter, series in curves.items()
    }
    together = Series(
        key,
        [step for series in curves.values() for step in series.steps],
        [value for series in curves.values() for value in series.values],
    )
    scale = _scale(together)
    margin = max(map(len, scale.labels))
    steps = range(min(together.steps), max(together.steps) + 1)
    canvases = {}
    for letter, of_run in points.items():
        canvases[letter] = _Canvas(screen.columns - margin - 3, len(scale.labels), braille=False)
        canvases[letter].draw(of_run, scale, steps)
    lines = [
        "".join(_letter(cells) for cells in zip(*row, strict=True))
        for row in zip(
            *([_lettered(line, a) for line in c.lines()] for a, c in canvases.items()), strict=True
        )
    ]
    titles = [
        line
        for letter, of_run in points.items()
        for line in _title(curves[letter]._replace(key=letter), of_run, screen.columns - 1)
    ]
    return "\n".join([key, *titles, *_framed(lines, scale, margin, steps, screen)])


def _lettered(line: str, letter: str) -> str:
    return "".join(" " if cell == " " else letter for cell in line)


def _letter(cells: Sequence[str]) -> str:
    letters = [cell for cell in cells if cell != " "]
    return " " if not letters else letters[0] if len(letters) == 1 else "*"


class _Scale(NamedTuple):
    least: float
    most: float
    labels: Sequence[str]
    """One for each line, from the top; empty for most."""


def _scale(series: Series) -> _Scale:
    """What a curve spans. One that does not change takes one line, one without a finite value none."""
    values = [value for value in series.values if math.isfinite(value)]
    if not values:
        return _Scale(0.0, 0.0, [""])
    least, most = min(values), max(values)
    if least == most:
        return _Scale(least, most, [f"{least:.4g}"])
    # Not by the difference of the two, which may be beyond the largest float.
    shares = [row / (ROWS - 1) for row in range(ROWS)]
    labels = [f"{most * (1 - share) + least * share:.4g}" for share in shares]
    return _Scale(
        least, most, [text if row in (0, ROWS // 2, ROWS - 1) else "" for row, text in enumerate(labels)]
    )


def _drawn(series: Series, scale: _Scale, margin: int, steps: range, screen: Screen) -> str:
    points = [(s, v) for s, v in zip(series.steps, series.values, strict=True) if math.isfinite(v)]
    canvas = _Canvas(screen.columns - margin - 3, len(scale.labels), screen.braille)
    canvas.draw(points, scale, steps)
    framed = _framed(canvas.lines(), scale, margin, steps, screen)
    return "\n".join([*_title(series, points, screen.columns - 1), *framed])


def _framed(lines: Sequence[str], scale: _Scale, margin: int, steps: range, screen: Screen) -> list[str]:
    """A picture with its scale on the left and the steps below."""
    side, tick, corner, line = "│┤└─" if screen.braille else "|+`-"
    columns = screen.columns - margin - 3
    first, last = str(steps[0]), str(steps[-1])
    return [
        *(
            f"{label:>{margin}} {tick if label else side}{text}".rstrip()
            for label, text in zip(scale.labels, lines, strict=True)
        ),
        f"{'':{margin}} {corner}{line * columns}",
        f"{'':{margin}}  {first}{last:>{columns - len(first)}}",
    ]


def _title(series: Series, points: Sequence[tuple[int, float]], columns: int) -> list[str]:
    parts = []
    if points:
        least, most = (choose(points, key=lambda point: point[1]) for choose in (min, max))
        parts = [f"last {points[-1][1]:.4g}"]
        parts += [
            f"{name} {value:.4g} at step {step}" for name, (step, value) in (("least", least), ("most", most))
        ]
    if len(points) < len(series.values):
        parts += [f"not finite: {len(series.values) - len(points)}"]
    return textwrap.wrap(f"{series.key}: {', '.join(parts)}", columns, subsequent_indent="  ")


@dataclass(slots=True)
class _Column:
    """What the values of one column of dots span, and the first and the last of them."""

    lowest: int
    highest: int
    first: int
    last: int


class _Canvas:
    """Dots, of which a character holds two by four, or in ASCII one by two."""

    def __init__(self, columns: int, rows: int, braille: bool) -> None:
        self.columns, self._rows, self._braille = columns, rows, braille
        self._wide, self._high = (2, 4) if braille else (1, 2)
        self._dots: set[tuple[int, int]] = set()

    def draw(self, points: Sequence[tuple[int, float]], scale: _Scale, steps: range) -> None:
        """Draw a line through points with rising steps. A column shows all that its values span: no peak is lost between two dots."""
        across, up = self.columns * self._wide - 1, self._rows * self._high - 1
        span = scale.most / 2 - scale.least / 2  # the whole may be beyond the largest float
        columns: dict[int, _Column] = {}
        for step, value in points:
            x = round((step - steps[0]) / max(1, len(steps) - 1) * across)
            y = round((value / 2 - scale.least / 2) / span * up) if span else up // 2
            column = columns.setdefault(x, _Column(y, y, y, y))
            column.lowest, column.highest = min(column.lowest, y), max(column.highest, y)
            column.last = y
        previous: tuple[int, int] | None = None
        for x, column in columns.items():
            self._fill(x, column.lowest, column.highest)
            if previous is not None:
                self._join(*previous, x, column.first)
            previous = x, column.last

    def _join(self, x0: int, y0: int, x1: int, y1: int) -> None:
        """The dots between two of them, each column up to where the next one begins."""
        for x in range(x0, x1 + 1):
            y_left, y_right = (
                y0 + (y1 - y0) * min(max(at - x0, 0), x1 - x0) / (x1 - x0) for at in (x - 0.5, x + 0.5)
            )
            self._fill(x, round(min(y_left, y_right)), round(max(y_left, y_right)))

    def _fill(self, x: int, low: int, high: int) -> None:
        self._dots.update((x, y) for y in range(low, high + 1))

    def lines(self) -> list[str]:
        return ["".join(self._cell(c, r) for c in range(self.columns)) for r in range(self._rows)]

    def _cell(self, column: int, row: int) -> str:
        top = (self._rows - row) * self._high - 1
        dots = [
            [(column * self._wide + i, top - j) in self._dots for i in range(self._wide)]
            for j in range(self._high)
        ]
        if not self._braille:
            return {(False, False): " ", (True, False): "'", (False, True): ".", (True, True): ":"}[
                dots[0][0], dots[1][0]
            ]
        bits = sum(_BRAILLE[j][i] for j in range(4) for i in range(2) if dots[j][i])
        return chr(0x2800 + bits) if bits else " "
