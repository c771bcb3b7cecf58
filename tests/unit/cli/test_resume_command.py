"""`lockstep resume` after the whole process tree was killed: the record and the bits of the undisturbed run.

SIGKILL comes at a moment of a seeded generator, once a checkpoint is there; everything happens through the command,
with MLflow's own SQLite store, as a person would do it.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from lockstep import train
from lockstep.driver.result import Result
from lockstep.record.ledger.tables import DETERMINISTIC, read_evaluations, read_parquet
from tests.distributed.training import bits
from tests.empty_store import put_empty_store
from tests.forked import ROOT, Forked, lockstep
from tests.in_process import here
from tests.unit.record.conftest import THIRD_PARTY
from tests.unit.record.s3 import s3
from tests.unit.record.server import Server

pytestmark = [
    pytest.mark.filterwarnings(text) for text in THIRD_PARTY
]  # some tests open MLflow in this process

UNTRACED = ["jobs/digits/train.yaml", "job.use=tests.untraced_jobs:UntracedDigits"]

JOBS = {
    "digits": [
        *UNTRACED, "length.epochs=6", "early_stop={patience: 5}", "job.params.width=16",
    ],
    "gpt": [
        "jobs/stdlib_gpt/train.yaml", "length.steps=60", "evaluate.every.steps=20", "precision=bf16",
        "job.params={depth: 1, heads: 2, head_width: 8, context: 32, dropout: 0.1, corpus_bytes: 200000}",
    ],
}  # fmt: skip


EACH_THIRD = "checkpoint.every.steps=3"
"""In the uninterrupted run as well: the ledger has digests at these steps."""


class Told(NamedTuple):
    """What a run came to: its `--json`, its ledger and its metric histories in MLflow, all as bits."""

    weights_digest: str
    best: Any
    metrics: Any
    ledger: Any
    evaluations: Any
    history: Any
    status: str


def words(folder: Path, *more: str) -> list[str]:
    return ["--local", "--uri", f"sqlite:///{folder}/mlflow.db", *more]


def start(folder: Path, *more: str, cwd: Path = ROOT) -> Forked:
    put_empty_store(folder / "mlflow.db")
    return lockstep(*more[:1], *words(folder), *more[1:], cwd=cwd)


def done(folder: Path, *more: str, code: int = 0, cwd: Path = ROOT) -> tuple[dict[str, Any], str]:
    """The command's `--json` and what it says on standard error."""
    process = start(folder, *more, "--json", cwd=cwd)
    out, err = process.communicate(timeout=400)
    assert process.returncode == code, err
    return json.loads(out), err


def told(folder: Path, result: dict[str, Any]) -> Told:
    run = folder / "runs" / result["run_id"]
    rows = read_parquet(run / "ledger.parquet")
    with sqlite3.connect(folder / "mlflow.db") as database:
        history = database.execute(
            "select key, step, value, is_nan from metrics where run_uuid = ? and key not like 'perf/%' and key not like 'system/%' "
            "order by key, step, timestamp",
            (result["run_id"],),
        ).fetchall()
        ((status,),) = database.execute(
            "select status from runs where run_uuid = ?", (result["run_id"],)
        ).fetchall()
    return Told(
        result["weights_digest"],
        (result["best_step"], result["best_digest"]),
        bits(result["metrics"]),
        [bits({name: getattr(row, name) for name in DETERMINISTIC}) for row in rows],
        [(row.step, row.epoch, bits(row.metrics)) for row in read_evaluations(run / "evaluations.parquet")],
        history,
        status,
    )


@pytest.fixture(scope="module", params=["digits", "gpt"])
def undisturbed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Told]:
    folder = tmp_path_factory.mktemp("undisturbed")
    saving = [f"checkpoint.storage={folder}/runs", EACH_THIRD]
    result, _ = done(folder, "train", *JOBS[request.param], *saving)
    whole = told(folder, result)
    assert whole.status == "FINISHED"
    assert [step for key, step, _, _ in whole.history if key == "train/loss"] == list(
        range(1, len(whole.ledger) + 1)
    )
    return request.param, whole


def killed(folder: Path, moment: random.Random, *more: str) -> str:
    """A run whose process tree was killed at a random moment after a checkpoint of it appeared; its id."""
    process = start(folder, *more)
    at_step = moment.randrange(1, 45)
    deadline = time.monotonic() + 300
    while not any(
        int(path.parent.name[5:]) >= at_step for path in folder.glob("runs/*/step-*/manifest.json")
    ):
        assert time.monotonic() < deadline, "no checkpoint appeared"
        assert process.poll() is None, process.communicate()
        time.sleep(0.005)
    time.sleep(moment.uniform(0, 0.3))
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    (run,) = [path for path in folder.glob("runs/*") if path.is_dir() and (path / "owner.json").exists()]
    return run.name


@pytest.mark.exact  # one that is resumed from its record alone was killed as well
@pytest.mark.parametrize("seed", range(1, 6))
def test_a_killed_run_is_taken_up_with_the_same_bits(
    undisturbed: tuple[str, Told], tmp_path: Path, seed: int
) -> None:
    """G1 and G4 over SIGKILL of the process tree: twice in one run, with other loader processes each time."""
    job, whole = undisturbed
    moment = random.Random(f"{job}-{seed}")
    saving = [f"checkpoint.storage={tmp_path}/runs", EACH_THIRD]
    run_id = killed(tmp_path, moment, "train", *JOBS[job], *saving)
    result, _ = done(tmp_path, "resume", run_id, f"data.loader_processes={2 * (seed % 2)}")
    assert result["run_id"] == run_id
    assert result["attempts"] > 1
    assert 0 < result["effective"] < 1
    assert result["lost_worker_h"] > 0
    assert told(tmp_path, result) == whole


PACED = [
    UNTRACED[0], "job.use=tests.untraced_jobs:PacedDigits", "job.params.width=8", "job.params.pause_s=0.01",
]  # fmt: skip
"""Time to do something to a run that has few steps: each step of a run is recorded, and each checkpoint sent."""

DIGITS = [*PACED, "length.epochs=3"]


def stop(folder: Path, *more: str) -> tuple[str, str]:
    """Train DIGITS and ask the run to stop once it has a checkpoint. Its id, and what it told."""
    process = start(folder, "train", *DIGITS, f"checkpoint.storage={folder}/runs", *more)
    deadline = time.monotonic() + 300
    while not list(folder.glob("runs/*/step-*/manifest.json")):
        assert time.monotonic() < deadline, "no checkpoint appeared"
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 143, err
    (owner,) = folder.glob("runs/*/owner.json")
    return owner.parent.name, out


def whole(folder: Path) -> Result:
    """The same run undisturbed, in this process and without MLflow."""
    return train(
        ROOT / DIGITS[0], [*DIGITS[1:], f"checkpoint.storage={folder}/whole", "record.uri=off"], local=True
    )


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, str]:
    """A run that was asked to stop: its folder, its id, what it told."""
    folder = tmp_path_factory.mktemp("stopped")
    return (folder, *stop(folder, "checkpoint.every.steps=5"))


@pytest.mark.thinned(3)
@pytest.mark.parametrize(
    ("more", "code", "line"),
    [
        (["optimizer.lr=1.0"], 2, r"lockstep: resume: optimizer.lr is 0.005 in run "),
        (["--from-step", "999"], 2, r"lockstep: resume: run "),
        (["nonsense=1"], 2, r"lockstep: nonsense: unknown key"),
    ],
)
@pytest.mark.scenario
def test_a_refused_resume_is_one_line(
    stopped: tuple[Path, str, str],
    more: list[str],
    code: int,
    line: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    folder, run_id, _ = stopped
    found, out, err = here(monkeypatch, capfd, ROOT, "resume", *words(folder), run_id, *more)
    assert (found, out) == (code, ""), err
    (only,) = err.splitlines()
    assert only.startswith(line)


@pytest.mark.scenario
def test_an_unknown_run_is_one_line(
    stopped: tuple[Path, str, str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    folder, *_ = stopped
    for uri in (f"sqlite:///{folder}/mlflow.db", f"sqlite:///{folder}/no.db", "off"):
        found, _, err = here(monkeypatch, capfd, ROOT, "resume", "--local", "--uri", uri, "0" * 32)
        assert found == 1
        (only,) = err.splitlines()
        assert "0" * 32 in only
    assert not (folder / "no.db").exists()


@pytest.mark.scenario
def test_a_run_asked_to_stop_says_how_to_go_on_and_does(
    stopped: tuple[Path, str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """SIGTERM: a checkpoint, exit code 143, KILLED; then from a clean directory, by the run id and the store alone."""
    folder, run_id, out = stopped
    (line,) = [line for line in out.splitlines() if "lockstep resume" in line]
    assert line.endswith(f"lockstep resume {run_id} --uri sqlite:///{folder}/mlflow.db")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    result, _ = done(folder, "resume", run_id, cwd=elsewhere)
    undisturbed = whole(tmp_path)
    assert result["weights_digest"] == undisturbed.weights_digest
    assert result["status"] == "FINISHED"
    assert result["lost_worker_h"] == 0  # a signal is no interruption
    assert 0 < result["effective"] < 1
    assert (result["step"], result["metrics"]) == (undisturbed.step, undisturbed.metrics)

    # A finished run is left as it is; a fork extends it.
    found, _, err = here(monkeypatch, capfd, ROOT, "resume", *words(folder), run_id)
    assert found == 0
    assert f"run {run_id} is finished" in err
    longer, _ = done(folder, "resume", run_id, "--fork", "length.epochs=4")
    assert (longer["step"], longer["status"]) == (4 * 11, "FINISHED")
    assert longer["run_id"] != run_id


LONGER = [*PACED, "length.epochs=5", "checkpoint.every.steps=10"]


@pytest.fixture(scope="module")
def longer(tmp_path_factory: pytest.TempPathFactory) -> Result:
    """LONGER undisturbed, in this process and without MLflow."""
    folder = tmp_path_factory.mktemp("longer")
    return train(
        ROOT / LONGER[0], [*LONGER[1:], f"checkpoint.storage={folder}", "record.uri=off"], local=True
    )


@pytest.fixture(params=["sqlite", pytest.param("server with S3", marks=pytest.mark.exact)])
def tracking(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """URI of an MLflow store, and the file of its database. A server keeps its files in S3, a database beside itself."""
    if request.param == "sqlite":
        yield put_empty_store(tmp_path / "mlflow.db"), tmp_path / "mlflow.db"
        return
    with s3() as (bucket, environment), Server(tmp_path, environment=environment, artifacts=bucket) as server:
        yield server.uri, tmp_path / "server.db"


def copied(database: Path) -> bool:
    """Whether the store has a checkpoint whole."""
    with sqlite3.connect(database) as store:
        return bool(store.execute("select 1 from tags where key = 'lockstep.copied_step'").fetchall())


def test_a_run_whose_last_checkpoint_cannot_be_written_has_not_finished(tmp_path: Path) -> None:
    """It keeps its weights and its record, says so in one line, and is saved by a resume; the control is that resume."""
    disk, record = tmp_path / "disk", tmp_path / "record"
    process = lockstep(
        "train", "jobs/digits/train.yaml", "--local", "--json", "job.use=tests.untraced_jobs:InTheWay",
        "length.steps=4", "job.params.width=8", f"job.params.disk={disk}", "record.uri=off", f"record.folder={record}",
        f"checkpoint.storage={disk}", "checkpoint.every.seconds=3600",
    )  # fmt: skip
    out, err = process.communicate(timeout=300)
    assert process.wait() == 1, err
    answer = json.loads(out)
    assert answer["status"] == "FAILED" and "the checkpoint of step 4 could not be saved" in answer["error"]
    (folder,) = record.iterdir()
    assert f"`lockstep resume {folder.name}`" in answer["error"] and str(folder) in answer["error"]
    run = json.loads((folder / "run.json").read_text())
    assert run["status"] == "FAILED"
    assert run["tags"]["lockstep.error"].startswith("the checkpoint of step 4 could not be saved")
    assert run["tags"]["lockstep.error"] in (folder / "error.txt").read_text()
    digest = json.loads((folder / "summary.json").read_text())["weights_digest"]
    assert (folder / "weights" / "final.safetensors").is_file()

    (disk / folder.name / "attempt-0001").unlink()
    resumed = lockstep(
        "resume", folder.name, "--local", "--json", "--uri", "off", f"checkpoint.storage={disk}",
        "job.params.disk=''", f"record.folder={record}",
    )  # fmt: skip
    out, err = resumed.communicate(timeout=300)
    assert resumed.wait() == 0, err
    again = json.loads(out)
    assert (again["status"], again["weights_digest"]) == ("FINISHED", digest)
    assert again["checkpoint"].endswith("step-000000004")
    assert json.loads((folder / "run.json").read_text())["tags"]["lockstep.error"] == ""


@pytest.mark.scenario
def test_a_run_is_resumed_from_its_record_alone(
    tmp_path: Path, tracking: tuple[str, Path], longer: Result
) -> None:
    """G6, as it comes by default: a killed run whose folder is deleted goes on from what MLflow has, with the same bits."""
    uri, database = tracking
    process = lockstep(
        "train",
        "--local",
        "--uri",
        uri,
        *LONGER,
        f"checkpoint.storage={tmp_path}/runs",
    )
    deadline = time.monotonic() + 300
    while not list(tmp_path.glob("runs/*/step-*/manifest.json")):
        assert time.monotonic() < deadline
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    while not copied(database):  # training hardly goes on, and its recorder does
        assert time.monotonic() < deadline
        process.send_signal(signal.SIGSTOP)
        time.sleep(0.2)
        if '{"checkpoint":' not in next(tmp_path.glob("runs/*/journal.jsonl")).read_text():
            process.send_signal(signal.SIGCONT)
            time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    (run,) = [path.parent for path in tmp_path.glob("runs/*/owner.json")]
    shutil.rmtree(run)
    process = lockstep("resume", "--local", "--uri", uri, run.name)
    out, err = process.communicate(timeout=400)
    assert process.returncode == 0, err
    assert "was downloaded from the record" in err
    assert longer.weights_digest in out
    rows = [
        [bits({name: getattr(row, name) for name in DETERMINISTIC}) for row in read_parquet(folder / "ledger.parquet")]
        for folder in (run, Path(longer.folder))
    ]  # fmt: skip
    assert rows[0] == rows[1]
    with sqlite3.connect(database) as store:
        history = store.execute(
            "select step from metrics where key = 'train/loss' order by timestamp, step"
        ).fetchall()
    assert [step for (step,) in history] == list(range(1, longer.step + 1))
