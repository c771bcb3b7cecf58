"""G1, G4: what goes wrong beside a run, all at once and end to end: the run and its record are those of one left alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from lockstep.record.mirror.sync import sync
from tests.chaos.disturbed import differences, fill, outcome, small_disk
from tests.unit.record.proxy import Proxy
from tests.unit.record.server import Server

ROOT = Path(__file__).parents[3]
STEPS = 160
REFUSED = "fields.json"
AHEAD_S = 600.0
DENIED_S = 60.0
FULL_S = 2.0

COMMAND = """
import sys, time
now, ahead_s = time.time, float(sys.argv.pop(1))
time.time = lambda: now() + ahead_s
from lockstep.cli.entry import run
run()
"""
"""The command in a process whose clock is ahead by so many seconds. That of its recorder, another process, is right."""

READER = f"""
import sys, time
from lockstep.record.runs import heartbeat
from lockstep.record.mirror.stores import reader
now = time.time
time.time = lambda: now() + {AHEAD_S}
heartbeat.pid_namespace = lambda: "another machine"
seen = []
while not seen or seen[-1] == "RUNNING":
    status = reader(sys.argv[1], None).run(sys.argv[2]).status
    seen += [] if seen[-1:] == [status] else [status]
    time.sleep(1.0)
print(*seen)
"""
"""Looks at the run from elsewhere until it is over, by a clock that is ahead."""


def started(runs: Path, uri: str, ahead_s: float = 0.0) -> subprocess.Popen[str]:
    words = [
        "train", "jobs/digits/train.yaml", "job.use=tests.untraced_jobs:PacedDigits",
        "job.params={width: 8, pause_s: 0.15}", f"length.steps={STEPS}", "checkpoint.every.steps=20",
        "evaluate.every.steps=40", f"checkpoint.storage={runs}", "--local", "--json", "--uri", uri,
    ]  # fmt: skip
    return python(COMMAND, str(ahead_s), *words)


def python(code: str, *words: str) -> subprocess.Popen[str]:
    path = os.pathsep.join([str(ROOT / "platform"), str(ROOT)])
    return subprocess.Popen(
        [sys.executable, "-c", code, *words], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": "0"},
    )  # fmt: skip


def rows(runs: Path) -> tuple[str, int]:
    """The id of the run that is there, and how many steps its journal has."""
    for journal in runs.glob("*/journal.jsonl"):
        return journal.parent.name, journal.read_bytes().count(b'{"step":')
    return "", 0


def reached(runs: Path, step: int, patience_s: float = 300.0) -> str:
    until = time.monotonic() + patience_s
    while (found := rows(runs))[1] < step:
        assert time.monotonic() < until, f"step {step} was not reached"
        time.sleep(0.1)
    return found[0]


@pytest.mark.exact
def test_a_wrong_clock_a_refusing_proxy_and_a_full_disk_leave_the_same_record(
    server: Server, tmp_path: Path
) -> None:
    """Its clock is ten minutes ahead, and a reader's; a proxy answers 413 to one file, and 401 to all for a minute; its disk is full for two seconds."""
    alone = started(tmp_path / "alone", server.uri)
    assert alone.wait(600) == 0, alone.communicate()[1][-3000:]
    expected = outcome(tmp_path / "alone" / rows(tmp_path / "alone")[0], server.uri)
    denied: list[tuple[float, float]] = []

    def judge(method: str, path: str, number: int) -> str:
        if any(begin <= time.monotonic() < end for begin, end in denied):
            return "401"
        return "413" if method == "PUT" and path.endswith(REFUSED) else ""

    runs = tmp_path / "runs"
    with Proxy(server.port) as proxy, small_disk(runs):
        proxy.judge = judge
        troubled = started(runs, proxy.uri, AHEAD_S)
        run_id = reached(runs, 10)
        looking = python(READER, server.uri, run_id)
        reached(runs, 30)
        denied.append((time.monotonic(), time.monotonic() + DENIED_S))
        reached(runs, 50)
        fill(runs, FULL_S)
        out, err = troubled.communicate(timeout=600)
        seen, _ = looking.communicate(timeout=60)
        assert troubled.returncode in {0, 1} and REFUSED in err + out, err[-3000:]
        assert seen.split() == ["RUNNING", "FINISHED"], "nobody took the run for dead"
        assert proxy.faults > 5
        found: dict[str, Any] = outcome(runs / run_id, server.uri)
        assert differences(found, expected) == []
        proxy.reset()
        assert sync(runs / run_id).sent, "what was refused is sent later"
        assert not sync(runs / run_id).sent
        assert differences(outcome(runs / run_id, server.uri), expected) == []
        assert json.loads((runs / run_id / REFUSED).read_text())
