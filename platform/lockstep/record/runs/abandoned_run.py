"""Records the end of a run whose own processes can no longer do so: of a driver that was killed, or whose cluster died under it.

The run's journal is locked first, so nobody records it meanwhile; and its end is added only where the process that recorded it
last is gone. A run that another command has resumed is left to that command.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from lockstep.errors import LockstepError, RecordError
from lockstep.process import pid_namespace, started
from lockstep.record.errors import LockedError
from lockstep.record.events.union import Document, Failed, Finished, Opened, Recorded, Started, TakenOver
from lockstep.record.ledger.goodput import with_time
from lockstep.record.ledger.journal import Journal
from lockstep.record.ledger.journal_end import PROCESS
from lockstep.record.ledger.journal_file import NAME
from lockstep.record.recorder import Recorder
from lockstep.record.runs.heartbeat import vanished
from lockstep.spec.fields import Spec
from lockstep.spec.loading import load_spec

RELEASE_S = 8.0
"""How long a recorder may take to end after its driver: Ray ends it, or it has still to write what it was told."""

LOST_S = 1.0
"""The same where its cluster is lost: what it has not fetched by now does not come."""

LOOK_S = 0.1


def record_end(
    spec: Spec,
    run_id: str | None,
    failed: Failed,
    documents: Sequence[Document],
    recorders: Sequence[str],
    *,
    new: bool,
    release_s: float = RELEASE_S,
) -> str | None:
    """Record that a run has failed, unless its journal has an end, or another command has resumed it. Returns the run's id where it did.

    `recorders` are the processes that may have recorded it, as their tag `lockstep.process` names them; one that does not end
    within `release_s` is killed. Without `run_id` it is the run that one of them has begun. If none has, a `new` run gets this end
    and nothing else, or nothing is recorded. RecordError where the store refuses.
    """
    run_id = run_id or next(_begun_by(recorders, spec.folder), None)
    if run_id is None:
        if not new:
            return None
        recorder = Recorder(spec, source=Path.cwd())
        recorder.start()
        recorder.tell(*documents, failed)
        recorder.close()
        return recorder.run_id()
    with closing(_journal(spec.folder / run_id, recorders, release_s)) as journal:
        if not _abandoned(run_id, journal.events, recorders, release_s):
            return None
        ends = not _has_end(journal.events, recorders)
        if not ends and journal.delivered:
            return None
        if ends:
            journal.add(_timed(journal, [*documents, failed]))
    recorder = Recorder(spec, run_id=run_id, replay=True)
    recorder.start()
    recorder.close()
    return run_id if ends else None


def _has_end(events: Sequence[Recorded], recorders: Sequence[str]) -> bool:
    """Whether the run has ended since its last start. What follows an end, such as its delivery, takes nothing of it back.

    One of the `recorders` that has opened the run again was to go on with it: it has no end yet, unless the run had finished.
    """
    reopened = False
    for event in reversed(events):
        match event:
            case Finished():
                return True
            case Failed() | TakenOver():
                return not reopened
            case Started():
                return False
            case Opened():
                reopened = reopened or event.process.get(PROCESS) in recorders
    return False


def _timed(journal: Journal, events: Sequence[Recorded]) -> Sequence[Recorded]:
    """These events, with what became of the run's time, as far as its steps can be read."""
    with suppress(RecordError, OSError):
        return with_time(journal, events)
    return events


def _abandoned(run_id: str, events: Sequence[Recorded], recorders: Sequence[str], release_s: float) -> bool:
    """Whether the process that opened the journal last is known to be gone.

    One of the `recorders` is waited for: it has released the journal, which a process that is killed does before it is gone.
    """
    opened = [event.process for event in events if isinstance(event, Opened)]
    if not opened:
        return False
    ended_by_now([process for process in recorders if process == opened[-1].get(PROCESS)], release_s)
    return bool(vanished(run_id, opened[-1]))


def _journal(folder: Path, recorders: Sequence[str], release_s: float) -> Journal:
    """The run's journal, once those who recorded it have released it."""
    until = time.monotonic() + release_s
    while True:
        try:
            return Journal(folder)
        except LockedError:
            if time.monotonic() > until + RELEASE_S:
                raise
            if time.monotonic() > until:
                _kill(recorders)
            time.sleep(LOOK_S)


def _kill(recorders: Sequence[str]) -> None:
    """Kill those that are alive, and wait until they are gone; one that waits in the kernel, as for a disk, is not waited for longer than RELEASE_S."""
    until = time.monotonic() + RELEASE_S
    for pid in _alive(recorders):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    while _alive(recorders) and time.monotonic() < until:
        time.sleep(LOOK_S)


def _alive(recorders: Sequence[str]) -> list[int]:
    """Those processes of this machine that have not ended."""
    pids = []
    for process in recorders:
        where, _, identity = process.partition(" ")
        pid, _, began = identity.partition(" ")
        if where == pid_namespace() and pid.isdigit() and started(int(pid)) == began:
            pids.append(int(pid))
    return pids


def ended_by_now(recorders: Sequence[str], release_s: float) -> None:
    """Wait until the recorders have ended; one that does not within `release_s` is killed."""
    until = time.monotonic() + release_s
    while _alive(recorders) and time.monotonic() < until:
        time.sleep(LOOK_S)
    _kill(recorders)


def _begun_by(recorders: Sequence[str], folder: Path) -> Iterator[str]:
    """The runs whose journal one of these processes has opened."""
    for path in folder.glob(f"*/{NAME}"):
        with suppress(OSError), path.open(encoding="utf-8", errors="replace") as file:
            first = file.readline()
            if any(json.dumps(process) in first for process in recorders):
                yield path.parent.name


Recording = Callable[[Mapping[str, Any], Failed, Sequence[Document], float], str | None]
"""Records what was told on standard input, within so many seconds of the recorders' release. Returns the id, if there was something to record."""


def answered(record: Recording) -> None:
    """Record the end that standard input describes, and print what came of it as JSON: the run's id, and what went wrong."""
    request: Mapping[str, Any] = json.load(sys.stdin)
    out = os.dup(1)
    os.dup2(2, 1)  # what libraries print is no answer
    answer = {"run_id": None, "problem": ""}
    try:
        # The job's source is looked up as by the driver.
        sys.path[:] = [*request["path"], *(path for path in sys.path if path not in request["path"])]
        failed = Failed(request["message"], request["details"], request["status"], at=time.time())
        documents = [Document(name, text) for name, text in request["documents"].items()]
        answer["run_id"] = record(request, failed, documents, LOST_S if request["new"] else RELEASE_S)
    except LockedError:  # another command has resumed the run
        pass
    except (LockstepError, OSError) as error:
        answer["problem"] = str(error if isinstance(error, RecordError) else f"record: {error}")
    os.write(out, json.dumps(answer).encode())


def main() -> None:
    """`answered` for a run."""

    def recorded(
        request: Mapping[str, Any], failed: Failed, documents: Sequence[Document], release_s: float
    ) -> str | None:
        spec, recorders = load_spec(request["spec"]), request["recorders"]
        return record_end(
            spec, request["run_id"], failed, documents, recorders, new=request["new"], release_s=release_s
        )

    answered(recorded)
