"""Samples in tar files, as WebDataset lays them out, as a map-style dataset: an index says where in which shard a sample lies.

Members that follow each other and share their name up to the first dot are one sample: `cats/12.jpg` and `cats/12.json`. The index of a
shard is made once, from the headers of its members, and kept in the user's cache by the file's identity. Processes that begin at the
same time each make it, and put the same text there.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import tarfile
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate
from pathlib import PurePosixPath
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from torch.utils.data import Dataset

from lockstep.data import problems
from lockstep.data.file_locations import StoredFile, find, one_line, retried
from lockstep.data.fingerprint import FILES, content_digest, names_in_order
from lockstep.data.user_cache import cached
from lockstep.errors import DataError

TAR = (".tar",)

INDEXED_AT_ONCE = 8

BLOCK = 512
"""Bytes of a tar file's unit. An empty one ends it."""

_NOT_UTF8 = "surrogateescape"
"""How tarfile gives bytes of a name that are no UTF-8, which older programs wrote."""

Decoders = Mapping[str, Callable[[bytes], Any]]


class Member(NamedTuple):
    """One file of a sample: what follows the first dot of its name, and where its bytes lie in the shard."""

    extension: str
    offset: int
    size: int


@dataclass(frozen=True)
class Shard:
    """The index of one tar file. Sample i has the members `firsts[i] … firsts[i + 1] - 1`."""

    file: StoredFile
    keys: npt.NDArray[np.bytes_]
    firsts: npt.NDArray[np.int64]
    extensions: tuple[str, ...]
    members: npt.NDArray[np.int64]
    """Of each member the number of its extension, its offset and its size, [members, 3]."""

    def __len__(self) -> int:
        return len(self.keys)

    def members_of(self, index: int) -> list[Member]:
        """The members of a sample."""
        rows = self.members[self.firsts[index] : self.firsts[index + 1]].tolist()
        return [Member(self.extensions[extension], offset, size) for extension, offset, size in rows]


class TarShards(Dataset[dict[str, Any]]):
    """The samples of tar files, in the order of the files' paths and of the members in them.

    `source` is a file, a folder with everything below it, a glob, a URI of an object store, or a list of these. A sample is a mapping:
    `__key__`, its name in the shard, and its members by extension, as bytes or as converted by `decode`, a function for each extension
    (`{"cls": int}`). With `content="full"` the fingerprint covers every byte of a shard, else parts of each. Raises DataError for a file that
    is not a complete tar file.
    """

    def __init__(
        self,
        source: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        decode: Decoders | None = None,
        *,
        content: Literal["sampled", "full"] = "sampled",
    ) -> None:
        self.decode, self.content = dict(decode or {}), content
        with ThreadPoolExecutor(INDEXED_AT_ONCE) as pool:
            self.shards = list(pool.map(_indexed, find(source, TAR)))
        self._ends = list(accumulate(map(len, self.shards)))

    @property
    def draws_nothing(self) -> bool:
        """Whether a sample is what the files hold: a `decode` may draw."""
        return not self.decode

    @property
    def block_sizes(self) -> list[int]:
        """Samples of each shard: `data.shuffle: blocks` mixes some shards at a time."""
        return [len(shard) for shard in self.shards if len(shard)]

    def __len__(self) -> int:
        return self._ends[-1]

    def locate(self, index: int) -> tuple[Shard, int]:
        """The shard of a sample, and its number there."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        s = bisect_right(self._ends, index)
        return self.shards[s], index - (self._ends[s] - len(self.shards[s]))

    def __getitem__(self, index: int) -> dict[str, Any]:
        shard, number = self.locate(index)
        key, members = shard.keys[number].decode(errors=_NOT_UTF8), shard.members_of(number)
        sample: dict[str, Any] = {"__key__": key}
        for member, content in zip(members, _contents(shard.file, members), strict=True):
            decode = self.decode.get(member.extension)
            try:
                sample[member.extension] = content if decode is None else decode(content)
            except Exception as error:  # the job's own code, or a library's
                shown = key.encode(errors="backslashreplace").decode()
                raise problems.MEMBER_UNDECODABLE(
                    sample=shown,
                    extension=member.extension,
                    file=shard.file.shown,
                    kind=type(error).__name__,
                    got=one_line(error),
                ) from error
        return sample

    def fingerprint(self) -> dict[str, Any]:
        """Of each shard its samples, its size and the hash of its content; see `lockstep.data.fingerprint`."""
        names = names_in_order([shard.file.name for shard in self.shards])
        fields = {
            f"shard.{name}": f"{len(shard)} samples, {shard.file.size} bytes, {self._digest(shard.file)[:32]}"
            for name, shard in zip(names, self.shards, strict=True)
        }
        if len(fields) > FILES:
            return {"shards": f"{len(fields)}, {hashlib.sha256(repr(fields).encode()).hexdigest()[:32]}"}
        return fields

    def _digest(self, file: StoredFile) -> str:
        return content_digest(file.identity, file.size, file.pieces, self.content)


def _contents(file: StoredFile, members: Sequence[Member]) -> list[bytes]:
    """The bytes of the members of a sample, which lie next to each other: one read."""
    start = members[0].offset
    stop = members[-1].offset + members[-1].size
    (content,) = file.pieces([(start, stop - start)])
    return [content[member.offset - start : member.offset - start + member.size] for member in members]


# --- the index ----------------------------------------------------------------------------------------------------


def _indexed(file: StoredFile) -> Shard:
    text = cached("tar-shards", repr(file.identity), lambda: json.dumps(_index(file)))
    samples: list[tuple[str, list[Member]]] = json.loads(text)
    every = [Member(*member) for _, members in samples for member in members]
    extensions = tuple(dict.fromkeys(member.extension for member in every))
    number = {extension: i for i, extension in enumerate(extensions)}
    return Shard(
        file,
        keys=np.array([key.encode(errors=_NOT_UTF8) for key, _ in samples] or [b""], np.bytes_)[
            : len(samples)
        ],
        firsts=np.cumsum([0, *(len(members) for _, members in samples)]),
        extensions=extensions,
        members=np.array(
            [(number[entry.extension], entry.offset, entry.size) for entry in every], np.int64
        ).reshape(-1, 3),
    )


def _index(file: StoredFile) -> list[tuple[str, list[Member]]]:
    """The samples of a shard: key and members. DataError with the name of what is no whole tar file, or has a member twice."""
    samples: list[tuple[str, list[Member]]] = []
    for name, offset, size in retried(lambda: list(_members(file)), repr(file.shown)):
        key, extension = _split(name)
        if not samples or samples[-1][0] != key:
            samples.append((key, []))
        members = samples[-1][1]
        if any(extension == member.extension for member in members):
            raise problems.MEMBER_TWICE(file=file.shown, name=name)
        members.append(Member(extension, offset, size))
    return samples


def _members(file: StoredFile) -> Iterator[tuple[str, int, int]]:
    """Name, offset and size of each file in a tar file; only the headers are read."""
    try:
        with (
            file.location.open(file.path) as stored,
            tarfile.open(fileobj=_Source(stored, file.size), mode="r:") as tar,
        ):
            for member in tar:
                if member.isfile() and not _ignored(member.name):
                    if member.issparse():
                        raise problems.SPARSE_MEMBER(name=member.name, file=file.shown)
                    yield member.name, member.offset_data, member.size
            ended = tar.offset + BLOCK <= file.size and not any(stored.read_at(BLOCK, tar.offset))
    except (tarfile.TarError, EOFError) as error:
        raise _no_tar(file, one_line(error)) from error
    if not ended:
        raise _no_tar(file, "it has no end mark")


def _no_tar(file: StoredFile, reason: str) -> DataError:
    return problems.NO_TAR(file=file.shown, got=reason)


class _Source(io.RawIOBase):
    """A stored file as tarfile reads it: a header here and there."""

    def __init__(self, stored: Any, size: int) -> None:
        self._stored, self._size, self._at = stored, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        count = self._size - self._at if size is None or size < 0 else min(size, self._size - self._at)
        content: bytes = self._stored.read_at(count, self._at) if count > 0 else b""
        self._at += len(content)
        return content


def _split(name: str) -> tuple[str, str]:
    """`a/b.tar-1/c.seg.png` is the key `a/b.tar-1/c` and the extension `seg.png`, in small letters."""
    path = PurePosixPath(name)
    stem, _, extension = path.name.partition(".")
    return str(path.with_name(stem)) if stem else str(path), extension.lower()


def _ignored(name: str) -> bool:
    return PurePosixPath(name).name.startswith((".", "_"))
