"""What became of a run's time, by its log alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lockstep.record.events.union import (
    AttemptsSummarised,
    Failed,
    Finished,
    Opened,
    Recorded,
    Started,
    TimeSpent,
)
from lockstep.record.ledger.goodput import (
    spent_text,
    text_of_tags,
    time_spent,
    time_tags,
    with_time,
)
from lockstep.record.ledger.journal import Journal
from lockstep.record.ledger.rows import StepRow
from tests.unit.record.rows import step_row

BEGAN = 1_000.0


def steps(first: int, last: int, at: float, attempt: int = 1) -> list[StepRow]:
    """A step of half a second each second; the first one ends at `at` seconds after the beginning."""
    return [
        step_row(number, wall_clock=BEGAN + at + number - first, step_s=0.5, attempt=attempt)
        for number in range(first, last + 1)
    ]


def attempts(*each: tuple[int, int, bool]) -> AttemptsSummarised:
    """Attempts by number, workers, and whether each ended as planned."""
    return AttemptsSummarised(
        [{"attempt": number, "workers": workers, "planned": planned} for number, workers, planned in each]
    )


def spent(events: list[Recorded], rows: list[StepRow], until: float) -> TimeSpent:
    found = time_spent(events, rows, BEGAN, BEGAN + until)
    assert found is not None
    return found


def test_nothing_is_told_of_the_time_where_a_clock_was_set_back() -> None:
    """Between two commands, an hour; a few seconds are the difference of two machines' clocks."""
    for back_s, is_told in ((5.0, True), (3600.0, False)):
        end = Failed("stopped", at=BEGAN + 20, status="KILLED")
        again = BEGAN + 20 - back_s
        events = [Opened(BEGAN), Started({"workers": 1}), end, Opened(again), Started({"workers": 1})]
        told = time_spent(events, steps(1, 10, at=5.0), BEGAN, again + 30)
        assert (told is not None) == is_told


def test_a_run_without_interruption_has_its_steps_and_the_rest() -> None:
    found = spent([Opened(BEGAN), Started({"workers": 2})], steps(1, 10, at=5.0), 20.0)
    assert found == TimeSpent(BEGAN + 20, 20.0, 5.0, 0.0, 0, 0.0, 0.0)
    assert found.effective == 0.25


def test_a_loss_takes_the_time_until_the_first_new_step_begins() -> None:
    """Attempt 2 takes steps 8 to 10 again, which the log does not show: their rows are those of attempt 1, which ended at 14 s. Step 11 begins at 29.5 s."""
    rows = [*steps(1, 10, at=5.0), *steps(11, 12, at=30.0, attempt=2)]
    found = spent([Opened(BEGAN), attempts((1, 4, False), (2, 3, True))], rows, 40.0)
    assert (found.counted_s, found.interruptions, found.lost_s) == (6.0, 1, 15.5)
    assert found.lost_worker_h == 15.5 * 4 / 3600
    assert found.effective == 6.0 / 40.0


def test_attempts_without_a_step_are_of_the_loss_that_began_them() -> None:
    rows = [*steps(1, 2, at=5.0), *steps(3, 3, at=50.5, attempt=4)]
    account = attempts((1, 2, False), (2, 2, False), (3, 2, False), (4, 2, True))
    found = spent([Opened(BEGAN), account], rows, 60.0)
    assert (found.interruptions, found.lost_s) == (1, 44.0)


@pytest.mark.parametrize("planned", [True, False])
def test_a_change_as_planned_is_no_loss(planned: bool) -> None:
    rows = [*steps(1, 2, at=5.0), *steps(3, 3, at=10.5, attempt=2)]
    found = spent([Opened(BEGAN), attempts((1, 2, planned), (2, 3, True))], rows, 20.0)
    assert (found.interruptions, found.lost_s) == ((0, 0.0) if planned else (1, 4.0))


def test_a_run_that_is_stopped_and_resumed_was_away_and_lost_nothing() -> None:
    """Without an account, as in one process. The recorder of the resumed command begins 8 s before its first step does."""
    end = Finished({"stopped": True}, at=BEGAN + 10)
    rows = [*steps(1, 5, at=5.0), *steps(6, 7, at=120.5, attempt=2)]
    events = [Opened(BEGAN), Started({"workers": 1}), end, Opened(BEGAN + 112), Started({"workers": 1})]
    found = spent(events, rows, 125.0)
    assert (found.away_s, found.interruptions, found.lost_s) == (102.0, 0, 0.0)
    assert found.effective == 3.5 / 125


def test_a_driver_that_is_killed_loses_the_time_until_its_end_is_recorded_and_that_of_the_way_back() -> None:
    """The last step is done at 9 s, the guardian records the end at 12 s; who resumes begins at 112 s, and the next step begins at 120 s."""
    guardian = [Failed("the driver was lost", at=BEGAN + 12), Opened(BEGAN + 12.5)]
    rows = [*steps(1, 5, at=5.0), *steps(6, 7, at=120.5, attempt=2)]
    events = [
        Opened(BEGAN), Started({"workers": 3}), attempts((1, 3, False)), *guardian,
        Opened(BEGAN + 112), Started({"workers": 3}), attempts((2, 3, True)),
    ]  # fmt: skip
    found = spent(events, rows, 125.0)
    assert (found.away_s, found.interruptions, found.lost_s) == (100.0, 1, 3.0 + 8.0)
    assert found.lost_worker_h == 11.0 * 3 / 3600


def test_a_loss_that_nobody_could_record_is_one() -> None:
    """Everything was killed at once, before the account or an end was told; the rows come from the checkpoint."""
    rows = [*steps(1, 5, at=5.0), *steps(6, 7, at=120.5, attempt=2)]
    events = [Opened(BEGAN), Opened(BEGAN + 112), Started({"workers": 3}), attempts((2, 3, True))]
    found = spent(events, rows, 125.0)
    assert (found.away_s, found.interruptions, found.lost_s) == (0.0, 1, 111.0)
    assert spent([], steps(1, 2, at=50.0, attempt=3), 60.0).lost_s == 49.5  # nor had any step been done


def test_attempts_that_were_lost_before_there_was_a_run_belong_to_it() -> None:
    account = AttemptsSummarised(
        [
            {"attempt": 1, "workers": 2, "planned": False, "began": BEGAN - 30},
            {"attempt": 2, "workers": 2, "planned": True, "began": BEGAN - 5},
        ]
    )
    found = spent([Opened(BEGAN), account], steps(1, 2, at=5.0, attempt=2), 10.0)
    assert (found.wall_s, found.interruptions, found.lost_s) == (40.0, 1, 34.5)


def test_a_run_that_ends_in_losses_has_lost_the_time_since_its_last_step() -> None:
    end = Failed("2 attempts in a row", at=BEGAN + 30)
    events = [Opened(BEGAN), Started({}), attempts((1, 2, False), (2, 2, False)), end]
    found = spent(events, steps(1, 5, at=5.0), 30.0)
    assert (found.interruptions, found.lost_s) == (1, 21.0)
    ended_by_a_person = Failed("ended at once by a second signal", status="KILLED", at=BEGAN + 30)
    assert spent([*events[:-1], ended_by_a_person], steps(1, 5, at=5.0), 30.0).interruptions == 0


def test_a_row_that_was_replaced_after_wrong_bits_is_counted_once() -> None:
    """Steps 4 and 5 were taken again by attempt 2, and step 5 had the same bits: its old row stays."""
    rows = [
        *steps(1, 3, at=5.0),
        *steps(4, 4, at=20.5, attempt=2),
        *steps(5, 5, at=9.0),
        *steps(6, 6, at=22.5, attempt=2),
    ]
    found = spent([Opened(BEGAN), attempts((1, 2, False), (2, 2, True))], rows, 30.0)
    assert (found.counted_s, found.interruptions, found.lost_s) == (3.0, 1, 13.0)


def test_a_run_for_which_another_one_stands_has_no_time_of_its_own() -> None:
    assert time_spent([Started({"reused_from": "a"})], steps(1, 5, at=5.0), BEGAN, BEGAN + 9) is None


def test_an_account_of_a_stranger_costs_no_end() -> None:
    account = AttemptsSummarised([{"attempt": 1, "workers": "many", "planned": "no"}, {"attempt": [1]}])
    rows = [*steps(1, 2, at=5.0), *steps(3, 3, at=10.5, attempt=2)]
    assert spent([account, Started({"workers": None})], rows, 20.0).lost_worker_h == 4.0 / 3600


def test_each_end_of_a_journal_has_its_time_before_it(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    first: list[Recorded] = [Opened(BEGAN), Started({"workers": 1}), *steps(1, 5, at=5.0)]
    failed = Failed("lost", at=BEGAN + 12)
    added = with_time(journal, [*first, failed])
    assert [type(event).__name__ for event in added[-2:]] == ["TimeSpent", "Failed"]
    journal.add(added)
    again: list[Recorded] = [Opened(BEGAN + 112), Started({"workers": 1}), *steps(6, 7, at=120.5, attempt=2)]
    end = Finished({"stopped": False}, at=BEGAN + 125)
    journal.add(again)
    (spent_by_then, _) = with_time(journal, [end])
    assert isinstance(spent_by_then, TimeSpent)
    assert (spent_by_then.wall_s, spent_by_then.counted_s, spent_by_then.away_s) == (125.0, 3.5, 100.0)
    assert (spent_by_then.interruptions, spent_by_then.lost_s) == (1, 11.0)
    assert with_time(journal, [Failed("an end that nobody heard")]) == [Failed("an end that nobody heard")]
    journal.close()
    empty = Journal(tmp_path / "empty")
    assert with_time(empty, [failed]) == [failed]  # before the first step there is nothing to tell
    empty.close()


def test_the_tags_say_what_the_event_does() -> None:
    found = TimeSpent(BEGAN + 125, 125.0, 100.0, 5.0, 2, 10.0, 0.0125)
    tags: dict[str, Any] = {f"lockstep.{name}": json.dumps(value) for name, value in time_tags(found).items()}
    text = "80.0% of its time went into steps that count; no command was at it for 0:05; 2 interruptions took 0.013 worker-hours"
    assert text_of_tags(tags) == spent_text(found)
    assert spent_text(found) == text
    assert text_of_tags({**tags, "lockstep.effective": ""}) == ""
    assert text_of_tags({}) == ""


@pytest.mark.parametrize(
    ("counted_s", "away_s", "lost_worker_h"),
    [(29.5512, 0.0, 0.25), (29.56, 0.9996, 0.25), (29.56, 0.0, 0.0145000004), (29.56, 0.0, 0.0144999997)],
)
def test_a_rounded_tag_is_not_rounded_again(counted_s: float, away_s: float, lost_worker_h: float) -> None:
    account = TimeSpent(BEGAN + 100, 100.0, counted_s, away_s, 1, 10.0, lost_worker_h)
    tags = {f"lockstep.{name}": json.dumps(value) for name, value in time_tags(account).items()}
    assert text_of_tags(tags) == spent_text(account)
