"""What a run warns of is in its journal, each warning once, and in its log."""

from __future__ import annotations

from collections.abc import Callable

from lockstep.record.events.union import Event, Finished, Started, Straggling, Warned
from lockstep.record.ledger.journal import Journal
from lockstep.record.mirror.sync import sync
from lockstep.record.recorder import Recorder
from lockstep.spec.fields import Spec
from tests.unit.record.rows import step_row

Specs = Callable[..., Spec]

SLOW = Straggling("rank 1 of 2 on host takes 3.0 times as long as the others, in steps 1 to 20")
SKIPPED = Warned("checkpoint 3 is skipped: weights.safetensors is damaged")


def recorded(spec: Specs, *events: Event, run_id: str | None = None) -> Recorder:
    recorder = Recorder(spec(), run_id=run_id)
    recorder.start()
    recorder.tell(*events)
    recorder.close()
    return recorder


def warnings_of(recorder: Recorder) -> list[Event]:
    journal = Journal(recorder.run_folder(), read_only=True)
    found: list[Event] = [event for event in journal.events if isinstance(event, Warned | Straggling)]
    journal.close()
    return found


def test_warnings_are_in_the_journal_and_in_the_log(spec: Specs) -> None:
    """Before the first facts too; the control is the run without any."""
    end = Finished({"step": 1})
    recorder = recorded(spec, SKIPPED, Started({"workers": 2}), step_row(1), SLOW, end)
    assert warnings_of(recorder) == [SKIPPED, SLOW]
    log = (recorder.run_folder() / "log.txt").read_text()
    assert f" warning: {SKIPPED.text}\n" in log and f" warning: {SLOW.text}\n" in log
    plain = recorded(spec, Started({"workers": 2}), step_row(1), end)
    assert warnings_of(plain) == []
    assert "warning" not in (plain.run_folder() / "log.txt").read_text()


def test_a_warning_that_comes_again_is_recorded_once(spec: Specs) -> None:
    """Again in one attempt, from a mailbox that a second recorder empties, in a resumed run, and in a sync. One with other words is another one."""
    first = recorded(spec, Started({}), SKIPPED, SLOW, step_row(1), SLOW, SKIPPED, Finished({"step": 1}))
    other = Warned(SLOW.text)
    again = recorded(spec, Started({}), SKIPPED, SLOW, other, Finished({"step": 1}), run_id=first.run_id())
    assert warnings_of(again) == [SKIPPED, SLOW, other]
    sync(again.run_folder(), again=True)
    assert warnings_of(again) == [SKIPPED, SLOW, other]


def test_a_password_in_a_warning_is_not_recorded(spec: Specs) -> None:
    warned = Warned("cannot reach postgresql://user:hidden-word@host/runs")
    first = recorded(spec, Started({}), warned, step_row(1), Finished({"step": 1}))
    again = recorded(spec, Started({}), warned, Finished({"step": 1}), run_id=first.run_id())
    assert len(warnings_of(again)) == 1
    for name in ("journal.jsonl", "log.txt"):
        assert "hidden-word" not in (again.run_folder() / name).read_text()
