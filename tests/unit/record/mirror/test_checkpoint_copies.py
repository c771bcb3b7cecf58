"""Whole copies of checkpoints: linked where they can be, one at a time, the newest first, nothing READY that is torn, nothing left over."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

from lockstep.checkpoint.pruning import prune
from lockstep.checkpoint.retention import Keep
from lockstep.checkpoint.runs.run_folder import Attempt, RunFolder
from lockstep.checkpoint.saver import AsyncSaver
from lockstep.checkpoint.storage.opening import open_storage
from lockstep.errors import RecordError
from lockstep.parsing import with_hash
from lockstep.record.mirror.checkpoint_copies import HELD, Copies
from lockstep.record.mirror.folder import FolderStore
from lockstep.record.mirror.mlflow import MlflowStore
from lockstep.record.mirror.run_store import Sent
from lockstep.record.mirror.stores import find_copies
from tests.forked import script
from tests.unit.checkpoint.one_process import newest_good
from tests.unit.checkpoint.states import state


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


@pytest.fixture
def elsewhere() -> Iterator[Path]:
    """A folder of another file system, from which nothing can be linked to where tests keep their files."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


@pytest.mark.scenario
def test_a_crash_in_the_middle_of_a_copy_leaves_no_ready_model(database: str, elsewhere: Path) -> None:
    """SIGKILL while the second file is sent; the same checkpoint sent again is whole, and the torn one gone."""
    store = MlflowStore(database, "crash", "r")
    run_id = store.open(None)
    folder = elsewhere / "step-7"
    folder.mkdir()
    (folder / "a.bin").write_bytes(b"a" * 1000)
    os.mkfifo(folder / "b.bin")  # its reader waits for ever: the upload stands still in the middle
    text = (
        "from pathlib import Path\nfrom lockstep.record.mirror.mlflow import MlflowStore\n"
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


def checkpoint(folder: Path, step: int) -> str:
    """A folder with what of a checkpoint is looked at here."""
    place = folder / f"step-{step}"
    place.mkdir(parents=True)
    (place / "model.bin").write_bytes(bytes([step]) * 1000)
    (place / "manifest.json").write_bytes(with_hash({"files": [{"name": "model.bin"}], "shared": []}))
    return str(place)


class Slow(FolderStore):
    """A store that takes a checkpoint when it is told to."""

    def __init__(self, storage: Path) -> None:
        super().__init__(storage, "slow")
        self.go, self.began = threading.Event(), threading.Event()
        self.got: list[tuple[int, bytes]] = []
        self.has: set[int] = set()
        self.calls: list[tuple[str, int]] = []
        self.at_once = self.most_at_once = 0
        self.niceness: list[int] = []

    def checkpoints(self) -> Mapping[int, bool]:
        return dict.fromkeys(self.has, True)

    def log_checkpoint(
        self, step: int, tags: Mapping[str, str], folder: Path | None, sent: Sent = lambda nbytes: None
    ) -> None:
        self.at_once += 1
        self.most_at_once = max(self.at_once, self.most_at_once)
        self.niceness.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        self.began.set()
        self.go.wait()
        self.at_once -= 1
        assert folder is not None
        self.got.append((step, (folder / "model.bin").read_bytes()))
        sent(1000)
        self.has.add(step)
        self.calls.append(("has", step))

    def delete_checkpoint(self, step: int) -> None:
        self.has.remove(step)
        self.calls.append(("deleted", step))


def copies_to(
    store: FolderStore, told: list[tuple[int, str | None]], mb_per_s: float | None = None
) -> Copies:
    return Copies(store, lambda step, failure: told.append((step, failure)), mb_per_s)


def test_a_slow_store_gets_the_newest_and_one_at_a_time(tmp_path: Path) -> None:
    """What was begun is sent to its end although it is deleted meanwhile, and goes when the newest one is whole, not before."""
    store, told = Slow(tmp_path), []
    copies = copies_to(store, told)
    uris = {step: checkpoint(tmp_path, step) for step in (1, 2, 3, 4)}
    copies.keep({1: uris[1]}, [1])
    assert store.began.wait(10)
    for file in Path(uris[1]).iterdir():
        file.unlink()
    for step in (2, 3, 4):
        copies.keep({step: uris[step]}, range(1, step + 1))
    store.go.set()
    assert copies.close(time.monotonic() + 10)
    assert store.got == [(1, b"\1" * 1000), (4, b"\4" * 1000)]
    assert store.calls == [("has", 1), ("has", 4), ("deleted", 1)]
    assert (told, store.most_at_once) == ([(1, None), (4, None)], 1)
    assert not (tmp_path / HELD).exists()


def test_what_a_killed_recorder_held_goes_with_the_next_copy(tmp_path: Path) -> None:
    """Also the files of a checkpoint that is never sent again: their links take the room of those that retention has deleted."""
    store, told = Slow(tmp_path), []
    store.go.set()
    uris = {step: checkpoint(tmp_path, step) for step in (1, 2)}
    held = tmp_path / HELD / Path(uris[1]).name
    held.mkdir(parents=True)
    for file in Path(uris[1]).iterdir():
        os.link(file, held / file.name)
        file.unlink()
    copies = copies_to(store, told)
    copies.keep({2: uris[2]}, [1])
    assert copies.close(time.monotonic() + 10)
    assert told == [(2, None)]
    assert not (tmp_path / HELD).exists()


def test_the_best_and_the_pinned_stay_and_strangers_are_left_alone(tmp_path: Path) -> None:
    """A copy whose storage was lost is not of this journal: nothing says that it may go."""
    store, told = Slow(tmp_path), []
    store.has = {70}
    store.go.set()
    copies = copies_to(store, told)
    uris = {step: checkpoint(tmp_path, step) for step in range(1, 7)}
    for step in range(1, 7):
        pinned = [(2, uris[2])] if step < 5 else []
        copies.keep(dict([(step, uris[step]), (3, uris[3]), *pinned][: step + 1]), range(1, step + 1))
        until = time.monotonic() + 10
        while not store.has >= {step}:
            assert time.monotonic() < until
            time.sleep(0.001)
    assert copies.close(time.monotonic() + 10)
    assert store.has == {3, 6, 70}


class Refusing(Slow):
    """A store that does not take a checkpoint."""

    def log_checkpoint(
        self, step: int, tags: Mapping[str, str], folder: Path | None, sent: Sent = lambda nbytes: None
    ) -> None:
        if step == 2:
            raise RecordError("413: too large")
        super().log_checkpoint(step, tags, folder, sent)


def test_the_copy_before_stays_where_the_newest_is_refused(tmp_path: Path) -> None:
    """And it is told; the next save is another try."""
    store, told = Refusing(tmp_path), []
    store.go.set()
    copies = copies_to(store, told)
    for step in (1, 2):
        copies.keep({step: checkpoint(tmp_path, step)}, range(1, step + 1))
        until = time.monotonic() + 10
        while len(told) < step:
            assert time.monotonic() < until
            time.sleep(0.001)
    assert (told, store.has) == ([(1, None), (2, "413: too large")], {1})
    assert not copies.close(time.monotonic() + 10)
    assert store.has == {1}


def test_a_run_that_ends_before_its_copy_is_whole_says_so(tmp_path: Path) -> None:
    store, told = Slow(tmp_path), []
    copies = copies_to(store, told)
    copies.keep({1: checkpoint(tmp_path, 1)}, [1])
    assert store.began.wait(10)
    assert not copies.close(time.monotonic() + 0.1)
    assert told == [(1, "the run ended before it was sent")]
    store.go.set()


@pytest.mark.skipif(sys.platform != "linux", reason="a thread has no priority of its own")
@pytest.mark.parametrize("nicer", [0, 3])
def test_a_run_that_has_ended_copies_at_the_priority_of_its_process(tmp_path: Path, nicer: int) -> None:
    """Beside the training it gives way, also to one that gives way itself. At the end a busy machine would leave it no time: what is under way is finished first."""
    with ThreadPoolExecutor(1) as training:
        training.submit(check_priorities, tmp_path, nicer).result()


def check_priorities(tmp_path: Path, nicer: int) -> None:
    thread = threading.get_native_id()
    plain = os.getpriority(os.PRIO_PROCESS, thread) + nicer
    os.setpriority(os.PRIO_PROCESS, thread, plain)
    store, told = Slow(tmp_path), []
    copies = copies_to(store, told)
    uris = {step: checkpoint(tmp_path, step) for step in (1, 2, 3)}
    copies.keep({1: uris[1]}, [1])
    assert store.began.wait(10)
    copies.keep({2: uris[2], 3: uris[3]}, [1, 2, 3])
    ended: list[bool] = []
    closing = threading.Thread(target=lambda: ended.append(copies.close(time.monotonic() + 10)))
    before = set(threading.enumerate())  # a thread of the test before may end meanwhile: so not their number
    closing.start()
    until = time.monotonic() + 10
    while len({*threading.enumerate()} - before) < 2:  # the one that closes, and the one that takes over
        assert time.monotonic() < until
        time.sleep(0.001)
    store.go.set()
    closing.join()
    assert (ended, [step for step, _ in store.got]) == ([True], [1, 3, 2])
    assert store.niceness == [min(plain + 10, 19), plain, plain]
    assert store.most_at_once == 1


def test_copies_keep_to_their_mean_rate(tmp_path: Path) -> None:
    """At 0.002 MB/s a kilobyte takes half a second."""
    store, told = Slow(tmp_path), []
    store.go.set()
    copies = copies_to(store, told, mb_per_s=0.002)
    began = time.monotonic()
    copies.keep({1: checkpoint(tmp_path, 1)}, [1])
    while not told:
        time.sleep(0.001)
    assert time.monotonic() - began >= 0.5
    assert told == [(1, None)]
    assert copies.close(time.monotonic() + 10)


def test_a_run_that_ends_rests_for_no_rate(tmp_path: Path) -> None:
    """The kilobyte would take 1,000 s."""
    store, told = Slow(tmp_path), []
    copies = copies_to(store, told, mb_per_s=1e-6)
    copies.keep({1: checkpoint(tmp_path, 1)}, [1])
    assert store.began.wait(10)
    store.go.set()
    assert copies.close(time.monotonic() + 60)
    assert (store.has, told) == ({1}, [(1, None)])


# --- links ------------------------------------------------------------------------------------------------


@pytest.mark.scenario
def test_a_copy_on_the_same_file_system_takes_no_room_and_cannot_be_written(
    database: str, tmp_path: Path, elsewhere: Path
) -> None:
    """One file with two names, read-only; from another file system it is copied."""
    store = MlflowStore(database, "links", "r")
    run_id = store.open(None)
    for step, storage in ((1, tmp_path), (2, elsewhere)):
        store.log_checkpoint(step, {}, Path(checkpoint(storage, step)))
    found = {
        name: {file.name: file for file in files(model)} for name, model in models(database, run_id).items()
    }
    for step, storage in ((1, tmp_path), (2, elsewhere)):
        for name, file in found[f"checkpoint-{step}"].items():
            source = storage / f"step-{step}" / name
            assert file.read_bytes() == source.read_bytes()
            assert file.samefile(source) == (step == 1)
            assert (file.stat().st_mode & 0o222 == 0) == (step == 1)
    store.delete_checkpoint(1)
    assert (tmp_path / "step-1" / "model.bin").read_bytes() == b"\1" * 1000
    (tmp_path / "step-1" / "model.bin").unlink()


def save(attempt: Attempt, step: int, sections: Any) -> None:
    saver = AsyncSaver(attempt, keep=Keep(last=9))
    saver.save(step, sections)
    saver.close()
    assert saver.failure is None


def test_what_checkpoints_share_is_sent_once_and_is_there_again(
    database: str, tmp_path: Path, elsewhere: Path
) -> None:
    """From another file system: each copy brings the segments that are new; where links are possible, each has all of them."""
    names = [f"{1 + 3 * i:09d}-{3 + 3 * i:09d}.{'a' * 32}.{'b' * 16}.rows" for i in range(3)]
    store = MlflowStore(database, "shared", "r")
    run_id = store.open(None)
    sent: list[int] = []
    for step, count, storage in ((3, 1, elsewhere), (6, 2, elsewhere), (9, 3, tmp_path)):
        folder = Path(checkpoint(storage, step))
        for name in names[:count]:
            (folder / name).write_bytes(name.encode() * 1000)
        shared = [f"{name} {len(name) * 1000} 0" for name in names[:count]]
        (folder / "manifest.json").write_bytes(
            with_hash({"files": [{"name": "model.bin"}], "shared": shared})
        )
        store.log_checkpoint(step, {}, folder, sent.append)
    segment = len(names[0]) * 1000
    assert sent.count(segment) == 2 and sum(sent) < 2 * segment + 4000
    found = {name: {file.name for file in files(model)} for name, model in models(database, run_id).items()}
    assert found["checkpoint-6"] == {"model.bin", "manifest.json"}
    assert found["checkpoint-9"] == {"model.bin", "manifest.json", *names}
    for copy, count in zip(find_copies(database, run_id), (3, 2, 1), strict=True):
        place = tmp_path / f"copy-{copy.step}"
        place.mkdir()
        copy.download(place)
        assert {file.name for file in place.iterdir()} == {"model.bin", "manifest.json", *names[:count]}
        assert all((place / name).read_bytes() == name.encode() * 1000 for name in names[:count])


def test_a_published_checkpoint_is_never_written_to(database: str, tmp_path: Path) -> None:
    """A linked copy keeps its bytes whatever the storage does later: saves, prunes, a step saved again, the next attempt."""
    run = RunFolder.create(open_storage(str(tmp_path / "runs")), "run-a")
    attempt = run.claim()
    store = MlflowStore(database, "unchanged", "r")
    run_id = store.open(None)
    save(attempt, 1, state(1, items=4))
    store.log_checkpoint(1, {}, tmp_path / "runs" / "run-a" / "step-000000001")
    (model,) = models(database, run_id).values()
    before = {file: file.read_bytes() for file in files(model)}
    save(attempt, 2, state(2, items=4))
    second = run.claim()
    save(second, 1, state(7, items=4))
    save(second, 3, state(3, items=4))
    prune(second, Keep(last=1))
    assert not (tmp_path / "runs" / "run-a" / "step-000000001").exists()
    assert {file: file.read_bytes() for file in files(model)} == before
    assert newest_good(run, pytest.fail) is not None


def test_a_model_that_is_deleted_is_never_ready_without_its_files(
    database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that ends between the two: what is left does not pass for a checkpoint, and goes with the next try."""
    from mlflow import MlflowClient

    store = MlflowStore(database, "deleted", "r")
    run_id = store.open(None)
    folder = Path(checkpoint(tmp_path, 1))
    store.log_checkpoint(1, {}, folder)
    with monkeypatch.context() as patched:

        def ended(*_: object) -> None:
            raise SystemExit

        patched.setattr(MlflowClient, "delete_logged_model", ended)
        with pytest.raises(SystemExit):
            store.delete_checkpoint(1)
    (left,) = models(database, run_id).values()
    assert (left.status, files(left)) == ("FAILED", [])
    assert store.checkpoints() == {1: False}
    store.log_checkpoint(1, {}, folder)  # saved again by an attempt that repeats the step
    (again,) = models(database, run_id).values()
    assert (again.status, len(files(again)), store.checkpoints()) == ("READY", 2, {1: True})


def test_files_take_the_place_of_a_reference(database: str, tmp_path: Path) -> None:
    """Where `record.checkpoints` is changed by a resume."""
    store = MlflowStore(database, "changed", "r")
    run_id = store.open(None)
    store.log_checkpoint(1, {}, None)
    assert store.checkpoints() == {1: False}
    store.log_checkpoint(1, {}, Path(checkpoint(tmp_path, 1)))
    (model,) = models(database, run_id).values()
    assert (len(files(model)), store.checkpoints()) == (2, {1: True})
