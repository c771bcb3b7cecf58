"""How a run ended is a function of its journal."""

from __future__ import annotations

from lockstep.record.events.union import Document, Failed, Finished, Opened, Started
from lockstep.record.ledger.journal_end import GONE, PROCESS, end_of, lost_end


def test_an_end_before_the_last_start_is_none() -> None:
    """It belongs to an earlier attempt. The control is a text after the end."""
    end = Finished({"step": 4})
    assert end_of([Failed("killed"), Started({}), end, Document("stacks.txt", "…")]) == end
    assert end_of([end, Started({})]) == end_of([]) == Failed(GONE)


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
