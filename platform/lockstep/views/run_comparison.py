"""Several recorded runs beside each other: what their specs have otherwise, and their curves, in a terminal or as a page."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from lockstep.errors import SpecError
from lockstep.printing import on_one_line, printable, table
from lockstep.record.mirror.documents import flat
from lockstep.views.curves import Curves
from lockstep.views.terminal_curves import Screen, Series, drawn_together, series_of

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
"""What stands for each run, in the order in which they are given."""

MOST = len(LETTERS)
"""Runs in one comparison."""


class Comparison(NamedTuple):
    """Runs, and what they have in common or not."""

    runs: Sequence[Curves]
    fields: Mapping[str, Sequence[str | None]]
    """The fields of the spec in which they differ, with the value of each run."""
    curves: Mapping[str, Mapping[str, Series]]
    """By key, the curve of each run that has one, by its letter."""

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        ids = dict(zip(LETTERS, (run.run_id for run in self.runs), strict=False))
        return {
            "runs": [{"run_id": run.run_id, "name": run.name} for run in self.runs],
            "fields": {name: list(values) for name, values in self.fields.items()},
            "curves": {
                key: {
                    ids[letter]: {"steps": curve.steps, "values": curve.values}
                    for letter, curve in curves.items()
                }
                for key, curves in self.curves.items()
            },
        }


def compared(runs: Sequence[Curves], keys: Sequence[str]) -> Comparison:
    """Runs beside each other, by the curves that `series_of` gives of each. SpecError for a key that none of them has."""
    curves: dict[str, dict[str, Series]] = {}
    missing: SpecError | None = None
    for letter, run in zip(LETTERS, runs, strict=False):
        for selection in [[key] for key in keys] or [[]]:
            try:
                series = series_of(run, selection)
            except SpecError as error:
                missing = error
                continue
            for curve in series:
                curves.setdefault(curve.key, {})[letter] = curve
    if missing is not None and not all(any(key == name or "*" in key for name in curves) for key in keys):
        raise missing
    flats = [flat(run.fields) for run in runs]
    names = sorted({name for fields in flats for name in fields})
    fields = {name: [fields.get(name) for fields in flats] for name in names}
    return Comparison(runs, {name: values for name, values in fields.items() if len(set(values)) > 1}, curves)


def as_text(comparison: Comparison, screen: Screen) -> str:
    """The comparison for a terminal: the runs with their letters, the fields that differ, and each curve of all runs in one picture."""
    letters = LETTERS[: len(comparison.runs)]
    parts = [
        table(
            [
                ["", "RUN", "NAME"],
                *([a, run.run_id, run.name] for a, run in zip(letters, comparison.runs, strict=True)),
            ]
        )
    ]
    if comparison.fields:
        rows = [[name, *(value or "" for value in values)] for name, values in comparison.fields.items()]
        parts.append(table([["FIELD", *letters], *rows]))
    parts += [drawn_together(key, curves, screen) for key, curves in comparison.curves.items()]
    return "\n\n".join(parts)


# --- the page ---------------------------------------------------------------------------------------------------

_WIDTH, _HEIGHT, _LEFT, _BELOW = 860, 260, 70, 24
_COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#8c564b", "#e377c2", "#17becf")
_MOST_POINTS = 2_000
"""Of a curve, in a page; between them the least and the greatest value are kept."""

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 980px; margin: 2em auto; padding: 0 1em; color: #222; background: #fff }
table { border-collapse: collapse; margin: 1em 0 } th, td { text-align: left; padding: 2px 14px 2px 0; vertical-align: top }
td { font-family: ui-monospace, monospace; font-size: 13px } h2 { font-size: 1.1em; margin: 1.6em 0 0 }
svg { width: 100%; height: auto } .axis { stroke: #999 } text { font-size: 12px; fill: #555 }
path { fill: none; stroke-width: 1.5 } b { font-family: ui-monospace, monospace }
@media (prefers-color-scheme: dark) { body { color: #ddd; background: #161616 } text { fill: #aaa } }
"""


def as_page(comparison: Comparison) -> str:
    """The same as one HTML file that needs no other."""
    letters = LETTERS[: len(comparison.runs)]
    runs = _html_table(
        ["", "run", "name"],
        [
            [_mark(a), _text(run.run_id), _text(run.name)]
            for a, run in zip(letters, comparison.runs, strict=True)
        ],
    )
    fields = _html_table(
        ["field", *letters],
        [
            [_text(name), *("" if value is None else _text(value) for value in values)]
            for name, values in comparison.fields.items()
        ],
    )
    pictures = "\n".join(
        f"<h2>{_text(key)}</h2>\n{_picture(curves)}" for key, curves in comparison.curves.items()
    )
    return (
        '<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n<meta name="viewport" content="width=device-width">\n'
        f"<title>{len(comparison.runs)} runs compared</title>\n<style>{_STYLE}</style>\n<h1>{len(comparison.runs)} runs compared</h1>\n"
        f"{runs}\n{fields if comparison.fields else '<p>Their specs are equal, but for placement.</p>'}\n{pictures}\n</html>\n"
    )


def _text(text: str) -> str:
    return html.escape(on_one_line(printable(text)))


def _mark(letter: str) -> str:
    return f'<b style="color: {_colour(letter)}">{letter}</b>'


def _colour(letter: str) -> str:
    return _COLOURS[LETTERS.index(letter) % len(_COLOURS)]


def _html_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    cells = ["".join(f"<th>{cell}</th>" for cell in head)]
    cells += ["".join(f"<td>{cell}</td>" for cell in row) for row in rows]
    return "<table>" + "".join(f"<tr>{row}</tr>" for row in cells) + "</table>"


def _picture(curves: Mapping[str, Series]) -> str:
    points = {letter: _finite(series) for letter, series in curves.items()}
    every = [point for of_run in points.values() for point in of_run]
    if not every:
        return "<p>no finite value</p>"
    first, last = min(step for step, _ in every), max(step for step, _ in every)
    least, most = min(value for _, value in every), max(value for _, value in every)
    span, steps = (
        (most / 2 - least / 2) or 1.0,
        max(1, last - first),
    )  # the whole may be beyond the largest float

    def at(step: int, value: float) -> str:
        x = _LEFT + (step - first) / steps * (_WIDTH - _LEFT - 10)
        y = 10 + (most / 2 - value / 2) / span * (_HEIGHT - _BELOW - 20)
        return f"{x:.1f},{y:.1f}"

    bottom = _HEIGHT - _BELOW
    axes = (
        f'<path class="axis" d="M{_LEFT},10V{bottom}H{_WIDTH - 10}"/>'
        f'<text x="{_LEFT - 6}" y="16" text-anchor="end">{most:.4g}</text>'
        f'<text x="{_LEFT - 6}" y="{bottom - 4}" text-anchor="end">{least:.4g}</text>'
        f'<text x="{_LEFT}" y="{_HEIGHT - 6}">{first}</text><text x="{_WIDTH - 10}" y="{_HEIGHT - 6}" text-anchor="end">step {last}</text>'
    )
    lines = "".join(
        f'<path style="stroke: {_colour(letter)}" d="M{" L".join(at(*point) for point in _thinned(of_run))}">'
        f"<title>{letter}: last {of_run[-1][1]:.6g} at step {of_run[-1][0]}</title></path>"
        for letter, of_run in points.items()
        if of_run
    )
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">{axes}{lines}</svg>'


def _finite(series: Series) -> list[tuple[int, float]]:
    return [(s, v) for s, v in zip(series.steps, series.values, strict=True) if math.isfinite(v)]


def _thinned(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """At most so many points, without losing a peak: of each stretch the first, the least, the greatest and the last."""
    length = -(-4 * len(points) // _MOST_POINTS)
    if length <= 4:
        return list(points)
    kept: list[tuple[int, float]] = []
    for start in range(0, len(points), length):
        stretch = points[start : start + length]
        extremes = {
            stretch[0],
            stretch[-1],
            min(stretch, key=lambda point: point[1]),
            max(stretch, key=lambda point: point[1]),
        }
        kept += sorted(extremes)
    return kept
