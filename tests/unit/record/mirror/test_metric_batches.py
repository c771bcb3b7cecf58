"""Which points of a journal a store gets: each once and in order, whatever it has already, and whatever it refuses of them."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from lockstep.errors import RecordError
from lockstep.record import problems
from lockstep.record.errors import RejectedError
from lockstep.record.events.metrics import Point, evaluation_points, step_points
from lockstep.record.events.union import Opened, Recorded, Sampled
from lockstep.record.ledger.journal import Journal
from lockstep.record.ledger.rows import StepRow
from lockstep.record.mirror import metric_batches
from lockstep.record.mirror.delivery_lanes import Lane
from lockstep.record.mirror.metric_batches import Evaluations, MetricCursor
from lockstep.record.mirror.run_store import Ended, Measured, RunStore
from tests.raised import raises
from tests.unit.record.rows import corrupted, evaluation_row, step_row

BEGAN = 1_700_000_000.0


class Points(RunStore):
    """A store in memory, which had points before, and rejects some."""

    def __init__(self, points: Sequence[Point] = ()) -> None:
        self.points = list(points)
        self.calls: list[list[Point]] = []
        self.asked: list[str] = []
        self.linked: list[int] = []
        self.rejects: Callable[[Point], bool] = lambda point: False

    def open(self, run_id: str | None) -> str:
        return run_id or ""

    def ended(self) -> Ended | None:
        return None

    def last_steps(self) -> Mapping[str, int]:
        return {point.key: point.step for point in sorted(self.points, key=lambda point: point.step)}

    def recorded_steps(self, key: str) -> Collection[int]:
        self.asked.append(key)
        return {point.step for point in self.points if point.key == key}

    def log_metrics(self, points: Sequence[Point]) -> None:
        if any(map(self.rejects, points)):
            raise RejectedError("413")
        self.calls.append(list(points))
        self.points += points

    def log_evaluation(self, step: int, evaluation: Sequence[Measured]) -> None:
        self.linked.append(step)


class Delivery:
    """The points of a journal on their way to a store, whose lane makes no call by itself."""

    def __init__(self, folder: Path, store: Points, *, thorough: bool = False) -> None:
        self.journal, self.store = Journal(folder), store
        if not self.journal.events:
            self.journal.add([Opened(BEGAN)])
        self.notes: list[str] = []
        self.lane = Lane("metrics", lambda what, error: self.notes.append(what))
        self.metrics = MetricCursor(self.journal, store, self.lane, scaled=False, thorough=thorough)

    def tell(self, *events: Recorded) -> list[Point]:
        """Add events to the journal, and send what is due. Returns the points that were sent."""
        before = len(self.store.points)
        self.journal.add(events)
        while (call := next(self.metrics.calls(), None)) is not None:
            call.make()
        return self.store.points[before:]


@pytest.fixture
def deliver(tmp_path: Path) -> Iterator[Callable[..., Delivery]]:
    """Opens the journal in one folder, again and again."""
    opened: list[Delivery] = []

    def again(store: Points, **more: Any) -> Delivery:
        for delivery in opened[-1:]:
            delivery.journal.close()
        opened.append(Delivery(tmp_path, store, **more))
        return opened[-1]

    yield again
    opened[-1].journal.close()


Deliver = Callable[..., Delivery]


def points(*rows: StepRow) -> list[Point]:
    """The points of rows, each of which follows the one before it in its numbers."""
    return [
        point
        for row in rows
        for point in step_points(row, step_row(row.step - 1) if row.step > 1 else None, scaled=False)
    ]


def rows(*steps: int) -> list[StepRow]:
    return [step_row(step) for step in steps]


EACH = len(points(step_row(2)))
"""Points of a step."""


def test_whole_rows_fill_a_call_and_a_larger_one_takes_several(
    deliver: Deliver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store learns each step's rate from the step before it, also across calls."""
    monkeypatch.setattr(metric_batches, "POINTS_PER_CALL", 2 * EACH)
    delivery = deliver(store := Points())
    assert delivery.tell(*rows(1, 2, 3, 4, 5)) == points(*rows(1, 2, 3, 4, 5))
    assert [len(call) for call in store.calls] == [2 * EACH, 2 * EACH, EACH]
    large = step_row(6, parts={f"part {i}": float(i) for i in range(4 * EACH)})
    assert delivery.tell(large, step_row(7)) == points(large, step_row(7))
    assert [len(call) for call in store.calls[3:]] == [2 * EACH, 2 * EACH, 2 * EACH - 1]
    assert delivery.metrics.is_at_end
    assert delivery.tell() == []


def test_a_run_that_goes_on_sends_what_the_store_lacks(deliver: Deliver) -> None:
    """From the last step that it has, without asking for all of its steps; the first new one has its rate, too."""
    first = deliver(store := Points())
    first.tell(*rows(1, 2, 3), evaluation_row(3))
    again = deliver(store)
    assert again.tell() == []
    sent = again.tell(step_row(4), evaluation_row(4), Sampled("a", BEGAN - 1, {"cpu": 2.0}), step_row(5))
    assert sent == [*points(step_row(4)), *evaluation_points(evaluation_row(4)), *points(step_row(5))]
    assert store.asked == []


def test_what_was_measured_as_a_run_began_is_sent(deliver: Deliver) -> None:
    """Its step counts the seconds since then: it is 0."""
    sent = deliver(Points()).tell(Sampled("a", BEGAN, {"cpu": 2.0}), Sampled("a", BEGAN + 9, {"cpu": 3.0}))
    assert [(point.step, point.value) for point in sent] == [(0, 2.0), (9, 3.0)]


def test_a_row_that_is_written_late_is_sent_unless_the_store_has_it(deliver: Deliver) -> None:
    """A row that a disk refused, and that is told again after later ones. Its key's highest step says nothing of it."""
    store = Points([*points(*rows(1, 2, 4, 5)), *evaluation_points(evaluation_row(4))])
    delivery = deliver(Points())
    delivery.tell(*rows(1, 2, 4, 5), evaluation_row(4))
    delivery = deliver(store)
    assert delivery.tell(step_row(3), evaluation_row(2)) == [
        *points(step_row(3)), *evaluation_points(evaluation_row(2))
    ]  # fmt: skip
    assert sorted(store.asked) == sorted({*store.asked}), "each key is asked for once"
    assert "train/loss" in store.asked and "eval/loss" in store.asked
    assert deliver(store).tell(step_row(2), evaluation_row(2)) == []


def test_a_store_that_may_have_gaps_is_asked_for_all_of_its_steps(deliver: Deliver) -> None:
    """As after a batch of which a part was refused. The control trusts the highest step."""
    deliver(Points()).tell(*rows(1, 2, 3, 4))
    lacking = Points(points(*rows(1, 3)))
    assert deliver(lacking, thorough=True).tell() == points(*rows(2, 4))
    assert deliver(Points(points(*rows(1, 3)))).tell() == points(step_row(4))


def test_steps_that_are_taken_again_after_wrong_bits_replace_what_the_store_has(deliver: Deliver) -> None:
    """Those after the last good step, however often wrong bits are found; the others are there once."""
    delivery = deliver(store := Points())
    delivery.tell(*rows(1, 2, 3, 4, 5, 6))
    delivery = deliver(store)
    wrong = [corrupted(6, since=3), corrupted(6, since=5), corrupted(6, since=4)]
    again = [step_row(step, loss=9.0) for step in (3, 4, 5, 6)]
    assert delivery.tell(*wrong, *again) == points(*again[1:])


def test_a_refused_point_costs_no_other_and_is_due_again_at_the_end(deliver: Deliver) -> None:
    delivery = deliver(store := Points())
    store.rejects = lambda point: (point.key, point.step) in {("train/loss", 2), ("train/lr", 3)}
    sent = delivery.tell(*rows(1, 2, 3))
    wanted = points(*rows(1, 2, 3))
    assert sorted(sent) == sorted(point for point in wanted if not store.rejects(point))
    told = ["metrics of step 2 (train/loss)", "metrics of step 3 (train/lr)"]
    assert delivery.notes == list(delivery.lane.refused) == told
    assert (delivery.metrics.is_at_end, delivery.lane.idle) == (True, True)
    store.rejects = lambda point: False
    assert delivery.lane.retry()
    assert sorted(delivery.tell()) == sorted(set(wanted) - set(sent))
    assert not delivery.lane.refused
    assert not delivery.lane.retry()


def test_of_many_refused_points_some_are_kept(deliver: Deliver, monkeypatch: pytest.MonkeyPatch) -> None:
    """They take memory in a process that may train for weeks. What is not kept is told all the same, and `record sync` finds it."""
    monkeypatch.setattr(metric_batches, "MOST_REFUSED", 3)
    monkeypatch.setattr(metric_batches, "POINTS_PER_CALL", 2)
    delivery = deliver(store := Points())
    store.rejects = lambda point: point.step < 3
    delivery.tell(*rows(1, 2, 3))
    assert [len(call) for call in store.calls] == [2] * (EACH // 2)
    assert len(delivery.notes) == 2 * EACH
    store.rejects = lambda point: False
    delivery.lane.retry()
    assert delivery.tell() == points(step_row(1))[:3]
    assert [len(call) for call in store.calls[-2:]] == [2, 1]


def test_a_refusal_for_good_names_the_steps_and_a_few_keys(deliver: Deliver) -> None:
    """Nothing is halved then."""
    delivery = deliver(store := Points())
    store.rejects = lambda point: (_ for _ in ()).throw(RecordError("the run is deleted"))
    delivery.tell(*rows(1, 2))
    assert delivery.notes == [
        "metrics of steps 1 to 2 (perf/data_wait_s, perf/samples_per_s, perf/step_s, …)"
    ]
    delivery.tell(Sampled("a", BEGAN, {"b": 1.0, "c": 2.0, "d": 3.0}))
    assert delivery.notes[1:] == ["metrics of step 0 (system/a/b, system/a/c, system/a/d)"]


def test_a_call_that_is_refused_as_a_whole_is_due_when_there_is_more(deliver: Deliver) -> None:
    delivery = deliver(store := Points())
    delivery.journal.add(rows(1))
    next(delivery.metrics.calls()).refuse(RecordError("it takes no metrics"))
    assert (delivery.notes, delivery.lane.idle) == (["metrics"], True)
    assert delivery.tell(step_row(2)) == points(*rows(1, 2))
    assert store.calls == [points(*rows(1, 2))]
    assert not delivery.lane.refused


def test_a_disk_that_cannot_be_read_is_tried_again_and_no_point_is_lost(
    deliver: Deliver, monkeypatch: pytest.MonkeyPatch
) -> None:
    delivery = deliver(Points())
    delivery.journal.add(rows(1, 2))

    def broken(*_: Any) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as failing:
        failing.setattr(os, "pread", broken)
        with raises(problems.CANNOT_READ, got=re.compile("Input/output error")):
            next(delivery.metrics.calls()).make()
    assert not delivery.metrics.is_at_end
    assert delivery.tell() == points(*rows(1, 2))


def test_an_evaluation_is_linked_once_all_points_before_it_are_sent(deliver: Deliver) -> None:
    """Linking adds its points: a process that is killed in between would leave a highest step below which some are missing."""
    delivery = deliver(store := Points())
    evaluations = Evaluations(delivery.metrics, delivery.lane, store)
    evaluations.desired = {2: ([], "its checkpoint")}
    delivery.journal.add([*rows(1, 2), evaluation_row(2)])
    assert list(evaluations.calls()) == []
    delivery.tell()
    for call in evaluations.calls():
        call.make()
    assert store.linked == [2]
    assert delivery.lane.idle
