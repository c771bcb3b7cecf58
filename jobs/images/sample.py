"""Writes sample images for jobs.images: `python -m jobs.images.sample [--images N] [--size N] [--out FOLDER]`.

Discs, squares and stripes in random colours, in a folder for each class and, as the same files, in a table.
"""

from __future__ import annotations

import argparse
import io
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

CLASSES = ("disc", "square", "stripes")


def drawn(kind: str, size: int, draw: np.random.Generator) -> bytes:
    """An image of a class as PNG."""
    y, x = np.mgrid[:size, :size] / size
    cy, cx = draw.uniform(0.35, 0.65, 2)
    radius = draw.uniform(0.15, 0.3)
    inside = {
        "disc": (x - cx) ** 2 + (y - cy) ** 2 < radius**2,
        "square": np.maximum(abs(x - cx), abs(y - cy)) < radius * 0.85,
        "stripes": np.sin((x * np.cos(cx * 9) + y * np.sin(cx * 9)) * 40) > 0,
    }[kind]
    back, front = draw.integers(0, 256, (2, 3))
    noise = draw.normal(0, 12, (size, size, 3))
    pixels = np.where(inside[..., None], front, back) + noise
    file = io.BytesIO()
    Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(file, "png")
    return file.getvalue()


def write_sample(folder: Path, images: int, size: int, *, seed: int) -> None:
    """`<class>/<number>.png`, as many of each class, and all of them in `<folder>.parquet` with a label by number."""
    draw = np.random.default_rng(seed)
    rows = []
    for number in range(images):
        label = number % len(CLASSES)
        content = drawn(CLASSES[label], size, draw)
        path = folder / CLASSES[label] / f"{number:05}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        rows.append((content, label))
    table = pa.table(
        {"image": pa.array([row[0] for row in rows], pa.binary()), "label": [row[1] for row in rows]}
    )
    pq.write_table(table, folder.with_name(f"{folder.name}.parquet"), row_group_size=64)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split(":")[0])
    parser.add_argument(
        "--images", type=int, default=960, help="for training; an eighth as many are held out"
    )
    parser.add_argument("--size", type=int, default=40, help="pixels of a side")
    parser.add_argument("--out", type=Path, default=Path("data/images"))
    options = parser.parse_args()
    write_sample(options.out / "train", options.images, options.size, seed=1)
    write_sample(options.out / "eval", max(3, options.images // 8), options.size, seed=2)


if __name__ == "__main__":
    main()
