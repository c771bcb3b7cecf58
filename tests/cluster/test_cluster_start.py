"""A cluster of a command's own whose raylet ends while it starts: it is started again, for some time."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from lockstep.clusters import connection, core_watch, problems
from lockstep.clusters.connection import STARTS
from lockstep.clusters.ray_internals import own_node
from lockstep.clusters.ray_internals.own_node import RayletEndedError
from tests.cluster.commands import ROOT, command, result_of
from tests.processes import named
from tests.raised import raises

SPEC = ["train", "jobs/digits/train.yaml", "length={steps: 3}", "record.uri=off", "--address", "local"]


def agents(run: subprocess.Popen[str]) -> Iterator[psutil.Process]:
    """The agent for runtime environments of each raylet of a command as it begins; without its port the raylet does not register its node."""
    seen, until = set[int](), time.monotonic() + 240
    while run.poll() is None:
        assert time.monotonic() < until
        with suppress(psutil.NoSuchProcess):
            started = psutil.Process(run.pid).children(recursive=True)
            for process in named("runtime_env/agent/main.py", among=started):
                program = process.cmdline()[:1]  # none while it is replaced by another
                if process.pid not in seen and program and "raylet/raylet" not in program[0]:
                    seen.add(process.pid)
                    yield process
        time.sleep(0.02)


@pytest.mark.scenario
def test_a_raylet_that_gives_up_waiting_for_its_agent_costs_no_command(tmp_path: Path) -> None:
    """Ray's raylet waits 15 s for it, which a busy machine can exceed, and aborts."""
    run = command(tmp_path / "disturbed", *SPEC)
    first = next(agents(run))
    first.suspend()
    raylet = first.parent()
    assert raylet is not None
    assert raylet.wait(120) is None
    assert not run.poll()
    undisturbed = result_of(command(tmp_path / "undisturbed", *SPEC))
    assert result_of(run)["weights_digest"] == undisturbed["weights_digest"]
    assert first.wait(10) is None


@pytest.mark.scenario
def test_a_raylet_that_never_stays_is_told_in_one_line(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "lockstep", *SPEC, f"checkpoint.storage={tmp_path}"]
    run, lost = subprocess.Popen(words, cwd=ROOT, stderr=subprocess.PIPE, text=True), 0
    for agent in agents(run):
        agent.suspend()
        raylet = agent.parent()
        assert raylet is not None
        raylet.kill()
        lost += 1
    _, err = run.communicate(timeout=60)
    assert run.returncode == 1, err
    assert lost == STARTS
    assert err.count("starting it again") == STARTS - 1
    assert str(problems.RAYLET_ENDED(times=STARTS, got=-9)) in err
    assert "Traceback" not in err
    assert not list(tmp_path.glob("*/*"))


@pytest.mark.scenario
def test_an_agent_that_serves_nobody_is_not_started_and_its_stand_in_ends_with_the_raylet(
    tmp_path: Path,
) -> None:
    run = command(tmp_path, *SPEC)
    raylet = next(agents(run)).parent()
    assert raylet is not None
    (stand_in,) = named("RAY_RAYLET_PID", among=raylet.children())
    assert named("dashboard/agent.py", among=raylet.children(recursive=True)) == []
    assert stand_in.memory_info().rss < 30 * 2**20
    assert result_of(run)["status"] == "FINISHED"
    assert stand_in.wait(10) is None


@pytest.mark.parametrize("alive", [True, False])
def test_a_stand_in_that_begins_after_its_raylet_has_ended_ends_too(alive: bool) -> None:
    """It is handed on to another process by then, and must not take that one for its raylet."""
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        ended.wait()
    raylet = os.getpid() if alive else ended.pid
    command = [sys.executable, "-I", "-S", "-c", own_node._WAITS]
    with subprocess.Popen(command, env={"RAY_RAYLET_PID": str(raylet)}) as stand_in:
        try:
            assert stand_in.wait(2.0 if alive else 60.0) == 0
        except subprocess.TimeoutExpired:
            assert alive
        else:
            assert not alive
        finally:
            stand_in.kill()


@pytest.mark.parametrize("ends", [STARTS - 1, STARTS])
def test_a_cluster_is_started_so_often_and_not_more_often(ends: int) -> None:
    lines, started, forgotten = list[str](), list[None](), list[None]()
    watch = SimpleNamespace(begun=pytest.fail, forget=lambda: forgotten.append(None))

    def start() -> None:
        started.append(None)
        if len(started) <= ends:
            raise RayletEndedError(1)

    told = nullcontext() if ends < STARTS else raises(problems.RAYLET_ENDED, times=STARTS, got=1)
    with told:
        connection._start_own_node(start, watch, lines.append, logs=False)
    assert (len(started), len(forgotten), len(lines)) == (STARTS, ends, STARTS - 1)


@pytest.mark.parametrize("forgotten", [True, False])
def test_only_a_process_on_which_something_depends_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forgotten: bool
) -> None:
    lost = list[Any]()
    watch = core_watch.CoreWatch(SimpleNamespace(tell=lambda **_: None), tmp_path)  # type: ignore[arg-type]
    monkeypatch.setattr(watch, "_lose", lambda error, *_: lost.append(error))
    with (
        subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process,
        closing(watch._ends),
    ):
        watch.begun(["/rays/gcs_server"], process.pid)
        if forgotten:
            watch.forget()
        process.kill()
        process.wait()
        assert watch._thread is not None
        watch._thread.join(2.0)
        watch._over.set()
        watch._thread.join()
    assert len(lost) == (0 if forgotten else 1)
