"""A run whose checkpoints are not where its record says is not begun anew; what its record has is taken up from any storage on a disk."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

import lockstep
from lockstep.calls.continuation import fetch_copy
from lockstep.calls.leased_storages import leased_run
from lockstep.checkpoint import problems
from lockstep.checkpoint.runs.lease import Lease, leased
from lockstep.checkpoint.runs.run_checkpoints import aside
from lockstep.checkpoint.runs.run_folder import RunFolder
from lockstep.checkpoint.storage.opening import open_storage
from lockstep.driver.notebook import default_progress
from lockstep.errors import SpecError
from lockstep.record.ledger.tables import read_parquet
from lockstep.spec.loading import load_spec
from tests.empty_store import put_empty_store
from tests.raised import raises
from tests.unit.record.conftest import THIRD_PARTY
from tests.untraced_jobs import UntracedDigits

pytestmark = [pytest.mark.filterwarnings(text) for text in THIRD_PARTY]


ROOT = Path(__file__).parents[3]


class Stopping(UntracedDigits):
    """Asks its own process to stop after a step."""

    class Params(UntracedDigits.Params):
        stop: int = 4

    params: Params

    def after_step(self, model: Any, step: int) -> None:
        if step == self.params.stop:
            os.kill(os.getpid(), signal.SIGTERM)


def stopped(folder: Path, *more: str, uri: str = "off") -> str:
    """A run that is stopped after its fourth step; its record and its checkpoints lie apart."""
    where = [f"record.folder={folder}/record", f"checkpoint.storage={folder}/store", f"record.uri={uri}"]
    quick = ["job.params.width=8", "length.steps=8", "checkpoint.every.steps=2", "rehearsal=off"]
    spec = ["job.use=tests.unit.cli.test_lost_storage:Stopping", *quick, *where, *more]
    result = lockstep.train("jobs/digits/train.yaml", spec, local=True)
    assert (result.status, result.step) == ("KILLED", 5)
    return result.run_id


def resumed(folder: Path, run_id: str, *more: str, uri: str = "off") -> lockstep.Result:
    return lockstep.resume(run_id, [f"record.folder={folder}/record", *more], local=True, uri=uri)


@pytest.mark.scenario
@pytest.mark.thinned(2)
@pytest.mark.parametrize("told", [True, False], ids=["told", "in the journal alone"])
def test_a_run_whose_storage_is_not_there_is_not_begun_anew(tmp_path: Path, told: bool) -> None:
    run_id = stopped(tmp_path)
    record, store = tmp_path / "record" / run_id, tmp_path / "store"
    if not told:
        run = record / "run.json"
        run.write_text(run.read_text().replace('"lockstep.checkpoint', '"lockstep.was'))
    before = {path: path.read_bytes() for path in record.rglob("*") if path.is_file()}
    store.rename(tmp_path / "elsewhere")
    with pytest.raises(SpecError) as raised:
        resumed(tmp_path, run_id)
    line = str(raised.value)
    assert f"names a checkpoint of step 5, {store}/{run_id}/step-000000005, and '{store}' has none" in line
    assert "mount the storage" in line and "\n" not in line
    assert not store.exists() and all(path.read_bytes() == kept for path, kept in before.items())
    (tmp_path / "elsewhere").rename(store)
    assert resumed(tmp_path, run_id).status == "FINISHED"
    assert {row.attempt for row in read_parquet(record / "ledger.parquet")} == {1, 2}


@pytest.mark.scenario
def test_a_run_without_a_checkpoint_starts_from_the_beginning(tmp_path: Path) -> None:
    """With the number of an attempt that its record has not had."""
    run_id = stopped(tmp_path)
    record = tmp_path / "record" / run_id
    for file, names in (
        (record / "run.json", b'"lockstep.checkpoint'),
        (record / "journal.jsonl", b'{"checkpoint"'),
    ):
        file.write_bytes(b"\n".join(line for line in file.read_bytes().split(b"\n") if names not in line))
    shutil.rmtree(tmp_path / "store")
    ended = resumed(tmp_path, run_id)
    assert (ended.status, ended.step) == ("KILLED", 5)  # it comes by its fourth step again
    assert RunFolder.open(open_storage(str(tmp_path / "store")), run_id).fence().number == 2


@pytest.mark.scenario
def test_a_copy_is_taken_up_with_the_modes_of_a_save(tmp_path: Path) -> None:
    """G6: also in a storage on a disk that is named by a URI."""
    uri = put_empty_store(tmp_path / "mlflow.db")
    before = os.umask(0o002)
    try:
        run_id = stopped(tmp_path, f"checkpoint.storage=file://{tmp_path}/store", uri=uri)
        step = tmp_path / "store" / run_id / "step-000000005"
        saved = step.stat().st_mode, {path.name for path in step.iterdir()}
        shutil.rmtree(tmp_path / "store")
        assert resumed(tmp_path, run_id, "checkpoint.keep_last=9", uri=uri).status == "FINISHED"
    finally:
        os.umask(before)
    assert (step.stat().st_mode, {path.name for path in step.iterdir()}) == saved
    assert saved[0] & 0o777 == 0o775 and {path.stat().st_mode & 0o777 for path in step.iterdir()} <= {
        0o664,
        0o444,
    }
    rows = read_parquet(tmp_path / "record" / run_id / "ledger.parquet")
    assert [row.attempt for row in rows] == [1] * 5 + [2] * 3
    assert not list(step.parent.glob(".download-*"))


def test_what_a_killed_download_has_left_goes_with_the_next_resume(tmp_path: Path) -> None:
    """It may be as large as a checkpoint, and no other command can find out that it is nobody's: the run is held."""
    run = RunFolder.create(open_storage(str(tmp_path)), "run-a")
    for name in (".download-dead", "tmpdead"):
        (tmp_path / "run-a" / name / "deeper").mkdir(parents=True)
        (tmp_path / "run-a" / name / "deeper" / "model.bin").write_bytes(b"half")
    spec = load_spec({"job": {"use": "any:Job"}, "checkpoint": {"storage": str(tmp_path)}})
    fetch_copy(spec, "off", run.run_id, None, default_progress())
    assert sorted(path.name for path in (tmp_path / "run-a").iterdir()) == ["owner.json", "tmpdead"]


def test_a_disk_that_refuses_a_download_is_told_in_one_line(tmp_path: Path) -> None:
    with (
        raises(problems.NOT_DOWNLOADED, folder=re.compile("run-a"), got="No space left on device") as raised,
        aside(str(tmp_path), "run-a"),
    ):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert "\n" not in str(raised.value)
    (tmp_path / "file").touch()
    with raises(problems.NOT_DOWNLOADED, got="Not a directory"), aside(str(tmp_path / "file"), "run-a"):
        pass


def test_a_run_whose_checkpoints_were_moved_is_held_where_it_is_recorded_too(tmp_path: Path) -> None:
    """Who comes second is told before anything is made in the other storage."""
    old, new, link = (str(tmp_path / name) for name in ("old", "new", "link"))

    def held(storage: str) -> AbstractContextManager[Lease | None]:
        spec = load_spec({"job": {"use": "any:Job"}, "checkpoint": {"storage": storage}})
        return leased_run(spec, "run-a", default_progress(), recorded=old)

    with held(new):
        assert not Path(old).exists()  # it was moved, and is not made again
    shutil.rmtree(new)
    RunFolder.create(open_storage(old), "run-a")
    with leased(open_storage(old), "run-a", "run run-a"):
        with raises(problems.HELD, what="run run-a"), held(new):
            pass
        assert not Path(new).exists()
    with held(new), raises(problems.HELD, what="run run-a"), held(old):
        pass
    Path(link).symlink_to(old)
    for storage in (link, f"file://{old}", old):  # the same place, which is held once
        with held(storage):
            pass


@pytest.mark.thinned(2)
@pytest.mark.scenario
@pytest.mark.parametrize("store", ["default", "off"])
def test_a_folder_with_an_apostrophe_in_its_name_has_a_record(tmp_path: Path, store: str) -> None:
    """In words of SQL, of a shell and of a message the name could end there."""
    here = tmp_path / "it's mine"
    here.mkdir()
    words = ["job.use=tests.untraced_jobs:UntracedDigits", "job.params.width=8", "length.steps=2"]
    where = [] if store == "default" else ["--uri", store]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'platform'}:{ROOT}", "PYTHONHASHSEED": "0"}
    for name in ("MLFLOW_TRACKING_URI", "RAY_ADDRESS"):
        environment.pop(name, None)
    for command in (["train", str(ROOT / "jobs/digits/train.yaml"), *words, "--local"], ["runs"]):
        done = subprocess.run(
            [sys.executable, "-m", "lockstep", *command, "--json", *where],
            cwd=here, env=environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        if command[0] == "train":
            run_id = json.loads(done.stdout)["run_id"]
    (run,) = json.loads(done.stdout)["runs"]
    assert (run["run_id"], run["status"]) == (run_id, "FINISHED")
    assert (here / "runs" / run_id / "journal.jsonl").is_file()
