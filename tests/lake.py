"""Tables of Delta, Iceberg and Lance, written by their own libraries, and a job that reads them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from jobs.tabular.job import Tabular
from lockstep.data import Column, Delta, Iceberg, Lance, Table
from lockstep.data.snapshots import Snapshot

FEATURES = 8
FORMATS = ["delta", "iceberg", "lance"]


def points(rows: int, seed: int) -> pa.Table:
    """Rows of two columns: a vector, and whether its first number is above zero."""
    x = np.random.default_rng(seed).standard_normal((rows, FEATURES), dtype=np.float32)
    vectors = pa.ListArray.from_arrays(
        np.arange(0, x.size + 1, FEATURES, dtype=np.int32), pa.array(x.ravel())
    )
    return pa.table({"features": vectors, "label": (x[:, 0] > 0).astype(np.float32)})


def append(kind: str, root: Path, rows: pa.Table) -> None:
    """Write a new version of the table in a folder: the first one, or one with these rows more."""
    match kind:
        case "delta":
            from deltalake import write_deltalake

            write_deltalake(str(root / "points"), rows, mode="append")
        case "lance":
            pq.write_table(rows, root / "new.parquet")
            run_lance(
                "lance.write_dataset(pq.read_table('new.parquet'), 'points', mode='append' if os.path.exists('points') else 'create')",
                root,
            )
        case _:
            catalog = iceberg_catalog(root)
            catalog.create_namespace_if_not_exists("db")
            catalog.create_table_if_not_exists("db.points", schema=rows.schema).append(rows)


def run_lance(program: str, folder: Path) -> None:
    """Run a line with Lance in a process of its own: imported, it warns of each fork of this one."""
    program = f"import os, lance, pyarrow.parquet as pq; {program}"
    subprocess.run([sys.executable, "-c", program], cwd=folder, check=True, stderr=subprocess.DEVNULL)


def iceberg_properties(root: Path) -> dict[str, str]:
    return {"type": "sql", "uri": f"sqlite:///{root}/catalog.db", "warehouse": f"file://{root}/warehouse"}


def iceberg_catalog(root: Path) -> Any:
    from pyiceberg.catalog import load_catalog

    (root / "warehouse").mkdir(parents=True, exist_ok=True)
    return load_catalog("default", **iceberg_properties(root))


def source(kind: str, root: Path | str, version: int | None = None) -> Snapshot:
    """The table in a folder, as the source of a `Table`."""
    match kind:
        case "delta":
            return Delta(f"{root}/points", version)
        case "lance":
            return Lance(f"{root}/points", version)
        case _:
            return Iceberg("db.points", version, properties=iceberg_properties(Path(root)))


class Lake(Tabular):
    """Trains on such a table."""

    class Params(Tabular.Params):
        kind: Literal["delta", "iceberg", "lance"] = "delta"
        version: int | None = None

    params: Params

    def train_data(self) -> Table:
        columns = {"features": Column("features", length=FEATURES), "label": "label"}
        return Table(
            source(self.params.kind, self.params.train, self.params.version),
            columns,
            memory_mb=self.params.memory_mb,
        )
