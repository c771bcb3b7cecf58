"""Writes a sample table for jobs.tabular: `python -m jobs.tabular.sample [--rows N] [--features N] [--out FOLDER]`."""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

FILE_ROWS = 1 << 18
"""Rows of a file."""

GROUP_ROWS = 1 << 14
"""Rows of a row group, the block that data.shuffle=blocks moves: 4 MiB of 64 float32 numbers."""


def write_sample(folder: Path, rows: int, features: int, *, seed: int = 1, start: int = 0) -> None:
    """Write `rows` rows of a vector `features` and a `label` of 0 or 1 that depends on it, in files of FILE_ROWS.

    Every file is made from (seed, its number from `start` on) alone, so that two folders need not share a row.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # Columns that hold no nulls, and say so, are read in two thirds of the time.
    vector = pa.list_(pa.field("item", pa.float32(), nullable=False), features)
    schema = pa.schema(
        [pa.field("features", vector, nullable=False), pa.field("label", pa.float32(), nullable=False)]
    )
    weights = np.random.default_rng(seed).standard_normal(features, dtype=np.float32)
    for number, first in enumerate(range(0, rows, FILE_ROWS), start):
        draw = np.random.default_rng((seed, number))
        x = draw.standard_normal((min(FILE_ROWS, rows - first), features), dtype=np.float32)
        noise = draw.standard_normal(len(x), dtype=np.float32)
        label = ((x @ weights) / np.sqrt(features) + 0.3 * noise > 0).astype(np.float32)
        vectors = pa.FixedSizeListArray.from_arrays(pa.array(x.ravel()), type=vector)
        table = pa.table([vectors, pa.array(label)], schema=schema)
        pq.write_table(
            table, folder / f"part-{number:05}.parquet", row_group_size=GROUP_ROWS, use_dictionary=False
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split(":")[0])
    parser.add_argument(
        "--rows", type=int, default=200_000, help="training rows; a tenth as many are held out"
    )
    parser.add_argument("--features", type=int, default=64)
    parser.add_argument("--out", type=Path, default=Path("data/tabular"))
    options = parser.parse_args()
    write_sample(options.out / "train", options.rows, options.features)
    write_sample(options.out / "eval", max(1, options.rows // 10), options.features, start=1_000_000)


if __name__ == "__main__":
    main()
