"""A journal that is taken up again: what is read of it, what its store gets, and what a step that is done again is compared with."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lockstep.record.events.metrics import EVERY_STEP, OF_TIME
from lockstep.record.events.union import Document, Event, Finished, Restored, Sampled, Started
from lockstep.record.ledger import journal as journal_module
from lockstep.record.ledger.journal import Journal
from lockstep.record.ledger.rows import Observation
from lockstep.record.ledger.segments import digest_of, seal
from lockstep.record.ledger.tables import Rows, read_parquet
from lockstep.record.mirror.sync import sync
from lockstep.record.recorder import Recorder
from lockstep.spec.fields import Spec
from tests.unit.record.failed_at_every_call import KeepingStore, Kept, quick
from tests.unit.record.rows import corrupted, evaluation_row, step_row

Specs = Callable[..., Spec]


@pytest.fixture(autouse=True)
def short() -> Iterator[None]:
    with quick():
        yield


def events(first: int, last: int) -> list[Any]:
    told: list[Any] = []
    for step in range(first, last + 1):
        told.append(step_row(step))
        if step % 3 == 0:
            told.append(evaluation_row(step))
        if step % 4 == 0:
            told.append(Sampled("node-0", 4e9 + step, {"system/cpu": 0.5}))
        if step % 5 == 0:
            told.append(Observation(step, {"layers/all/gradient_norm": 0.25}, 4e9 + step))
    return told


def record(spec: Spec, kept: Kept, told: list[Event], run_id: str | None = None) -> Recorder:
    recorder = Recorder(spec, lambda _: KeepingStore(spec.folder, kept, None, "", lasts=False), run_id)
    recorder.start()
    recorder.run_id()
    for start in range(0, len(told), 7):
        recorder.tell(*told[start : start + 7])
    return recorder


# --- what is read --------------------------------------------------------------------------------------------


def test_a_journal_is_opened_without_a_look_into_its_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their numbers and checksums are enough; what damage does is in test_journal.py."""
    journal = Journal(tmp_path)
    journal.add(events(1, 503))
    journal.close()
    read: list[bytes] = []
    monkeypatch.setattr(
        journal_module,
        "from_line",
        lambda line, folder, real=journal_module.from_line: (read.append(line), real(line, folder))[1],
    )
    again = Journal(tmp_path)
    assert again.last_step == 503 and again.has_step(77) and not again.missing_steps() and not again.damage
    assert read and not any(line.startswith(b'{"step"') for line in read)
    assert [row.step for row in again.steps(500)] == [501, 502, 503]
    assert sum(line.startswith(b'{"step"') for line in read) == 3
    again.close()


@pytest.mark.parametrize("seed", range(10))
def test_steps_that_come_late_or_again_are_in_their_places(tmp_path: Path, seed: int) -> None:
    """In a journal that is opened now and then, compared with a plain dictionary."""
    chance, wanted = random.Random(seed), dict[int, Any]()
    journal, step = Journal(tmp_path), chance.choice([1, 8])
    for _ in range(20):
        told = [step_row(number) for number in range(step, step + chance.randrange(1, 7))]
        told += [
            step_row(number, loss=chance.random())
            for number in chance.sample(range(1, step + 1), min(step, 2))
        ]
        journal.add(told)
        wanted |= {row.step: row for row in told}
        step += chance.randrange(1, 9)
        if chance.random() < 0.4:
            journal.close()
            journal = Journal(tmp_path)
        assert list(journal.steps()) == [wanted[number] for number in sorted(wanted)]
        assert [journal.step(number) for number in range(60)] == [wanted.get(number) for number in range(60)]
        after = chance.randrange(60)
        assert [row.step for row in journal.steps(after)] == [n for n in sorted(wanted) if n > after]
        gaps = [n for n in range(min(wanted), max(wanted)) if n not in wanted]
        missing = journal.missing_steps()
        assert (list(missing)[:1], missing.stop in wanted or not gaps) == (gaps[:1], True)
    journal.close()


def test_a_segment_is_known_by_its_digest(tmp_path: Path) -> None:
    rows = [step_row(i) for i in range(1, 11)]
    journal = Journal(tmp_path)
    journal.add([*rows[:4], *rows[5:]])
    segment = seal(Rows(rows, ()))[0]
    assert segment.digest == digest_of(rows) and not journal.has_segment(segment)
    journal.add([rows[4]])
    assert journal.has_segment(segment)
    journal.add([rows[4]._replace(loss=0.5)])
    assert not journal.has_segment(segment)
    journal.close()


# --- what the store gets -------------------------------------------------------------------------------------


def keys(kept: Kept) -> list[tuple[str, int]]:
    """Without those of the run's ends, of which one that is recorded again has more."""
    return sorted((point.key, point.step) for point in kept.points if point.key not in OF_TIME)


@pytest.mark.scenario
def test_a_run_that_goes_on_is_sent_from_the_last_step_on_that_its_store_has(
    spec: Specs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing twice and nothing left out, whatever part of the last rows it has; it is not asked for all of its steps, nor are the rows before read."""
    told = [Started({"identity": "abc"}), *events(1, 23)]
    whole, sent = Kept(), list[Any]()
    recorder = record(spec(), whole, told)
    recorder.close()
    folder = recorder.run_folder()
    content = (folder / "journal.jsonl").read_bytes()
    assert content.endswith(b"\n") and b'{"delivered":{}}' in content
    content = content[: content.index(b'{"delivered"')]  # the process was killed before it knew
    points = list(whole.points)
    log = KeepingStore.log_metrics
    monkeypatch.setattr(
        KeepingStore, "log_metrics", lambda self, more: (sent.extend(more), log(self, more))[1]
    )
    monkeypatch.setattr(
        KeepingStore, "recorded_steps", lambda self, key: pytest.fail(f"it was asked for {key}")
    )
    read, starts = Journal.read, list[int]()
    monkeypatch.setattr(Journal, "read", lambda self, start: (starts.append(start), read(self, start))[1])
    for count in (1, 8, len(points) // 2, len(points) - 3, len(points)):
        kept = Kept()
        kept.points.update(dict.fromkeys(points[:count]))
        (folder / "journal.jsonl").write_bytes(content)
        sent.clear()
        starts.clear()
        record(spec(), kept, [], recorder.run_id()).close()
        assert keys(kept) == keys(whole), count
        assert {(p.key, p.step) for p in sent}.isdisjoint((p.key, p.step) for p in points[:count]), count
        of_each = [[point.step for point in points[:count] if point.key == key] for key in EVERY_STEP]
        reached = min(max(steps, default=0) for steps in of_each)
        assert min(starts) == (content.index(b'{"step":[%d,' % reached) if reached else 0), count


def test_an_evaluation_that_came_late_is_sent_though_its_store_has_later_ones(spec: Specs) -> None:
    """It was mended, and the process was killed before it was sent."""
    kept = Kept()
    recorder = record(spec(), kept, [Started({"identity": "abc"}), *events(1, 10)])
    recorder.close()
    lacks = [point for point in kept.points if point.key.startswith("eval/") and point.step == 3]
    assert lacks
    for point in lacks:
        del kept.points[point]
    journal = Journal(recorder.run_folder())
    journal.add([evaluation_row(3)])
    journal.close()
    record(spec(), kept, [], recorder.run_id()).close()
    assert set(lacks) <= set(kept.points)


def test_a_store_that_was_put_back_from_a_backup_gets_what_it_has_lost(
    spec: Specs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """G4: it had confirmed these points and documents, and the journal says that all is delivered."""
    kept, sent = Kept(), list[str]()
    monkeypatch.setattr(KeepingStore, "log_file", lambda self, path, folder: sent.append(path.name))
    where = spec(f"sqlite:///{tmp_path}/mlflow.db")
    recorder = record(where, kept, [Started({"identity": "abc"}), Document("a.txt", "a"), *events(1, 23)])
    recorder.close()
    whole = keys(kept)
    goes_on: list[Event] = [Started({"identity": "abc"}), Finished({"step": 23})]
    sent.clear()
    record(where, kept, goes_on, recorder.run_id()).close()
    assert "a.txt" not in sent, "it has everything"
    for point in [point for point in kept.points if point.step > 7]:
        del kept.points[point]
    record(where, kept, goes_on, recorder.run_id()).close()
    assert keys(kept) == whole
    assert sent.count("a.txt") == 1


def test_sync_sends_what_a_store_lacks_in_the_middle(spec: Specs, monkeypatch: pytest.MonkeyPatch) -> None:
    """To a store that has nothing of these steps, and none twice of those that it has."""
    kept = Kept()
    recorder = record(spec(), kept, [Started({"identity": "abc"}), *events(1, 23), Finished({"step": 23})])
    recorder.close()
    whole = keys(kept)
    for point in [point for point in kept.points if point.step in (2, 3, 12)]:
        del kept.points[point]
    monkeypatch.setattr(
        "lockstep.record.recorder.store_for",
        lambda spec, started_at: KeepingStore(spec.folder, kept, None, "", lasts=False),
    )
    sync(recorder.run_folder(), again=True)
    assert keys(kept) == whole


# --- what a step is compared with ----------------------------------------------------------------------------


def test_the_ledger_is_whole_after_an_attempt_that_starts_from_the_middle(spec: Specs) -> None:
    """G4: after a process that ended without a word."""
    kept = Kept()
    recorder = record(spec(), kept, [Started({"identity": "abc"}), *events(1, 23)])
    recorder.close()
    restored = Restored([step_row(i) for i in range(1, 18)], [])
    told = [Started({"identity": "abc"}), restored, *events(18, 40), Finished({"step": 40})]
    again = record(spec(), kept, told, recorder.run_id())
    again.close()
    assert not again.state.violation
    assert read_parquet(again.run_folder() / "ledger.parquet") == [step_row(i) for i in range(1, 41)]
    assert [step for key, step in keys(kept) if key == "train/loss"] == list(range(1, 41))


def test_a_violation_is_seen_however_old_the_step(spec: Specs) -> None:
    """G1: a step that is done again with other bits, long after it was recorded."""
    recorder = record(spec(), Kept(), [Started({"identity": "abc"}), *events(1, 23)])
    recorder.tell(*[step_row(i) for i in range(3, 12)], step_row(12, loss=0.125))
    recorder.close()
    assert "step 12" in recorder.state.violation and "0.125" in recorder.state.violation


def test_a_row_of_wrong_bits_gives_way_however_old_it_is(spec: Specs) -> None:
    recorder = record(spec(), Kept(), [Started({"identity": "abc"}), *events(1, 23), corrupted(23, since=1)])
    recorder.tell(step_row(3, loss=0.125, attempt=2))
    recorder.close()
    journal = Journal(recorder.run_folder(), read_only=True)
    row = journal.step(3)
    assert row is not None and row.loss == 0.125 and not recorder.state.violation
    journal.close()
