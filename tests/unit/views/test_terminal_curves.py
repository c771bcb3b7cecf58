"""Curves in a terminal: each line fits, nothing but characters, and no peak is lost."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from lockstep.record.ledger.rows import Observation
from lockstep.views import problems
from lockstep.views.terminal_curves import Screen, Series, drawn, series_of
from tests.in_process import here
from tests.raised import raises
from tests.unit.record.rows import evaluation_row, step_row
from tests.unit.views.recorded import RUN, curves, record

STEPS = range(1, 1001)
LOSS = Series("train/loss", STEPS, [1 + math.exp(-step / 200) for step in STEPS])


@pytest.mark.parametrize("columns", [40, 80, 160])
@pytest.mark.parametrize("braille", [False, True])
@pytest.mark.parametrize("count", [1, 2, 7, 1000])
def test_every_line_fits_and_the_curve_takes_the_whole_width(columns: int, braille: bool, count: int) -> None:
    series = Series("train/loss", STEPS[:count], LOSS.values[:count])
    lines = drawn([series], Screen(columns, braille)).splitlines()
    assert lines[0].startswith("train/loss: last ")
    assert max(map(len, lines)) == columns - 1
    lines = lines[-3 if count == 1 else -12 :]
    assert all("|" in line or "│" in line or "┤" in line or "+" in line for line in lines[:-2])
    characters = set("".join(lines)) - set(" 0123456789.e-+")
    if braille:
        assert all(character in "│┤└─" or 0x2800 < ord(character) < 0x2900 for character in characters)
    else:
        assert characters <= set("|`':")


def test_a_curve_is_drawn_where_its_values_are() -> None:
    """A line that falls, to the character."""
    falling = Series("x", range(1, 38), [float(-step) for step in range(37)])
    lines = drawn([falling], Screen(43, False)).splitlines()[-12:-2]
    columns = [line[5:].ljust(37) for line in lines]
    tops = [next(row for row in range(10) if columns[row][x] != " ") for x in range(37)]
    assert tops == sorted(tops)
    assert (tops[0], tops[-1]) == (0, 9)


@pytest.mark.parametrize("braille", [False, True])
def test_no_peak_is_lost_between_two_columns(braille: bool) -> None:
    values = [0.0] * 10_000
    values[2_345] = 5.0
    lines = drawn([Series("x", range(10_000), values)], Screen(80, braille)).splitlines()
    assert "most 5 at step 2345" in lines[0]
    assert lines[1].strip().startswith("5 ")
    assert len(lines[1].split()) == 3, "the peak is in the topmost line"


def test_values_that_are_not_finite_are_left_out_and_told() -> None:
    text = drawn([Series("x", [1, 2, 3], [1.0, math.nan, math.inf])], Screen(80, False))
    assert text.splitlines()[0] == "x: last 1, least 1 at step 1, most 1 at step 1, not finite: 2"
    assert drawn([Series("x", [1], [math.nan])], Screen(80, False)).startswith("x: not finite: 1\n")


@pytest.mark.parametrize("least", [-1.7e308, 0.0])
def test_values_near_the_largest_float_are_drawn_like_any_other(least: float) -> None:
    """Their difference overflows, as do the values of a loss that diverges in float64."""

    def curve(scale: float) -> list[str]:
        values = [least and -scale, scale / 2, scale]
        return drawn([Series("x", [1, 2, 3], values)], Screen(80, False)).splitlines()

    huge, small = curve(1.7e308), curve(1.7e108)
    assert [line.partition("|")[2] for line in huge[1:-2]] == [line.partition("|")[2] for line in small[1:-2]]
    assert not any("inf" in line or "nan" in line for line in huge)


def test_curves_are_over_the_same_steps() -> None:
    text = drawn([LOSS, Series("eval/loss", [500, 1000], [2.0, 1.0])], Screen(80, False))
    first, second = text.split("\n\n")
    assert first.splitlines()[-1] == second.splitlines()[-1]
    assert second.splitlines()[1].index("'") > 40


def test_loss_evaluation_and_rate_are_shown_by_default(tmp_path: Path) -> None:
    record(tmp_path, [step_row(1), step_row(2), evaluation_row(2, accuracy=0.5, loss=1.0), step_row(3)])
    assert [series.key for series in series_of(curves(tmp_path), [])] == [
        "train/loss",
        "eval/loss",
        "train/lr",
    ]
    record(
        tmp_path, [Observation(3, {"layers/head/gradient_norm": 0.5, "layers/head/update_ratio": 1e-3}, 0.0)]
    )
    assert [one.key for one in series_of(curves(tmp_path), ["layers/*", "train/lr"])] == [
        "layers/head/gradient_norm",
        "layers/head/update_ratio",
        "train/lr",
    ]
    with raises(problems.PLOT_KEY, got="layer/*"):
        series_of(curves(tmp_path), ["layer/*"])
    (chosen,) = series_of(curves(tmp_path), ["eval/accuracy"])
    assert chosen == Series("eval/accuracy", [2], [0.5])
    with raises(problems.PLOT_KEY, got="train/los"):
        series_of(curves(tmp_path), ["train/los"])


@pytest.mark.parametrize("content", [b"", b"[]", b"\xff", b"{"])
def test_a_spec_that_is_none_is_one_line(tmp_path: Path, content: bytes) -> None:
    (record(tmp_path, [step_row(1)]) / "spec.yaml").write_bytes(content)
    with raises(problems.NO_SPEC):
        curves(tmp_path)


def test_the_command_draws_what_is_recorded_so_far(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    record(tmp_path / "runs", [step_row(1), step_row(2), step_row(3)])
    monkeypatch.setenv("COLUMNS", "100")
    code, out, _ = here(monkeypatch, capfd, tmp_path, "show", RUN, "--plot", "train/loss", "--uri", "off")
    assert code == 0
    assert out.isascii(), "standard output is no terminal here"
    assert max(map(len, out.splitlines())) == 99
    code, out, _ = here(monkeypatch, capfd, tmp_path, "show", RUN, "--plot", "--json", "--uri", "off")
    assert code == 0
    told = json.loads(out)
    assert told["run_id"] == RUN
    assert told["curves"]["train/loss"] == {
        "steps": [1, 2, 3],
        "values": [step_row(s).loss for s in (1, 2, 3)],
    }
    code, _, err = here(monkeypatch, capfd, tmp_path, "show", RUN, "train/loss", "--uri", "off")
    assert (code, err) == (2, "lockstep: show: got 'train/loss' after the run; keys are for --plot\n")
