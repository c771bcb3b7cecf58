"""Samples of the evaluation data that are in the training data as well, for they flatter every metric.

Tables are compared row by row, whole. Of any other dataset samples are fetched, as many as a time limit allows, and
compared by the digest of all that they hold.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lockstep.data.contents import UnreadableError, digest
from lockstep.data.dataset import fetch_one, is_table
from lockstep.data.dataset_order import number_of_ids
from lockstep.data.order import Bijection
from lockstep.data.user_cache import cached
from lockstep.randomness import sample_key, seed_all

if TYPE_CHECKING:
    from lockstep.data.tables import Table  # pyarrow's Parquet costs a fifth of a second

WITHIN_S = 0.5
"""How long samples are fetched to look for leakage where nothing else is said."""

DRAWN = 1 << 12
"""Samples whose places are drawn at once."""

ROWS = 1 << 13
"""Rows that are compared at once; their words stay in a processor's cache."""


class Leakage(NamedTuple):
    """How many evaluation rows are training rows too; the first of them, and where it is in the training data."""

    rows: int
    eval_row: int | None
    train_row: int | None
    eval_looked_at: int | None = None
    """Evaluation samples that were compared; None for all of them."""
    train_looked_at: int | None = None
    """Training samples that they were compared with; None for all of them."""

    @property
    def whole(self) -> bool:
        """Whether every sample of the one was compared with every sample of the other."""
        return self.eval_looked_at is None and self.train_looked_at is None

    def described(self, eval_samples: int) -> str:
        """One line for a person; `rows` must not be 0."""
        looked = "" if self.eval_looked_at is None else f" {self.eval_looked_at} looked at, of"
        least = "" if self.whole else "at least "
        return (
            f"{least}{self.rows} of{looked} {eval_samples} evaluation samples are training samples too: the first is evaluation "
            f"sample {self.eval_row}, training sample {self.train_row}"
        )


def find_leakage(train: Any, evaluation: Any, seed: int, within_s: float = WITHIN_S) -> Leakage | None:
    """Evaluation samples that are training samples too. None where they cannot be compared, or it would take too long.

    That is so for tables above their bound on memory, which would be read from end to end, and for samples whose content
    cannot be read. Reads what a table holds once for the same files; of another dataset as many samples as `within_s` allows.
    """
    if is_table(train) and is_table(evaluation):
        return known_leakage(train, evaluation)
    try:
        return leaked_samples(train, evaluation, seed, within_s)
    except UnreadableError:  # refused elsewhere, unless the data have a fingerprint of their own
        return None


def leaked_samples(train: Any, evaluation: Any, seed: int, within_s: float) -> Leakage:
    """The evaluation samples whose content a training sample has, too.

    All are compared where that takes less than `within_s`. Else evaluation samples are drawn for a quarter of the time and
    held against training samples that are drawn for the rest of it. Every sample is fetched under one seed, so that a sample
    that is varied at random comes out the same in both. Raises UnreadableError.
    """
    began, of_train = time.perf_counter(), number_of_ids(train)
    eval_digests = _digests(evaluation, len(evaluation), seed, began + within_s / 4)
    eval_contents = {content for content, _ in eval_digests}
    looked_at, first = 0, dict[bytes, int]()
    for content, index in _digests(train, of_train, seed, began + within_s):
        looked_at += 1
        if content in eval_contents and index < first.get(content, of_train):
            first[content] = index
    leaked = sorted((index, first[content]) for content, index in eval_digests if content in first)
    eval_row, train_row = leaked[0] if leaked else (None, None)
    return Leakage(
        len(leaked),
        eval_row,
        train_row,
        None if len(eval_digests) == len(evaluation) else len(eval_digests),
        None if looked_at == of_train else looked_at,
    )


def _digests(dataset: Any, size: int, seed: int, until: float) -> list[tuple[bytes, int]]:
    """Digest and index of the samples 0 … size - 1, in an order drawn from the seed, until the time is over."""
    digests = list[tuple[bytes, int]]()
    order = Bijection(size, (seed, "leakage"))
    for start in range(0, size, DRAWN):
        for index in order(np.arange(start, min(start + DRAWN, size))).tolist():
            if time.perf_counter() > until and digests:
                return digests
            seed_all(sample_key(seed, "leakage"))
            try:
                sample = fetch_one(dataset, index)
            except (Exception, SystemExit):  # noqa: BLE001 - a sample that cannot be fetched is told with its step when training meets it
                continue
            digests.append((digest(sample), index))
    return digests


def known_leakage(train: Table, evaluation: Table) -> Leakage | None:
    """The same as `leaked_rows`, found once for the same files; None for tables above their bound on memory."""
    if "blocks" in (train.residence, evaluation.residence):
        return None
    identity = repr((train.identity(), evaluation.identity()))
    text = cached("leakage", identity, lambda: json.dumps(leaked_rows(train, evaluation)))
    return Leakage(*json.loads(text))


def leaked_rows(train: Table, evaluation: Table) -> Leakage:
    """The evaluation rows that are equal to a training row in every entry that both tables have.

    Rows are compared by 64-bit hashes: of 10^6 × 10^6 rows a wrong match has a chance of 10^-7. Reads both tables once.
    """
    names = [d.name for d in train.decoders if d.name in {e.name for e in evaluation.decoders}]
    if not names:
        return Leakage(0, None, None)
    eval_hashes = np.concatenate([np.empty(0, np.uint64), *_hashes(evaluation, names)])
    distinct_hashes = np.unique(eval_hashes)
    first: dict[int, int] = {}
    for start, hashes in zip(range(0, len(train), ROWS), _hashes(train, names), strict=True):
        places = np.searchsorted(distinct_hashes, hashes)
        places[places == len(distinct_hashes)] = 0
        for hit in np.flatnonzero(distinct_hashes[places] == hashes).tolist() if len(distinct_hashes) else ():
            first.setdefault(int(hashes[hit]), start + hit)
    rows = np.flatnonzero(np.isin(eval_hashes, np.array(list(first), np.uint64)))
    if not rows.size:
        return Leakage(0, None, None)
    return Leakage(len(rows), int(rows[0]), first[int(eval_hashes[rows[0]])])


def _hashes(table: Table, names: list[str]) -> Iterator[NDArray[np.uint64]]:
    """A hash of every row, ROWS at a time: of what the table holds, also where a class of the job's own makes something else of it."""
    from lockstep.data.tables import Table

    for start in range(0, len(table), ROWS):
        ids = np.arange(start, min(start + ROWS, len(table)))
        batch = Table.__getitems__(table, ids)
        total = np.zeros(len(ids), np.uint64)
        for i, name in enumerate(names):
            decoder = next(d for d in table.decoders if d.name == name)
            if decoder.kind == "dense":
                column_hashes = _dense(batch[name].numpy().reshape(len(ids), -1), i)
            elif decoder.kind == "bytes":
                column_hashes = _each([v.encode() if isinstance(v, str) else v for v in batch[name]], i)
            else:
                lengths = batch[f"{name}_lengths"].tolist()
                rows = zip(batch[name].numpy(), lengths, strict=True)
                column_hashes = _each([row[:length].tobytes() for row, length in rows], i)
            total += column_hashes
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
