"""A checkpoint has the rows behind its segments, and names the segments: a save costs what is new."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lockstep.checkpoint.errors import BadCheckpointError
from lockstep.checkpoint.reader import (
    checkpoint_at,
    checkpoints,
    load_newest,
    load_step,
    shared_files,
    verify,
)
from lockstep.checkpoint.runs.run_checkpoints import adopt, read_shared
from lockstep.checkpoint.runs.run_folder import Attempt, RunFolder
from lockstep.checkpoint.saver import AsyncSaver
from lockstep.checkpoint.storage.local import LocalStorage
from lockstep.checkpoint.writer import share
from lockstep.errors import StorageError
from lockstep.record import problems
from lockstep.record.events.union import Finished, Restored, Segment
from lockstep.record.ledger import segments, tables
from lockstep.record.ledger.history import History
from lockstep.record.ledger.journal_file import NAME
from lockstep.record.ledger.rows import EvaluationRow
from lockstep.record.mirror.checkpoint_copies import _linked
from lockstep.record.recorder import Recorder
from lockstep.spec.fields import Spec
from lockstep.training.checkpoints import _sharing
from tests.raised import raises
from tests.unit.record.rows import evaluation_row, step_row
from tests.unit.record.written import read_steps

Specs = Callable[..., Spec]
EVERY, SEGMENT, STEPS = 5, 10, 32


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "SEGMENT_STEPS", SEGMENT)


def add(history: History, step: int, **changes: Any) -> None:
    history.add(step_row(step, **changes))
    if step % 4 == 0:
        history.evaluations.append(evaluation_row(step))


def save(saver: AsyncSaver, history: History, step: int) -> None:
    rows = history.saving()
    saver.save(step, {**rows.blocks()}, None, _sharing(rows))
    saver.wait()
    assert saver.failure is None, saver.failure


def trained(attempt: Attempt, last: int, history: History | None = None, **changes: Any) -> History:
    """Steps up to `last`, saved each EVERY steps."""
    history = history or History()
    saver = AsyncSaver(attempt)
    sealed = history.segments[-1].last if history.segments else 0
    first = (history.steps[-1].step if history.steps else sealed) + 1
    for step in range(first, last + 1):
        add(history, step, **changes)
        if step % EVERY == 0 or step == last:
            save(saver, history, step)
    saver.close()
    return history


def restored(run: RunFolder, step: int | None = None) -> History:
    loaded = load_newest(run, pytest.fail) if step is None else load_step(run, step)
    assert loaded is not None
    named = [Segment.of(one.name, one.size, one.sha256) for one in loaded.manifest.shared]
    return History.restored(loaded.sections, named, shared_files(loaded, pytest.fail))


def whole(run: RunFolder, step: int) -> tables.Rows:
    loaded = load_step(run, step)
    return History.whole(loaded.sections, shared_files(loaded, pytest.fail))


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return RunFolder.create(LocalStorage(tmp_path / "runs"), "run-a")


def test_each_checkpoint_has_all_rows_and_each_segment_is_written_once(run: RunFolder) -> None:
    """G4, G5: every kept checkpoint, however it is cut, and what another attempt adds to it."""
    saver_of_first = run.claim()
    history = trained(saver_of_first, STEPS)
    assert [one.first for one in history.segments] == [1, 11, 21]
    assert len(history.steps) == 2 and not history._full
    shared = Path(run.storage.shown) / "run-a" / "shared"  # type: ignore[arg-type]
    before = {path.name: path.stat().st_mtime_ns for path in shared.iterdir()}
    assert set(before) == {one.name for one in history.segments}
    again = restored(run)
    trained(run.claim(), STEPS + 9, again)
    for step in [path.manifest().step for path in checkpoints(run)]:
        rows = whole(run, step)
        assert rows.steps == [step_row(i) for i in range(1, step + 1)]
        assert rows.evaluations == [evaluation_row(i) for i in range(4, step + 1, 4)]
    after = {path.name: path.stat().st_mtime_ns for path in shared.iterdir()}
    assert len(after) == 4 and before.items() <= after.items()


def test_a_save_writes_no_step_of_a_segment_before_it(run: RunFolder) -> None:
    history = History()
    attempt = run.claim()
    for step in range(1, STEPS + 1):
        add(history, step)
        rows = history.saving()
        entries = _sharing(rows)(lambda name, content: written(attempt, name, content))
        steps = tables.decode_steps(rows.blocks()["steps"]())
        assert [row.step for row in steps] == list(range(step // SEGMENT * SEGMENT + 1, step + 1))
        assert len(entries) == step // SEGMENT


def written(attempt: Attempt, name: str, content: bytes) -> Any:
    return share(attempt, name, content)


def test_a_run_that_is_taken_up_where_a_segment_ends_knows_its_last_step(run: RunFolder) -> None:
    trained(run.claim(), 2 * SEGMENT)
    history = restored(run)
    assert not history.steps and [row.step for row in history.past().steps] == [2 * SEGMENT]
    trained(run.claim(), 3 * SEGMENT + 1, history)
    assert whole(run, 3 * SEGMENT + 1).steps == [step_row(i) for i in range(1, 3 * SEGMENT + 2)]


def test_a_run_that_seldom_saves_holds_its_full_segments_sealed(run: RunFolder) -> None:
    history = History()
    for step in range(1, STEPS + 1):
        add(history, step)
    assert [type(one).__name__ for one in history._full] == ["tuple", "tuple", "Rows"]
    save(AsyncSaver(run.claim()), history, STEPS)
    assert whole(run, STEPS).steps == [step_row(i) for i in range(1, STEPS + 1)]


def test_rows_that_come_while_a_save_is_written_are_not_in_it(run: RunFolder) -> None:
    history = History()
    for step in range(1, 10):
        add(history, step)
    rows = history.saving()
    blocks = rows.blocks()
    for step in range(10, STEPS + 1):  # the segment at hand is full by now, and the next one
        add(history, step)
    assert rows.segments(pytest.fail) == []
    assert [row.step for row in tables.decode_steps(blocks["steps"]())] == list(range(1, 10))
    assert [row.step for row in tables.decode_evaluations(blocks["evaluations"]())] == [4, 8]


@pytest.mark.parametrize("how", ["flipped", "short", "gone"])
def test_a_damaged_segment_is_told_and_costs_no_checkpoint(run: RunFolder, how: str) -> None:
    """G5: every later checkpoint names it, and the state of each is whole."""
    history = trained(run.claim(), STEPS)
    path = Path(run.storage.shown) / "run-a" / "shared" / history.segments[1].name  # type: ignore[arg-type]
    content = path.read_bytes()
    path.chmod(0o644)
    if how == "gone":
        path.unlink()
    else:
        path.write_bytes(
            content[:-1] if how == "short" else content[:99] + bytes([content[99] ^ 1]) + content[100:]
        )
    loaded = load_newest(run, pytest.fail)
    assert loaded is not None and loaded.manifest.step == STEPS
    told: list[str] = []
    named = [Segment.of(one.name, one.size, one.sha256) for one in loaded.manifest.shared]
    past = History.restored(loaded.sections, named, shared_files(loaded, told.append)).past()
    assert len(told) == 1 and history.segments[1].name in told[0]
    assert [row.step for row in past.evaluations] == [4, 8, 24, 28, 32] and past.segments == tuple(named)
    with pytest.raises(BadCheckpointError):
        verify(checkpoints(run)[0])


def test_a_copy_in_a_store_has_its_segments_with_it(run: RunFolder, tmp_path: Path) -> None:
    """G6: where the whole storage is lost, the copy alone is taken up."""
    trained(run.claim(), STEPS)
    folder = Path(run.storage.shown) / "run-a" / "step-000000032"  # type: ignore[arg-type]
    with _linked(folder) as held:
        verify(checkpoint_at(str(held)))
        (tmp_path / "other").mkdir()
        copy = tmp_path / "other" / "download"
        copy.mkdir()
        for file in held.iterdir():
            (copy / file.name).write_bytes(file.read_bytes())
    adopt(str(tmp_path / "other"), "run-a", 32, copy)
    other = RunFolder.open(LocalStorage(tmp_path / "other"), "run-a")
    assert whole(other, 32).steps == [step_row(i) for i in range(1, STEPS + 1)]


def test_digests_tell_one_bit_and_no_time() -> None:
    rows = [step_row(i) for i in range(1, 11)]
    digest = segments.digest_of(rows)
    assert segments.seal(tables.Rows(rows, ()))[0].digest == digest
    assert segments.digest_of([row._replace(step_s=9.0, wall_clock=1.0, attempt=7) for row in rows]) == digest
    other = [
        rows[3]._replace(loss=math.nextafter(rows[3].loss, 1)),
        rows[3]._replace(skipped=True),
        rows[3]._replace(grad_norm=-0.0),
        rows[3]._replace(parts={}),
        rows[3]._replace(parts={"entropy": math.nan}),
        rows[3]._replace(parts={**rows[3].parts, "more": 1.0}),
    ]
    digests = {segments.digest_of([*rows[:3], one, *rows[4:]]) for one in other}
    assert len(digests) == len(other) and digest not in digests


# --- a recorder that is told of segments --------------------------------------------------------------------


class Fetch:
    """Reads the run's shared files, and counts."""

    def __init__(self, storage: str) -> None:
        self.storage, self.names = storage, list[str]()

    def __call__(self, run_id: str, name: str) -> bytes:
        self.names.append(name)
        return read_shared(self.storage, "run-a", name)


def begun(spec: Spec, **changes: Any) -> str:
    """A run whose journal has all steps and no end."""
    recorder = Recorder(spec)
    recorder.start()
    recorder.tell(*[step_row(i, **(changes if i == 15 else {})) for i in range(1, STEPS + 1)])
    run_id = recorder.run_id()
    recorder.close()
    return run_id


def resumed(spec: Spec, run_id: str, told: Restored, fetch: Callable[[str, str], bytes]) -> Recorder:
    recorder = Recorder(spec, run_id=run_id, fetch=fetch)
    recorder.start()
    recorder.tell(told, *[step_row(i, attempt=2) for i in range(STEPS, STEPS + 3)])
    recorder.tell(Finished({"step": STEPS + 2}))
    return recorder


ALL = [step_row(i) for i in range(1, STEPS + 1)]


def test_a_journal_that_has_the_same_steps_reads_no_segment(run: RunFolder, spec: Specs) -> None:
    trained(run.claim(), STEPS)
    fetch = Fetch(run.storage.shown)
    recorder = resumed(spec(), begun(spec()), restored(run).past(), fetch)
    recorder.close()
    assert fetch.names == [] and not recorder.state.violation
    assert read_steps(recorder.run_folder())[: STEPS + 1] == [*ALL, step_row(STEPS + 1, attempt=2)]


@pytest.mark.parametrize("lost", ["all of it", "a line"])
def test_what_a_journal_lacks_is_read_from_the_segments(run: RunFolder, spec: Specs, lost: str) -> None:
    """G4: a ledger is whole, though the folder of the record was deleted, or a line of the journal damaged."""
    trained(run.claim(), STEPS)
    run_id = begun(spec())
    journal = spec().folder / run_id / NAME
    if lost == "all of it":
        journal.unlink()
    else:
        journal.write_bytes(journal.read_bytes().replace(b'{"step":[17,', b'{"step":[1x,'))
    fetch = Fetch(run.storage.shown)
    recorder = resumed(spec(), run_id, restored(run).past(), fetch)
    recorder.close()
    assert len(fetch.names) == (3 if lost == "all of it" else 1)
    assert tables.read_parquet(recorder.run_folder() / "ledger.parquet")[:STEPS] == ALL


def test_a_segment_with_other_bits_is_a_violation(run: RunFolder, spec: Specs) -> None:
    """G1: the step that differs is named."""
    trained(run.claim(), STEPS)
    recorder = resumed(spec(), begun(spec(), loss=0.5), restored(run).past(), Fetch(run.storage.shown))
    recorder.close()
    assert "step 15" in recorder.state.violation and "loss 0.5" in recorder.state.violation


def test_a_run_whose_segments_cannot_be_read_is_not_finished(run: RunFolder, spec: Specs) -> None:
    trained(run.claim(), STEPS)
    run_id = begun(spec())
    (spec().folder / run_id / NAME).unlink()

    def lost(run_id: str, name: str) -> bytes:
        raise StorageError(f"checkpoint.storage: {name} is not there")

    told = restored(run).past()
    recorder = resumed(spec(), run_id, told, lost)
    with raises(problems.STEPS_LOST, got=re.compile(r"\.rows is not there")):
        recorder.close()
    assert '"status": "FAILED"' in (recorder.run_folder() / "run.json").read_text()
    recorder = resumed(spec(), run_id, told, Fetch(run.storage.shown))
    recorder.close()
    assert '"status": "FINISHED"' in (recorder.run_folder() / "run.json").read_text()


def test_what_is_no_segment_is_refused() -> None:
    segment, content = segments.seal(tables.Rows([step_row(1)], ()))
    assert Segment.of(segment.name, segment.size, segment.sha256) == segment
    assert segments.check(segment, content) is content
    for bad in (content[:-1], content.replace(b"ledger-1", b"ledger-2"), b""):
        with pytest.raises(StorageError):
            segments.check(segment, bad)
        with pytest.raises(StorageError):
            segments.steps_in(bad)
    with raises(problems.LEDGER_UNREADABLE, got="it is no segment"):
        Segment.of("../../etc/passwd", 1, hashlib.sha256().hexdigest())


def test_the_best_evaluation_is_known_after_a_resume_and_by_who_takes_over() -> None:
    history = History()
    for step, loss in ((4, math.nan), (8, 0.5), (12, 0.2), (16, 0.2), (20, 0.9)):
        history.add_evaluation(EvaluationRow(step, 0, {"eval/loss": loss}, 0.1, 0.0))
    blocks = {name: block() for name, block in history.saving().blocks().items()}
    for one in (history, History.of(history.handed()), History.restored(blocks)):
        assert (one.best_step("eval/loss", "min"), one.best_step("eval/loss", "max")) == (12, 20)
        assert one.best_step("eval/accuracy", "max") is None
    history.take_back(19, 16)  # it is made again, and is the best then as well
    history.add_evaluation(EvaluationRow(20, 0, {"eval/loss": 0.9}, 0.1, 0.0))
    assert history.best_step("eval/loss", "max") == 20
