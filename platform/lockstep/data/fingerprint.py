"""What the data are, as fields of a run's identity: a run on other data is another run, and can say what changed.

A table is known by its columns and by its files, each with its rows and a hash of its content; any other dataset by a
`fingerprint()` of its own, or else by some of its samples.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from lockstep.data.remembered import remembered
from lockstep.errors import JobError
from lockstep.randomness import seed_all

SAMPLES = 16
"""Samples, evenly spread, that stand for a dataset without a fingerprint of its own."""

FILES = 256
"""Most files that are told one by one; more are one field together."""

SPANS, SPAN_BYTES = 16, 1 << 16
"""What is hashed of a large file in samples: so many spans, evenly spread, and its end, which in Parquet is the footer."""


def fingerprint(dataset: Any, samples: int, seed: int) -> dict[str, Any]:
    """Fields that differ where the data do, by name, in plain data."""
    own = getattr(dataset, "fingerprint", None)
    if own is None:
        return {"samples": _samples_digest(dataset, samples, seed)}
    fields = own()
    if not isinstance(fields, Mapping):
        raise JobError(
            f"data: fingerprint() of {type(dataset).__name__} gave {type(fields).__name__}, wanted a mapping"
        )
    return {str(name): str(value) for name, value in fields.items()}


def _samples_digest(dataset: Any, samples: int, seed: int) -> str:
    digest = hashlib.sha256()
    chosen = sorted({i * (samples - 1) // (SAMPLES - 1) for i in range(SAMPLES)}) if samples else []
    for index in chosen:
        seed_all(seed, "fingerprint", index)
        try:
            many = getattr(dataset, "__getitems__", None)
            sample = many([index]) if many is not None else dataset[index]
        except Exception:  # noqa: BLE001 - a sample that cannot be fetched is told with its step when training meets it
            digest.update(b"cannot be fetched")
            continue
        for leaf in leaves(sample):
            digest.update(repr(leaf).encode())
    return digest.hexdigest()[:32]


def check_repeats(once: Any, again: Any) -> None:
    """Refuse a micro-batch that was fetched twice under one seed and came out different. Raises JobError."""
    for (path, first), (_, second) in zip(leaves(once), leaves(again), strict=False):
        if first != second:
            raise JobError(
                f"data: the first micro-batch, fetched twice under one seed, differs{f' in batch{path}' if path else ''}; "
                "the dataset keeps something from one fetch to the next or draws from a generator of its own: "
                "draw from the default generators or from lockstep.rng()"
            )


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Every tensor, number and text in `value`: where it is, and what it is, bit for bit. Of other objects only the kind."""
    if isinstance(value, Mapping):
        yield path, f"mapping of {list(value)}"
        for key, inner in value.items():
            yield from leaves(inner, f"{path}[{key!r}]")
    elif isinstance(value, list | tuple):
        yield path, f"{type(value).__name__} of {len(value)}"
        for i, inner in enumerate(value):
            yield from leaves(inner, f"{path}[{i}]")
    elif isinstance(value, torch.Tensor):
        whole = value.detach().cpu().contiguous()
        content = whole.view(torch.uint8) if whole.dim() else whole.reshape(1).view(torch.uint8)
        yield (
            path,
            f"{whole.dtype} {tuple(whole.shape)} {hashlib.sha256(content.numpy().tobytes()).hexdigest()}",
        )
    elif isinstance(value, np.ndarray | np.generic):
        yield path, f"{value.dtype} {value.shape} {hashlib.sha256(value.tobytes()).hexdigest()}"
    elif isinstance(value, bool | int | float | complex | str | bytes | type(None)):
        yield path, f"{type(value).__name__} {value!r}"
    else:
        yield path, type(value).__qualname__


# --- files ------------------------------------------------------------------------------------------------


def file_digest(table_files: Any, number: int, content: str) -> str:
    """sha256 of a file of a table, whole or in samples; remembered by the file's identity, so that it is read once."""

    def find() -> str:
        size = table_files.files[number].size
        digest = hashlib.sha256(str(size).encode())
        for piece in table_files.pieces(number, _spans(size, content)):
            digest.update(piece)
        return digest.hexdigest()

    return remembered("fingerprints", repr((*table_files.identity(number), content)), find)


def _spans(size: int, content: str) -> Sequence[tuple[int, int]]:
    if content == "full" or size <= (SPANS + 1) * SPAN_BYTES:
        return [(start, min(1 << 20, size - start)) for start in range(0, size, 1 << 20)]
    starts = [i * (size - SPAN_BYTES) // SPANS for i in range(SPANS + 1)]
    return [(start, SPAN_BYTES) for start in starts]
