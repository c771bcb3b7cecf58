"""Reads checkpoints: newest first, verified while they are read, skipped where they are not whole.

No content is returned before the hash of its whole file has been compared; nothing that is read can run code.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from lockstep.checkpoint import layout, problems
from lockstep.checkpoint.errors import BadCheckpointError, LostFileError, OtherFormatError
from lockstep.checkpoint.manifest import FileEntry, Manifest, SharedFile
from lockstep.checkpoint.runs.run_folder import RunFolder
from lockstep.checkpoint.storage.interface import PIECE, Reading, Storage
from lockstep.checkpoint.storage.opening import open_storage
from lockstep.checkpoint.tree_decoder import seen_otherwise, unpack
from lockstep.errors import StorageError
from lockstep.parsing import strict_json

if TYPE_CHECKING:
    from lockstep.checkpoint.tensor_file import TensorLocation
    from lockstep.checkpoint.tree import Tree

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A folder with a manifest. Whether it is good shows only when it is read."""

    storage: Storage
    folder: str
    run_id: str | None = None
    step: int | None = None
    name: str = layout.MANIFEST
    """The name of the manifest."""

    @classmethod
    def of(cls, run: RunFolder, step: int, name: str = layout.MANIFEST) -> Checkpoint:
        """The checkpoint of a run after `step`, whether or not it exists."""
        return cls(run.storage, run.path(layout.step_folder(step)), run.run_id, step, name)

    @property
    def shown(self) -> str:
        """The folder, for a person."""
        return f"{self.storage.shown.rstrip('/')}/{self.folder}".rstrip("/")

    def exists(self) -> bool:
        """Whether there is a manifest."""
        return self.storage.exists(self.path(self.name))

    def manifest(self) -> Manifest:
        """The manifest. BadCheckpointError where it cannot be used, or is of another run or step."""
        try:
            manifest = Manifest.decode(self.storage.read(self.path(self.name)))
        except LostFileError as error:
            raise self.bad(self.name, "it is missing") from error
        except OtherFormatError as error:
            raise error.with_message(f"checkpoint {self.shown}: {self.name}: {error}") from error
        except BadCheckpointError as error:
            raise self.bad(self.name, error) from error
        for field, expected, got in (("run", self.run_id, manifest.run), ("step", self.step, manifest.step)):
            if expected is not None and got != expected:
                raise self.bad(
                    self.name, f"it belongs to {field} {got}, but is in the place of {field} {expected}"
                )
        return manifest

    def path(self, name: str) -> str:
        """The path of a file within the storage."""
        return f"{self.folder}/{name}" if self.folder else name

    @property
    def shared_folder(self) -> str:
        """The folder of the files that it shares: beside the run's checkpoints, or in its own folder if it stands alone."""
        return self.folder if self.run_id is None else f"{self.run_id}/{layout.SHARED}"

    def bad(self, name: str, why: object) -> BadCheckpointError:
        return problems.DAMAGED(checkpoint=self.shown, file=name, got=why)


class Loaded(NamedTuple):
    """A verified checkpoint's content: each section a tree or a block of bytes."""

    checkpoint: Checkpoint
    manifest: Manifest
    sections: dict[str, Tree | bytes]


def checkpoint_at(uri: str) -> Checkpoint:
    """The checkpoint in a folder that stands alone, such as one downloaded from a record; of any run and step."""
    storage = open_storage(uri)
    names = layout.manifests(item.name for item in storage.list(""))
    return Checkpoint(storage, "", name=next(iter(names), layout.MANIFEST))


def checkpoints(run: RunFolder) -> list[Checkpoint]:
    """Every checkpoint of the run, unverified: newest step first, and within a step the newest attempt first."""
    return [Checkpoint.of(run, step, name) for step, names in listed(run) for name in layout.manifests(names)]


def checkpoints_of(run: RunFolder, step: int) -> list[Checkpoint]:
    """The checkpoints of one step: in an object store an older attempt's may be beside the one that replaced it."""
    names = [item.name for item in run.storage.list(run.path(layout.step_folder(step)))]
    return [Checkpoint.of(run, step, name) for name in layout.manifests(names)]


def listed(run: RunFolder) -> list[tuple[int, dict[str, int]]]:
    """Each step that has a folder, newest first, with the names and sizes of its files. It lists all of them in one go."""
    folders = [
        (step, {item.name: item.size for item in items})
        for folder, items in run.storage.tree(run.run_id).items()
        if (step := layout.step_of(folder)) is not None
    ]
    return sorted(folders, key=lambda folder: -folder[0])


class ByRows(NamedTuple):
    """How several ranks load a checkpoint together, each only the rows that it needs: the tensors of these sections stay in their files."""

    sections: Collection[str]
    storage: Storage
    """Where this rank reads."""
    verified: Callable[[Checkpoint, Sequence[FileEntry]], Sequence[Mapping[str, TensorLocation]]]
    """Verifies files, shared out over the ranks, and says where the tensors of each lie. Raises the same error on every rank."""


def load_step(run: RunFolder, step: int, by_rows: ByRows | None = None) -> Loaded:
    """The content of the checkpoint of `step`. BadCheckpointError where there is none that is whole."""
    failed: StorageError | None = None
    for checkpoint in checkpoints_of(run, step) or [Checkpoint.of(run, step)]:
        try:
            return load(checkpoint, by_rows=by_rows)
        except (BadCheckpointError, LostFileError) as error:
            failed = failed or error
    assert failed is not None
    raise failed


def verify(checkpoint: Checkpoint, *, hashes: bool = True, shared: bool = True) -> Manifest:
    """The manifest of a checkpoint whose files are all there, with the right sizes and hashes.

    BadCheckpointError names the first file that is wrong, and how. Without `hashes` only sizes are compared; without
    `shared` the files that it shares are not checked.
    """
    manifest = checkpoint.manifest()
    check_sizes(checkpoint, manifest.files, _sizes(checkpoint))
    for entry in manifest.files if hashes else ():
        _read(checkpoint, entry, lambda file: file.finish())
    if shared and manifest.shared:
        check_sizes(checkpoint, manifest.shared, _sizes_of_shared(checkpoint))
    for shared_file in manifest.shared if hashes and shared else ():
        _read(checkpoint, shared_file, lambda file: file.finish())
    return manifest


def load(
    checkpoint: Checkpoint, only: Collection[str] | None = None, by_rows: ByRows | None = None
) -> Loaded:
    """Read a checkpoint, or `only` some of its sections, in one pass that also verifies each file.

    With `by_rows`, large tensors of its sections are `StoredTensor`s, once the ranks have verified their files. BadCheckpointError names the first file
    that is wrong, and how.
    """
    from lockstep.checkpoint.tensor_file import read_tensors  # imports torch, which the recorder does without

    manifest = checkpoint.manifest()
    entries = [entry for entry in manifest.files if only is None or entry.section in only]
    check_sizes(checkpoint, entries, _sizes(checkpoint))
    tensors: dict[str, dict[str, Any]] = {}
    skeletons: dict[str, tuple[FileEntry, Any]] = {}
    sections: dict[str, Tree | bytes] = {}
    in_files = [
        entry
        for entry in entries
        if by_rows and entry.kind == "tensors" and entry.section in by_rows.sections
    ]
    for entry in entries:
        if entry in in_files:
            continue
        if entry.kind == "tensors":
            file_tensors = _read(checkpoint, entry, lambda file: read_tensors(file.fill, file.entry.size))
            tensors.setdefault(entry.section, {}).update(file_tensors)
        elif entry.kind == "tree":
            skeletons[entry.section] = entry, _read(checkpoint, entry, _skeleton)
        else:
            sections[entry.section] = _read(checkpoint, entry, lambda file: bytes(file.all()))
    if by_rows is not None:
        for entry, locations in zip(in_files, by_rows.verified(checkpoint, in_files), strict=True):
            whole = seen_otherwise(skeletons[entry.section][1]) if entry.section in skeletons else set()
            stored = _in_file(by_rows.storage, checkpoint.path(entry.name), locations, whole)
            tensors.setdefault(entry.section, {}).update(stored)
    for section, (entry, skeleton) in skeletons.items():
        try:
            sections[section] = unpack(skeleton, tensors.get(section, {}))
        except BadCheckpointError as error:
            raise checkpoint.bad(entry.name, error) from error
    return Loaded(checkpoint, manifest, sections)


def locations_in(checkpoint: Checkpoint, entry: FileEntry) -> dict[str, TensorLocation]:
    """Where the tensors of a file lie in it, once all of it has been read and has the right hash. It needs no memory for them."""
    from lockstep.checkpoint.tensor_file import read_locations

    return _read(checkpoint, entry, lambda file: read_locations(file.fill, file.entry.size))


SMALL_TENSOR = 1 << 16
"""Bytes of a tensor that is not left in its file: a request for it would cost more than its memory."""


def _in_file(
    storage: Storage, path: str, locations: Mapping[str, TensorLocation], whole: Collection[str]
) -> dict[str, Any]:
    """The tensors of a file, of which the large ones stay there. Small ones that are neighbours are read in one request."""
    import torch

    from lockstep.checkpoint.stored_tensor import StoredTensor
    from lockstep.checkpoint.tree import DTYPES

    def reading(start: int) -> Callable[[int, memoryview], None]:
        return lambda at, buffer: storage.fill(path, start + at, buffer)

    stored = {
        name: StoredTensor(DTYPES[location.dtype], torch.Size(location.shape), reading(location.start))
        for name, location in locations.items()
    }
    result: dict[str, Any] = {**stored, **{name: stored[name].whole() for name in whole if name in stored}}
    run: list[tuple[str, TensorLocation]] = []

    def read_run() -> None:
        if run:
            first = run[0][1].start
            content = bytearray(run[-1][1].start + run[-1][1].nbytes - first)
            storage.fill(path, first, memoryview(content))
            for name, (_, _, start, nbytes) in run:
                part = memoryview(content)[start - first : start - first + nbytes]
                result[name] = stored[name].of_bytes(part)
        run.clear()

    for name, location in sorted(locations.items(), key=lambda item: item[1].start):
        if location.nbytes > SMALL_TENSOR:
            read_run()
        elif name not in whole:
            run.append((name, location))
    read_run()
    return result


def shared_files(loaded: Loaded, warn: Callable[[str], None]) -> Iterator[bytes]:
    """The files that a checkpoint shares, verified as they are read. A damaged one is reported to `warn` and skipped.

    No state depends on them. So a damaged one does not spoil the checkpoint: all later checkpoints would be spoilt as well.
    """
    for entry in loaded.manifest.shared:
        try:
            yield _read(loaded.checkpoint, entry, lambda file: bytes(file.all()))
        except (BadCheckpointError, LostFileError) as error:
            warn(f"{error}; the record has its steps, or is not whole")


def load_newest(run: RunFolder, warn: Callable[[str], None], by_rows: ByRows | None = None) -> Loaded | None:
    """The content of the newest checkpoint that is whole, read only once; None where there is none.

    Each skipped one is reported to `warn`, with the bad file and what is wrong with it. Any other
    StorageError is raised: a store that cannot be reached is no reason to start from an older state.
    """
    for step in run.steps():  # one at a time: of thousands, the first is nearly always good
        for checkpoint in checkpoints_of(run, step):
            try:
                return load(checkpoint, by_rows=by_rows)
            except (BadCheckpointError, LostFileError) as error:
                warn(f"{error}; this checkpoint is passed over")
    return None


def _sizes(checkpoint: Checkpoint) -> dict[str, int]:
    return {item.name: item.size for item in checkpoint.storage.list(checkpoint.folder)}


def _sizes_of_shared(checkpoint: Checkpoint) -> dict[str, int]:
    return {item.name: item.size for item in checkpoint.storage.list(checkpoint.shared_folder)}


def check_sizes(
    checkpoint: Checkpoint, entries: Iterable[FileEntry | SharedFile], sizes: Mapping[str, int]
) -> None:
    """BadCheckpointError for the first file that is missing from `sizes`, or has another size there."""
    for entry in entries:
        if entry.name not in sizes:
            raise checkpoint.bad(entry.name, "it is missing")
        if sizes[entry.name] != entry.size:
            raise checkpoint.bad(
                entry.name, f"it has {sizes[entry.name]} bytes, and its manifest says {entry.size}"
            )


def _read(checkpoint: Checkpoint, entry: FileEntry | SharedFile, content: Callable[[_Verified], T]) -> T:
    """The result of `content` for a file, once all of it has been read and has the right hash."""
    try:
        with checkpoint.storage.open(_path(checkpoint, entry)) as reading:
            file = _Verified(reading, entry)
            try:
                result = content(file)
            except BadCheckpointError:
                file.finish()  # a wrong hash is the cause, so report that instead
                raise
            file.finish()
            return result
    except BadCheckpointError as error:
        raise checkpoint.bad(entry.name, error) from error


def _path(checkpoint: Checkpoint, entry: FileEntry | SharedFile) -> str:
    if isinstance(entry, FileEntry):
        return checkpoint.path(entry.name)
    return f"{checkpoint.shared_folder}/{entry.name}".lstrip("/")


def _skeleton(file: _Verified) -> Any:
    try:
        return strict_json(file.all(), most=file.entry.size)
    except ValueError as error:
        raise problems.UNREADABLE(wanted="skeleton of its tensors", got=error) from error


class _Verified:
    """A file that is hashed as it is read."""

    def __init__(self, reading: Reading, entry: FileEntry | SharedFile) -> None:
        self.entry = entry
        self._reading = reading
        self._digest = hashlib.sha256()
        self._remaining = entry.size

    def fill(self, buffer: memoryview) -> None:
        """Fill the buffer with the bytes that follow. BadCheckpointError where there are too few."""
        while buffer:
            got = self._reading.readinto(buffer[:PIECE]) or 0
            if not got:
                raise problems.OTHER_CONTENT(got=f"it ends {self._remaining} bytes too early")
            self._digest.update(buffer[:got])
            self._remaining -= got
            buffer = buffer[got:]

    def all(self) -> bytearray:
        """The whole file."""
        content = bytearray(self.entry.size)
        self.fill(memoryview(content))
        return content

    def finish(self) -> None:
        """Read what is left and compare the hash. BadCheckpointError where it differs."""
        piece = memoryview(bytearray(min(self._remaining, PIECE)))
        while self._remaining > 0:
            self.fill(piece[: self._remaining])
        if self._digest.hexdigest() != self.entry.sha256:
            raise problems.OTHER_CONTENT(got="its hash is not the one in its manifest")
