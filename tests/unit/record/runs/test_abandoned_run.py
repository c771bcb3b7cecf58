"""The end of a run is recorded by another process where its own cannot, and only where nobody else records it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from lockstep.process import pid_namespace, started
from lockstep.record import problems
from lockstep.record.errors import LockedError
from lockstep.record.events.union import (
    Delivered,
    Document,
    Failed,
    Finished,
    Opened,
    Recorded,
    SetAside,
    Started,
)
from lockstep.record.ledger.journal import Journal
from lockstep.record.ledger.journal_end import PROCESS
from lockstep.record.mirror.stores import reader
from lockstep.record.mirror.sync import sync
from lockstep.record.recorder import Recorder
from lockstep.record.runs.abandoned_run import record_end
from lockstep.record.runs.heartbeat import process_tags
from lockstep.spec.fields import Spec
from tests.raised import raises

WHY = Failed("the GCS was killed", "where its logs are")
HOLDS = "import sys, time; from pathlib import Path; from lockstep.record.ledger.journal import Journal; j = Journal(Path(sys.argv[1])); print(flush=True); time.sleep(600)"


@contextmanager
def child(*words: str) -> Iterator[subprocess.Popen[str]]:
    """A python process, which is there once it has written a line."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(
        [sys.executable, "-c", *words], stdout=subprocess.PIPE, text=True, env=environment
    )
    assert process.stdout is not None
    process.stdout.readline()
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def tag(pid: int) -> str:
    return f"{pid_namespace()} {pid} {started(pid)}"


@pytest.fixture
def run(spec: Callable[..., Spec]) -> tuple[Spec, str]:
    """A run without an end, whose recorder is gone: the process that its journal and its run.json name has ended."""
    recorder = Recorder(spec("off"))
    recorder.start()
    run_id = recorder.run_id()
    recorder.tell(Finished({}))
    recorder.close()
    folder = spec("off").folder / run_id
    gone = {**process_tags(1.0), PROCESS: f"{pid_namespace()} 999999999 1"}
    (folder / "journal.jsonl").unlink()
    with closing(Journal(folder)) as journal:
        journal.add([Opened(1.0, gone)])
    text = (
        (folder / "run.json")
        .read_text()
        .replace("FINISHED", "RUNNING")
        .replace(tag(os.getpid()), gone[PROCESS])
    )
    (folder / "run.json").write_text(text)
    return spec("off"), run_id


def recorded(spec: Spec, run_id: str) -> list[Recorded]:
    with closing(Journal(spec.folder / run_id, read_only=True)) as journal:
        return journal.events


def status(run: tuple[Spec, str]) -> str:
    return reader("off", run[0].folder).run(run[1]).status


def test_an_abandoned_run_gets_its_end_and_its_documents(run: tuple[Spec, str]) -> None:
    spec, run_id = run
    assert record_end(spec, run_id, WHY, [Document("stacks.txt", "a stack")], [], new=True) == run_id
    assert status(run) == "FAILED"
    folder = spec.folder / run_id
    assert (folder / "error.txt").read_text() == "the GCS was killed\n\nwhere its logs are\n"
    assert (folder / "stacks.txt").read_text() == "a stack"


def test_an_end_that_the_run_has_recorded_is_left_as_it_is(run: tuple[Spec, str]) -> None:
    spec, run_id = run
    with closing(Journal(spec.folder / run_id)) as journal:
        journal.add([Failed("its own end", "", "KILLED", at=2.0)])
    assert record_end(spec, run_id, WHY, [], [], new=True) is None
    assert status(run) == "KILLED"


@pytest.mark.parametrize(
    "after",
    [[], [Delivered()], [SetAside("a point", "the store refuses it")], [Opened(3.0, {}), Delivered()]],
    ids=["killed-undelivered", "delivered", "set-aside", "synced"],
)
def test_what_follows_an_end_takes_nothing_of_it_back(run: tuple[Spec, str], after: list[Recorded]) -> None:
    """Its process was killed between the end and its exit. The control is a run that was started again since."""
    spec, run_id = run
    gone = {**process_tags(2.0), PROCESS: f"{pid_namespace()} 999999999 1"}
    rest = [replace(event, process=gone) if isinstance(event, Opened) else event for event in after]
    with closing(Journal(spec.folder / run_id)) as journal:
        journal.add([Started({}), Finished({}, at=2.0), *rest])
    for _ in range(2):
        assert record_end(spec, run_id, WHY, [], [gone[PROCESS]], new=True) is None
    assert not any(isinstance(event, Failed) for event in recorded(spec, run_id))
    with closing(Journal(spec.folder / run_id)) as journal:
        journal.add([Opened(4.0, gone), Started({})])
    assert record_end(spec, run_id, WHY, [], [gone[PROCESS]], new=True) == run_id
    assert status(run) == "FAILED"


def test_an_attempt_that_was_killed_before_it_started_has_failed_and_its_end_is_recorded_once(
    run: tuple[Spec, str],
) -> None:
    """The run was killed, and resumed by a process that opened it and did no more. The control: a sync of another process opened it."""
    spec, run_id = run
    first, second = (f"{pid_namespace()} 99999999{n} 1" for n in (8, 9))
    with closing(Journal(spec.folder / run_id)) as journal:
        killed = Failed("ended by a signal", "", "KILLED", at=2.0)
        journal.add([Started({}), killed, Opened(3.0, {**process_tags(3.0), PROCESS: second})])
    assert record_end(spec, run_id, WHY, [], [first], new=True) is None
    assert status(run) == "KILLED"
    with closing(Journal(spec.folder / run_id)) as journal:
        journal.add([Opened(4.0, {**process_tags(4.0), PROCESS: second})])
    assert record_end(spec, run_id, WHY, [], [second], new=True) == run_id
    assert status(run) == "FAILED"
    with closing(Journal(spec.folder / run_id)) as journal:  # its recorder, by the id of this process
        journal.add([Opened(5.0, {**process_tags(5.0), PROCESS: first})])
    assert record_end(spec, run_id, WHY, [], [second], new=True) is None


def test_the_spec_of_a_run_that_is_reported_again_is_the_recorded_one(run: tuple[Spec, str]) -> None:
    spec, run_id = run
    before = (spec.folder / run_id / "spec.yaml").read_bytes()
    other = spec.model_copy(update={"seed": spec.seed + 1})
    assert record_end(other, run_id, WHY, [], [], new=True) == run_id
    assert (spec.folder / run_id / "spec.yaml").read_bytes() == before
    assert reader("off", spec.folder).run(run_id).params["seed"] == str(spec.seed)


def test_a_run_that_a_live_process_has_opened_since_is_left_to_it(run: tuple[Spec, str]) -> None:
    """It was resumed; the control is the same journal once that process is gone."""
    spec, run_id = run
    with child("import time; print(flush=True); time.sleep(600)") as process:
        with closing(Journal(spec.folder / run_id)) as journal:
            journal.add([Opened(2.0, {**process_tags(2.0), PROCESS: tag(process.pid)})])
        assert record_end(spec, run_id, WHY, [], [], new=True) is None
    assert record_end(spec, run_id, WHY, [], [], new=True) == run_id


def test_a_recorder_that_does_not_end_is_killed_and_no_other_process(run: tuple[Spec, str]) -> None:
    spec, run_id = run
    folder = str(spec.folder / run_id)
    with child(HOLDS, folder) as other:
        with pytest.raises(LockedError):
            record_end(spec, run_id, WHY, [], [f"{pid_namespace()} {other.pid} 1"], new=True, release_s=0.2)
        assert other.poll() is None
        assert record_end(spec, run_id, WHY, [], [tag(other.pid)], new=True, release_s=0.2) == run_id
        assert other.wait() == -signal.SIGKILL


def test_a_recorder_that_has_released_the_journal_may_take_a_while_to_end(run: tuple[Spec, str]) -> None:
    """The system lets go of the files of a process that is killed before it is gone. The control: a process that is none of the recorders."""
    spec, run_id = run
    for recorders in (lambda pid: [], lambda pid: [tag(pid)]):
        with child("import time; print(flush=True); time.sleep(0.8)") as process:
            with closing(Journal(spec.folder / run_id)) as journal:
                journal.add([Opened(2.0, {**process_tags(2.0), PROCESS: tag(process.pid)})])
            named = recorders(process.pid)
            wanted = run_id if named else None
            assert record_end(spec, run_id, WHY, [], named, new=True, release_s=5.0) == wanted
    assert status(run) == "FAILED"


def test_a_run_whose_id_nobody_was_told_is_known_by_its_recorder(run: tuple[Spec, str]) -> None:
    spec, run_id = run
    assert record_end(spec, None, WHY, [], [f"{pid_namespace()} 999999999 1"], new=False) == run_id


def test_without_a_run_one_is_made_only_if_that_is_asked_for(spec: Callable[..., Spec]) -> None:
    assert record_end(spec("off"), None, WHY, [], [], new=False) is None
    run_id = record_end(spec("off"), None, WHY, [], [], new=True)
    assert run_id is not None
    assert status((spec("off"), run_id)) == "FAILED"


def test_a_run_of_another_machine_is_ended_only_once_it_was_silent(
    run: tuple[Spec, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`record sync` and `record check --repair`: a paused process elsewhere is not taken for dead before its beat has stood still for long."""
    spec, run_id = run
    folder = spec.folder / run_id
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    now = [1000.0]
    monkeypatch.setattr("lockstep.record.runs.heartbeat._now", lambda: now[0])
    text = (folder / "run.json").read_text()
    (folder / "run.json").write_text(text.replace(pid_namespace(), "another-boot/pid:[1]"))
    for silent_s in (0.0, 149.0):
        now[0] = 1000.0 + silent_s
        with raises(problems.LIVING):
            sync(folder, "off")
    now[0] = 1151.0
    assert sync(folder, "off").sent
    assert status(run) == "FAILED"
