"""Texts in files: which files there are, and the texts in them, with their labels where they have some.

Of JSON lines, CSV and Parquet every row is a text; any other file is one text as a whole.
"""

from __future__ import annotations

import csv
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from lockstep.data.fingerprint import FILES, local_digest, names_in_order
from lockstep.errors import DataError, nearest
from lockstep.hf import problems

JSON_LINES = (".jsonl", ".ndjson")
PARQUET = (".parquet", ".pq")
ROWS = (*JSON_LINES, ".csv", *PARQUET)


class TextFile(NamedTuple):
    """A file, and the name below the given folder by which a person knows it."""

    path: Path
    name: str

    @property
    def kind(self) -> str:
        """How its name ends, in small letters."""
        return self.path.suffix.lower()


class Text(NamedTuple):
    """A text, and its label where one was asked for."""

    text: str
    label: str | None


def find(source: str) -> list[TextFile]:
    """The files of a path, a folder with all below it, or a glob, in the order of their paths. DataError where there is none.

    Names that begin with `_` or `.` are left out of folders.
    """
    path = Path(source).expanduser()
    if path.is_file():
        return [TextFile(path, path.name)]
    if path.is_dir():
        below = [(entry, entry.relative_to(path)) for entry in sorted(path.rglob("*")) if entry.is_file()]
        files = [
            TextFile(entry, name.as_posix())
            for entry, name in below
            if not any(part.startswith(("_", ".")) for part in name.parts)
        ]
    else:
        base = Path(path.anchor)
        files = [
            TextFile(entry, entry.name)
            for entry in sorted(base.glob(str(path.relative_to(base))))
            if entry.is_file()
        ]
    if not files:
        raise problems.NO_TEXTS(path=source)
    return files


def digests(files: Sequence[TextFile]) -> dict[str, str]:
    """The sha256 of each file by `file.<name>`; of many, one over all."""
    names = names_in_order([file.name for file in files], PurePosixPath)
    by_name = {f"file.{name}": local_digest(file.path) for name, file in zip(names, files, strict=True)}
    if len(by_name) <= FILES:
        return by_name
    together = hashlib.sha256(json.dumps(by_name, sort_keys=True).encode()).hexdigest()
    return {"files": f"{len(by_name)}: {together}"}


def read(files: Sequence[TextFile], text: str, label: str | None = None) -> Iterator[Text]:
    """The texts of files in order; `text` and `label` are the fields or columns of rows. Raises DataError with the file's name."""
    for file in files:
        if file.kind not in ROWS:
            if label is not None:
                raise problems.NO_LABELS(file=file.name, wanted=", ".join(ROWS), text=text, label=label)
            yield Text(_whole(file), None)
            continue
        for number, row in enumerate(_rows(file, [text] if label is None else [text, label]), 1):
            yield Text(
                _field(row, text, file, number), None if label is None else _field(row, label, file, number)
            )


def _whole(file: TextFile) -> str:
    try:
        return file.path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise _unreadable(file, error) from error


def _rows(file: TextFile, columns: Sequence[str]) -> Iterator[Mapping[str, Any]]:
    try:
        if file.kind in PARQUET:
            import pyarrow.parquet as pq

            available = pq.read_schema(file.path).names
            for column in columns:
                if column not in available:
                    raise problems.NO_COLUMN(file=file.name, column=column, hint=nearest(column, available))
            yield from pq.read_table(file.path, columns=list(columns)).to_pylist()
            return
        with file.path.open(encoding="utf-8", newline="" if file.kind == ".csv" else None) as lines:
            if file.kind == ".csv":
                yield from _csv_rows(file, csv.DictReader(lines))
            else:
                yield from (json.loads(line) for line in lines if line.strip())
    except (OSError, ValueError, csv.Error) as error:  # pyarrow's errors are ValueErrors and OSErrors
        raise _unreadable(file, error) from error


def _csv_rows(file: TextFile, rows: csv.DictReader[str]) -> Iterator[Mapping[str, Any]]:
    for number, row in enumerate(rows, 1):
        if None in row:  # more than there are columns
            columns = len(rows.fieldnames or ())
            raise problems.FIELD_COUNT(
                row=number, file=file.name, got=columns + len(row[None]), wanted=columns
            )
        yield row


def _field(row: Any, name: str, file: TextFile, number: int) -> str:
    value = row.get(name) if isinstance(row, Mapping) else None
    if not isinstance(value, str | int):  # a label may be a number
        got = "nothing" if value is None else type(value).__name__
        raise problems.NO_TEXT(row=number, file=file.name, got=got, column=name)
    return str(value)


def _unreadable(file: TextFile, error: BaseException) -> DataError:
    return problems.TEXTS_UNREADABLE(file=str(file.path), got=" ".join(str(error).split()))
