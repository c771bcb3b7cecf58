"""What a journal says once more is a function of its events."""

from __future__ import annotations

from lockstep.record.events.union import CheckpointRow, Document, Failed, Finished, Opened, Started
from lockstep.record.ledger.replay import GONE, PROCESS, last_words, lost_end


def saved(step: int, *deleted: int) -> CheckpointRow:
    return CheckpointRow(step, f"/runs/{step}", None, 1, 0.0, 0.0, 0.0, 0.0, deleted)


def test_the_end_comes_last_and_an_earlier_attempts_end_is_none() -> None:
    started, end = Started({"workers": 2}), Finished({"step": 4})
    text = Document("stacks.txt", "…")
    assert last_words([Opened(1.0), Failed("killed"), started, end, text]) == [
        Opened(1.0),
        started,
        text,
        end,
    ]
    assert last_words([end, started]) == [started, Failed(GONE)]
    assert last_words([]) == [Failed(GONE)]


def test_checkpoints_are_told_as_far_as_they_are_left_and_what_was_deleted_once() -> None:
    told = last_words([saved(1), saved(2, 1), saved(3), saved(4, 3)])
    assert told == [saved(2), saved(4, 1, 3), Failed(GONE)]


def test_an_end_is_lost_if_a_store_was_told_it_by_a_process_that_wrote_it_down_first() -> None:
    first, second = Opened(1.0, {PROCESS: "first"}), Opened(2.0, {PROCESS: "second"})
    finished, killed, started = Finished({}), Finished({"stopped": True}), Started({})
    assert lost_end([], "FINISHED", "first")
    assert lost_end([first, started], "FINISHED", "first")
    assert lost_end([first, started, killed], "FINISHED", "second")
    assert lost_end([first, started, Failed("no")], "KILLED", "second")
    assert not lost_end([first, started, killed, second, started], "KILLED", "first"), "it goes on since"
    assert not lost_end([first, started, finished, second], "FINISHED", "second")
    assert not lost_end([first, started, finished], "KILLED", "first"), "the store was told less"
    assert not lost_end([first, started], "FAILED", "first"), "a reader has marked it"
    assert not lost_end([first, started], "RUNNING", "first")
