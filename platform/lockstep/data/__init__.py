"""Data: the order of the samples, tables, mixtures and packing, and the way from the dataset to the device.

All are imported when they are first used: pyarrow's Parquet costs a fifth of a second.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lockstep.data.delta_table import Delta
    from lockstep.data.iceberg_table import Iceberg
    from lockstep.data.images import ImageFolder
    from lockstep.data.lance_table import Lance
    from lockstep.data.mixture import Mixture
    from lockstep.data.packing import Packed
    from lockstep.data.table_columns import Column
    from lockstep.data.tables import Table
    from lockstep.data.tar_shards import TarShards

__all__ = ["Column", "Delta", "Iceberg", "ImageFolder", "Lance", "Mixture", "Packed", "Table", "TarShards"]

_HOME = {
    "Column": "lockstep.data.table_columns",
    "Delta": "lockstep.data.delta_table",
    "Iceberg": "lockstep.data.iceberg_table",
    "ImageFolder": "lockstep.data.images",
    "Lance": "lockstep.data.lance_table",
    "Mixture": "lockstep.data.mixture",
    "Packed": "lockstep.data.packing",
    "Table": "lockstep.data.tables",
    "TarShards": "lockstep.data.tar_shards",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'lockstep.data' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
