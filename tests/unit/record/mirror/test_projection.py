"""What a store should have of a run follows from its log; its files are written as several threads of its recorder ask for them."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lockstep import files
from lockstep.record.events.union import (
    AttemptsSummarised,
    CheckpointRow,
    Document,
    Failed,
    Finished,
    PeakMemory,
    Recorded,
    Started,
)
from lockstep.record.ledger.journal import Journal
from lockstep.record.ledger.rows import Observation
from lockstep.record.ledger.tables import read_evaluations, read_observations, read_parquet
from lockstep.record.mirror.projection import Projection
from lockstep.record.mirror.run_files import RunFiles
from lockstep.record.plots import run_plots
from lockstep.record.recorder import Recorder
from lockstep.spec.fields import Spec
from tests.unit.record.rows import evaluation_row, step_row
from tests.without_figures import DRAW


def projected(spec: Spec, folder: Path, *events: Recorded) -> Projection:
    """The projection of a run with this log."""
    with contextlib.closing(Journal(folder)) as journal:
        journal.add(events)
        projection = Projection(spec, folder, journal)
        for event in journal.events:
            projection.take(event)
        return projection


def saved(step: int, *deleted: int) -> CheckpointRow:
    return CheckpointRow(step, f"/runs/{step}", None, 1, 0.0, 0.0, 0.0, 0.0, deleted)


def test_checkpoints_are_wanted_as_far_as_they_are_left(spec: Callable[..., Spec], tmp_path: Path) -> None:
    """A step that was deleted and is saved again by another attempt is left."""
    log = [saved(1), saved(2, 1), saved(3), saved(4, 3), saved(1)]
    projection = projected(spec(record={"checkpoints": "reference"}), tmp_path, *log)
    assert projection.references == {2: "/runs/2", 4: "/runs/4", 1: "/runs/1"}
    assert projection.known_steps == {1, 2, 3, 4} and not projection.makes_copies


def test_an_end_before_the_last_start_leaves_nothing_wanted(
    spec: Callable[..., Spec], tmp_path: Path
) -> None:
    """The control is the end that counts: its text, its tag and its status. What is not of the end stays."""
    log = [Started({"workers": 2}), Document("stacks.txt", "…"), Failed("the loss is nan")]
    ended = projected(spec(), tmp_path / "ended", *log)
    assert ended.end is not None and ended.end.status == "FAILED"
    assert ended.end.documents == {"error.txt": "the loss is nan\n"}
    assert ended.tags(trouble="", figures=(), ended=True)["lockstep.error"] == "the loss is nan"
    goes_on = projected(spec(), tmp_path / "goes on", *log, Started({"workers": 1}))
    assert goes_on.end is None
    tags = goes_on.tags(trouble="", figures=(), ended=True)
    assert (tags["lockstep.error"], tags["lockstep.workers"]) == ("", "1")
    assert goes_on.documents["stacks.txt"] == "…"


def test_attempts_of_an_earlier_driver_stay_as_it_left_them(
    spec: Callable[..., Spec], tmp_path: Path
) -> None:
    first, second = {"attempt": 1, "end": "killed"}, {"attempt": 2, "end": "FINISHED"}
    log = [AttemptsSummarised([{"attempt": 1}]), AttemptsSummarised([first]), AttemptsSummarised([second])]
    projection = projected(spec(), tmp_path, *log)
    assert json.loads(projection.documents["attempts.json"]) == [first, second]


def test_a_line_that_two_threads_log_at_once_is_in_the_log_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer's thread, the lane of files and that of copies log."""
    began, other_is_done = threading.Event(), threading.Event()

    def slow(path: Path, text: str) -> int:
        size = files.append(path, text)
        if not began.is_set():
            began.set()
            other_is_done.wait(0.1)
        return size

    monkeypatch.setattr("lockstep.record.mirror.run_texts.append", slow)
    journal = Journal(tmp_path)
    run_files = RunFiles(tmp_path, journal, scaled=False)
    first = threading.Thread(target=run_files.log, args=("one",))
    first.start()
    began.wait()
    run_files.log("two")
    other_is_done.set()
    first.join()
    journal.close()
    lines = (tmp_path / "log.txt").read_text().splitlines()
    assert [line.split()[-1] for line in lines] == ["one", "two"]


@pytest.mark.scenario
def test_runs_that_end_together_in_one_process_draw_one_after_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each holds all of its rows while it draws, and the trials of a sweep end by hundreds; all have their figures."""
    at_once: list[int] = []
    drawing = 0

    def watched(*given: Any, **named: Any) -> list[Path]:
        nonlocal drawing
        drawing += 1
        at_once.append(drawing)
        time.sleep(0.05)
        try:
            return DRAW(*given, **named)
        finally:
            drawing -= 1

    monkeypatch.setattr(run_plots, "draw", watched)
    runs = [tmp_path / str(number) for number in range(4)]

    def end(folder: Path) -> None:
        folder.mkdir()
        with contextlib.closing(Journal(folder)) as journal:
            journal.add([step_row(step) for step in range(1, 9)])
            RunFiles(folder, journal, scaled=False).write_tables()

    threads = [threading.Thread(target=end, args=(folder,)) for folder in runs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert at_once == [1, 1, 1, 1]
    assert all(list(folder.glob("figures/*.png")) for folder in runs)


@pytest.mark.usefixtures("drawn_figures")
def test_a_figure_that_cannot_be_drawn_is_left_out_and_costs_nothing_else(
    spec: Callable[..., Spec],
) -> None:
    """Losses near the largest float64 are finite, and matplotlib's axes overflow over them."""
    rows = [step_row(step, loss=loss) for step, loss in enumerate((1.0, 1e100, 1e300, 1.6e308), 1)]
    observed = [Observation(step, {"perf/memory/rss_mb": 1.0}, 1.7e9) for step in (1, 2)]
    recorder = Recorder(spec())
    recorder.start()
    recorder.tell(*rows, evaluation_row(4), *observed, Finished({"step": 4}))
    recorder.close()
    folder = recorder.run_folder()
    run = json.loads((folder / "run.json").read_text())
    assert run["status"] == "FINISHED" and run["tags"]["lockstep.error"] == ""
    assert read_parquet(folder / "ledger.parquet") == rows
    assert read_evaluations(folder / "evaluations.parquet") == [evaluation_row(4)]
    assert read_observations(folder / "observations.parquet") == observed
    drawn = {"gradient_norm.png", "time.png", "memory.png"}
    assert {file.name for file in (folder / "figures").iterdir()} == drawn
    (told,) = [line for line in (folder / "log.txt").read_text().splitlines() if "no figure" in line]
    assert "no figure loss.png: it cannot be drawn: " in told
    assert "loss.png" not in run["tags"]["lockstep.note"] and "time.png" in run["tags"]["lockstep.note"]


@pytest.mark.every(2)
@pytest.mark.usefixtures("drawn_figures")
@pytest.mark.parametrize("more", [False, True])
def test_figures_are_drawn_before_the_end_is_known_and_once(
    spec: Callable[..., Spec], monkeypatch: pytest.MonkeyPatch, more: bool
) -> None:
    """While rank 0 exports the final model. The control: where another attempt has evaluated since, they are drawn anew."""
    drawn: list[int] = []
    draw = run_plots.draw

    def noted(x: Any, evaluated: Any, *given: Any, **named: Any) -> Any:
        drawn.append(len(evaluated))
        return draw(x, evaluated, *given, **named)

    monkeypatch.setattr(run_plots, "draw", noted)
    recorder = Recorder(spec())
    recorder.start()
    recorder.tell(*[step_row(step) for step in range(1, 5)], evaluation_row(2), PeakMemory([1]))
    until = time.monotonic() + 60
    while not drawn:
        assert time.monotonic() < until
        time.sleep(0.01)
    recorder.tell(*([evaluation_row(4)] if more else []), Finished({"step": 4}))
    recorder.close()
    assert drawn == ([1, 2] if more else [1])
    folder = recorder.run_folder()
    note = json.loads((folder / "run.json").read_text())["tags"]["lockstep.note"]
    assert note.count("loss.png") == 1
    assert (folder / "figures" / "loss.png").exists()
