"""Tables: Parquet and Arrow files, on disk or in an object store, as datasets that give whole micro-batches.

What fits its bound is decoded once and kept in memory that the workers of a node share. What does not is either
mapped (Arrow files on a local disk: the kernel keeps what it has room for) or read block by block; the blocks that are
held take no more than the bound, and the workers of a node share them too. The bits of a batch are the same in all
three, and it is always memory of its own: a job may write to it.
"""

from __future__ import annotations

import hashlib
import shutil
import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset

from lockstep.data import problems
from lockstep.data.fingerprint import FILES, file_digest, names_in_order
from lockstep.data.node_folder import NodeFolder, map_file
from lockstep.data.table_columns import Array, Column, Decoder, Parts, Piece, declared_columns, parts_bytes
from lockstep.data.table_files import Source, TableFiles
from lockstep.errors import DataError

Decoded = dict[str, Parts]

MIB = 1 << 20

_FEW = 1 << 16

SHARE_OF_MEMORY = 0.25
"""Part of the machine's memory that a table may take where the job gives no bound."""


class Table(Dataset[dict[str, Any]]):
    """Rows of Parquet or Arrow files; a batch is a mapping from the declared names to tensors (see `Column`).

    `source` is a file, a folder (read with all below it; `key=value` folders are columns), a glob, a URI (s3, gs), or
    a list of these; or a version of a table: `Delta(…)`, `Iceberg(…)` or `Lance(…)`. `columns` maps each name in a batch to a column, to a list of columns side by side, or to a Column;
    without it every column keeps its own name. `memory_mb` is the most memory that it holds, in MiB; default: a quarter
    of the machine's memory. `content` says what the fingerprint reads of the files: samples, or every byte.

    Raises DataError, with the file and the column, for every problem in them that can be found before training.
    """

    takes_arrays = True
    """Ids come as an int64 array."""

    draws_nothing = True
    """No fetch draws a random number: a thread may do it ahead of time."""

    def __init__(
        self,
        source: Source,
        columns: Mapping[str, str | Sequence[str] | Column] | None = None,
        *,
        memory_mb: float | None = None,
        content: Literal["sampled", "full"] = "sampled",
    ) -> None:
        asked = declared_columns(columns or {})
        self.files = TableFiles(source, _sources(asked) or None)
        self.block_sizes = self.files.block_sizes
        self.content = content
        declared = asked or declared_columns({name: name for name in self.files.all_columns()})
        self._sources = _sources(declared)
        types = self.files.columns(self._sources)
        self.decoders = [Decoder(name, column, types) for name, column in declared.items()]
        self._check_names()
        for name in self._sources:
            self.files.known_nulls(name)
        self._first = np.cumsum([0, *self.block_sizes])
        self._rows = int(self._first[-1])
        self.bound = round(memory_mb * MIB) if memory_mb is not None else _share_of_memory()
        self._cache = self._row_store()

    def _check_names(self) -> None:
        """DataError where an entry of the batch has the name of a ragged one's lengths, of which one would take the other's place."""
        names = {decoder.name for decoder in self.decoders}
        for decoder in self.decoders:
            if decoder.kind == "ragged" and (lengths_name := f"{decoder.name}_lengths") in names:
                raise problems.NAME_TWICE(column=lengths_name, source=decoder.name)

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, index: int) -> dict[str, Any]:
        """One row; a list of any length is not padded."""
        return {name: value[0] for name, value in self.__getitems__([index]).items()}

    def __getitems__(self, ids: Sequence[int] | NDArray[np.int64]) -> dict[str, Any]:
        """The batch of these rows, in this order."""
        rows = np.asarray(ids, np.int64)
        if rows.size and (rows.min() < 0 or rows.max() >= self._rows):
            raise IndexError(f"an id of {rows.min()} … {rows.max()} in a table of {self._rows} rows")
        pieces = self._cache.pieces(rows)
        batch: dict[str, Any] = {}
        for decoder in self.decoders:
            batch |= decoder.batch(pieces, len(rows))
        return batch

    def read_ahead(self, blocks: Sequence[int]) -> None:
        """Read these blocks, which will be wanted soon, where the table is read by block."""
        self._cache.read_ahead(blocks)

    @property
    def residence(self) -> Literal["memory", "mapped", "blocks"]:
        """Where the rows are: decoded in memory, in mapped files, or read by block."""
        return self._cache.residence

    def check_order(self, shuffle: str, window: int) -> None:
        """Refuse an order that would read every block anew for every micro-batch. Raises SpecError."""
        if self.residence != "blocks":
            return
        table = f"a table of {self._bytes() // MIB} MiB, above its bound of {self.bound // MIB} MiB"
        if shuffle in {"full", "hashed", "by_length"}:
            raise problems.TABLE_SHUFFLE(got=shuffle, table=table)
        needed = (
            2
            * (window if shuffle == "blocks" else 1)
            * max(map(self._block_bytes, range(len(self.block_sizes))))
        )
        if needed > self.bound:
            raise problems.WINDOW(window=window, needed=-(-needed // MIB), table=table)

    def fingerprint(self) -> dict[str, str]:
        """The columns, and for each file its rows and the hash of its content; see `lockstep.data.fingerprint`."""
        files = self.files.files
        fields = {
            f"file.{name}": f"{sum(file.rows)} rows in {len(file.rows)} blocks, {file_digest(self.files, i, self.content)[:32]}"
            for i, (name, file) in enumerate(zip(names_in_order([f.name for f in files]), files, strict=True))
        }
        if len(fields) > FILES:
            fields = {"files": f"{len(fields)}, {hashlib.sha256(repr(fields).encode()).hexdigest()[:32]}"}
        columns = ", ".join(
            f"{d.name}: {d.kind} {d.dtype}{list(d.shape) or ''} {d.declared}" for d in self.decoders
        )
        snapshot = self.files.snapshot
        version = {} if snapshot is None else {"version": f"{snapshot.version}, {snapshot.contents}"}
        return {"columns": columns, **version, **fields}

    def identity(self) -> tuple[Any, ...]:
        """What changes with the rows or with what a batch is made of, on this machine."""
        files = range(len(self.files.files))
        return ([self.files.identity(i) for i in files], [(d.name, d.declared) for d in self.decoders])

    # --- where the rows are ---

    def _row_store(self) -> _RowStore:
        if self._bytes() <= self.bound:
            return _Whole(self)
        mapped = self.files.mapped(self._sources) if all(d.keeps_memory for d in self.decoders) else None
        if mapped is not None:
            return _Mapped(self, [self._decoded_from(table, block) for block, table in enumerate(mapped)])
        return _Blocks(self)

    def _decoded(self, block: int) -> Decoded:
        return self._decoded_from(self.files.read(block, self._sources), block)

    def _decoded_from(self, table: Any, block: int) -> Decoded:
        file, number = self.files.names(block)
        return {decoder.name: decoder.decode(table, file, number) for decoder in self.decoders}

    def _block_bytes(self, block: int) -> int:
        """Memory of a decoded block; of rows of any length, as the file states it."""
        rows = self.block_sizes[block]
        dense = sum(rows * (d.row_bytes or 0) for d in self.decoders)
        unsized_sources = [s for d in self.decoders if d.row_bytes is None for s in d.declared.sources]
        return dense + (
            self.files.stored_bytes(block, unsized_sources) + 8 * rows * len(unsized_sources)
            if unsized_sources
            else 0
        )

    def _bytes(self) -> int:
        return sum(map(self._block_bytes, range(len(self.block_sizes))))

    def _key(self) -> str:
        """What names the shared memory of this table: two processes with one key would decode the same."""
        return f"table {hashlib.sha256(repr(self.identity()).encode()).hexdigest()}"


def _sources(declared: Mapping[str, Column]) -> list[str]:
    """The columns of the files that are read, each once."""
    return list(dict.fromkeys(s for column in declared.values() for s in column.sources))


def _share_of_memory() -> int:
    import psutil  # type: ignore[import-untyped]

    return int(psutil.virtual_memory().total * SHARE_OF_MEMORY)


class _RowStore:
    """Gives rows as pieces of decoded blocks."""

    residence: Literal["memory", "mapped", "blocks"]

    def __init__(self, table: Table) -> None:
        self._first = table._first

    def pieces(self, rows: Array) -> list[Piece]:
        """The blocks that hold `rows`, each with its own ones. The rows of a block are read together."""
        number = np.searchsorted(self._first, rows, side="right") - 1
        if len(self._first) <= _FEW:
            number = number.astype(np.uint16)  # which numpy sorts in a sixth of the time
        order = np.argsort(number, kind="stable")
        ordered = number[order]
        starts = np.flatnonzero(np.diff(ordered, prepend=-1))
        blocks = ordered[starts]
        decoded = self.blocks(blocks.tolist())
        places = np.split(order, starts[1:])
        return [
            Piece(columns, rows[indices] - self._first[block], indices)
            for block, columns, indices in zip(blocks.tolist(), decoded, places, strict=True)
        ]

    def blocks(self, numbers: list[int]) -> list[Decoded]:
        """These blocks, decoded."""
        raise NotImplementedError

    def read_ahead(self, numbers: Sequence[int]) -> None:
        """Have these blocks at hand soon; nothing where all of them are."""


class _Whole(_RowStore):
    """The whole table in memory, decoded by one process of the node and mapped by all."""

    residence = "memory"

    def __init__(self, table: Table) -> None:
        super().__init__(table)
        self._folder = NodeFolder(table._key(), table._bytes())
        blocks = range(len(table.block_sizes))
        path = self._folder.file(
            "table", lambda aside: _write(aside, table.decoders, map(table._decoded, blocks))
        )
        assert path is not None
        self._columns = _mapped(path, table.decoders, len(table))

    def pieces(self, rows: Array) -> list[Piece]:
        return [Piece(self._columns, rows, None)]


class _Mapped(_RowStore):
    """Arrow files where they are: the kernel reads what is asked for and keeps what it has room for."""

    residence = "mapped"

    def __init__(self, table: Table, blocks: list[Decoded]) -> None:
        super().__init__(table)
        self._blocks = blocks

    def blocks(self, numbers: list[int]) -> list[Decoded]:
        return [self._blocks[number] for number in numbers]


class _Blocks(_RowStore):
    """The blocks that were used last, up to the bound, in memory that the workers of a node share."""

    residence = "blocks"

    def __init__(self, table: Table) -> None:
        super().__init__(table)
        self._table = table
        self._folder = NodeFolder(f"{table._key()} {table.bound}", table.bound)
        self._resident: OrderedDict[int, tuple[Decoded, int]] = OrderedDict()
        self._bytes = 0
        self._one_at_a_time = threading.Lock()

    def blocks(self, numbers: list[int]) -> list[Decoded]:
        """Blocks that no other process makes just now come first: workers that need the same ones share the work."""
        with self._one_at_a_time:
            available = {number: self._used(number) for number in numbers if number in self._resident}
            for wait in (False, True):
                for number in numbers:
                    if number not in available and (decoded := self._shared(number, wait=wait)) is not None:
                        available[number] = decoded
                        self._hold(number, decoded)
            return [available[number] for number in numbers]

    def read_ahead(self, numbers: Sequence[int]) -> None:
        """What another process of the node reads just now is left to it."""
        with self._one_at_a_time, suppress(DataError):  # raised when the block is needed
            for number in numbers:
                if number not in self._resident and (decoded := self._shared(number, wait=False)) is not None:
                    self._hold(number, decoded)

    def _used(self, number: int) -> Decoded:
        self._resident.move_to_end(number)
        return self._resident[number][0]

    def _shared(self, number: int, *, wait: bool) -> Decoded | None:
        decoders, name = self._table.decoders, f"block-{number}"
        while True:
            path = self._folder.file(
                name, lambda aside: _write(aside, decoders, [self._table._decoded(number)]), wait=wait
            )
            if path is None:
                return None
            try:
                return _mapped(path, decoders, self._table.block_sizes[number])
            except FileNotFoundError:  # another worker had no more use for it and deleted it just now
                continue

    def _hold(self, number: int, decoded: Decoded) -> None:
        size = parts_bytes(decoded)
        while self._resident and self._bytes + size > self._table.bound:
            oldest, (_, freed) = self._resident.popitem(last=False)
            self._bytes -= freed
            self._folder.delete(f"block-{oldest}")
        self._resident[number] = (decoded, size)
        self._bytes += size


def _write(folder: Path, decoders: Sequence[Decoder], blocks: Iterable[Decoded]) -> None:
    """Blocks end to end in a new folder, two files for a column; no more than one block is in memory beside them."""
    if folder.exists():  # a process was killed while it wrote
        shutil.rmtree(folder)
    folder.mkdir()
    with ExitStack() as stack:
        values = [stack.enter_context((folder / f"{i}.values").open("wb")) for i in range(len(decoders))]
        ends = [stack.enter_context((folder / f"{i}.ends").open("wb")) for i in range(len(decoders))]
        written = [0] * len(decoders)
        for block in blocks:
            for i, decoder in enumerate(decoders):
                parts = block[decoder.name]
                values[i].write(np.ascontiguousarray(parts.values).view(np.uint8).data)
                if parts.ends is not None:
                    block_ends = parts.ends if not written[i] and not ends[i].tell() else parts.ends[1:]
                    ends[i].write((block_ends + written[i]).data)
                    written[i] += len(parts.values)


def _mapped(folder: Path, decoders: Sequence[Decoder], rows: int) -> Decoded:
    """What `_write` wrote, in the memory of its files."""
    columns = {}
    for i, decoder in enumerate(decoders):
        values = folder / f"{i}.values"
        if decoder.kind == "dense":
            columns[decoder.name] = Parts(map_file(values, decoder.dtype, (rows, *decoder.shape)))
        else:
            length = values.stat().st_size // decoder.dtype.itemsize
            ends = map_file(folder / f"{i}.ends", np.int64, (rows + 1,))
            columns[decoder.name] = Parts(map_file(values, decoder.dtype, (length,)), ends)
    return columns
