"""The fingerprint of a Hugging Face `datasets.Dataset`: it is Arrow already and is read by index; its transform is the job's code."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from lockstep.data.arrow_cache import even_batches

SPANS, SPAN_ROWS = 17, 1024
"""What is hashed of a large dataset: so many spans, evenly spread, the last one at its end."""


def hub_fields(dataset: Any) -> dict[str, str]:
    """The columns, and the number of rows with a hash of them, as they are stored: selected and in order, but not transformed."""
    digest = hashlib.sha256()
    for part in _spans(dataset.with_format("arrow"), len(dataset)):
        for batch in even_batches([part]):
            digest.update(batch.serialize())
    columns = ", ".join(f"{name}: {kind}" for name, kind in sorted(dataset.features.items()))
    return {"columns": columns, "rows": f"{len(dataset)}, {digest.hexdigest()[:32]}"}


def _spans(arrow: Any, rows: int) -> Iterator[pa.Table]:
    if rows <= SPANS * SPAN_ROWS:
        starts, length = range(0, rows, SPAN_ROWS), SPAN_ROWS
    else:
        starts, length = [i * (rows - SPAN_ROWS) // (SPANS - 1) for i in range(SPANS)], SPAN_ROWS  # type: ignore[assignment]
    for start in starts:
        yield arrow[start : start + length]
