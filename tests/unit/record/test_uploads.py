"""Copies of checkpoints: one at a time, the newest that waits, nothing READY that is torn, nothing left that is deleted."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from lockstep.errors import RecordError
from lockstep.record.folder_store import FolderStore
from lockstep.record.mlflow_store import MlflowStore
from lockstep.record.uploads import Uploads
from tests.forked import script


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


def test_a_crash_in_the_middle_of_an_upload_leaves_no_ready_model(database: str, tmp_path: Path) -> None:
    """SIGKILL while the second file is sent; the same checkpoint sent again is whole, and the torn one gone."""
    store = MlflowStore(database, "crash", "r")
    run_id = store.open(None)
    folder = tmp_path / "step-7"
    folder.mkdir()
    (folder / "a.bin").write_bytes(b"a" * 1000)
    os.mkfifo(folder / "b.bin")  # its reader waits for ever: the upload stands still in the middle
    text = (
        "from pathlib import Path\nfrom lockstep.record.mlflow_store import MlflowStore\n"
        f"store = MlflowStore({database!r}, 'crash', 'r')\nstore.open({run_id!r})\n"
        f"store.log_checkpoint(7, {{}}, Path({str(folder)!r}))\n"
    )
    process = script(text)
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


class Torn(Slow):
    """A store that has a part of a checkpoint when its files go."""

    def __init__(self, storage: Path) -> None:
        super().__init__(storage)
        self.deleted: list[int] = []

    def log_checkpoint(self, step: int, tags: Any, folder: Path | None) -> None:
        super().log_checkpoint(step, tags, folder)
        raise RecordError("its files are gone")

    def delete_checkpoint(self, step: int) -> None:
        self.deleted.append(step)


def test_a_checkpoint_that_is_deleted_under_its_upload_is_deleted_from_the_store(tmp_path: Path) -> None:
    """What was sent of it by then; and nobody is told of a failure, for it is none."""
    store, told = Torn(tmp_path), []
    uploads = Uploads(store, lambda step, _: told.append(step))
    uploads.send(7, tmp_path, {})
    while not store.at_once:
        time.sleep(0.01)
    uploads.delete(7)
    store.go.set()
    uploads.close(time.monotonic() + 10)
    assert (store.deleted, told) == ([7], [])
