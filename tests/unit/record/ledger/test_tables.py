from __future__ import annotations

import math
import re
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lockstep.files import replacing
from lockstep.record import problems
from lockstep.record.ledger.row_comparison import step_difference
from lockstep.record.ledger.rows import Digests, EvaluationRow, StepRow
from lockstep.record.ledger.tables import (
    DETERMINISTIC,
    TIMING,
    read_evaluations,
    read_parquet,
    write_evaluations,
    write_parquet,
)
from tests.raised import raises
from tests.unit.record.rows import evaluation_row, step_row


def bits(value: object) -> object:
    """Floats as their 64 bits, so that NaN equals itself and 0.0 does not equal -0.0."""
    if isinstance(value, float):
        return struct.pack("<d", value)
    if isinstance(value, dict):
        return {name: bits(inner) for name, inner in value.items()}
    return value


def row_bits(row: StepRow | EvaluationRow) -> list[object]:
    return [bits(value) for value in row]


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(values=st.lists(st.tuples(st.floats(width=64), st.floats(width=64), st.booleans()), max_size=8))
def test_every_float_comes_back_bit_for_bit(tmp_path: Path, values: list[tuple[float, float, bool]]) -> None:
    rows = [
        step_row(
            i + 1,
            loss=loss,
            grad_norm=norm,
            skipped=skipped,
            parts={"a": norm, "b c/d": loss} if skipped else {},
        )
        for i, (loss, norm, skipped) in enumerate(values)
    ]
    write_parquet(rows, tmp_path / "ledger.parquet")
    assert [row_bits(row) for row in read_parquet(tmp_path / "ledger.parquet")] == [
        row_bits(row) for row in rows
    ]


def test_nan_infinity_and_negative_zero_are_told_apart(tmp_path: Path) -> None:
    odd_nan = struct.unpack("<d", struct.pack("<Q", 0x7FF8_0000_0000_1234))[0]
    values = [math.nan, odd_nan, math.inf, -math.inf, -0.0, 0.0, 5e-324]
    rows = [step_row(i + 1, loss=value, parts={"p": value}) for i, value in enumerate(values)]
    write_parquet(rows, tmp_path / "ledger.parquet")
    found = read_parquet(tmp_path / "ledger.parquet")
    assert [bits(row.loss) for row in found] == [bits(value) for value in values]
    assert [bits(row.parts["p"]) for row in found] == [bits(value) for value in values]


def test_a_missing_part_stays_missing_and_a_nan_part_stays_nan(tmp_path: Path) -> None:
    rows = [step_row(1, parts={}), step_row(2, parts={"p": math.nan}), step_row(3, parts={"q": 1.0})]
    write_parquet(rows, tmp_path / "ledger.parquet")
    assert [sorted(row.parts) for row in read_parquet(tmp_path / "ledger.parquet")] == [[], ["p"], ["q"]]


def test_digests_come_back_and_rows_without_any_have_none(tmp_path: Path) -> None:
    rows = [
        step_row(1, digests=Digests(2**64 - 1, 0, (1, 2**63))),
        step_row(2),
        step_row(3, digests=Digests(5, 6, None)),
    ]
    write_parquet(rows, tmp_path / "ledger.parquet")
    assert read_parquet(tmp_path / "ledger.parquet") == rows


def test_a_difference_names_the_digest_and_the_micro_batch() -> None:
    row = step_row(1, digests=Digests(1, 2, (3, 4, 5)))
    other = step_row(1, digests=Digests(1, 16, (3, 255, 5)))
    assert step_difference(row, other) == (
        "gradient_digest of micro-batch 1 0000000000000004 → 00000000000000ff, "
        "optimizer_digest 0000000000000002 → 0000000000000010"
    )
    assert step_difference(row, row) == ""
    assert step_difference(row, step_row(1)) == step_difference(step_row(1), row) == ""
    assert step_difference(row, step_row(1, digests=Digests(1, 2, None))) == ""


def test_evaluations_come_back_bit_for_bit(tmp_path: Path) -> None:
    rows = [evaluation_row(10, loss=math.nan, accuracy=1 / 3), evaluation_row(20, loss=-0.0)]
    write_evaluations(rows, tmp_path / "evaluations.parquet")
    found = read_evaluations(tmp_path / "evaluations.parquet")
    assert [row_bits(row) for row in found] == [row_bits(row) for row in rows]


def test_reading_leaves_no_threads_that_could_abort_the_end_of_the_process(tmp_path: Path) -> None:
    """Arrow's threads drop a Python file when they get to it: in an interpreter that ends, that is an abort."""
    write_parquet([step_row(i) for i in range(1, 100)], tmp_path / "ledger.parquet")
    script = (
        "import os, sys\nfrom pathlib import Path\nimport pyarrow.parquet\n"
        "from lockstep.record.ledger.tables import read_parquet\n"
        "before = set(os.listdir('/proc/self/task'))\n"
        "rows = read_parquet(Path(sys.argv[1]))\n"
        "started = set(os.listdir('/proc/self/task')) - before\n"
        "names = [Path(f'/proc/self/task/{thread}/comm').read_text().strip() for thread in started]\n"
        "print(len(rows), [name for name in names if not name.startswith('jemalloc')])\n"
    )
    process = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "ledger.parquet")], capture_output=True, text=True
    )
    assert (process.returncode, process.stdout.strip(), process.stderr) == (0, "99 []", "")


def test_every_column_is_either_deterministic_or_timing() -> None:
    assert sorted((*DETERMINISTIC, *TIMING)) == sorted(StepRow._fields)


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "ledger.parquet"
    write_parquet([step_row(1)], path)
    with pytest.raises(OSError, match="disk full"), replacing(path) as file:
        file.write(b"half a ledger")
        raise OSError("disk full")
    assert read_parquet(path) == [step_row(1)]
    assert [file.name for file in tmp_path.iterdir()] == ["ledger.parquet"]


def test_a_torn_or_missing_ledger_is_one_clear_line(tmp_path: Path) -> None:
    path = tmp_path / "ledger.parquet"
    with raises(problems.LEDGER_UNREADABLE, what=re.compile(r"ledger\.parquet")):
        read_parquet(path)
    write_parquet([step_row(1)], path)
    path.write_bytes(path.read_bytes()[:-9])
    with raises(problems.LEDGER_UNREADABLE, what=re.compile(r"ledger\.parquet")) as told:
        read_parquet(path)
    assert "\n" not in str(told.value)


def test_a_folder_that_cannot_be_written_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with raises(problems.LEDGER_UNWRITABLE):
        write_parquet([step_row(1)], tmp_path / "file" / "ledger.parquet")
