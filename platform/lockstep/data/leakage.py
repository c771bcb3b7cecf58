"""Rows of the evaluation data that are in the training data as well, for they flatter every metric."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lockstep.data.remembered import remembered
from lockstep.data.tables import Table

ROWS = 1 << 13
"""Rows that are compared at once; their words stay in a processor's cache."""


class Leakage(NamedTuple):
    """How many evaluation rows are training rows too; the first of them, and where it is in the training data."""

    rows: int
    eval_row: int | None
    train_row: int | None


def known_leakage(train: Any, evaluation: Any) -> Leakage | None:
    """The same as `leaked_rows`, found once for the same files. None for what it would take long to compare, or cannot be.

    That are other datasets than tables, and tables above their bound on memory, which would be read from end to end.
    """
    if not (isinstance(train, Table) and isinstance(evaluation, Table)):
        return None
    if "blocks" in (train.residence, evaluation.residence):
        return None
    identity = repr((train.identity(), evaluation.identity()))
    found = remembered("leakage", identity, lambda: json.dumps(leaked_rows(train, evaluation)))
    return Leakage(*json.loads(found))


def leaked_rows(train: Table, evaluation: Table) -> Leakage:
    """The evaluation rows that are equal to a training row in every entry that both tables have.

    Rows are compared by 64-bit hashes: of 10^6 × 10^6 rows a wrong match has a chance of 10^-7. Reads both tables once.
    """
    names = [d.name for d in train.decoders if d.name in {e.name for e in evaluation.decoders}]
    if not names:
        return Leakage(0, None, None)
    own = np.concatenate([np.empty(0, np.uint64), *_hashes(evaluation, names)])
    wanted = np.unique(own)
    first: dict[int, int] = {}
    for start, hashes in zip(range(0, len(train), ROWS), _hashes(train, names), strict=True):
        places = np.searchsorted(wanted, hashes)
        places[places == len(wanted)] = 0
        for hit in np.flatnonzero(wanted[places] == hashes).tolist() if len(wanted) else ():
            first.setdefault(int(hashes[hit]), start + hit)
    rows = np.flatnonzero(np.isin(own, np.array(list(first), np.uint64)))
    if not rows.size:
        return Leakage(0, None, None)
    return Leakage(len(rows), int(rows[0]), first[int(own[rows[0]])])


def _hashes(table: Table, names: list[str]) -> Iterator[NDArray[np.uint64]]:
    """A hash of every row, ROWS at a time."""
    for start in range(0, len(table), ROWS):
        ids = np.arange(start, min(start + ROWS, len(table)))
        batch = table.__getitems__(ids)
        total = np.zeros(len(ids), np.uint64)
        for i, name in enumerate(names):
            decoder = next(d for d in table.decoders if d.name == name)
            if decoder.kind == "dense":
                own = _dense(batch[name].numpy().reshape(len(ids), -1), i)
            elif decoder.kind == "bytes":
                own = _each([v.encode() if isinstance(v, str) else v for v in batch[name]], i)
            else:
                lengths = batch[f"{name}_lengths"].tolist()
                rows = zip(batch[name].numpy(), lengths, strict=True)
                own = _each([row[:length].tobytes() for row, length in rows], i)
            total += own
        yield total


def _dense(values: NDArray[np.generic], salt: int) -> NDArray[np.uint64]:
    """The sum of a row's words times random odd numbers, modulo 2^64 (Carter & Wegman 1979): one pass, no loop."""
    bits = values.view(f"u{values.dtype.itemsize}").astype(np.uint64)
    factors = np.random.default_rng(salt + 1).integers(0, 2**63, bits.shape[1], dtype=np.uint64) * np.uint64(
        2
    )
    hashes: NDArray[np.uint64] = (bits * (factors + np.uint64(1))).sum(axis=1, dtype=np.uint64)
    return hashes


def _each(rows: list[bytes], salt: int) -> NDArray[np.uint64]:
    key = salt.to_bytes(8, "little")
    return np.array(
        [int.from_bytes(hashlib.blake2b(row, digest_size=8, key=key).digest(), "little") for row in rows],
        np.uint64,
    )
