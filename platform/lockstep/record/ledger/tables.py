"""The ledger: one row per step and one per evaluation, kept in Parquet bit for bit.

The deterministic columns are equal, bit for bit, in every execution of a run; `verify`, `diff` and the guarantees
compare them. The timing columns are not. Every float is a float64; NaN with its payload, infinities and the
sign of zero survive. A part that a step did not have is null, a part that was NaN is NaN.
"""

from __future__ import annotations

import io
import os
from array import array
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, get_type_hints

from lockstep.files import replacing
from lockstep.parsing import check_version, one_line
from lockstep.paths import OutsideError, open_beneath
from lockstep.record import problems
from lockstep.record.ledger.rows import VERSION, Digests, EvaluationRow, Observation, StepRow

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa  # 0.1 s to import, which only the writing process should pay


TIMING = ("data_wait_s", "step_s", "wall_clock", "attempt")
"""Columns that differ from one execution of a run to the next."""

DETERMINISTIC = tuple(name for name in StepRow._fields if name not in TIMING)
"""Columns that are the same bits in every execution of a run. `parts` stands for all the columns `part/<name>`."""

_ARROW = {int: "int64", float: "double", bool: "bool"}


def _types(row: type[StepRow | EvaluationRow | Observation]) -> dict[str, str]:
    """The columns of a kind of row, by name: of its numbers. Its parts, metrics or values are columns of their own."""
    return {name: _ARROW[kind] for name, kind in get_type_hints(row).items() if kind in _ARROW}


_STEP_TYPES = _types(StepRow)
_DIGEST_TYPES = {
    "weights_digest": "uint64",
    "optimizer_digest": "uint64",
    "gradient_digests": "list<uint64>",  # one for each micro-batch
    "ema_digest": "uint64",  # only with `ema` in the spec
}
"""The columns of `StepRow.digests`: null in rows without digests."""
_EVALUATION_TYPES = _types(EvaluationRow)
_OBSERVATION_TYPES = _types(Observation)
_PART = "part/"
_METADATA: dict[bytes | str, bytes | str] = {b"lockstep-ledger": b"%d" % VERSION}
_ROWS_AT_ONCE = 10_000


class Rows(NamedTuple):
    """Steps and evaluations, in order."""

    steps: Sequence[StepRow]
    evaluations: Sequence[EvaluationRow]


def encode_steps(rows: Sequence[StepRow]) -> bytes:
    """Steps as the content of a file."""
    return encoded(step_table(rows))


def encode_evaluations(rows: Sequence[EvaluationRow]) -> bytes:
    """Evaluations as the content of a file."""
    return encoded(_evaluation_table(rows))


def encode_observations(rows: Sequence[Observation]) -> bytes:
    """Observations as the content of a file."""
    return encoded(_observation_table(rows))


def decode_steps(block: bytes) -> list[StepRow]:
    """Read what `encode_steps` made. StorageError for anything else."""
    return _step_rows(_decoded(block, _STEP_TYPES))


def decode_evaluations(block: bytes) -> list[EvaluationRow]:
    """Read what `encode_evaluations` made. StorageError for anything else."""
    return _evaluation_rows(_decoded(block, _EVALUATION_TYPES))


def decode_observations(block: bytes) -> list[Observation]:
    """Read what `encode_observations` made. StorageError for anything else."""
    return _observation_rows(_decoded(block, _OBSERVATION_TYPES))


def write_parquet(rows: Iterable[StepRow], path: Path) -> None:
    """Write steps as `path`, whole or not at all. Few are held at a time as rows, the others as Parquet. StorageError where that fails."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    remaining, blocks, fields = (
        iter(rows),
        list[bytes](),
        {field.name: field for field in step_table(()).schema},
    )
    while chunk := list(islice(remaining, _ROWS_AT_ONCE)):
        table = step_table(chunk)
        fields |= {field.name: field for field in table.schema}
        blocks.append(encoded(table))
    names = [*_STEP_TYPES, *sorted(fields.keys() - _STEP_TYPES.keys())]
    schema = pa.schema([fields[name] for name in names], _METADATA)
    try:
        with (
            replacing(path) as file,
            pq.ParquetWriter(file, schema, compression="zstd", use_dictionary=False) as writer,
        ):
            for block in blocks:
                table = pq.ParquetFile(io.BytesIO(block), pre_buffer=False).read(use_threads=False)
                for name in fields.keys() - set(table.column_names):  # a part that none of these steps had
                    table = table.append_column(fields[name], pa.nulls(len(table), fields[name].type))
                writer.write_table(table.select(names))
    except OSError as error:
        raise problems.LEDGER_UNWRITABLE(path=path, got=error.strerror or error) from error


def columns(steps: Iterable[StepRow], names: Sequence[str]) -> dict[str, np.ndarray[Any, Any]]:
    """Fields of all steps by name, as float64."""
    import numpy as np

    get, arrays = attrgetter(*names), {name: array("d") for name in names}
    append = [values.append for values in arrays.values()]
    for row in steps:
        for add, value in zip(append, get(row), strict=True):
            add(value)
    return {name: np.frombuffer(values) for name, values in arrays.items()}


def columns_in(path: Path, names: Sequence[str]) -> dict[str, np.ndarray[Any, Any]]:
    """The same of the steps in a file that `write_parquet` has just written."""
    import numpy as np
    import pyarrow.parquet as pq

    table = pq.ParquetFile(path, pre_buffer=False).read(list(names), use_threads=False)
    return {name: table.column(name).to_numpy().astype(np.float64) for name in names}


def read_parquet(path: Path) -> list[StepRow]:
    """Read what `write_parquet` wrote, bit for bit. StorageError where it cannot be read."""
    return _step_rows(_read(path, _STEP_TYPES))


def write_evaluations(rows: Sequence[EvaluationRow], path: Path) -> None:
    """Write evaluations as `path`, whole or not at all. StorageError where that fails."""
    _write(_evaluation_table(rows), path)


def read_evaluations(path: Path) -> list[EvaluationRow]:
    """Read what `write_evaluations` wrote, bit for bit. StorageError where it cannot be read."""
    return _evaluation_rows(_read(path, _EVALUATION_TYPES))


def write_observations(rows: Sequence[Observation], path: Path) -> None:
    """Write observations as `path`, whole or not at all. StorageError where that fails."""
    _write(_observation_table(rows), path)


def read_observations(path: Path) -> list[Observation]:
    """Read what `write_observations` wrote, bit for bit. StorageError where it cannot be read."""
    return _observation_rows(_read(path, _OBSERVATION_TYPES))


def read_history(folder: Path) -> Rows:
    """All rows of a run that has ended, from its folder. StorageError where they cannot be read."""
    evaluations = folder / "evaluations.parquet"
    steps = read_parquet(folder / "ledger.parquet")
    return Rows(steps, read_evaluations(evaluations) if evaluations.exists() else [])


OBSERVATIONS = "observations.parquet"

Fields = list[tuple[dict[str, Any], dict[str, float]]]
"""Each row as its fields and its other columns, without the null ones."""


def _step_rows(rows: Fields) -> list[StepRow]:
    return [
        StepRow(
            **fields,
            parts={
                name.removeprefix(_PART): value for name, value in extra.items() if name not in _DIGEST_TYPES
            },
            digests=_digests(extra),
        )
        for fields, extra in rows
    ]


def _digests(row: Mapping[str, Any]) -> Digests | None:
    weights, optimizer, gradients, average = map(row.get, _DIGEST_TYPES)
    if weights is None or optimizer is None:
        return None
    return Digests(weights, optimizer, None if gradients is None else tuple(gradients), average)


def _evaluation_rows(rows: Fields) -> list[EvaluationRow]:
    return [EvaluationRow(**fields, metrics=metrics) for fields, metrics in rows]


def _observation_rows(rows: Fields) -> list[Observation]:
    return [Observation(**fields, values=values) for fields, values in rows]


def step_table(rows: Sequence[StepRow]) -> pa.Table:
    """Steps as a table, one row each."""
    import pyarrow as pa

    parts = [{_PART + name: value for name, value in row.parts.items()} for row in rows]
    table = _table(rows, parts, _STEP_TYPES)
    for i, (name, kind) in enumerate(_DIGEST_TYPES.items()):
        values = [row.digests[i] if row.digests is not None else None for row in rows]
        if name == "ema_digest" and all(value is None for value in values):
            continue
        table = table.append_column(name, pa.array(values, _arrow_type(kind)))
    return table


def _arrow_type(kind: str) -> pa.DataType:
    import pyarrow as pa

    return pa.list_(pa.uint64()) if kind.startswith("list") else pa.type_for_alias(kind)


def _evaluation_table(rows: Sequence[EvaluationRow]) -> pa.Table:
    return _table(rows, [row.metrics for row in rows], _EVALUATION_TYPES)


def _observation_table(rows: Sequence[Observation]) -> pa.Table:
    return _table(rows, [row.values for row in rows], _OBSERVATION_TYPES)


def _table(rows: Sequence[Any], named: Sequence[Mapping[str, float]], types: Mapping[str, str]) -> pa.Table:
    """A table with a column for each field in `types`, then one for each name that any row has; null where a row lacks it."""
    import pyarrow as pa

    columns = {
        field: pa.array([getattr(row, field) for row in rows], pa.type_for_alias(kind))
        for field, kind in types.items()
    }
    for name in sorted({name for values in named for name in values}):
        columns[name] = pa.array([values.get(name) for values in named], pa.float64())
    return pa.table(columns, metadata=_METADATA)


def encoded(table: pa.Table) -> bytes:
    """A table as the content of a file."""
    file = io.BytesIO()
    _write_table(table, file)
    return file.getvalue()


def _write_table(table: pa.Table, file: BinaryIO) -> None:
    import pyarrow.parquet as pq

    pq.write_table(table, file, compression="zstd", use_dictionary=False)  # floats of a run hardly repeat


def _write(table: pa.Table, path: Path) -> None:
    try:
        with replacing(path) as file:
            _write_table(table, file)
    except OSError as error:
        raise problems.LEDGER_UNWRITABLE(path=path, got=error.strerror or error) from error


def _decoded(block: bytes, types: Mapping[str, str]) -> Fields:
    return _rows(io.BytesIO(block), len(block), types, "a checkpoint's rows")


def _read(path: Path, types: Mapping[str, str]) -> Fields:
    try:
        with os.fdopen(open_beneath(path.parent, path.name), "rb") as file:
            return _rows(file, os.fstat(file.fileno()).st_size, types, repr(str(path)))
    except (OSError, OutsideError) as error:
        raise problems.LEDGER_UNREADABLE(what=repr(str(path)), got=error) from error


def _rows(file: BinaryIO, size: int, types: Mapping[str, str], label: str) -> Fields:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        # Only in this thread: Arrow's own threads, leaving a Python file, abort an interpreter that is exiting.
        table = _bounded(pq.ParquetFile(file, pre_buffer=False), size).read(use_threads=False)
        _check_columns(table.schema, types)
        rows = table.to_pylist()
    except (pa.ArrowException, OSError, ValueError) as error:
        raise problems.LEDGER_UNREADABLE(what=label, got=one_line(error)) from error
    return [
        (
            {field: row[field] for field in types},
            {name: value for name, value in row.items() if name not in types and value is not None},
        )
        for row in rows
    ]


_VALUES_PER_BYTE = 64
"""The most values that a byte of a file may stand for, beyond the first million: rows of a run differ, and fill it."""


def _bounded(file: Any, size: int) -> Any:
    """The file of Parquet, if what it claims to hold is in proportion to its size. ValueError where not."""
    values = file.metadata.num_rows * max(1, file.metadata.num_columns)
    if not 0 <= values <= 1_000_000 + _VALUES_PER_BYTE * size:
        raise ValueError(f"{size} bytes claim to hold {values} values")
    return file


def _check_columns(schema: pa.Schema, types: Mapping[str, str]) -> None:
    """ValueError where the version of the format is another one, or a column is missing, is there twice or has another type than was written."""
    (version,) = _METADATA
    said = (schema.metadata or {}).get(version, b"")
    check_version(int(said) if said.isdigit() and len(said) < 9 else None, VERSION)
    if len(set(schema.names)) < len(schema.names):
        raise ValueError("it has a column twice")
    for name in types:
        if name not in schema.names:
            raise ValueError(f"it has no column {name}")
    for field in schema:
        expected = types.get(field.name) or _DIGEST_TYPES.get(field.name) or "double"
        if field.type != _arrow_type(expected) and not (expected == "double" and str(field.type) == "null"):
            raise ValueError(f"its column {field.name[:80]!r} has {field.type}, wanted {expected}")
