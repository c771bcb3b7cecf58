"""What the user's command is told of a run, and that nothing of it reaches the run."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import psutil
import pytest

from lockstep import resume, train
from lockstep.checkpoint.errors import StaleAttemptError
from lockstep.driver import notification, problems
from lockstep.driver.notification import Notifications
from lockstep.driver.signals import StopSignal
from lockstep.errors import ClusterError, JobError, LockstepError, SpecError
from lockstep.record.events.union import Alerted
from tests.raised import raises

RUN = "f" * 32


def telling(path: Path) -> str:
    """A command that keeps each JSON it is given, a line each."""
    return f"cat >> '{path}'; echo >> '{path}'"


def told(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def until(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_facts_are_in_the_environment_and_on_standard_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(notification.VARIABLE, "not for the command itself")
    command = f"env | grep ^LOCKSTEP_ | sort >> '{tmp_path}/variables'; {telling(tmp_path / 'given')}"
    notifications = Notifications(command, tmp_path / "runs", print)
    notifications.began(RUN, 3)
    notifications.failed(JobError("it broke at postgresql://me:hunter2@host/db"), 7)
    common = {"run_id": RUN, "folder": str(tmp_path / "runs" / RUN), "alert": "", "evidence": ""}
    error = "it broke at postgresql://me:***@host/db"
    expected = [
        {"event": "start", "status": "RUNNING", "step": 3, "error": "", **common},
        {"event": "failure", "status": "FAILED", "step": 7, "error": error, **common},
    ]
    assert told(tmp_path / "given") == expected
    lines = [
        f"LOCKSTEP_{name.upper()}={value}" for facts in expected for name, value in sorted(facts.items())
    ]
    found = (tmp_path / "variables").read_text().splitlines()
    assert sorted(found) == sorted(lines)
    assert notifications.warnings == []


def test_words_are_run_without_a_shell(tmp_path: Path) -> None:
    path = tmp_path / "a; b"
    notifications = Notifications(["tee", str(path)], tmp_path, print)
    notifications.ended("FINISHED", 5)
    (facts,) = told_at_once(path)
    assert (facts["event"], facts["status"], facts["step"]) == ("end", "FINISHED", 5)


def told_at_once(path: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text())]


def signalled(error: LockstepError) -> LockstepError:
    stop = StopSignal()
    stop.ask()
    return stop.ended(error)


@pytest.mark.parametrize(
    ("error", "run_id", "expected"),
    [
        (StaleAttemptError("taken over"), RUN, []),
        (SpecError("batch.micro: wrong"), None, []),
        (SpecError("the workers cannot be placed"), RUN, [("failure", "FAILED")]),
        (ClusterError("no room"), None, [("failure", "FAILED")]),
        (KeyboardInterrupt(), RUN, [("end", "KILLED")]),
        (signalled(ClusterError("a worker was lost")), RUN, [("end", "KILLED")]),
    ],
)
def test_an_error_is_told_unless_the_run_goes_on_elsewhere_or_never_was(
    tmp_path: Path, error: BaseException, run_id: str | None, expected: list[tuple[str, str]]
) -> None:
    Notifications(telling(tmp_path / "given"), tmp_path, print, run_id).failed(error, 4)
    assert [(facts["event"], facts["status"]) for facts in told(tmp_path / "given")] == expected


def test_a_command_that_hangs_is_ended_with_all_that_it_has_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notification, "LIMIT_S", 0.5)
    said: list[str] = []
    notifications = Notifications(
        f"echo $$ >> '{tmp_path}/pids'; sleep 1000 & echo $! >> '{tmp_path}/pids'; wait",
        tmp_path,
        said.append,
    )
    notifications.began(RUN, 0)
    notifications.ended("FINISHED", 1)
    (warning,) = notifications.warnings
    assert warning == "notify: the command for the start of the run did not end within 0.5 s, and was ended"
    assert said == [f"warning: {warning}"], "told once, though it hung twice"
    pids = [int(line) for line in (tmp_path / "pids").read_text().splitlines()]
    assert len(pids) == 4
    until(lambda: not any(psutil.pid_exists(pid) for pid in pids))


def test_a_run_does_not_wait_for_the_command_of_its_start(tmp_path: Path) -> None:
    """It ends only when the run has gone on."""
    notifications = Notifications(
        f"until [ -e '{tmp_path}/on' ]; do sleep 0.02; done; echo $LOCKSTEP_EVENT >> '{tmp_path}/ended'",
        tmp_path,
        print,
    )
    notifications.began(RUN, 0)
    assert not (tmp_path / "ended").exists()
    (tmp_path / "on").touch()
    notifications.ended("FINISHED", 1)
    assert (tmp_path / "ended").read_text() == "start\nend\n"
    assert notifications.warnings == []


def test_what_a_command_leaves_behind_holds_nothing_up(tmp_path: Path) -> None:
    notifications = Notifications(f"setsid sleep 1000 & echo $! > '{tmp_path}/pid'", tmp_path, print)
    notifications.ended("FINISHED", 1)
    assert notifications.warnings == []
    left = psutil.Process(int((tmp_path / "pid").read_text()))
    left.kill()


def test_a_command_that_fails_is_a_warning_told_once(tmp_path: Path) -> None:
    said: list[str] = []
    command = "echo first; echo \"curl: (6) no host, password='hunter2-hunter2'\" >&2; exit 1"
    notifications = Notifications(command, tmp_path, said.append)
    notifications.began(RUN, 0)
    notifications.ended("FINISHED", 2)
    assert notifications.warnings == [
        "notify: the command for the start of the run ended with exit code 1: curl: (6) no host, "
        "password='<redacted: Secret Keyword>'"
    ]
    assert len(said) == 1


def test_an_error_of_any_form_can_be_told(tmp_path: Path) -> None:
    notifications = Notifications(telling(tmp_path / "given"), tmp_path, print, RUN)
    notifications.failed(JobError("a\0b \ud800 " + "x" * 20_000), 1)
    assert notifications.warnings == []
    (facts,) = told(tmp_path / "given")
    assert facts["error"] == "a\0b \ud800 " + "x" * 20_000


def test_a_command_that_cannot_be_started_is_a_warning(tmp_path: Path) -> None:
    notifications = Notifications([str(tmp_path / "nothing")], tmp_path, print)
    notifications.ended("FINISHED", 1)
    assert notifications.warnings == [
        "notify: the command for the end of the run cannot be started: No such file or directory"
    ]


# --- runs ---------------------------------------------------------------------------------------------------


def spec_of(tmp_path: Path, job: str) -> dict[str, Any]:
    return {
        "job": {"use": job},
        "batch": {"global": 32},
        "length": {"steps": 20},
        "record": {"uri": "off"},
        "checkpoint": {"storage": str(tmp_path / "runs")},
        "rehearsal": "off",
    }


@pytest.mark.scenario
def test_a_run_that_succeeds_is_told_and_has_the_bits_of_one_that_nobody_hears_of(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, "tests.faulty_jobs.jobs:Sound")
    quiet = train(spec, local=True)
    result = train(spec, local=True, notify=telling(tmp_path / "given"))
    start, end = told(tmp_path / "given")
    assert (start["event"], start["status"], start["step"]) == ("start", "RUNNING", 0)
    assert (end["event"], end["status"], end["step"], end["error"]) == ("end", "FINISHED", 20, "")
    assert start["run_id"] == end["run_id"] == result.run_id
    assert Path(end["folder"], "summary.json").exists()
    assert (quiet.weights_digest, quiet.identity) == (result.weights_digest, result.identity)
    assert result.warnings == quiet.warnings


def test_a_command_that_hangs_or_fails_is_a_warning_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notification, "LIMIT_S", 0.5)
    result = train(spec_of(tmp_path, "tests.faulty_jobs.jobs:Sound"), local=True, notify=["sleep", "1000"])
    assert result.status == "FINISHED"
    assert result.warnings[-1] == (
        "notify: the command for the start of the run did not end within 0.5 s, and was ended"
    )


def test_a_run_that_fails_is_told_with_its_error(tmp_path: Path) -> None:
    with pytest.raises(JobError):
        train(
            spec_of(tmp_path, "tests.unit.views.jobs:Failing"), local=True, notify=telling(tmp_path / "given")
        )
    start, failure = told(tmp_path / "given")
    assert (start["event"], failure["event"], failure["status"]) == ("start", "failure", "FAILED")
    assert failure["step"] == 6
    assert "the coffee machine is broken, password='<redacted: Secret Keyword>'" in failure["error"]


def test_a_run_that_is_stopped_is_told_and_so_is_the_attempt_that_takes_it_up(tmp_path: Path) -> None:
    given = tmp_path / "given"
    stopped = train(spec_of(tmp_path, "tests.unit.views.jobs:Stopped"), local=True, notify=telling(given))
    assert stopped.status == "KILLED"
    resume(stopped.run_id, [f"record.folder={tmp_path}/runs"], local=True, uri="off", notify=telling(given))
    assert [(facts["event"], facts["status"], facts["step"]) for facts in told(given)] == [
        ("start", "RUNNING", 0),
        ("end", "KILLED", 8),
        ("start", "RUNNING", 8),
        ("end", "FINISHED", 20),
    ]
    assert {facts["run_id"] for facts in told(given)} == {stopped.run_id}
    assert "LOCKSTEP_EVENT" not in os.environ


class Webhook(BaseHTTPRequestHandler):
    """Keeps what it is sent, and answers with the statuses that it is given, the last one again and again."""

    got: ClassVar[list[dict[str, Any]]] = []
    statuses: ClassVar[list[int]] = [200]

    def do_POST(self) -> None:
        assert self.headers["Content-Type"] == "application/json"
        self.got.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(self.statuses.pop(0) if len(self.statuses) > 1 else self.statuses[0])
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def webhook(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(Webhook, "got", [])
    with ThreadingHTTPServer(("127.0.0.1", 0), Webhook) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/hook"
        server.shutdown()


@pytest.mark.parametrize(
    ("statuses", "posts", "warned"), [([200], 1, False), ([503, 200], 2, False), ([403], 1, True)]
)
def test_a_webhook_gets_what_the_command_gets(
    tmp_path: Path,
    webhook: str,
    monkeypatch: pytest.MonkeyPatch,
    statuses: list[int],
    posts: int,
    warned: bool,
) -> None:
    monkeypatch.setattr(Webhook, "statuses", statuses)
    notifications = Notifications(telling(tmp_path / "given"), tmp_path, print, RUN, webhook=webhook)
    notifications.alerted(Alerted("loss above 8", 412, "loss is 9"))
    notifications.wait()
    (facts,) = told(tmp_path / "given")
    assert facts["event"] == "alert" and (facts["alert"], facts["evidence"], facts["step"]) == (
        "loss above 8",
        "loss is 9",
        412,
    )
    assert Webhook.got == [facts] * posts
    assert bool(notifications.warnings) == warned
    if warned:
        assert notifications.warnings == [
            "webhook: the webhook for the alert of the run was answered with status 403"
        ]


def test_an_address_that_is_none_is_refused(tmp_path: Path) -> None:
    with raises(problems.WEBHOOK, got="file:///etc/passwd"):
        Notifications(None, tmp_path, print, webhook="file:///etc/passwd")
