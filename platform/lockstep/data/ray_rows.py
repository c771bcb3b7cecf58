"""The rows of a `ray.data.Dataset`: read once, in its order, and written as Arrow."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

from lockstep.data.arrow_cache import materialized_by_content

ROWS_AT_ONCE = 4096


def written_rows(dataset: Any) -> Path:
    """The file with a Ray dataset's rows, in the order that its sources have: blocks do not come as their tasks end."""
    return materialized_by_content(_parts(dataset))


def _parts(dataset: Any) -> Iterator[pa.Table]:
    options = dataset.context.execution_options
    previous, options.preserve_order = options.preserve_order, True
    try:
        rows = 0
        for batch in dataset.iter_batches(
            batch_size=ROWS_AT_ONCE, batch_format="pyarrow", prefetch_batches=0
        ):
            rows += batch.num_rows
            yield batch
        if not rows:
            yield pa.table({})
    finally:
        options.preserve_order = previous
