"""Lance tables: a version's rows, which pylance reads, written once as Arrow.

Lance has files of its own, and its client does not survive a fork, by which loader processes come into being. So it runs
in a process of its own, which ends when the rows are written.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from lockstep.data.arrow_cache import materialized
from lockstep.data.file_locations import one_line
from lockstep.data.snapshots import NumberedVersion, SnapshotFiles, contents_digest, selected_columns
from lockstep.interpreters import library_environment, library_words


@dataclass(frozen=True)
class Lance(NumberedVersion):
    """A Lance table at a path or a URI, in its newest version at the beginning of the run or in the `version` that is given.

    Its rows, in the order of its fragments and without those that are deleted, are written once into the user's cache.
    `storage_options` are those of pylance.
    """

    format = "Lance"
    extra = "lance"

    def newest(self) -> str:
        with self.reading():
            return str(self._asked(version=None)["version"])

    def files(self, version: str, columns: Sequence[str] | None) -> SnapshotFiles:
        with self.reading(version):
            answer = self._asked(version=int(version), columns=None if columns is None else list(columns))
        path = answer["path"]
        folder = path.rpartition("/")[0]
        return SnapshotFiles(version, self.stored_files(version, folder, [path]), answer["contents"])

    def _asked(self, **request: Any) -> dict[str, Any]:
        """What the process that reads the table answers."""
        if importlib.util.find_spec("lance") is None:
            raise ImportError("No module named 'lance'")
        ended = subprocess.run(
            library_words(__name__),
            input=json.dumps({"uri": self.location, "options": self.options, **request}).encode(),
            stdout=subprocess.PIPE,
            env=library_environment(),
            check=False,
        )
        if ended.returncode:
            raise RuntimeError(f"the process that reads it ended with {ended.returncode}")
        answer: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer


def main() -> None:
    """Look for the newest version, or write the rows of one: what is asked for on standard input, answered on standard output."""
    request = json.load(sys.stdin)
    try:
        answer = _newest(request) if request["version"] is None else _written(request)
    except Exception as error:  # noqa: BLE001 - a library's, or of the disk: raised where it was asked for
        answer = {"error": one_line(error)}
    with os.fdopen(1, "w", closefd=False) as out:
        out.write(json.dumps(answer))


def _opened(request: Mapping[str, Any]) -> Any:
    import lance

    return lance.dataset(request["uri"], version=request["version"], storage_options=request["options"])


def _newest(request: Mapping[str, Any]) -> dict[str, Any]:
    return {"version": _opened(request).version}


def _written(request: Mapping[str, Any]) -> dict[str, Any]:
    table = _opened(request)
    selected = selected_columns(request["columns"], table.schema.names)
    contents = contents_digest(_contents(table))

    def parts() -> Iterator[pa.Table]:
        yield table.schema.empty_table().select(selected)
        for batch in table.to_batches(columns=selected, scan_in_order=True):
            yield pa.Table.from_batches([batch])

    path = materialized(f"lance {request['uri']} {table.version} {contents} {selected}", parts)
    return {"path": str(path), "contents": contents}


def _contents(table: Any) -> Iterator[Any]:
    """What a version consists of: its columns, the files of each fragment, whose names are given once, and how many rows are left of it."""
    yield _columns(table.lance_schema.fields())  # a column is renamed without a new file
    for fragment in table.get_fragments():
        yield [file.path for file in fragment.data_files()], fragment.deletion_file(), fragment.count_rows()


def _columns(fields: Sequence[Any]) -> list[Any]:
    """Columns by their ids, by which they are found in files, names and types, with the columns in each."""
    return [(each.id(), each.name(), str(each.to_arrow().type), _columns(each.children())) for each in fields]
