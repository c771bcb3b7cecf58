"""A lane pushes differences: the newest values once, whatever the store refuses costs nothing else, and a refusal is forgotten with its cause."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from lockstep.errors import RecordError
from lockstep.record.errors import RejectedError, UnavailableError
from lockstep.record.events.metrics import Point
from lockstep.record.events.union import Finished
from lockstep.record.mirror.delivery_lanes import Lane, Outage, Part
from lockstep.record.mirror.folder import FolderStore
from lockstep.record.recorder import Recorder
from lockstep.spec.fields import Spec
from tests.unit.record.failed_at_every_call import quick
from tests.unit.record.rows import step_row


@pytest.fixture(autouse=True)
def fast() -> Iterator[None]:
    with quick():
        yield


class Tags:
    """A store of tags that rejects some texts, and does not answer while it is away."""

    def __init__(self) -> None:
        self.has: dict[str, str] = {}
        self.calls: list[Mapping[str, str]] = []
        self.rejects = ""
        self.away = threading.Event()
        self.notes: list[str] = []
        self.lane = Lane("tags", lambda what, error: self.notes.append(what))
        self.part = Part(self.lane, "tags", self.send, together=True)

    def send(self, tags: Mapping[str, str]) -> None:
        if self.away.is_set():
            raise UnavailableError("it does not answer")
        if self.rejects in tags.values():
            raise RejectedError("413")
        self.calls.append(tags)
        self.has |= tags

    def want(self, wanted: Mapping[str, str]) -> None:
        self.part.desired = wanted
        self.lane.wake()

    def settle(self) -> None:
        until = time.monotonic() + 20
        while not self.lane.idle:
            assert time.monotonic() < until
            time.sleep(0.001)


@pytest.fixture
def tags() -> Iterator[Tags]:
    tags = Tags()
    yield tags
    tags.lane.stop()


def test_a_tag_that_is_refused_costs_no_other_and_is_due_when_it_changes(tags: Tags) -> None:
    tags.rejects = "too long"
    wanted = {f"t{i}": str(i) for i in range(9)}
    tags.want({**wanted, "bad": "too long"})
    tags.settle()
    assert tags.has == wanted and list(tags.lane.refused) == tags.notes == ["tags bad"]
    tags.want({**wanted, "bad": "too long", "t1": "new"})
    tags.settle()
    assert tags.calls[-1] == {"t1": "new"} and tags.lane.refused
    tags.want({**wanted, "bad": "short"})
    tags.settle()
    assert tags.has == {**wanted, "bad": "short"} and not tags.lane.refused


def test_what_was_refused_is_due_once_more_where_that_is_asked_for(tags: Tags) -> None:
    tags.rejects = "too long"
    tags.want({"bad": "too long"})
    tags.settle()
    tags.rejects = ""
    assert tags.lane.idle and tags.lane.retry() and not tags.lane.retry()
    tags.lane.wake()
    tags.settle()
    assert tags.has == {"bad": "too long"} and not tags.lane.refused


def test_after_an_outage_the_newest_values_are_sent_once(tags: Tags) -> None:
    tags.away.set()
    for number in range(100):
        tags.want({"step": str(number), "name": "run"})
    while tags.lane.outage is None:
        time.sleep(0.001)
    tags.away.clear()
    tags.settle()
    assert tags.calls == [{"step": "99", "name": "run"}] and tags.lane.outage is None


def test_what_is_no_longer_wanted_is_deleted_and_nothing_else(tags: Tags) -> None:
    deleted = list[str]()
    files = Part(tags.lane, "files", lambda _: None, delete=deleted.append)
    files.desired = {"kept": 1, "dropped": 1}
    tags.lane.wake()
    tags.settle()
    files.desired = {"kept": 1}
    tags.lane.wake()
    tags.settle()
    assert (deleted, files.actual) == (["dropped"], {"kept": 1})


def test_each_pause_of_an_outage_is_twice_the_one_before_up_to_the_longest(tags: Tags) -> None:
    pauses = list[float]()
    for tries in range(1, 5):
        tags.lane.outage = Outage(0.0, tries, UnavailableError("it does not answer"))
        pauses.append(tags.lane._pause_s())
    assert pauses == [0.005, 0.01, 0.02, 0.02]


def test_a_refusal_that_the_journal_cannot_note_is_tried_again(
    tags: Tags, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else nobody would know of it after a resume."""
    full = iter([RecordError("the disk is full")])

    def note(what: str, error: RecordError) -> None:
        for problem in full:
            raise problem
        tags.notes.append(what)

    monkeypatch.setattr(tags.lane, "_note", note)
    tags.rejects = "too long"
    tags.want({"bad": "too long"})
    tags.settle()
    assert tags.notes == ["tags bad"]


class Fussy(FolderStore):
    """It rejects step 3 at first; when that is tried again it is away once."""

    def __init__(self, storage: Path) -> None:
        super().__init__(storage, "fussy")
        self.points: list[Point] = []
        self.answers: Iterator[RecordError] = iter([RejectedError("400"), UnavailableError("away")])

    def log_metrics(self, points: Sequence[Point]) -> None:
        if any(point.key == "train/loss" and point.step == 3 for point in points):
            if len(points) > 1:
                raise RejectedError("400")
            for answer in self.answers:
                raise answer
        self.points.extend(points)


def test_a_refused_point_is_not_lost_if_the_store_goes_away_while_it_is_tried_again(
    spec: Callable[..., Spec], tmp_path: Path
) -> None:
    """G4: the run ends well, so its store has it."""
    store = Fussy(tmp_path / "runs")
    recorder = Recorder(spec(), lambda _: store)
    recorder.start()
    recorder.tell(*[step_row(step) for step in range(1, 6)], Finished({"step": 5}))
    recorder.close()
    losses = sorted({point.step for point in store.points if point.key == "train/loss"})
    assert losses == [1, 2, 3, 4, 5]
