"""`lockstep compare`: several runs in one picture, in a terminal and as a page."""

from __future__ import annotations

import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from lockstep.views import problems
from lockstep.views.curves import Curves, curves_of
from lockstep.views.run_comparison import Comparison, as_page, as_text, compared
from lockstep.views.terminal_curves import Screen, Series
from tests.in_process import here
from tests.raised import raises
from tests.unit.record.rows import evaluation_row, step_row
from tests.unit.views.recorded import RUN, record

SCREEN = Screen(80, braille=False)


def two(folder: Path, name: str = "digits") -> list[Curves]:
    """Runs with another rate; the second one has no evaluation."""
    runs = []
    for place, rate, evaluations in (("a", 0.1, [evaluation_row(2)]), ("b", 0.2, [])):
        rows = [step_row(n, loss=1 / (n * rate)) for n in range(1, 41)]
        there = record(folder / place, [*rows, *evaluations], optimizer={"lr": rate}, name=name)
        runs.append(curves_of(RUN, "off", there))
    return runs


def test_what_differs_is_shown_and_each_curve_has_all_runs(tmp_path: Path) -> None:
    found = compared(two(tmp_path), [])
    assert found.fields == {"optimizer.lr": ["0.1", "0.2"]}
    assert {key: list(curves) for key, curves in found.curves.items()} == {
        "train/loss": ["A", "B"],
        "eval/loss": ["A"],
        "train/lr": ["A", "B"],
    }
    lines = as_text(found, SCREEN).splitlines()
    assert max(map(len, lines)) < 80
    assert lines[5].split() == ["optimizer.lr", "0.1", "0.2"]
    picture = as_text(found, SCREEN).split("\n\n")[2].splitlines()
    assert picture[1].startswith("A: last 0.25, least 0.25 at step 40, most 10 at step 1")
    assert picture[2].startswith("B: last 0.125")
    assert "".join(picture[3:13]).count("A") > 5
    assert "".join(picture[3:13]).count("B") > 5


def test_curves_are_where_their_values_are_and_a_star_is_where_several_are() -> None:
    same = Series("x", range(1, 41), [1.0] * 20 + [2.0] * 20)
    other = same._replace(values=[1.0] * 20 + [0.0] * 20)
    lines = as_text(Comparison([], {}, {"x": {"A": same, "B": other}}), SCREEN).splitlines()
    top, bottom = (next(line for line in lines if line.strip().startswith(label)) for label in ("2 +", "0 +"))
    assert set(top.partition("+")[2]) == {" ", "A"}
    assert set(bottom.partition("+")[2]) == {" ", "B"}
    assert any("*" in line and "B" not in line for line in lines)


def test_a_key_that_one_of_them_has_is_drawn_and_one_that_none_has_is_refused(tmp_path: Path) -> None:
    runs = two(tmp_path)
    assert list(compared(runs, ["eval/loss"]).curves) == ["eval/loss"]
    assert list(compared(runs, ["eval/*", "train/lo*"]).curves) == ["eval/loss", "train/loss"]
    with raises(problems.PLOT_KEY, got="train/los", hint="; did you mean 'train/loss'?"):
        compared(runs, ["train/los"])


class Checked(HTMLParser):
    """A page whose tags are balanced, and which loads nothing."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert not {"src", "href"} & {name for name, _ in attrs}
        assert tag != "script"
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None: ...

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def test_the_page_is_whole_and_takes_names_as_text(tmp_path: Path) -> None:
    name = "<script>alert(1)</script>&\x1b[31m"
    runs = [Curves(run.run_id, {**run.document, "name": name}, run.rows, run.failed) for run in two(tmp_path)]
    page = as_page(compared(runs, []))
    checked = Checked(page)
    assert checked.open == []
    assert "<script>alert(1)</script>&\\x1b[31m" in checked.text
    assert page.count("<svg") == 3
    assert page.count("<path style") == 5


def test_no_peak_of_a_long_curve_is_lost_in_a_page() -> None:
    values = [0.0] * 100_000
    values[54_321] = 5.0
    values[7] = math.nan
    page = as_page(Comparison([], {}, {"x": {"A": Series("x", range(100_000), values)}}))
    (line,) = re.findall(r'<path style="[^"]*" d="M([^"]*)"', page)
    assert len(line.split()) <= 2_000
    assert [point for point in line.split() if point.endswith(",10.0")]


def test_the_command_writes_the_page_and_answers_with_one_object(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    two(tmp_path)
    other = "f" * 32
    (tmp_path / "b" / RUN).rename(tmp_path / "a" / other)
    words = ["compare", RUN, other, "--storage", "a", "--uri", "off", "--html", "page.html"]
    code, out, err = here(monkeypatch, capfd, tmp_path, *words, "--json")
    assert code == 0, err
    answer = json.loads(out)
    assert [run["run_id"] for run in answer["runs"]] == [RUN, other]
    assert answer["curves"]["train/loss"][other]["values"][-1] == 0.125
    assert answer["html"] == "page.html"
    assert Checked((tmp_path / "page.html").read_text()).open == []
    assert here(monkeypatch, capfd, tmp_path, "compare", RUN, RUN, "--storage", "a", "--uri", "off")[0] == 2
