"""One command holds a run. Who comes second asks, and judges by a counter on its own clock."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from lockstep.checkpoint import problems
from lockstep.checkpoint.runs import lease
from lockstep.checkpoint.runs.lease import Holder, Lease, leased
from lockstep.checkpoint.runs.run_checkpoints import claim
from lockstep.checkpoint.runs.run_folder import RunFolder
from lockstep.checkpoint.storage import object_store
from lockstep.checkpoint.storage.interface import Storage
from lockstep.checkpoint.storage.object_store import ObjectStorage
from lockstep.checkpoint.storage.opening import open_storage
from lockstep.errors import SpecError
from lockstep.parsing import canonical_json
from tests.raised import raises
from tests.silent import silent_store
from tests.unit.checkpoint.states import everywhere

RUN, WHAT = "run-a", "run run-a"


def elsewhere(number: int, **more: Any) -> Holder:
    """A holder on another machine."""
    return replace(Holder.of_this_process(number), host="far", place="another boot", pid=7, **more)


def put(storage: Storage, found: Holder) -> None:
    storage.put(f"{RUN}/holds/{found.number:04d}.json", canonical_json(asdict(found)))


def files(storage: Storage) -> list[str]:
    return [item.name for item in storage.list(f"{RUN}/holds")]


@pytest.mark.every(2)
@everywhere
def test_a_run_is_held_once_and_let_go(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "WATCH_S", 60.0)
    with leased(storage, RUN, WHAT) as taken:
        taken.reached(17, 2)
        with (
            raises(
                problems.HELD,
                what=WHAT,
                holder=re.compile(r"^process \d+ on host \S+ at step 17$"),
                heard="heard 0.2 s ago",
            ) as raised,
            leased(storage, RUN, WHAT),
        ):
            pass
        assert raised.value.exit_code == 2
    with leased(storage, RUN, WHAT) as taken:
        assert taken.holder.number == 2
    assert files(storage) == ["0002.json"]


def test_a_counter_that_moves_elsewhere_is_a_holder_that_lives(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Told at the first move that is seen. No clock of the other machine takes part: only whether its counter moves while we look."""
    monkeypatch.setattr(lease, "WATCH_S", 60.0)
    put(storage, elsewhere(4, step=9))
    over = threading.Event()

    def beat() -> None:
        beats = 0
        while not over.wait(0.5):
            beats += 1
            put(storage, elsewhere(4, step=9, beats=beats, token="its own"))

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        with (
            raises(problems.HELD, holder="process 7 on host far at step 9", heard="heard 0.2 s ago"),
            leased(storage, RUN, WHAT),
        ):
            pass
    finally:
        over.set()
        thread.join()
    assert files(storage) == ["0004.json"], "it was harmed in nothing"


@pytest.mark.scenario
def test_a_counter_that_does_not_move_is_a_holder_that_is_dead(storage: Storage) -> None:
    """So is a file that a loss of power has left empty. All at once: each is watched for seconds."""
    texts = [canonical_json(asdict(elsewhere(4))), b"", b'{"number": 1}', b"[]"]
    for i, text in enumerate(texts):
        storage.put(f"run-{i}/holds/0004.json", text)

    def seconds_and_number(i: int) -> tuple[float, int]:
        began = time.monotonic()
        with leased(storage, f"run-{i}", WHAT) as taken:
            return time.monotonic() - began, taken.holder.number

    with ThreadPoolExecutor(len(texts)) as threads:
        for seconds, number in threads.map(seconds_and_number, range(len(texts))):
            assert seconds >= lease.WATCH_S
            assert number == 5


@pytest.mark.scenario
def test_a_process_that_ended_here_is_known_to_be_dead_at_once(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "WATCH_S", 60.0)
    script = "from tests.unit.checkpoint.runs.test_lease import *; import sys; put(open_storage(sys.argv[1]), Holder.of_this_process(3))"
    subprocess.run([sys.executable, "-c", script, storage.shown], check=True)
    with leased(storage, RUN, WHAT) as taken:
        assert taken.holder.number == 4


def many(storage: Storage, count: int) -> tuple[list[int], list[str]]:
    """Numbers of those that took the run, and what the others were told."""
    took: list[int] = []
    told: list[str] = []
    together, done = threading.Barrier(count), threading.Event()

    def ask() -> None:
        together.wait()
        try:
            with leased(storage, RUN, WHAT) as taken:
                took.append(taken.holder.number)
                done.wait(60)
        except SpecError as error:
            told.append(str(error))

    threads = [threading.Thread(target=ask) for _ in range(count)]
    for thread in threads:
        thread.start()
    until = time.monotonic() + 50
    while len(took) + len(told) < count and time.monotonic() < until:
        time.sleep(0.05)
    done.set()
    for thread in threads:
        thread.join()
    return took, told


@pytest.mark.every(2)
@everywhere
def test_of_many_that_find_it_dead_one_takes_it(storage: Storage) -> None:
    put(storage, elsewhere(1, released=True))
    took, told = many(storage, 8)
    assert took == [2] and len(told) == 7
    assert all("run run-a is held by process" in line for line in told)


@pytest.mark.parametrize("uri", ["s3"], indirect=True)
def test_where_a_store_knows_no_conditions_one_takes_it_at_most(
    storage: ObjectStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "_conditions", False)
    for _ in range(3):
        took, told = many(storage, 4)
        assert len(took) <= 1 and len(took) + len(told) == 4
    with leased(storage, RUN, WHAT):
        pass
    assert len(files(storage)) == 1, "nothing is left of those that asked"


def test_a_check_and_a_put_would_let_several_in(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: the holder's file has to be created exclusively."""
    together = threading.Barrier(4)

    def create(path: str, content: bytes) -> None:
        assert not storage.exists(path)
        together.wait(10)
        storage.put(path, content)

    monkeypatch.setattr(storage, "create", create)
    took, _ = many(storage, 4)
    assert len(took) == 4


@pytest.mark.every(2)
@everywhere
def test_a_takeover_asks_the_holder_and_waits_for_its_end(storage: Storage) -> None:
    asked, said = threading.Event(), []

    def live() -> None:
        with (
            raises(problems.TAKEN_OVER, what=WHAT, taker=re.compile(r"^process \d+ "), step=30),
            leased(storage, RUN, WHAT) as taken,
        ):
            taken.reached(30, 1)
            taken.when_taken(asked.set)
            began.set()
            assert asked.wait(30)
            time.sleep(0.5)  # its step and its checkpoint
            ended.set()
            taken.ensure()

    began, ended = threading.Event(), threading.Event()
    thread = threading.Thread(target=live)
    thread.start()
    assert began.wait(30)
    with leased(storage, RUN, WHAT, takeover=True, say=said.append) as taken:
        assert ended.is_set(), "it was waited for"
        assert taken.holder.number == 2
        thread.join()
    assert len(said) == 1 and "which ends after its next step" in said[0]


def test_who_was_taken_over_claims_no_attempt(storage: Storage, uri: str) -> None:
    """Its supervisor would begin one after the loss of a worker, and fence off the command that took over."""
    RunFolder.create(storage, RUN)
    with leased(storage, RUN, WHAT):
        assert claim(uri, RUN, None).attempt == 1
        put(storage, elsewhere(2))
        with raises(problems.TAKEN_OVER, taker="process 7 on host far"):
            claim(uri, RUN, None)
    assert RunFolder.open(storage, RUN).claim().number == 2


def test_a_number_that_was_forgotten_is_not_taken_again(storage: Storage) -> None:
    """Who looked before two others had come and gone, and is late, gives way to the newest."""
    put(storage, elsewhere(6))
    with raises(problems.HELD, heard="which has just begun"):
        lease._create(storage, RUN, Holder.of_this_process(5), WHAT)
    assert files(storage) == ["0006.json"]
    assert json.loads(storage.read(f"{RUN}/holds/0006.json"))["host"] == "far"


__all__ = ["Holder", "open_storage", "put"]


def test_a_run_that_is_held_in_two_places_is_taken_over_in_either(tmp_path: Path) -> None:
    places = [open_storage(str(tmp_path / name)) for name in ("old", "new")]
    with leased(places[0], RUN, WHAT) as old, leased(places[1], RUN, WHAT) as new:
        new.follow(old)
        asked = threading.Event()
        new.when_taken(asked.set)
        new.reached(17, 2)
        assert (old.holder.step, old.holder.attempt) == (17, 2)
        put(places[0], elsewhere(2))
        assert asked.wait(20)
        with raises(problems.TAKEN_OVER, taker="process 7 on host far"):
            new.ensure()


def test_a_store_that_never_answers_does_not_keep_a_release_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_store, "_SILENT_S", 1)
    monkeypatch.setattr(object_store, "_ATTEMPTS", 1)
    monkeypatch.setattr(lease, "RELEASE_S", 0.2)
    with silent_store() as store:
        held = Lease(open_storage(store.uri), RUN, WHAT, Holder.of_this_process(1))
        assert store.asked.wait(30)
        began = time.monotonic()
        held.release()
        assert time.monotonic() - began < 0.9
        held._thread.join(60)
        assert not held._thread.is_alive()


HOLDING = """
import signal, sys, threading
from lockstep.checkpoint.runs import lease
from lockstep.checkpoint.storage import object_store
from lockstep.checkpoint.storage.opening import open_storage
object_store._SILENT_S, object_store._ATTEMPTS, lease.RELEASE_S = 1, 1, 1.0
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
held = lease.Lease(open_storage(sys.argv[1]), "run-a", "run run-a", lease.Holder.of_this_process(1))
print("held", flush=True)
try:
    threading.Event().wait()
finally:
    held.release()
"""


def test_a_signal_ends_a_process_whose_store_never_answers() -> None:
    with (
        silent_store() as store,
        subprocess.Popen(
            [sys.executable, "-c", HOLDING, store.uri], stdout=subprocess.PIPE, text=True
        ) as process,
    ):
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        assert store.asked.wait(60)
        process.terminate()
        assert process.wait(60) == 143
