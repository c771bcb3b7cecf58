"""What the data are, as fields of a run's identity: a run on other data is another run, and can say what changed.

A table is known by its columns and by its files, each with its rows and a hash of its content; any other dataset by a
`fingerprint()` of its own, or else by some of its samples.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from lockstep.data import problems
from lockstep.data.contents import UnreadableError, leaves, tree_of
from lockstep.data.dataset import (
    Fingerprinted,
    fetch_one,
    is_fingerprinted,
    is_hub_dataset,
    is_mosaic_dataset,
    reads_samples,
)
from lockstep.data.user_cache import cached
from lockstep.errors import DataError, LockstepError, first_line
from lockstep.job.frames import place_in_job
from lockstep.randomness import sample_key, seed_all

SAMPLES = 16
"""Samples, evenly spread, that stand for a dataset without a fingerprint of its own."""

PAUSES_S = (0.1, 0.5, 2.0)
"""Before such a sample is fetched again, as a read of a table is."""

FILES = 256
"""The most files that have a field each; more share one field."""

SPANS, SPAN_BYTES = 16, 1 << 16
"""What is hashed of a large file in samples: so many spans, evenly spread, and its end, which in Parquet is the footer."""


def fingerprint(
    dataset: Any, samples: int, seed: int, left_out: Callable[[int], bool] = lambda _: False
) -> dict[str, Any]:
    """Fields that differ where the data do, by name: trees of the identity. A sample that is `left_out` of training is not read.

    Raises JobError for content that cannot be looked into, and the error of a sample that cannot be fetched.
    """
    if not is_fingerprinted(dataset):
        read = partial(_sample, dataset, seed)
        return {
            **_library_fields(dataset),
            "samples": _samples_digest(
                dataset, samples, lambda index: None if left_out(index) else read(index)
            ),
        }
    fields = dict[str, Any]()
    for name, value in _own_fields(dataset, left_out).items():
        try:
            fields[str(name)] = tree_of(value)
        except UnreadableError as error:
            raise problems.FINGERPRINT_CONTENT(
                dataset=type(dataset).__name__, name=name, kind=error.kind, reason=error.reason
            ) from error
    return fields


def _library_fields(dataset: Any) -> dict[str, str]:
    """The fields of a dataset of a library that Lockstep knows, over all its rows."""
    if is_hub_dataset(dataset):
        from lockstep.data.hub_dataset import hub_fields

        return hub_fields(dataset)
    if is_mosaic_dataset(dataset):
        from lockstep.data.indexed_shards import mosaic_fields

        return mosaic_fields(dataset)
    return {}


def _own_fields(dataset: Fingerprinted, left_out: Callable[[int], bool]) -> Mapping[str, Any]:
    fields = dataset.fingerprint(left_out) if reads_samples(dataset) else dataset.fingerprint()
    if not isinstance(fields, Mapping):
        raise problems.FINGERPRINT_KIND(dataset=type(dataset).__name__, got=type(fields).__name__)
    return fields


def _samples_digest(dataset: Any, samples: int, read: Callable[[int], tuple[Any] | None]) -> str:
    hasher = hashlib.sha256()
    chosen = sorted({i * (samples - 1) // (SAMPLES - 1) for i in range(SAMPLES)}) if samples else []
    for index in chosen:
        sample = read(index)
        if sample is None:
            hasher.update(b"cannot be fetched")
            continue
        try:
            for leaf in leaves(sample[0]):
                hasher.update(repr(leaf).encode())
        except UnreadableError as error:
            raise problems.SAMPLE_CONTENT(
                **_place(f"sample {index}", range(index, index + 1)),
                kind=error.kind,
                reason=error.reason,
                dataset=type(dataset).__name__,
            ) from error
    return hasher.hexdigest()[:32]


def _sample(dataset: Any, seed: int, index: int) -> tuple[Any]:
    """A sample; one that cannot be fetched is tried again, as reads of Lockstep's own are. Raises its error after the last try.

    A run that took "cannot be fetched" for its content would not be resumed once it can.
    """
    for pause_s in (*PAUSES_S, None):
        seed_all(sample_key(seed, "fingerprint", index))
        try:
            return (fetch_one(dataset, index),)
        except LockstepError:
            raise
        except (Exception, SystemExit) as error:  # a dataset may end the process
            if pause_s is None:
                failed = problems.FINGERPRINT_SAMPLE(
                    **_place(f"sample {index}", range(index, index + 1)),
                    tries=len(PAUSES_S) + 1,
                    where=place_in_job(error),
                    got=first_line(error),
                    samples=SAMPLES,
                    name=type(dataset).__name__,
                )
                raise (failed.as_kind(DataError) if isinstance(error, OSError) else failed) from error
            time.sleep(pause_s)
    raise AssertionError("the last try returns or raises")


def of_part(error: LockstepError, what: Callable[[str], str], ids: Callable[[int], range]) -> LockstepError:
    """The error of a sample of a part of the data as one of the whole, so that its line names the ids that `data.without` takes.

    `what` names it anew, and `ids` are the samples of the whole that one of the part is in. Any other error as it is.
    """
    problem = {each.code: each for each in (problems.FINGERPRINT_SAMPLE, problems.SAMPLE_CONTENT)}.get(
        error.code
    )
    if problem is None:
        return error
    span = range(0)
    if error.facts["ids"]:
        first, last = map(int, error.facts["ids"].split("-"))
        span = range(ids(first).start, ids(last).stop)
    return problem(**{**error.facts, **_place(what(error.facts["what"]), span)}).as_kind(type(error))


def _place(what: str, ids: range) -> dict[str, str]:
    """Facts of a sample: its name, the first and the last id that it is in, and how it is left out; empty ones where no id has it."""
    if not ids:
        return {"what": what, "ids": "", "leave_out": ""}
    first, last = ids[0], ids[-1]
    without = str(first) if first == last else f"{first}-{last}"
    return {
        "what": what,
        "ids": f"{first}-{last}",
        "leave_out": f"leave it out of train_data by data.without={without}, ",
    }


def check_repeats(once: Any, again: Any, *, opaque: bool = False) -> None:
    """Refuse a micro-batch that was fetched twice under one seed and came out different. Raises JobError.

    A micro-batch that cannot be looked into is refused too, unless the data have a fingerprint of their own (`opaque`).
    """
    try:
        pairs = list(zip(leaves(once, opaque=opaque), leaves(again, opaque=opaque), strict=False))
    except UnreadableError as error:
        raise problems.BATCH_CONTENT(kind=error.kind, reason=error.reason) from error
    location = _first_difference(pairs)
    if location is not None:
        raise problems.FETCHES_DIFFER(location=location)


def difference(once: Any, again: Any) -> str | None:
    """Where two micro-batches differ first, as a message goes on; what cannot be looked into counts by its type."""
    return _first_difference(zip(leaves(once, opaque=True), leaves(again, opaque=True), strict=False))


def _first_difference(pairs: Iterable[tuple[tuple[str, str], tuple[str, str]]]) -> str | None:
    for (path, first), (_, second) in pairs:
        if first != second:
            return f" in batch{path}" if path else ""
    return None


# --- files ------------------------------------------------------------------------------------------------


def names_in_order(names: Sequence[str], order: Callable[[str], Any] = str) -> list[str]:
    """The names of files in a fingerprint: with their numbers where the names alone do not say which is which, or which is first.

    `order` is the order in which the files of one folder are taken. Files of several folders are ordered by where these are, which may change.
    """
    if list(names) == sorted(set(names), key=order):
        return list(names)
    return [f"{i}.{name}" for i, name in enumerate(names)]


def file_digest(table_files: Any, number: int, content: str) -> str:
    """sha256 of a file of a table, whole or in samples; remembered by the file's identity, so that it is read once."""
    size = table_files.files[number].size
    return content_digest(
        table_files.identity(number), size, lambda spans: table_files.pieces(number, spans), content
    )


def local_digest(path: Path) -> str:
    """The same of any file on a disk, whole. Raises OSError."""
    status = path.stat()
    identity = (
        str(path.absolute()), status.st_size, status.st_mtime_ns, (status.st_ino, status.st_ctime_ns)
    )  # fmt: skip

    def pieces(spans: Sequence[tuple[int, int]]) -> Iterator[bytes]:
        with path.open("rb") as file:
            for _, length in spans:  # one after the other, from the start
                yield file.read(length)

    return content_digest(identity, status.st_size, pieces, "full")


def content_digest(
    identity: tuple[Any, ...],
    size: int,
    pieces: Callable[[Sequence[tuple[int, int]]], Iterable[bytes]],
    content: str,
) -> str:
    """sha256 of a file of `size` bytes, whole or in samples, whose bytes at (offset, length) spans `pieces` gives.

    It is remembered by `identity`, which changes with the file.
    """

    def find() -> str:
        digest = hashlib.sha256(str(size).encode())
        for piece in pieces(_spans(size, content)):
            digest.update(piece)
        return digest.hexdigest()

    return cached("fingerprints", repr((*identity, content)), find)


def _spans(size: int, content: str) -> Sequence[tuple[int, int]]:
    if content == "full" or size <= (SPANS + 1) * SPAN_BYTES:
        return [(start, min(1 << 20, size - start)) for start in range(0, size, 1 << 20)]
    starts = [i * (size - SPAN_BYTES) // SPANS for i in range(SPANS + 1)]
    return [(start, SPAN_BYTES) for start in starts]
