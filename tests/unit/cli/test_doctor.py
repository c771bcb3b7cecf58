"""`lockstep doctor`: it ends within seconds whatever does not answer, tells no secret, and changes nothing."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from lockstep.calls.starter import init
from lockstep.checks import machine
from lockstep.record.redaction import redacted_variables
from tests.in_process import here

Doctor = Callable[..., dict[str, Any]]


@pytest.fixture
def doctor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Doctor:
    """The command in a folder where nothing is named unless a test does; what it answers with --json."""
    for name in ("RAY_ADDRESS", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))

    def answered(*words: str, folder: Path = tmp_path) -> dict[str, Any]:
        code, out, err = here(monkeypatch, capfd, folder, "doctor", "--json", *words)
        assert (code, err) == (0, "")
        found: dict[str, Any] = json.loads(out)
        return found

    return answered


@contextmanager
def silent() -> Iterator[int]:
    """The port of a server that accepts connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0), backlog=16) as listening:
        yield listening.getsockname()[1]


@contextmanager
def telling(status: int, text: str) -> Iterator[int]:
    """The port of a server that answers every request for /version so."""

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            assert self.path == "/mlflow/version"
            self.send_response(status)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: Any) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Answer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port
        server.shutdown()


def every_path(folder: Path) -> dict[str, tuple[int, int]]:
    return {
        str(path): (path.stat().st_mtime_ns, path.stat().st_size) for path in [folder, *folder.rglob("*")]
    }


def test_it_tells_what_a_report_needs_and_changes_nothing(
    doctor: Doctor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    before = every_path(tmp_path)
    found = doctor()
    text = here(monkeypatch, capfd, tmp_path, "doctor")[1]
    assert every_path(tmp_path) == before
    assert found["versions"].keys() >= {"lockstep", "python", "torch", "ray", "mlflow"}
    assert found["machine"].keys() >= {"platform", "cpu", "instruction_sets", "logical_cores", "memory_bytes"}
    assert "hostname" not in found["machine"]
    assert found["gpus"].keys() >= {"driver", "devices"}
    assert found["lockstep"]["path"].endswith("lockstep")
    assert found["cluster"] == {
        "address": None,
        "answers": None,
        "evidence": "none is named: a run starts its own",
    }
    assert found["store"]["answers"] is True
    assert found["runs"]["writable"] is True
    assert found["runs"]["free_bytes"] > 0
    assert found["spec"] is None
    assert found["folder"]["commit"] is None
    assert {line.split()[0] for line in text.splitlines()} >= {"versions", "machine", "gpus", "store", "runs"}


@pytest.mark.scenario
def test_servers_that_do_not_answer_cost_seconds(doctor: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both at once, and the exit code is 0: that they are silent is what the report is for."""
    with silent() as store, silent() as cluster:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{store}")
        monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{cluster}")
        began = time.monotonic()
        found = doctor()
        assert time.monotonic() - began < 30
    assert found["store"]["answers"] is found["cluster"]["answers"] is False
    assert f"http://127.0.0.1:{store} does not answer (timed out)" in found["store"]["evidence"]
    assert "does not answer as a Ray cluster within 4 s" in found["cluster"]["evidence"]
    assert {found["store"]["evidence"], found["cluster"]["evidence"]} <= set(found["warnings"])


def test_nothing_that_listens_is_told_at_once(doctor: Doctor) -> None:
    with silent() as port:
        pass
    found = doctor(
        "--uri", f"postgresql://me:opensesame@127.0.0.1:{port}/db", "--address", f"127.0.0.1:{port}"
    )
    assert "postgresql://me:***@127.0.0.1" in found["store"]["evidence"]
    assert "(Connection refused)" in found["store"]["evidence"]
    assert "no Ray cluster answers" in found["cluster"]["evidence"]


@pytest.mark.parametrize(
    ("status", "text", "told"),
    [(200, "3.17.2", "answers: MLflow 3.17.2"), (401, "", "answers with status 401")],
)
def test_a_server_that_answers_tells_its_version(doctor: Doctor, status: int, text: str, told: str) -> None:
    with telling(status, text) as port:
        found = doctor("--uri", f"http://me:opensesame@127.0.0.1:{port}/mlflow/")
    assert found["store"]["answers"] is True
    assert told in found["store"]["evidence"]
    assert "opensesame" not in json.dumps(found)


def test_variables_are_told_without_secrets(doctor: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    secrets = {
        "MLFLOW_TRACKING_TOKEN": "$opensesame 1",
        "MLFLOW_TRACKING_PASSWORD": "'opensesame 2",
        "RAY_auth_token": "opensesame3",
        "LOCKSTEP_NOTE": "postgresql://me:opensesame4@host/db",
        "AWS_SECRET_ACCESS_KEY": "opensesame5",
    }
    for name, value in {**secrets, "OMP_NUM_THREADS": "3", "EDITOR": "vi"}.items():
        monkeypatch.setenv(name, value)
    found = doctor()
    assert "opensesame" not in json.dumps(found)
    assert found["variables"]["OMP_NUM_THREADS"] == "3"
    assert found["variables"]["LOCKSTEP_NOTE"] == "postgresql://me:***@host/db"
    assert found["variables"].keys() >= secrets.keys() - {"AWS_SECRET_ACCESS_KEY"}
    assert found["variables"].keys().isdisjoint({"AWS_SECRET_ACCESS_KEY", "EDITOR"})


def test_of_a_variable_that_is_named_like_a_secret_nothing_is_left() -> None:
    given = {"A_TOKEN": "$x y", "my_password": "", "apikey": "k", "PLAIN": "http://me:pw@host"}
    mark = "<redacted: Secret Keyword>"
    assert redacted_variables(given) == {
        "A_TOKEN": mark, "my_password": "", "apikey": mark, "PLAIN": "http://me:***@host",
    }  # fmt: skip


# --- the spec and its folder ------------------------------------------------------------------------------


@pytest.mark.exact  # a process that imports torch, as in the next one
def test_a_spec_is_loaded_and_its_job_made(doctor: Doctor, tmp_path: Path) -> None:
    init(tmp_path / "first")
    found = doctor("train.yaml", folder=tmp_path / "first")
    assert found["spec"] == {
        "file": "train.yaml", "loads": True, "problem": None, "imports": True, "import_problem": None, "advice": [],
    }  # fmt: skip


@pytest.mark.scenario
def test_a_job_that_ends_its_process_is_told(doctor: Doctor, tmp_path: Path) -> None:
    (tmp_path / "ends.py").write_text("import os\nprint('said before the end')\nos._exit(7)\n")
    (tmp_path / "train.yaml").write_text('job: {use: "ends:Job"}\n')
    found = doctor("train.yaml")
    assert found["spec"]["imports"] is False
    assert found["spec"]["import_problem"] == "job.use: the process that imported 'ends:Job' ended with 7"
    assert found["spec"]["import_problem"] in found["warnings"]


def test_a_spec_that_does_not_load_is_told_and_no_error(doctor: Doctor, tmp_path: Path) -> None:
    (tmp_path / "train.yaml").write_text('job: {use: "a:B"}\nsede: 1\n')
    found = doctor("train.yaml")
    assert found["spec"]["loads"] is False
    assert found["spec"]["problem"] == "sede: unknown key; did you mean 'seed'?"
    assert doctor("train.yaml", "sede=1")["spec"]["loads"] is False


def test_a_folder_that_cannot_be_written_is_told(doctor: Doctor, tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file in its place")
    found = doctor()
    assert found["runs"]["writable"] is False
    assert f"{tmp_path / 'runs'} cannot be written: Not a directory" in found["warnings"]


# --- what is known to be wrong ----------------------------------------------------------------------------


def test_versions_out_of_range_are_told() -> None:
    needed = [
        Requirement(line) for line in ("torch>=2.11", "ray[tune]<3,>=2.60", "rich>=14", "x; extra == 'y'")
    ]
    found = {"torch": "2.10.1+cpu", "ray": "2.60.0", "rich": None, "x": None}
    assert list(machine.out_of_range(">=3.11", "3.10.4", needed, found)) == [
        "python 3.10.4 is out of range: Lockstep needs python >=3.11",
        "torch 2.10.1+cpu is out of range: pip install 'torch>=2.11'",
        "rich is not installed: pip install 'rich>=14'",
    ]
    good = {**found, "torch": "2.11.0+cu128", "rich": "14.1"}
    assert list(machine.out_of_range(">=3.11", "3.11.0", needed, good)) == []
    assert list(machine.wrong_versions()) == []  # where the tests run


def test_limits_that_runs_run_into_are_told() -> None:
    enough = {"shared_memory_bytes": 1 << 30, "open_files_at_most": 4096}
    assert list(machine.wrong_limits(enough)) == []
    assert list(machine.wrong_limits({"shared_memory_bytes": None, "open_files_at_most": -1})) == []
    shared, files = machine.wrong_limits({"shared_memory_bytes": 64 << 20, "open_files_at_most": 1024})
    assert shared.startswith("/dev/shm has 64 MiB")
    assert files.startswith("a process may open 1024 files")


def test_variables_under_which_other_bits_come_out_are_told() -> None:
    assert list(machine.wrong_variables({"MKL_CBWR": "AUTO", "PYTHONHASHSEED": "0"})) == []
    (line,) = machine.wrong_variables({"MKL_CBWR": "COMPATIBLE"})
    assert line.startswith("MKL_CBWR is COMPATIBLE")
