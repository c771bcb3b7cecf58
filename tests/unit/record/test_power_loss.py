"""G4: after a loss of power at any moment a resume has the record of an uninterrupted run, and what is FINISHED is whole."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from lockstep.record.events.union import Event, Failed, Finished
from lockstep.record.ledger import segments
from lockstep.record.ledger.journal import Journal
from lockstep.record.recorder import Recorder
from lockstep.spec.fields import Spec
from tests.power_loss import HOWS, How, Noted
from tests.unit.record.failed_at_every_call import (
    SAVED,
    STEPS,
    Kept,
    judged,
    not_whole,
    quick,
    recorded,
    rows,
    saved,
    started,
    status,
    store,
    waves,
)

COVER = 24
SEEDS = 2
"""Of each moment and each kind of loss."""

Specs = Callable[..., Spec]


@pytest.fixture(autouse=True)
def fast() -> Iterator[None]:
    with quick():
        yield


class Case(NamedTuple):
    after: int
    how: How
    seed: int


class Moment(NamedTuple):
    """What is elsewhere, where there is power, and what the run was told by then."""

    points: int
    waves: int


SCENARIOS = ("new", "uncut", "resumed")


class Recording:
    """One process that records a run, and the calls that it made.

    `new`: a run with segments of three steps, which are cut out of its journal; `uncut`: one that is too short for that;
    `resumed`: one that an earlier process began.
    """

    def __init__(self, spec: Spec, scenario: str) -> None:
        self.spec, self.scenario, self.storage = spec, scenario, spec.folder
        self.kept, self._waves = Kept(), 0
        self.storage.mkdir(exist_ok=True)
        segments.SEGMENT_STEPS = 3 if scenario != "uncut" else 2 * STEPS
        run_id = None
        if scenario == "resumed":
            first = Recorder(spec, lambda _: store(self.storage, self.kept))
            before = [[started(1), *rows(1, SAVED + 2, 1), saved(SAVED)], [Failed("killed")]]
            assert not recorded(first, before)
            run_id = first.run_id()
        self.noted = Noted(self.storage, lambda: Moment(len(self.kept.points), self._waves))
        with self.noted.watching():
            recorder = Recorder(spec, lambda _: store(self.storage, self.kept), run_id)
            assert not recorded(recorder, self._told())
        self.run_id = recorder.run_id()
        assert not not_whole(self.storage / self.run_id, self.kept)

    def _told(self) -> Iterator[list[Event]]:
        for wave in waves("resumed" if self.scenario == "resumed" else "new"):
            self._waves += 1
            yield wave

    def cases(self) -> list[Case]:
        """All of them, in an order that a seed has chosen."""
        moments = range(self.noted.begun, len(self.noted.calls) + 1)
        found = [Case(at, how, seed) for at in moments for how in HOWS for seed in range(SEEDS)]
        random.Random(16).shuffle(found)
        return found

    def lies(self, case: Case) -> list[str]:
        """What is untrue after a loss of power, and after the resume that follows it."""
        self.noted.left(case.after, case.how, random.Random(case.seed)).write(self.storage)
        moment: Moment = self.noted.moments[case.after]
        kept = Kept()
        kept.points = dict.fromkeys(list(self.kept.points)[: moment.points])
        folder = self.storage / self.run_id
        if not (folder / "run.json").exists():
            return ["the run is gone, and its id was told"] if moment.waves else []
        found = []
        try:
            finished = status(folder)[0] == "FINISHED"
        except ValueError:
            return ["its status cannot be read"]
        if finished:
            found = [f"FINISHED, but {lack}" for lack in [*not_whole(folder, kept), *damage(folder)]]
        again = Recorder(self.spec, lambda _: store(self.storage, kept), self.run_id)
        failure = recorded(again, self._rest(moment))
        if failure:
            return [*found, f"resumed: {failure}"]
        return [*found, *(f"resumed: {lie}" for lie in judged(self.storage, again, failure, kept))]

    def _rest(self, moment: Moment) -> Sequence[list[Event]]:
        """What the next attempt tells: from the checkpoint on, where one had been told, or from the beginning."""
        if self.scenario == "resumed" or moment.waves > 2:
            return waves("resumed")
        return [[started(2), *rows(1, STEPS, 2)], [Finished({"step": STEPS})]]


def damage(folder: Path) -> list[str]:
    journal = Journal(folder, read_only=True)
    journal.close()
    lacking = (
        [] if journal.last_step == STEPS and not journal.missing_steps() else ["its journal lacks steps"]
    )
    return [*lacking, *(f"its journal is damaged: {one.content}" for one in journal.damage)]


def found(recording: Recording, cases: Sequence[Case]) -> dict[Case, list[str]]:
    return {case: wrong for case in cases if (wrong := recording.lies(case))}


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_some_losses_of_power_leave_no_lie(spec: Specs, scenario: str) -> None:
    """A few dozen, as a seed has chosen them."""
    recording = Recording(spec(), scenario)
    end = len(recording.noted.calls)
    assert found(recording, [Case(end - 1, "dropped", 0)]) == {}
    assert found(recording, recording.cases()[: COVER // len(SCENARIOS)]) == {}


@pytest.mark.exact
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_no_loss_of_power_leaves_a_lie(spec: Specs, scenario: str) -> None:
    """All of them."""
    recording = Recording(spec(), scenario)
    cases = recording.cases()
    wrong = found(recording, cases)
    print(f"{len(cases)} losses of power, {len(wrong)} lies")
    assert wrong == {}


@pytest.mark.parametrize("of", ["folders", "files"])
def test_a_record_that_is_not_flushed_lies(spec: Specs, of: str) -> None:
    """The controls: names that may be lost, and names of files whose content may be."""
    recording = Recording(spec(), "uncut")
    recording.noted.forget_flushes(of_folders=of == "folders")
    last = len(recording.noted.calls)
    assert found(recording, [Case(last, how, 0) for how in ("dropped", "names", "zeros")])
