"""Writes a checkpoint: every rank writes its part, then one rank publishes the manifest.

Invariants: a file is on the disk, whole and hashed, before a receipt or a manifest names it; the manifest is
written last, and nothing that a published one names is written again; no two attempts or
ranks share a name. A crash at any moment leaves what was published before, and files that nothing names.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from hashlib import sha256
from typing import NamedTuple

from lockstep.checkpoint import layout, problems
from lockstep.checkpoint.layout import FileName
from lockstep.checkpoint.manifest import Facts, FileEntry, Manifest, SharedFile, check_entry
from lockstep.checkpoint.reader import Checkpoint
from lockstep.checkpoint.runs.run_folder import Attempt
from lockstep.checkpoint.snapshot import Snapshot
from lockstep.checkpoint.storage.interface import Item
from lockstep.checkpoint.tensor_file import tensor_pieces
from lockstep.errors import StorageError
from lockstep.parsing import canonical_json, one_line, strict_json

_LONGEST_PAUSE_S = 1.0
_FENCE_EVERY_S = 5.0


class Part(NamedTuple):
    """What one rank has written. `structure` is equal on ranks with equal state."""

    rank: int
    structure: str
    files: list[FileEntry]


def write_part(attempt: Attempt, step: int, copied: Snapshot) -> Part:
    """Write this rank's part of a step and flush each file to the disk. The part counts for nothing until `commit`.

    StaleAttemptError where the attempt is over, TakenError where it has already published this step.
    """
    copied.wait()  # first: what is refused here frees the memory that a GPU copies into
    attempt.ensure_current()
    _refuse_published(attempt, step)
    files = []
    for section, kind, pieces in _files(copied):
        name = FileName(section, attempt.number, copied.rank, kind)
        written = attempt.write((layout.step_folder(step), str(name)), pieces)
        files.append(FileEntry(str(name), section, kind, written.size, written.sha256))
    return Part(copied.rank, copied.structure(), files)


def post_receipt(attempt: Attempt, step: int, part: Part) -> None:
    """Report to the committing rank, through the store, that a part is written."""
    _post(attempt, step, part.rank, {**part._asdict(), "files": [asdict(entry) for entry in part.files]})


def post_failure(attempt: Attempt, step: int, rank: int, reason: str) -> None:
    """Report to the committing rank that a part will not come, so that it need not wait."""
    _post(attempt, step, rank, {"failed": reason})


def gather_parts(
    attempt: Attempt,
    step: int,
    local_part: Part,
    writers: int,
    *,
    timeout_s: float,
    sleep: Callable[[float], object] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> list[Part]:
    """The parts of all writers, once the other ranks have posted their receipts.

    StorageError where a rank reports a failure, holds another state, or is silent for `timeout_s` seconds.
    """
    missing = set(range(writers)) - {local_part.rank}
    parts, pause_s, began = {local_part.rank: local_part}, 0.01, clock()
    fence_at = began + _FENCE_EVERY_S
    while missing:
        for rank in sorted(missing):
            if (part := _receipt(attempt, step, rank)) is not None:
                parts[rank] = part
                missing.discard(rank)
        waited_s = clock() - began
        if missing and waited_s >= timeout_s:
            raise problems.SILENT_RANKS(ranks=sorted(missing), step=step, waited_s=f"{waited_s:.0f}")
        if missing:
            if clock() >= fence_at:
                attempt.ensure_current()
                fence_at = clock() + _FENCE_EVERY_S
            sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
    strays = [rank for rank, part in sorted(parts.items()) if part.structure != local_part.structure]
    if strays:
        raise problems.OTHER_STATE(ranks=strays, step=step, rank=local_part.rank)
    return [parts[rank] for rank in sorted(parts)]


def share(attempt: Attempt, name: str, content: bytes) -> SharedFile:
    """Write a file that checkpoints of the run share. Its name contains its hash, so an existing file of that name is the same.

    In an object store it is left as it is: a write that failed half-way would take it from the checkpoints that name it.
    """
    storage, folder = attempt.run.storage, attempt.run.path(layout.SHARED)
    if not storage.fences and Item(name, False, len(content)) in storage.list(folder):
        return SharedFile(name, len(content), sha256(content).hexdigest())
    written = attempt.write((layout.SHARED, name), [content])
    return SharedFile(name, written.size, written.sha256)


def commit(
    attempt: Attempt, step: int, parts: Iterable[Part], facts: Facts, shared: Iterable[SharedFile] = ()
) -> Checkpoint:
    """Publish a step whose parts and shared files are all written: from here on the checkpoint exists.

    StaleAttemptError where the attempt is over. Files in the step's folder that this makes useless are deleted.
    """
    files = tuple(entry for part in parts for entry in part.files)
    folder = layout.step_folder(step)
    sizes = {item.name: item.size for item in attempt.run.storage.list(attempt.run.path(folder))}
    for entry in files:
        if sizes.get(entry.name) != entry.size:
            raise problems.FILE_CHANGED(
                file=entry.name, step=step, got=sizes.get(entry.name, "none"), wanted=entry.size
            )
    manifest = Manifest(attempt.run.run_id, step, attempt.number, time.time(), files, facts, tuple(shared))
    attempt.publish((folder, attempt.manifest), manifest.encode())
    with suppress(StorageError):  # the step is published; anything left is cleared with the leftovers
        for name in layout.manifests(sizes):  # before the files that they name
            if name != attempt.manifest:
                attempt.withdraw((folder, name))
        for name in _replaced(attempt.number, sizes, files):
            attempt.discard((folder, name))
    return Checkpoint.of(attempt.run, step, attempt.manifest)


def _files(copied: Snapshot) -> Iterator[tuple[str, str, Iterable[bytes | memoryview]]]:
    """Section, kind and bytes of each file of this rank's part. Rank 0 has the skeletons and blocks."""
    for section, tensors in copied.tensors.items():
        yield section, "tensors", tensor_pieces(tensors)
    if copied.rank == 0:
        for section, skeleton in copied.trees.items():
            yield section, "tree", [canonical_json(skeleton)]
        for section, block in copied.blocks.items():
            yield section, "bytes", [block() if callable(block) else block]


def _replaced(number: int, names: Iterable[str], files: Iterable[FileEntry]) -> list[str]:
    """Receipts, which are no longer needed, and the files of an older attempt's checkpoint of this step."""
    parsed = [(name, layout.file_name(name)) for name in set(names) - {entry.name for entry in files}]
    return [
        name for name, parts in parsed if parts and (parts.kind == layout.RECEIPT or parts.attempt < number)
    ]


def _refuse_published(attempt: Attempt, step: int) -> None:
    checkpoint = Checkpoint.of(attempt.run, step, attempt.manifest)
    try:
        published = checkpoint.manifest()
    except StorageError:
        return  # none, or a useless one: its place is free
    if published.attempt == attempt.number:
        raise problems.TAKEN(path=checkpoint.path(attempt.manifest))


def _post(attempt: Attempt, step: int, rank: int, content: Mapping[str, object]) -> None:
    attempt.write(_receipt_path(attempt, step, rank), [canonical_json(content)])


def _receipt_path(attempt: Attempt, step: int, rank: int) -> tuple[str, str]:
    return layout.step_folder(step), str(FileName(layout.RECEIPT, attempt.number, rank, layout.RECEIPT))


def _receipt(attempt: Attempt, step: int, rank: int) -> Part | None:
    """A rank's part, or None until it has posted one. StorageError where it reports a failure."""
    path = _receipt_path(attempt, step, rank)
    try:
        text = attempt.run.storage.read(attempt.run.path(*path))
    except StorageError:
        return None  # not there yet, or unreadable just now: the caller asks again
    try:
        content = strict_json(text)
        if "failed" not in content:
            files = [FileEntry(**entry) for entry in content["files"]]
            for entry in files:
                check_entry(entry)
            return Part(rank, content["structure"], files)
    except (KeyError, TypeError, ValueError) as error:
        raise problems.RECEIPT(rank=rank, got=one_line(error)) from error
    raise problems.PART_FAILED(rank=rank, step=step, got=content["failed"])
