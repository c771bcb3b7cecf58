"""Sealed segments: the rows of SEGMENT_STEPS steps in one file that never changes again.

Segment k has the steps k·SEGMENT_STEPS + 1 … (k+1)·SEGMENT_STEPS, as far as the run took them, in every execution of the run.
Its name contains them, the digest of their deterministic columns, and the hash of the file. Two records have the same
steps if the digests are equal, which can be seen without reading a row.

    lockstep-ledger-1 {"steps": 412345, "evaluations": 2345}     a line with the sizes of what follows
    <steps><evaluations>                                           two files of Parquet, as in the ledger
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lockstep.parsing import check_version, json_mapping
from lockstep.record import problems
from lockstep.record.events.union import Segment
from lockstep.record.ledger import tables
from lockstep.record.ledger.rows import EvaluationRow, StepRow
from lockstep.record.ledger.tables import Rows

if TYPE_CHECKING:
    import pyarrow as pa

SEGMENT_STEPS = 10_000
"""With a save every thousand steps, a save writes 5,000 rows of the open segment on average, which is 0.3 MB in 30 ms."""

VERSION = 1
_HEAD = re.compile(rb"lockstep-ledger-(\d{1,9}) (.*)", re.DOTALL)


def end_of(step: int) -> int:
    """The last step of the segment that a step belongs to."""
    return -(-step // SEGMENT_STEPS) * SEGMENT_STEPS


def seal(rows: Rows) -> tuple[Segment, bytes]:
    """The segment of these rows, which have at least one step, and the content of its file."""
    table = tables.step_table(rows.steps)
    steps = tables.encoded(table)
    evaluations = tables.encode_evaluations(rows.evaluations)
    sizes = json.dumps({"steps": len(steps), "evaluations": len(evaluations)}).encode()
    content = b"".join((b"lockstep-ledger-%d " % VERSION, sizes, b"\n", steps, evaluations))
    sha256 = hashlib.sha256(content).hexdigest()
    digest = _digest(table)
    return Segment(rows.steps[0].step, rows.steps[-1].step, digest, len(content), sha256), content


def digest_of(steps: Sequence[StepRow]) -> str:
    """The digest of the deterministic columns of steps."""
    return _digest(tables.step_table(steps))


def steps_in(content: bytes) -> list[StepRow]:
    """The steps in a segment's file. StorageError for any other content."""
    return tables.decode_steps(_blocks(content)[0])


def evaluations_in(content: bytes) -> list[EvaluationRow]:
    """The evaluations in a segment's file. StorageError for any other content."""
    return tables.decode_evaluations(_blocks(content)[1])


def check(segment: Segment, content: bytes) -> bytes:
    """Return the content if it is the segment's. StorageError if not."""
    if len(content) != segment.size or hashlib.sha256(content).hexdigest() != segment.sha256:
        raise problems.LEDGER_UNREADABLE(what=repr(segment.name), got="its hash is not the one in its name")
    return content


def _blocks(content: bytes) -> tuple[bytes, bytes]:
    head, _, body = content.partition(b"\n")
    try:
        match = _HEAD.fullmatch(head)
        if match is None:
            raise ValueError("it is no segment of a ledger")
        check_version(int(match[1]), VERSION)
        sizes = json_mapping(match[2])
        steps, evaluations = int(sizes["steps"]), int(sizes["evaluations"])
        if min(steps, evaluations) < 0 or len(body) != steps + evaluations:
            raise ValueError(f"it has {len(body)} bytes of rows, wanted {steps + evaluations}")
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        raise problems.LEDGER_UNREADABLE(what="a segment", got=error) from error
    return body[:steps], body[steps:]


def _digest(table: pa.Table) -> str:
    """128 bits over every column except the timing ones: its name, which rows have it, and the bits of its values."""
    digest = hashlib.sha256()
    for name in sorted(set(table.column_names) - set(tables.TIMING)):
        column = table.column(name).combine_chunks()
        digest.update(f"{name} {column.type} {len(column)}\n".encode())
        digest.update(_bits(column.is_valid()))
        digest.update(_bits(column))
    return digest.hexdigest()[:32]


def _bits(column: Any) -> bytes:
    """The values of a column without nulls, in a form that depends only on them."""
    import pyarrow as pa

    values = column.drop_null()
    if pa.types.is_floating(values.type) or pa.types.is_integer(values.type):
        return bytes(values.to_numpy(zero_copy_only=False).tobytes())
    if pa.types.is_boolean(values.type):
        return bytes(values.to_numpy(zero_copy_only=False).astype("u1").tobytes())
    return json.dumps(values.to_pylist(), default=repr).encode()
