"""Runs the store under a shim that counts calls to the operating system and kills the process at call k, for all k.

    python -m tests.unit.checkpoint.killed_at_every_call FOLDER TRIAL …

Prints one JSON object with, for each trial, the calls of an undisturbed process, and what was wrong with the store
after a process was killed at one of them. A trial is a scenario (`first`: from nothing to a checkpoint, `next`: an
attempt that finds checkpoints and an unfinished save) and a variant (`sound`, or broken on purpose): `next-sound`.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import signal
import sys
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from lockstep.checkpoint.errors import LostFileError
from lockstep.checkpoint.layout import MANIFEST, step_folder
from lockstep.checkpoint.pruning import clear_leftovers, prune
from lockstep.checkpoint.reader import Checkpoint, checkpoints, load, verify
from lockstep.checkpoint.retention import Keep
from lockstep.checkpoint.runs.run_folder import Attempt, RunFolder
from lockstep.checkpoint.snapshot import snapshot
from lockstep.checkpoint.storage import interface, local
from lockstep.checkpoint.storage.interface import Written
from lockstep.checkpoint.storage.local import LocalStorage
from lockstep.checkpoint.writer import write_part
from tests.unit.checkpoint.one_process import newest_good, write_checkpoint
from tests.unit.checkpoint.states import FACTS, same, state

COUNTED = ("open", "write", "fsync", "replace", "link", "unlink", "mkdir", "rmdir")
KEEP = Keep(last=2)
RUN = "run-a"
SHARED = {f"000000001-000000300.{'a' * 32}.{'b' * 16}.rows": b"steps" * 1000}


class Shim:
    """Stands before the calls of `os`. At call `at` the process ends; a write that ends it has written half."""

    def __init__(self, at: int | None, *, half: bool = False) -> None:
        self.at, self.half, self.count = at, half, 0
        self.log: list[tuple[str, str, str]] = []
        self._names: dict[int, str] = {}
        for name in COUNTED:
            setattr(os, name, self._counted(name, getattr(os, name)))

    def _counted(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **options: Any) -> Any:
            if self.count == self.at:
                if name == "write" and self.half:
                    call(arguments[0], arguments[1][: len(arguments[1]) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            self.count += 1
            result = call(*arguments, **options)
            if name == "open":
                self._names[result] = str(arguments[0])
            first = self._names.get(arguments[0], "") if name in ("write", "fsync") else str(arguments[0])
            self.log.append((name, first, str(arguments[1]) if name in ("replace", "link") else ""))
            return result

        return counted


class InPlace(LocalStorage):
    """Broken: files are written where they belong at once."""

    def write(self, path: str, pieces: Iterable[bytes | memoryview], *, staging: str) -> Written:
        target = self.root / path
        local.make_folder(target.parent)
        return local._write(target, pieces)


def save_next(run: RunFolder, variant: str) -> None:
    """What one attempt does from its begin to the end of its first save."""
    attempt = run.claim()
    clear_leftovers(attempt)
    save = publish_first if variant == "manifest_first" else write_checkpoint
    save(attempt, 300, small(300), FACTS, SHARED)
    if variant == "files_first":
        delete_files_first(attempt)
    prune(attempt, KEEP, whole=300)


def small(step: int) -> dict[str, Any]:
    """A file of each kind."""
    sections = state(step)
    return {name: sections[name] for name in ("model", "ledger")}


def publish_first(
    attempt: Attempt, step: int, sections: dict[str, Any], facts: Any, shared: dict[str, bytes]
) -> None:
    """Broken: the manifest is there before the files are."""
    real, attempt_write = Attempt.write, Attempt.write
    kept: list[tuple[tuple[str, ...], bytes]] = []

    def later(self: Attempt, path: tuple[str, ...], pieces: Iterable[bytes | memoryview]) -> Written:
        content = b"".join(bytes(piece) for piece in pieces)
        if path[-1] == MANIFEST:
            written = real(self, path, [content])
            for name, data in kept:
                real(self, name, [data])
            return written
        kept.append((path, content))
        return interface.hashed([content], lambda _: None)

    sizes = attempt.run.storage.list
    try:
        Attempt.write = later  # type: ignore[method-assign]
        # `commit` compares sizes with what is there; here nothing is yet.
        attempt.run.storage.list = lambda folder: [  # type: ignore[method-assign]
            interface.Item(path[-1], False, len(data)) for path, data in kept
        ]
        write_checkpoint(attempt, step, sections, facts, shared)
    finally:
        Attempt.write = attempt_write  # type: ignore[method-assign]
        attempt.run.storage.list = sizes  # type: ignore[method-assign]


def delete_files_first(attempt: Attempt) -> None:
    """Broken: a checkpoint's files are deleted while its manifest still stands."""
    oldest = checkpoints(attempt.run)[-1]
    for entry in oldest.manifest().files:
        attempt.run.storage.delete(oldest.path(entry.name))


def prepared(folder: Path, scenario: str) -> None:
    """The store before anything is killed."""
    if scenario == "next":
        run = RunFolder.create(LocalStorage(folder), RUN)
        attempt = run.claim()
        for step in (100, 200):
            write_checkpoint(attempt, step, small(step), FACTS)
        write_part(attempt, 300, snapshot(small(300)))  # a save that was never finished


def opened(store: LocalStorage, scenario: str) -> RunFolder:
    if scenario == "next":
        return RunFolder.open(store, RUN)
    try:
        return RunFolder.open(store, RUN)
    except LostFileError:
        return RunFolder.create(store, RUN)


def complaints(folder: Path, scenario: str) -> list[str]:
    """What is wrong with a store that some process was killed over. Ends with one more attempt, which must heal it."""
    store, found = LocalStorage(folder), []
    run = opened(store, scenario)
    newest = newest_good(run, found.append)
    if newest is None and scenario == "next":
        found.append("no good checkpoint is left")
    for checkpoint in checkpoints(run):
        verify(checkpoint)  # raises where one is not whole: a crash never leaves a bad one
        loaded = load(checkpoint)
        if not same(loaded.sections, ordered(loaded.sections, small(loaded.manifest.step))):
            found.append(f"step {loaded.manifest.step} holds another state")
    save_next(run, "sound")
    names = {str(path.relative_to(folder / RUN)) for path in (folder / RUN).rglob("*") if path.is_file()}
    wanted = {"owner.json", "attempt.json"}
    for step in (200, 300) if scenario == "next" else (300,):
        listed = Checkpoint.of(run, step).manifest().files
        wanted |= {f"{step_folder(step)}/{name}" for name in (MANIFEST, *(entry.name for entry in listed))}
    wanted |= {f"shared/{name}" for name in SHARED}
    if names != wanted:
        found.append(f"left behind or lost: {sorted(names ^ wanted)}")
    return found


def ordered(like: dict[str, Any], sections: dict[str, Any]) -> dict[str, Any]:
    return {name: sections[name] for name in like}


def store_of(variant: str, folder: Path) -> LocalStorage:
    return (InPlace if variant == "in_place" else LocalStorage)(folder)


def killed(folder: Path, scenario: str, variant: str, at: int, *, half: bool) -> bool:
    """Run the scenario in a process of its own, killed at call `at`. False where it came to its end."""
    child = os.fork()
    if child == 0:
        try:
            Shim(at, half=half)
            save_next(opened(store_of(variant, folder), scenario), variant)
            os._exit(0)
        except Exception:  # noqa: BLE001  printed, and told by the code
            traceback.print_exc()
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    if os.WIFEXITED(status) and os.WEXITSTATUS(status) != 0:
        raise AssertionError("the scenario itself failed")
    return os.WIFSIGNALED(status)


def calls_of(folder: Path, scenario: str, variant: str) -> list[tuple[str, str, str]]:
    """The calls of a process that nobody kills."""
    place = copied(folder)
    if os.fork() == 0:
        try:
            shim = Shim(None)
            save_next(opened(store_of(variant, place), scenario), variant)
            calls = list(shim.log)
            (folder / "calls.json").write_text(json.dumps(calls))
        finally:
            os._exit(0)
    os.wait()
    shutil.rmtree(place)
    return list(json.loads((folder / "calls.json").read_text()))


def copied(folder: Path) -> Path:
    place = folder / "now"
    if (folder / "before").exists():
        shutil.copytree(folder / "before", place)
    return place


def tried(folder: Path, scenario: str, variant: str, at: int, *, half: bool) -> list[str]:
    """What is wrong with a store whose writer was killed at call `at`."""
    place = copied(folder)
    try:
        if not killed(place, scenario, variant, at, half=half):
            return ["nothing was killed"]
        return complaints(place, scenario)
    except Exception as error:  # noqa: BLE001  what it is, the test shows
        return [repr(error)]
    finally:
        shutil.rmtree(place)


def trial(folder: Path, scenario: str, variant: str) -> dict[str, Any]:
    """Every call in turn, before it is made, and every write when half of it is done. A broken store's first fault will do."""
    prepared(folder / "before", scenario)
    calls = calls_of(folder, scenario, variant)
    wrong = {}
    for at, (name, *_) in reversed(list(enumerate(calls))):
        found = tried(folder, scenario, variant, at, half=False)
        if name == "write":
            found += tried(folder, scenario, variant, at, half=True)
        if found:
            wrong[at] = found
        if wrong and variant != "sound":
            break
    return {"calls": calls, "wrong": wrong}


if __name__ == "__main__":
    torch.set_num_threads(1)
    interface.PIECE = 1024  # several writes a file
    gc.disable()  # a collection in a forked process touches, and so copies, every page
    told = {}
    for name in sys.argv[2:]:
        folder = Path(sys.argv[1]) / name
        folder.mkdir()
        told[name] = trial(folder, *name.split("-"))
    print(json.dumps(told))
