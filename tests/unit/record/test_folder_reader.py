"""What `lockstep runs` and `lockstep show` say of runs that are recorded in folders alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from lockstep.record import problems
from lockstep.record.events.union import Finished
from lockstep.record.mirror import folder as folder_store
from lockstep.record.mirror.stores import reader
from lockstep.record.recorder import Recorder
from lockstep.spec.fields import Spec
from tests.forked import lockstep
from tests.in_process import here
from tests.raised import raises
from tests.unit.record.rows import step_row

Specs = Callable[..., Spec]


def recorded(spec: Spec, steps: int) -> Path:
    recorder = Recorder(spec)
    recorder.start()
    recorder.tell(*[step_row(i) for i in range(1, steps + 1)])
    recorder.tell(Finished({"step": steps}))
    recorder.close()
    return recorder.run_folder()


def gone(folder: Path) -> Path:
    """Make a run one whose process has gone without a word."""
    run = json.loads((folder / "run.json").read_text())
    run["status"] = "RUNNING"
    run["tags"]["lockstep.process"] = run["tags"]["lockstep.process"] + "1"  # started at another time
    (folder / "run.json").write_text(json.dumps(run))
    return folder


def command(folder: Path, *words: str) -> tuple[str, int | None]:
    """What the command prints to standard output, and its exit code."""
    process = lockstep(*words, cwd=folder)
    return process.communicate(60)[0], process.returncode


def test_runs_are_listed_newest_first_and_shown(spec: Specs, tmp_path: Path) -> None:
    first, second = recorded(spec(), 3), recorded(spec(), 5)
    found = reader("off", tmp_path / "runs").runs(None, 10)
    assert [(run.run_id, run.status, run.step) for run in found] == [
        (second.name, "FINISHED", 5),
        (first.name, "FINISHED", 3),
    ]
    assert len(reader("off", tmp_path / "runs").runs(None, 1)) == 1
    table = command(tmp_path, "runs", "--uri", "off")[0].splitlines()
    assert [line.split()[0] for line in table] == ["RUN", second.name, first.name]
    page, _ = command(tmp_path, "show", first.name, "--uri", "off")
    assert "FINISHED" in page and "ledger.parquet" in page
    told = json.loads(command(tmp_path, "show", first.name, "--uri", "off", "--json")[0])
    assert (told["status"], told["step"], told["params"]["optimizer.lr"]) == ("FINISHED", 3, "0.001")


def test_a_run_whose_process_has_gone_is_marked_where_it_is_seen(spec: Specs, tmp_path: Path) -> None:
    folder = gone(recorded(spec(), 3))
    assert reader("off", tmp_path / "runs").run(folder.name).status == "FAILED"
    kept = json.loads((folder / "run.json").read_text())
    assert kept["status"] == "FAILED"
    assert kept["tags"]["lockstep.error"].startswith("the process that recorded it is gone")


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"run_id": 3}'])
def test_a_run_that_cannot_be_read_costs_the_others_nothing(
    spec: Specs,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    content: str,
) -> None:
    whole, damaged = recorded(spec(), 3), recorded(spec(), 5)
    (damaged / "run.json").write_text(content)
    code, out, err = here(monkeypatch, capfd, tmp_path, "runs", "--uri", "off", "--json")
    assert code == 0
    assert [run["run_id"] for run in json.loads(out)["runs"]] == [whole.name]
    (line,) = err.splitlines()
    assert line.startswith(f"lockstep: run {damaged.name}: its run.json in")


def test_a_run_of_another_user_whose_process_has_gone_is_shown_so(
    spec: Specs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = gone(recorded(spec(), 3))
    before = (folder / "run.json").read_bytes()

    def refused(path: Path, text: str) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(folder_store, "write_text", refused)
    assert [run.status for run in reader("off", tmp_path / "runs").runs(None, 10)] == ["FAILED"]
    assert (folder / "run.json").read_bytes() == before


def test_what_is_not_there_is_one_clear_line(tmp_path: Path) -> None:
    with raises(problems.NO_RUN):
        reader("off", tmp_path).run("0" * 32)
    with raises(problems.NO_EXPERIMENTS):
        reader("off", tmp_path).runs("digits", 1)
    _, refused = command(tmp_path, "runs", "--uri", "off", "--limit", "0")
    assert refused == 2
    unknown, code = command(tmp_path, "show", "0" * 32, "--uri", "off", "--json")
    assert code == 1
    assert json.loads(unknown)["status"] == "FAILED"
