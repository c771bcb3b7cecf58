"""What a job takes along and how it is called, before anything is sent."""

from __future__ import annotations

import asyncio
import random
import re
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.calls.named_runs import NAME
from lockstep.clusters import problems, submission
from lockstep.clusters.packaging import MIB, Package
from lockstep.clusters.packaging import pack as pack_if_known
from lockstep.clusters.ray_internals.packages import upload_limit
from lockstep.clusters.submission import Submitted, connect, entrypoint, find_address, job_name
from lockstep.errors import Problem, SpecError
from tests.in_process import here
from tests.raised import raises

ROOT = Path(__file__).parents[3]

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning:ray.*"),
]


def pack(folder: Path, limit: int | None = None) -> Package:
    """With Ray's own functions, which have to be there."""
    package = pack_if_known(folder, limit=limit)
    assert package is not None
    return package


def noise(path: Path, size: int) -> None:
    """Bytes that no packing makes smaller."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(random.Random(0).randbytes(size))


def test_what_is_ignored_stays_here(tmp_path: Path) -> None:
    noise(tmp_path / "job.py", 100)
    noise(tmp_path / "data" / "big.bin", 2 * MIB)
    noise(tmp_path / "data" / "small.txt", 10)
    noise(tmp_path / "notes" / "draft.txt", 10)
    noise(tmp_path / ".git" / "objects", MIB)
    noise(tmp_path / "__pycache__" / "x.pyc", MIB)
    (tmp_path / ".gitignore").write_text("*.bin\n")
    (tmp_path / ".rayignore").write_text("notes/\n")
    package = pack(tmp_path)
    assert {name for name, _ in package.largest} <= {"job.py", "data/small.txt", ".gitignore", ".rayignore"}
    assert package.size < 10_000
    (tmp_path / ".gitignore").unlink()
    assert pack(tmp_path).size > 2 * MIB


def test_a_package_that_is_too_large_is_refused_before_ray_does_and_names_what_is_large(
    tmp_path: Path,
) -> None:
    noise(tmp_path / "job.py", 100)
    noise(tmp_path / "weights" / "old.bin", 3 * MIB)
    with raises(
        problems.TOO_LARGE, wanted=2, got="2 files, 3.0 MiB packed; largest: weights/old.bin 3.0 MiB"
    ):
        pack(tmp_path, limit=2 * MIB)
    assert pack(tmp_path, limit=4 * MIB).files == 2


def test_the_limit_is_that_of_rays_dashboard() -> None:
    assert upload_limit() == 100 * MIB


def test_a_spec_is_trained_and_a_run_id_resumed(tmp_path: Path) -> None:
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "train.yaml").touch()
    start = ["python", "-m", "lockstep"]
    assert entrypoint("jobs/train.yaml", ["seed=1"], None, tmp_path) == [
        *start,
        "train",
        "jobs/train.yaml",
        "seed=1",
    ]
    assert entrypoint("jobs/train.yaml", [], "night", tmp_path) == [
        *start, "train", "jobs/train.yaml", "--run", "night"
    ]  # fmt: skip
    assert entrypoint("0" * 32, ["workers.max=4"], None, tmp_path) == [
        *start, "resume", "0" * 32, "workers.max=4"
    ]  # fmt: skip
    assert entrypoint("0" * 32, [], None, tmp_path, 3, "mail me") == [
        *start, "resume", "0" * 32, "--retries", "3", "--notify", "mail me"
    ]  # fmt: skip
    with raises(problems.SECRET_IN_NOTIFY):
        entrypoint("0" * 32, [], None, tmp_path, notify="curl https://me:hunter2@host/")


@pytest.mark.parametrize(
    ("what", "overrides", "problem"),
    [
        ("nothing.yaml", [], problems.NO_SPEC_OR_RUN),
        ("../train.yaml", [], problems.SPEC_OUTSIDE),
        ("jobs/train.yaml", ["record.uri=http://me:hunter2@mlflow:5000"], problems.PASSWORD_IN_OVERRIDE),
    ],
)
def test_what_cannot_work_there_is_refused_here(
    tmp_path: Path, what: str, overrides: list[str], problem: Problem[SpecError]
) -> None:
    (tmp_path / "here" / "jobs").mkdir(parents=True)
    (tmp_path / "here" / "jobs" / "train.yaml").touch()
    (tmp_path / "train.yaml").touch()
    with raises(problem) as caught:
        entrypoint(what, overrides, None, tmp_path / "here")
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("folder", ["übung 3", "Ünde", "données", "_-.", "a" * 200, "digits"])
def test_a_job_has_a_name_by_which_its_run_can_go_on(folder: str) -> None:
    """A run that is submitted with retries is named as its job: the command on the cluster had refused the letters of some folders."""
    name = job_name(f"jobs/{folder}/train.yaml", None)
    assert re.fullmatch(NAME, name), name
    assert name.rpartition("-")[0] == {"digits": "digits", "données": "donn-es"}.get(
        folder, name.rpartition("-")[0]
    )


def test_an_address_is_a_url_or_one_that_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.delenv("RAY_API_SERVER_ADDRESS", raising=False)
    with raises(problems.NO_ADDRESS):
        find_address(None)
    with raises(problems.JOB_API_ADDRESS, got="10.0.0.1:6379"):
        find_address("10.0.0.1:6379")
    assert find_address("http://10.0.0.1:8265/") == "http://10.0.0.1:8265"
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", "http://10.0.0.2:8265")
    assert find_address(None) == "http://10.0.0.2:8265"


@pytest.mark.parametrize("installed", [False, True])
def test_a_mistake_in_the_spec_is_told_before_anybody_is_asked(
    tmp_path: Path, installed: bool, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The version that goes along would refuse it on the cluster; another version that is installed there may not."""
    command = ["submit", "jobs/digits/train.yaml", "seeed=1", "--address", "http://127.0.0.1:9"]
    given = [*command, "--installed"] if installed else command
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    code, _, err = here(monkeypatch, capfd, ROOT, *given)
    assert code == (1 if installed else 2), err
    said = "does not answer like Ray's job API" if installed else "seeed: unknown key; did you mean 'seed'?"
    assert said in err.splitlines()[-1]


def test_nobody_at_the_address_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with raises(problems.NO_JOB_API, address="http://127.0.0.1:9") as caught:
        connect("http://127.0.0.1:9")
    assert "\n" not in str(caught.value)


def test_a_job_api_that_accepts_and_never_answers_is_told_in_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(submission, "CONNECT_S", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with raises(problems.UNANSWERED, whose=address, seconds=1):
            connect(address)


def test_a_job_that_is_silent_has_its_output_asked_for_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream that was cut looks like a job that prints nothing: nothing is lost, and nothing shown twice."""
    monkeypatch.setattr(submission, "QUIET_S", 0.2)
    written: list[str] = []
    output = submission._Output(written.append)

    class Client:
        async def tail_job_logs(self, job: str) -> AsyncIterator[str]:
            yield "one\n"
            await asyncio.sleep(3600)

    class Whole:
        async def tail_job_logs(self, job: str) -> AsyncIterator[str]:
            yield "one\ntwo\n"

    with pytest.raises(TimeoutError):
        asyncio.run(output.take(Client(), "job"))
    asyncio.run(output.take(Whole(), "job"))
    assert "".join(written) == "one\ntwo\n"


LOST = Submitted("demo-1a", "http://h:8265", "FAILED", 1, None, "driver killed", lost=True, retries=3)


class Jobs:
    """A job API that has a hiccup first, as long as it is told."""

    def __init__(self, hiccups: int, *jobs: str) -> None:
        self.hiccups, self.jobs = hiccups, jobs

    def list_jobs(self) -> list[Any]:
        self.hiccups -= 1
        if self.hiccups >= 0:
            raise RuntimeError("Request failed with status code 503: Service Unavailable")
        return [SimpleNamespace(submission_id=job) for job in self.jobs]


def test_a_hiccup_of_the_job_api_does_not_lose_the_next_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submission, "POLL_S", 0.0)
    jobs = Jobs(3, "demo-1a", "demo-1a-retry-1")
    assert submission._retry_after(jobs, LOST) == "demo-1a-retry-1"
    assert jobs.hiccups == -1


def test_a_job_api_that_stays_away_is_told_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control is one that answers, and has no further job."""
    monkeypatch.setattr(submission, "POLL_S", 0.0)
    monkeypatch.setattr(submission, "pause_s", lambda number: 0.0)
    monkeypatch.setattr(submission, "PATIENCE_S", 0.0)
    with raises(problems.NO_JOB_API, address="http://h:8265", got=re.compile("503: Service")):
        submission._retry_after(Jobs(1), LOST)
    assert submission._retry_after(Jobs(0, "demo-1a"), LOST) is None


def test_a_job_that_is_not_there_is_told_at_once() -> None:
    """A misspelled `--attach`; a cluster that does not answer is waited for instead."""

    class Client:
        async def tail_job_logs(self, job: str) -> AsyncIterator[str]:
            raise RuntimeError("404")
            yield ""

        def get_job_info(self, job: str) -> Any:
            raise RuntimeError(f"Request failed with status code 404: Job {job} does not exist.")

    with raises(problems.NO_JOB, address="http://h:8265", got="dmeo-1a"):
        submission._follow(Client(), "dmeo-1a", "http://h:8265", lambda text: None)


def test_a_job_whose_cluster_was_started_anew_is_no_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its run is lost there, and can be gone on with: exit code 1."""
    monkeypatch.setattr(submission, "POLL_S", 0.0)

    class Client:
        def __init__(self) -> None:
            self.asked = 0

        async def tail_job_logs(self, job: str) -> AsyncIterator[str]:
            yield f"run {'a' * 32}\n"

        def get_job_info(self, job: str) -> Any:
            self.asked += 1
            if self.asked > 1:
                raise RuntimeError(f"Request failed with status code 404: Job {job} does not exist.")
            return SimpleNamespace(status="RUNNING", driver_exit_code=None, message="", entrypoint="")

    with raises(problems.JOB_GONE, job="demo-1a") as caught:
        submission._follow(Client(), "demo-1a", "http://h:8265", lambda text: None)
    assert caught.value.remedy == f"lockstep submit {'a' * 32} --address http://h:8265 goes on with its run"


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        ("Request failed with status code 401: Unauthenticated", problems.OTHER_TOKEN),
        ("Authentication required: token missing", problems.OTHER_TOKEN),
        (f"Request failed with status code 500: {submission.NO_AGENT} here", problems.NO_AGENT),
        ("Request failed with status code 502: Bad Gateway", problems.NO_JOB_API),
    ],
)
def test_what_the_job_api_answers_is_a_problem(answer: str, problem: Problem[Any]) -> None:
    with raises(problem, address="http://h:8265"):
        raise submission.job_api_error(RuntimeError(answer), "http://h:8265")
