"""Copies of checkpoints: one at a time, the newest that waits, nothing READY that is torn, nothing left that is deleted."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

from lockstep.record.folder_store import FolderStore
from lockstep.record.ledger import CheckpointRow
from lockstep.record.mlflow_store import MlflowStore
from lockstep.record.recorder import Recorder
from lockstep.record.uploads import Uploads
from lockstep.spec import Spec
from tests.unit.record.rows import step_row

Specs = Callable[..., Spec]


def models(uri: str, run_id: str) -> dict[str, Any]:
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_run(run_id).info.experiment_id
    found = client.search_logged_models([experiment], filter_string=f"source_run_id = '{run_id}'")
    return {model.name: model for model in found}


def files(model: Any) -> list[Path]:
    return [
        path
        for path in Path(unquote(model.artifact_location.removeprefix("file://"))).rglob("*")
        if path.is_file()
    ]


def checkpoint(folder: Path, step: int, deleted: tuple[int, ...] = ()) -> CheckpointRow:
    place = folder / f"step-{step:09}"
    place.mkdir(parents=True)
    (place / "manifest.json").write_text(f"manifest {step}")
    (place / "model.bin").write_bytes(bytes([step]) * 1000)
    return CheckpointRow(step, str(place), None, 1000, 0.0, 0.0, 0.1, 1_700_000_000.0 + step, deleted)


@pytest.mark.parametrize("kept", ["reference", "artifact"])
def test_retention_over_twenty_checkpoints_leaves_exactly_what_the_run_kept(
    database: str, spec: Specs, tmp_path: Path, kept: str
) -> None:
    beside = Path(database.removeprefix("sqlite:///")).parent
    of_others = set(beside.rglob("model.bin"))  # the store is the whole session's
    recorder = Recorder(spec(record={"uri": database, "checkpoints": kept}))
    recorder.start()
    run_id = recorder.run_id()
    for step in range(1, 21):
        recorder.steps([step_row(step)])
        gone = (step - 2,) if step > 2 and (step - 2) % 5 else ()
        recorder.checkpoint(checkpoint(tmp_path / "checkpoints", step, gone))
        until = time.monotonic() + 30
        while kept == "artifact" and f"checkpoint-{step}" not in models(database, run_id):
            assert time.monotonic() < until
            time.sleep(0.05)
    recorder.finished({"step": 20})
    recorder.close()
    found = models(database, run_id)
    assert {name: model.status for name, model in found.items()} == {
        f"checkpoint-{step}": "READY" for step in (5, 10, 15, 19, 20)
    }
    for name, model in found.items():
        step = int(name.removeprefix("checkpoint-"))
        assert model.tags["lockstep.uri"].endswith(f"step-{step:09}")
        assert model.tags["lockstep.manifest"].startswith("sha256:")
        assert sorted(path.name for path in files(model)) == (
            ["manifest.json", "model.bin"] if kept == "artifact" else []
        )
    left = [
        path
        for path in set(beside.rglob("model.bin")) - of_others
        if path.read_bytes()[:1] not in {bytes([s]) for s in (5, 10, 15, 19, 20)}
    ]
    assert left == []


def test_a_crash_in_the_middle_of_an_upload_leaves_no_ready_model(database: str, tmp_path: Path) -> None:
    """SIGKILL while the second file is sent; the same checkpoint sent again is whole, and the torn one gone."""
    store = MlflowStore(database, "crash", "r")
    run_id = store.open(None)
    folder = tmp_path / "step-7"
    folder.mkdir()
    (folder / "a.bin").write_bytes(b"a" * 1000)
    os.mkfifo(folder / "b.bin")  # its reader waits for ever: the upload stands still in the middle
    script = (
        "from pathlib import Path\nfrom lockstep.record.mlflow_store import MlflowStore\n"
        f"store = MlflowStore({database!r}, 'crash', 'r')\nstore.open({run_id!r})\n"
        f"store.log_checkpoint(7, {{}}, Path({str(folder)!r}))\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    until = time.monotonic() + 60
    while not any(files(model) for model in models(database, run_id).values()):
        assert time.monotonic() < until and process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    (torn,) = models(database, run_id).values()
    assert torn.status == "PENDING"
    (folder / "b.bin").unlink()
    (folder / "b.bin").write_bytes(b"b" * 1000)
    store.log_checkpoint(7, {}, folder)
    (whole,) = models(database, run_id).values()
    assert (whole.status, whole.model_id != torn.model_id) == ("READY", True)
    assert sorted(path.name for path in files(whole)) == ["a.bin", "b.bin"]
    assert files(torn) == []


class Slow(FolderStore):
    """A store that takes a checkpoint when it is told to."""

    def __init__(self, storage: Path) -> None:
        super().__init__(storage, "slow")
        self.go = threading.Event()
        self.got: list[int] = []
        self.at_once = self.most_at_once = 0

    def log_checkpoint(self, step: int, tags: Any, folder: Path | None) -> None:
        self.at_once += 1
        self.most_at_once = max(self.at_once, self.most_at_once)
        self.go.wait()
        self.at_once -= 1
        self.got.append(step)


def test_a_slow_store_gets_the_newest_and_one_at_a_time(tmp_path: Path) -> None:
    store = Slow(tmp_path)
    uploads = Uploads(store, lambda step, reason: None)
    uploads.send(1, tmp_path, {})
    while not store.at_once:
        time.sleep(0.01)
    for step in (2, 3, 4):
        uploads.send(step, tmp_path, {})
    store.go.set()
    uploads.close(time.monotonic() + 10)
    assert (store.got, store.most_at_once) == ([1, 4], 1)
