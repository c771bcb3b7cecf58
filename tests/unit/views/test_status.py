"""`lockstep status`: how far a run is, from its record alone."""

from __future__ import annotations

import json
import math
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from lockstep.cli.problems import PORT_TAKEN
from lockstep.errors import RecordError
from lockstep.record.events.union import Failed, TimeSpent
from lockstep.record.mirror.run_store import RunInfo
from lockstep.views import status
from lockstep.views.status import RunStatus, as_text, status_of
from lockstep.views.status_server import StatusServer
from tests.in_process import here
from tests.unit.record.rows import step_row
from tests.unit.views.recorded import RUN, record

BEGAN = 1_000.0


def known(**more: Any) -> RunInfo:
    fields = {
        "run_id": RUN, "name": "n", "experiment": "", "status": "RUNNING", "started": BEGAN, "ended": None, "step": 0,
        "metrics": {}, "params": {"plan.total_steps": "100"}, "tags": {"lockstep.workers": "2"}, "url": "",
    }  # fmt: skip
    return RunInfo(**{**fields, **more})


def test_a_run_that_trains_has_a_pace_of_its_newest_attempt(tmp_path: Path) -> None:
    """Two attempts with an hour between them; a step of 0.5 s each second."""
    rows = [step_row(n, wall_clock=BEGAN + n, step_s=0.5, attempt=1) for n in range(1, 11)]
    rows += [step_row(n, wall_clock=BEGAN + 3600 + n, step_s=0.5, attempt=2) for n in range(11, 21)]
    folder = record(tmp_path, rows, checkpoint={"storage": str(tmp_path)})
    found = status_of(known(), "off", folder, BEGAN + 4000)
    assert found == RunStatus(RUN, "RUNNING", 20, 100, 80.0, 10 / 4000, None, 2, 0.0, 1, 3600.5 / 3600)
    ended = status_of(known(status="KILLED", ended=BEGAN + 100.0), "off", folder, BEGAN + 4000)
    assert (ended.eta_s, ended.effective) == (None, 0.1)
    assert as_text(ended, "lockstep resume X").splitlines()[-1] == "resume it with    lockstep resume X"
    assert "resume it with" not in as_text(found, "lockstep resume X")
    assert "time left         1:20" in as_text(found, "")
    assert "0.2% of its time went into steps that count; one interruption took 1 worker-hours" in as_text(
        found, ""
    )


def test_a_run_that_has_ended_has_the_time_that_its_record_tells(tmp_path: Path) -> None:
    told = TimeSpent(BEGAN + 100, 100.0, 25.0, 50.0, 2, 10.0, 0.5)
    end = Failed("lost", at=BEGAN + 100)
    folder = record(tmp_path, [step_row(1), told, end], checkpoint={"storage": str(tmp_path)})
    found = status_of(known(status="FAILED", ended=BEGAN + 101), "off", folder, BEGAN + 4000)
    assert (found.effective, found.away_s, found.interruptions, found.lost_worker_h) == (0.25, 50.0, 2, 0.5)
    assert status_of(known(), "off", folder, BEGAN + 4000).effective != 0.25  # it goes on


def test_a_run_without_a_step_is_known_by_its_facts(tmp_path: Path) -> None:
    found = status_of(known(tags={}, params={}), "off", tmp_path / RUN, BEGAN)
    assert found == RunStatus(RUN, "RUNNING", 0, None, None, None, None, None)
    assert as_text(found, "").splitlines()[1:3] == ["state             RUNNING", "step              0"]


def test_the_newest_checkpoint_is_that_of_its_storage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, str]] = []

    def steps_of(storage: str, run_id: str) -> list[int]:
        asked.append((storage, run_id))
        return [8, 4]

    monkeypatch.setattr(status, "steps_of", steps_of)
    folder = record(tmp_path, [step_row(9)], checkpoint={"storage": "elsewhere"})
    assert status_of(known(), "off", folder, BEGAN).last_checkpoint == 8
    assert [(Path(storage).name, run_id) for storage, run_id in asked] == [("elsewhere", RUN)]


def test_the_command_answers_with_one_object(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = record(tmp_path / "runs", [step_row(3)], checkpoint={"storage": str(tmp_path / "runs")})
    told = {
        "run_id": RUN, "name": "n", "status": "FINISHED", "started": BEGAN, "ended": BEGAN + 9, "params": {"plan.total_steps": "3"},
        "tags": {},
    }  # fmt: skip
    (folder / "run.json").write_text(json.dumps(told))
    code, out, err = here(monkeypatch, capfd, tmp_path, "status", RUN, "--uri", "off", "--json")
    assert code == 0, err
    answer = json.loads(out)
    assert list(answer) == [
        "run_id", "state", "step", "steps", "eta_s", "effective", "last_checkpoint", "workers", "away_s", "interruptions",
        "lost_worker_h",
    ]  # fmt: skip
    assert (answer["state"], answer["step"], answer["steps"]) == ("FINISHED", 3, 3)
    code, _, err = here(monkeypatch, capfd, tmp_path, "status", "f" * 32, "--uri", "off")
    assert code == 1
    assert "`lockstep runs` lists those that it has" in err


def scraped(url: str) -> dict[str, Any]:
    """The samples at an address, as Prometheus's own parser reads them: value by name and labels."""
    from prometheus_client.parser import text_string_to_metric_families

    with urllib.request.urlopen(url, timeout=10) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        text = answer.read().decode()
    return {
        (sample.name, sample.labels.get("state")): (sample.value, sample.labels["run"])
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def answer_of(url: str, **headers: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_the_server_has_the_status_as_json_and_as_metrics(tmp_path: Path) -> None:
    """Both say the same of one moment; a request after it reads the record anew."""
    rows = [step_row(n, wall_clock=BEGAN + n, step_s=0.5, attempt=1) for n in range(1, 11)]
    folder = record(tmp_path, rows, checkpoint={"storage": str(tmp_path)})
    runs = [known(), known(status="FINISHED", ended=BEGAN + 20)]
    reads: list[RunStatus] = []

    def read() -> RunStatus:
        if len(reads) == 2:
            raise RecordError("store: it does not answer")
        reads.append(status_of(runs[len(reads)], "off", folder, BEGAN + 20))
        return reads[-1]

    with serving(StatusServer(read, 0, fresh_s=math.inf)) as server:
        code, text = answer_of(f"{server.url}/")
        assert (code, json.loads(text)) == (200, reads[0].as_dict())
        assert scraped(f"{server.url}/metrics") == {
            ("lockstep_run_step", None): (10.0, RUN),
            ("lockstep_run_steps", None): (100.0, RUN),
            ("lockstep_run_eta_seconds", None): (90.0, RUN),
            ("lockstep_run_effective_ratio", None): (0.25, RUN),
            ("lockstep_run_workers", None): (2.0, RUN),
            ("lockstep_run_away_seconds", None): (0.0, RUN),
            ("lockstep_run_interruptions", None): (0.0, RUN),
            ("lockstep_run_lost_worker_hours", None): (0.0, RUN),
            ("lockstep_run_state", "RUNNING"): (1.0, RUN),
        }
        assert len(reads) == 1
        server._newest = None
        ended = scraped(f"{server.url}/metrics")
        assert ("lockstep_run_state", "FINISHED") in ended
        assert ("lockstep_run_eta_seconds", None) not in ended
        server._newest = None
        assert answer_of(f"{server.url}/") == (503, "store: it does not answer\n")
        assert answer_of(f"{server.url}/other")[0] == 404


def test_the_server_answers_nobody_but_this_machine(tmp_path: Path) -> None:
    """A page of another site may have its own name lead to loopback: the name is refused."""
    with serving(StatusServer(lambda: status_of(known(), "off", tmp_path, BEGAN), 0)) as server:
        assert server.server_address[0] == "127.0.0.1"
        assert answer_of(f"{server.url}/", Host="evil.example:80")[0] == 403
        assert answer_of(f"{server.url}/", Host=f"localhost:{server.server_address[1]}")[0] == 200


def test_the_command_serves_until_it_is_interrupted(tmp_path: Path) -> None:
    folder = record(tmp_path, [step_row(1)], checkpoint={"storage": str(tmp_path)})
    told = {
        "run_id": RUN, "name": "n", "status": "FINISHED", "started": BEGAN, "ended": BEGAN + 9, "params": {}, "tags": {},
    }  # fmt: skip
    (folder / "run.json").write_text(json.dumps(told))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        words = ("status", RUN, "--storage", str(tmp_path), "--uri", "off")
        port = str(taken.getsockname()[1])
        refused = subprocess.run(
            [sys.executable, "-m", "lockstep", *words, "--serve", port],
            capture_output=True,
            text=True,
            check=False,
        )
    assert refused.returncode == 2
    assert str(PORT_TAKEN(got=port, reason="Address already in use")) in refused.stderr
    process = subprocess.Popen(
        [sys.executable, "-m", "lockstep", *words, "--serve", "0"], stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stderr is not None
        line = process.stderr.readline()
        url = line.split()[4].rstrip(",")
        assert json.loads(answer_of(f"{url}/")[1])["run_id"] == RUN
        assert ("lockstep_run_step", None) in scraped(f"{url}/metrics")
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
    finally:
        process.kill()
        process.communicate()


@contextmanager
def serving(server: StatusServer) -> Iterator[StatusServer]:
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
