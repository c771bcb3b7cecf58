"""Shards that another library has written for a loop of its own, and that it reads by index as well: litdata's, and MosaicML Streaming's.

The order is Lockstep's: what the library's loop would do (shuffle, split between workers, say where it is) has no part in it.
"""

from __future__ import annotations

import hashlib
import os
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset

from lockstep.data import problems
from lockstep.data.file_locations import find
from lockstep.data.fingerprint import FILES, content_digest


def mosaic_fields(dataset: Any) -> dict[str, str]:
    """The shards of a `streaming.LocalDataset`."""
    folder = Path(dataset.local, dataset.split or "")
    return shard_fields(folder, sorted({shard.raw_data.basename for shard in dataset.shards}))


class LitShards(Dataset[Any]):
    """The samples of a `litdata.StreamingDataset` on a disk by their index, in the order in which they were written.

    Each process reads with a copy of its own: the library's reader does not survive a fork.
    """

    def __init__(self, dataset: Any) -> None:
        folder = dataset.input_dir.path
        if dataset.input_dir.url or folder is None or not Path(folder, "index.json").is_file():
            raise problems.STREAMED(folder=str(dataset.input_dir.url or folder))
        self._folder = Path(folder)
        self._pickled = pickle.dumps(dataset)
        self._chunks = list(dataset.subsampled_files)
        # Not its own length, which is that of one worker's share.
        self._length: int = sum(end - begin for begin, end in dataset.region_of_interest)
        self._readers: dict[int, Any] = {}

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        process = os.getpid()
        if process not in self._readers:
            self._readers = {process: pickle.loads(self._pickled)}
        return self._readers[process][index]

    def fingerprint(self) -> dict[str, str]:
        """The samples, and each chunk with its size and a hash of its content."""
        return {"samples": str(self._length), **shard_fields(self._folder, self._chunks)}


def shard_fields(folder: Path, names: Sequence[str]) -> dict[str, str]:
    """The index of a folder of shards, and its files by their names, each with its size and a hash of its content."""
    fields = {}
    for name in ("index.json", *names):
        (file,) = find(folder / name, ())
        digest = content_digest(file.identity, file.size, file.pieces, "sampled")
        fields[f"shard.{name}"] = f"{file.size} bytes, {digest[:32]}"
    if len(fields) > FILES:
        return {"shards": f"{len(fields)}, {hashlib.sha256(repr(fields).encode()).hexdigest()[:32]}"}
    return fields
