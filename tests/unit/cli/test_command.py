"""The `lockstep` command as a person or a script calls it: one answer, one line for a mistake, an exit code."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from lockstep.checks.start_checks import check_storage
from lockstep.cli.main import _result_text
from lockstep.driver.result import Result
from lockstep.driver.resume_hint import resume_command
from lockstep.errors import StorageError
from lockstep.spec.loading import load_spec
from tests.forked import lockstep
from tests.in_process import here
from tests.unit.driver import called_apart

ROOT = Path(__file__).parents[3]
SHORT = [
    "job.use=tests.untraced_jobs:UntracedDigits",
    "length.steps=3",
    "job.params.width=8",
    "record.uri=off",
]
TRAIN_SHORT = ["train", "jobs/digits/train.yaml", "--local", "--json", *SHORT]


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "lockstep", *words]


def environment(**more: str) -> dict[str, str]:
    """Without what this test session was started with: the command sets what it needs."""
    kept = {name: value for name, value in os.environ.items() if name not in {"PYTHONHASHSEED", "MKL_CBWR"}}
    return {**kept, "PYTHONPATH": str(ROOT / "platform"), **more}


def call(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """As a shell would start it."""
    return subprocess.run(
        command(*words, f"checkpoint.storage={folder}") if "train" in words else command(*words),
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def answer(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """The same where the start of the interpreter is not what is looked at."""
    process = lockstep(*words, *([f"checkpoint.storage={folder}"] if "train" in words else []))
    out, err = process.communicate(timeout=300)
    return subprocess.CompletedProcess(words, process.wait(), out, err)


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> subprocess.CompletedProcess[str]:
    """Three steps, told as JSON."""
    return call(tmp_path_factory.mktemp("short"), *TRAIN_SHORT)


@pytest.mark.scenario
def test_json_is_one_object_on_one_line_of_standard_output(short: subprocess.CompletedProcess[str]) -> None:
    assert short.returncode == 0, short.stderr
    (line,) = short.stdout.splitlines()
    result = json.loads(line)
    for name in (
        "run_id", "status", "identity", "step", "epoch", "samples", "attempts", "workers", "metrics",
        "weights_digest", "first_step_s", "steps_per_s", "samples_per_s", "checkpoint",
    ):  # fmt: skip
        assert name in result
    assert (result["status"], result["step"], result["samples"]) == ("FINISHED", 3, 3 * 128)
    assert 0 < result["first_step_s"] < 120
    stages = ["command", "job", "checkpoint", "data", "model", "rehearsal", "preparation", "first_step"]
    assert list(result["start"]) == stages
    assert sum(result["start"].values()) == pytest.approx(result["first_step_s"])


@pytest.mark.parametrize("name", ["rec", "a #folder: of mine"])
def test_the_command_that_is_printed_finds_the_run_again(
    short: subprocess.CompletedProcess[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    name: str,
) -> None:
    """From anywhere, where a run is recorded in a folder that is not the default one."""
    result = Result(**json.loads(short.stdout))
    folder = shutil.copytree(result.folder, tmp_path / name / result.run_id)
    printed = _result_text(replace(result, status="KILLED", folder=str(folder)))
    (line,) = [line for line in printed.splitlines() if line.startswith("resume it with")]
    words = shlex.split(line.removeprefix("resume it with"))
    code, _, err = here(monkeypatch, capfd, tmp_path, *words[1:], "--local")
    assert code == 0, err
    assert f"run {result.run_id} is finished" in err
    (tmp_path / name).rename(tmp_path / "runs")
    with monkeypatch.context() as patched:
        patched.chdir(tmp_path)
        default = resume_command(result.run_id, "off", str(tmp_path / "runs" / result.run_id))
    assert default == f"lockstep resume {result.run_id} --uri off"


def test_a_variable_that_names_no_store_takes_nothing_from_a_run_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://x:99999999")
    assert (
        resume_command("0" * 32, "http://y:5000", "/runs/0")
        == f"lockstep resume {'0' * 32} --uri http://y:5000"
    )


@pytest.mark.parametrize("in_environment", [False, True])
def test_no_password_of_a_store_is_printed(monkeypatch: pytest.MonkeyPatch, in_environment: bool) -> None:
    """What a command prints is kept in logs, and what a notebook shows in its file."""
    uri = "postgresql://me:s3cr3t@host/runs"
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    if in_environment:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    found = replace(called_apart.result("KILLED", 3), tracking_uri=uri)
    said = [_result_text(found), found._repr_html_(), json.dumps(found.as_dict())]
    assert not [text for text in said if "s3cr3t" in text]
    assert "lockstep ui --uri 'postgresql://me:***@host/runs'" in said[0]
    assert ("lockstep resume" in said[0]) and (
        "--uri 'postgresql://me:***@host/runs'\nlook" in said[0]
    ) != in_environment


@pytest.mark.scenario
def test_two_runs_of_one_spec_have_one_digest_and_another_seed_has_another(
    short: subprocess.CompletedProcess[str], tmp_path: Path
) -> None:
    """G1 over repeats, one in an interpreter with random string hashing of its own; the seed is the negative control."""
    first = json.loads(short.stdout)
    second = json.loads(answer(tmp_path, *TRAIN_SHORT).stdout)
    other = json.loads(answer(tmp_path, *TRAIN_SHORT, "seed=18").stdout)
    assert first["weights_digest"] == second["weights_digest"] != other["weights_digest"]
    assert first["identity"] == second["identity"] != other["identity"]


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("optimzer.lr=1e-3", "did you mean 'optimizer'?"),
        ("batch.micro=48", "divisor of batch.global"),
        ("job.use=jobs.nowhere:Job", "no module 'jobs.nowhere'"),
        ("precision=fp8", "precision"),
    ],
)
def test_a_mistake_in_the_spec_is_one_line_and_exit_code_2(tmp_path: Path, override: str, told: str) -> None:
    """G7. Nothing is left behind."""
    done = answer(tmp_path / "runs", "train", "jobs/digits/train.yaml", "--local", override, "record.uri=off")
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("lockstep: ")
    assert told in line
    assert not (tmp_path / "runs").exists()


def test_an_error_with_json_is_an_object_too(tmp_path: Path) -> None:
    done = answer(tmp_path, "train", "jobs/digits/train.yaml", "--json", "seed=-1")
    assert done.returncode == 2
    (line,) = done.stdout.splitlines()
    assert json.loads(line)["status"] == "FAILED"
    assert "seed" in json.loads(line)["error"]


def test_storage_that_cannot_be_written_is_told_before_training(tmp_path: Path) -> None:
    file = tmp_path / "a-file"
    file.write_text("in the way")
    done = answer(file, "train", "jobs/digits/train.yaml", "--local", *SHORT)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("lockstep: checkpoint.storage: cannot write in")


@pytest.mark.parametrize("field", ["record.folder", "checkpoint.storage"])
def test_a_link_that_leads_nowhere_is_told_before_training(field: str, tmp_path: Path) -> None:
    """Nothing is written; the control is a link to a folder."""
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "nowhere" / "runs")
    spec = load_spec(ROOT / "jobs/digits/train.yaml", [*SHORT, f"{field}={link}/deep"], uri="off")
    with pytest.raises(
        StorageError, match=f"^{field}: '{link}' is a link to '.*/nowhere/runs', which is not there; make"
    ):
        check_storage(spec)
    (tmp_path / "nowhere" / "runs").mkdir(parents=True)
    check_storage(spec)
    assert not any((tmp_path / "nowhere" / "runs").iterdir())


def test_a_traceback_is_shown_with_verbose_alone(tmp_path: Path) -> None:
    words = ["train", "jobs/digits/train.yaml", "--local", "precision=fp8"]
    assert "Traceback" not in answer(tmp_path, *words).stderr
    assert "Traceback" in answer(tmp_path, *words, "-v").stderr


def test_dry_run_tells_the_spec_and_the_plan_and_trains_nothing(tmp_path: Path) -> None:
    done = answer(
        tmp_path / "runs", "train", "jobs/digits/train.yaml", "--dry-run", "--json", "batch.micro=16"
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["spec"]["batch"] == {"global": 128, "micro": 16, "tokens": None}
    plan = report["plan"]
    assert (plan["micro_batches"], plan["steps_per_epoch"], plan["total_steps"]) == (
        8,
        1433 // 128,
        25 * (1433 // 128),
    )
    assert plan["workers"][1] == {
        "workers": 2,
        "micro_batch_ranges": ["0-3", "4-7"],
        "accumulation_steps": [4, 4],
        "sums": [1, 1],
    }
    assert not (tmp_path / "runs").exists()


@pytest.mark.scenario
@pytest.mark.thinned(2)
@pytest.mark.parametrize(
    ("sent", "code"), [pytest.param(signal.SIGTERM, 143, marks=pytest.mark.scenario), (signal.SIGINT, 130)]
)
def test_a_signal_ends_the_run_as_killed(tmp_path: Path, sent: signal.Signals, code: int) -> None:
    words = ["train", "jobs/digits/train.yaml", "--local", "--json", "length.epochs=100000", "record.uri=off"]
    notify = f"echo $LOCKSTEP_EVENT $LOCKSTEP_STATUS >> '{tmp_path}/told'"
    process = lockstep(*words, f"checkpoint.storage={tmp_path}", LOCKSTEP_NOTIFY=notify)
    deadline = time.monotonic() + 300
    while not list(tmp_path.glob("*/environment.json")):
        assert time.monotonic() < deadline, "the run did not start"
        assert process.poll() is None, process.communicate()
        time.sleep(0.1)
    process.send_signal(sent)
    out, err = process.communicate(timeout=300)
    assert process.returncode == code, err
    assert json.loads(out)["status"] == "KILLED"
    (record,) = tmp_path.glob("*/run.json")
    assert json.loads(record.read_text())["status"] == "KILLED"
    assert (tmp_path / "told").read_text() == "start RUNNING\nend KILLED\n"
