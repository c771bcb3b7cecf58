"""Waits whose limits docs/failures.md lists, and that no test of what waits has."""

from __future__ import annotations

import threading
import time

import pytest

from lockstep import periodic
from lockstep.attempts import problems, worker_group
from lockstep.attempts.placement import WorkerPlacement
from lockstep.attempts.worker_group import WorkerGroup
from lockstep.checkpoint.runs.run_folder import AttemptOrigin
from lockstep.spec.loading import load_spec
from tests.raised import raises


def test_workers_that_ray_does_not_end_are_waited_for_so_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_group, "END_S", 0.2)
    over = threading.Event()

    class Unended(WorkerGroup):
        def _fit(self) -> None:
            over.wait()

    spec = load_spec({"job": {"use": "jobs.digits.job:Digits"}, "record": {"uri": "off"}})
    place = WorkerPlacement(2, {"CPU": 1.0}, frozenset(), frozenset())
    group = Unended(spec, AttemptOrigin(), None, place, {}, "shown")
    group.end()  # nothing was started
    group.start()
    with raises(problems.STILL_THERE, attempt=1, seconds=0):
        group.end()
    over.set()


def test_a_reading_that_never_comes_back_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(periodic, "END_S", 0.2)
    reads, over = threading.Event(), threading.Event()

    def read() -> None:
        reads.set()
        over.wait()

    began = time.monotonic()
    with periodic.periodically(lambda: read, 0.01, "reading"):
        assert reads.wait(30)
    assert time.monotonic() - began < 30
    over.set()
