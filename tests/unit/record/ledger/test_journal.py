"""The journal keeps what it is told: bit for bit, once, under one writer, whatever end its process had."""

from __future__ import annotations

import math
import os
import resource
import signal
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.record import problems
from lockstep.record.events.union import Delivered, Mended, Opened, Recorded, Started
from lockstep.record.ledger.journal import Journal, newest_checkpoint, newest_step
from lockstep.record.ledger.journal_file import NAME
from lockstep.record.ledger.row_comparison import evaluation_difference, step_difference
from lockstep.record.ledger.rows import Digests
from tests.raised import raises
from tests.unit.record.rows import corrupted, evaluation_row, step_row
from tests.unit.record.written import read_steps

ODD_NAN = struct.unpack(">d", bytes.fromhex("7ff8000000000abc"))[0]


def bits(value: float) -> bytes:
    return struct.pack(">d", value)


def test_rows_come_back_bit_for_bit(tmp_path: Path) -> None:
    row = step_row(
        1, loss=ODD_NAN, lr=-0.0, grad_norm=math.inf, clipped_norm=5e-324, parts={"a@b": -math.inf}
    )
    journal = Journal(tmp_path)
    journal.add([row, step_row(2)])
    journal.add([evaluation_row(2, loss=ODD_NAN)])
    journal.add([Started({"plan": {"m": 8}})])
    journal.close()
    again = Journal(tmp_path)
    assert again.last_step == 2
    first, second = again.steps()
    assert [bits(v) for v in first if isinstance(v, float)] == [bits(v) for v in row if isinstance(v, float)]
    assert first.parts == row.parts
    assert second == step_row(2)
    assert bits(again.evaluations()[0].metrics["eval/loss"]) == bits(ODD_NAN)
    assert again.events == [Started({"plan": {"m": 8}})]
    again.close()


def test_wrong_bits_come_back_as_they_were_told(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.add([corrupted(8, since=5)])
    journal.close()
    again = Journal(tmp_path, read_only=True)
    assert again.events == [corrupted(8, since=5)]
    again.close()


def test_every_step_can_be_found_again(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.add([step_row(i) for i in range(5, 3000)])
    journal.close()
    again = Journal(tmp_path)
    again.add([step_row(3000)])
    for number in (5, 6, 1777, 2999, 3000):
        assert again.step(number) == step_row(number)
    assert newest_step(tmp_path) == step_row(3000)
    assert newest_step(tmp_path / "elsewhere") is None
    again.add([step_row(4)])
    assert newest_step(tmp_path) == step_row(3000), "a row that is mended comes after later ones"
    again.add([Started({"git": {"diff": "+" * 2_000_000}})])
    assert newest_step(tmp_path) == step_row(3000), (
        "what an attempt begins with is longer than what is read at once"
    )
    assert again.step(3) is again.step(3001) is None
    assert read_steps(tmp_path) == [step_row(i) for i in range(4, 3001)]
    again.close()


def test_digests_are_kept_and_rows_without_any_have_none(tmp_path: Path) -> None:
    with_digests = step_row(2, digests=Digests(2**64 - 1, 7, (2**63, 1)))
    native = step_row(3, digests=Digests(1, 2, None))
    journal = Journal(tmp_path)
    journal.add([step_row(1), with_digests, native])
    journal.close()
    assert read_steps(tmp_path) == [step_row(1), with_digests, native]


@pytest.mark.parametrize("kept", [0, 1, 40, -1])
def test_a_torn_last_line_is_cut_off_and_written_over(tmp_path: Path, kept: int) -> None:
    journal = Journal(tmp_path)
    journal.add([step_row(1)])
    whole = journal.size
    journal.add([step_row(2)])
    end = journal.size + kept if kept < 0 else whole + kept
    journal.close()
    os.truncate(tmp_path / NAME, end)
    again = Journal(tmp_path)
    assert (again.last_step, again.size) == (1, whole)
    again.add([step_row(2, loss=9.0)])
    assert [row.loss for row in again.steps()] == [step_row(1).loss, 9.0]
    again.close()


def test_a_damaged_line_is_passed_over_told_and_written_again(tmp_path: Path) -> None:
    """Every bit of a line in turn: none passes for another value, and no other row is lost."""
    journal = Journal(tmp_path)
    journal.add([step_row(1), step_row(2), step_row(3)])
    journal.close()
    whole = (tmp_path / NAME).read_bytes()
    begin, end = whole.index(b"\n") + 1, whole.index(b"\n", whole.index(b"\n") + 1)
    for bit in range(8 * begin, 8 * end):
        data = bytearray(whole)
        data[bit // 8] ^= 1 << bit % 8
        (tmp_path / NAME).write_bytes(data)
        journal = Journal(tmp_path, read_only=True)
        assert [row.step for row in journal.steps()] == [1, 3]
        assert journal.missing_steps() == range(2, 3)
        assert journal.damage and journal.damage[0].start == begin
        journal.close()
    journal = Journal(tmp_path)
    journal.add([step_row(2), Mended([damage.start for damage in journal.damage], "told again")])
    journal.close()
    again = Journal(tmp_path)
    assert (again.damage, again.missing_steps()) == ([], range(0))
    assert list(again.steps()) == [step_row(1), step_row(2), step_row(3)]
    again.close()


@pytest.mark.parametrize("fork", [None, "0123456789abcdef@3", "0123456789abcdef@3 exact"])
def test_first_steps_that_are_lost_are_missing(tmp_path: Path, fork: str | None) -> None:
    """The facts of an attempt say where the run began; the control is the run that has them all."""
    begin = 4 if fork else 1
    for lost in (0, 2):
        journal = Journal(tmp_path / str(lost))
        assert not journal.missing_steps()
        journal.add([Started({"fields": {"fork": fork}})])
        journal.add([step_row(step) for step in range(begin + lost, begin + 5)])
        assert journal.missing_steps() == range(begin, begin + lost)
        journal.close()


@pytest.mark.parametrize(
    ("steps", "missing"),
    [
        ((2, 4, 5), range(0)),
        ((2, 4, 5, 7), range(6, 7)),
        ((2, 4, 6), range(5, 6)),
        ((2, 4, 7, 9), range(5, 7)),
    ],
)
def test_a_gap_is_found_though_rows_from_before_the_first_step_are_there(
    tmp_path: Path, steps: tuple[int, ...], missing: range
) -> None:
    """A fork's own first step is not that of its journal where another run's rows came into it: they hide no gap, and make none."""
    journal = Journal(tmp_path)
    journal.add([Started({"fields": {"fork": "0123456789abcdef@3"}}), *map(step_row, steps)])
    assert journal.missing_steps() == missing
    journal.close()


@pytest.mark.parametrize(
    "later", [[], [step_row(2)], [evaluation_row(2)]], ids=["nothing", "row", "evaluation"]
)
def test_what_comes_after_a_delivery_is_not_delivered(tmp_path: Path, later: list[Recorded]) -> None:
    """As it is added, and as the journal is taken up again."""
    journal = Journal(tmp_path)
    journal.add([step_row(1), Delivered(), *later])
    assert journal.delivered == (not later)
    journal.close()
    again = Journal(tmp_path, read_only=True)
    assert again.delivered == (not later)
    again.close()


def test_a_run_was_last_alive_when_its_last_row_was_written(tmp_path: Path) -> None:
    """A step or an evaluation, in whatever order they came; without any it is when the run was first opened."""
    journal = Journal(tmp_path)
    assert journal.last_sign is None
    journal.add([Opened(5.0), Opened(7.0)])
    assert journal.last_sign == 5.0
    journal.add([step_row(1, wall_clock=9.0)])
    assert journal.last_sign == 9.0
    journal.add([evaluation_row(2)._replace(wall_clock=30.0), evaluation_row(1)._replace(wall_clock=20.0)])
    assert journal.last_sign == 30.0
    journal.add([step_row(2, wall_clock=40.0)])
    assert journal.last_sign == 40.0
    journal.close()


def test_the_times_of_steps_come_once_and_in_the_order_of_the_file(tmp_path: Path) -> None:
    """Of a step that is told again, those of its newest row. A row whose values are damaged has none."""
    journal = Journal(tmp_path)
    journal.add([Opened(5.0), step_row(1), step_row(2), step_row(4), evaluation_row(4), step_row(3)])
    journal.add([step_row(2, wall_clock=9.0)])
    times = [(time.step, time.wall_clock) for time in journal.step_times()]
    assert times == [
        (row.step, row.wall_clock) for row in (*map(step_row, (1, 4, 3)), step_row(2, wall_clock=9.0))
    ]
    journal.close()


def test_the_journal_of_another_run_is_read_beside_its_writer_or_refused(tmp_path: Path) -> None:
    """A folder, a pipe or a link in its place is no journal."""
    journal = Journal(tmp_path)
    journal.add([step_row(1)])
    assert newest_step(tmp_path) == step_row(1)
    journal.close()
    (tmp_path / NAME).unlink()
    (tmp_path / NAME).mkdir()
    for read in (newest_step, newest_checkpoint):
        with raises(problems.UNREADABLE, run=tmp_path.name):
            read(tmp_path)
    (tmp_path / NAME).rmdir()
    (tmp_path / NAME).symlink_to(tmp_path.parent / "elsewhere")
    with raises(problems.LEADS_OUT, run=tmp_path.name):
        newest_step(tmp_path)


def test_a_second_writer_is_refused_until_the_first_is_gone(tmp_path: Path) -> None:
    """The lock ends with its process, SIGKILL included."""
    script = f"from pathlib import Path; from lockstep.record.ledger.journal import Journal; j = Journal(Path({str(tmp_path)!r})); print('held', flush=True); input()"
    holder = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert holder.stdout is not None and holder.stdin is not None
    assert holder.stdout.readline() == b"held\n"
    with raises(problems.LOCKED):
        Journal(tmp_path)
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    holder.stdin.close()
    holder.stdout.close()
    Journal(tmp_path).close()


def test_a_full_disk_is_told_and_leaves_no_half_line(tmp_path: Path) -> None:
    script = f"""
import resource, signal
from pathlib import Path
from lockstep.errors import RecordError
from lockstep.record.ledger.journal import Journal
from tests.unit.record.rows import step_row
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
journal = Journal(Path({str(tmp_path)!r}))
journal.add([step_row(1)])
resource.setrlimit(resource.RLIMIT_FSIZE, (journal.size + 100, resource.RLIM_INFINITY))
try:
    journal.add([step_row(2)])
except RecordError as error:
    print(error)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
journal.add([step_row(2)])
journal.close()
"""
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[1] == resource.RLIM_INFINITY
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "cannot write" in done.stdout and "File too large" in done.stdout
    assert read_steps(tmp_path) == [step_row(1), step_row(2)]


def test_a_difference_of_one_bit_is_found_and_timing_is_not_compared() -> None:
    row = step_row(7)
    assert step_difference(row, row._replace(wall_clock=0.0, step_s=9.0, data_wait_s=1.0, attempt=2)) == ""
    assert step_difference(row._replace(loss=ODD_NAN), row._replace(loss=ODD_NAN)) == ""
    assert step_difference(row, row._replace(loss=math.nextafter(row.loss, 1))).startswith(
        "loss 0.1111111111111111 → "
    )
    assert step_difference(row._replace(lr=0.0), row._replace(lr=-0.0)) == "lr 0.0 → -0.0"
    assert step_difference(row, row._replace(parts={"entropy": 0.5})) == "entropy 1.0 → 0.5"
    assert step_difference(row, row._replace(parts={})) == "entropy 1.0 → None"
    assert (
        evaluation_difference(evaluation_row(3, loss=1.0), evaluation_row(3, loss=2.0))
        == "eval/loss 1.0 → 2.0"
    )
    assert evaluation_difference(evaluation_row(3), evaluation_row(3)._replace(seconds=7.0)) == ""
