"""G5: every file of a checkpoint, damaged in every way, is detected, named and passed over; nothing in it is run."""

from __future__ import annotations

import io
import os
import pickle
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lockstep.checkpoint import problems
from lockstep.checkpoint.errors import BadCheckpointError
from lockstep.checkpoint.layout import MANIFEST, step_folder
from lockstep.checkpoint.manifest import FileEntry, Manifest
from lockstep.checkpoint.reader import Checkpoint, _Verified, load, load_newest, verify
from lockstep.checkpoint.runs.run_folder import RunFolder
from lockstep.checkpoint.snapshot import snapshot
from lockstep.checkpoint.storage.interface import hashed
from lockstep.checkpoint.storage.local import LocalStorage
from lockstep.checkpoint.writer import write_part
from tests.raised import raises
from tests.unit.checkpoint.one_process import newest_good, write_checkpoint
from tests.unit.checkpoint.states import FACTS, same, state

FILES = [
    MANIFEST,
    "model.a0001.r0000.safetensors",
    "model.a0001.r0000.json",
    "optimizer.a0001.r0000.safetensors",
    "optimizer.a0001.r0000.json",
    "scaler.a0001.r0000.json",
    "ledger.a0001.r0000.bin",
]


def flipped(content: bytes) -> bytes:
    changed = bytearray(content)
    changed[random.Random(len(content)).randrange(len(content))] ^= 1 << random.Random(0).randrange(8)
    return bytes(changed)


def swapped(content: bytes) -> bytes:
    """Two neighbours that differ, exchanged."""
    i = next(i for i in range(len(content) // 2, len(content)) if content[i] != content[i - 1])
    return content[: i - 1] + bytes([content[i], content[i - 1]]) + content[i + 1 :]


DAMAGES: dict[str, Callable[[bytes], bytes | None]] = {
    "truncated": lambda content: content[: len(content) // 2],
    "one byte short": lambda content: content[:-1],
    "emptied": lambda content: b"",
    "one bit flipped": flipped,
    "first bit flipped": lambda content: bytes([content[0] ^ 1]) + content[1:],
    "last bit flipped": lambda content: content[:-1] + bytes([content[-1] ^ 128]),
    "two bytes swapped": swapped,
    "zeros": lambda content: bytes(len(content)),
    "longer": lambda content: content + b"\n",
    "gone": lambda content: None,
}


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A storage with a run of two checkpoints."""
    folder = tmp_path_factory.mktemp("sound")
    attempt = RunFolder.create(LocalStorage(folder), "run-a").claim()
    for step in (1, 2):
        write_checkpoint(attempt, step, state(step), FACTS)
    return folder


@pytest.fixture
def local(sound: Path, tmp_path: Path) -> RunFolder:
    """A copy of the run, to be damaged."""
    shutil.copytree(sound, tmp_path / "runs")
    return RunFolder.open(LocalStorage(tmp_path / "runs"), "run-a")


@pytest.fixture
def saved(local: RunFolder) -> Path:
    """The folder of the newer of its checkpoints."""
    return Path(local.shown) / step_folder(2)


def test_the_files_are_all_of_them(saved: Path) -> None:
    assert {path.name for path in saved.iterdir()} == set(FILES)


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_is_detected_and_passed_over(
    local: RunFolder, saved: Path, name: str, damage: str
) -> None:
    file = saved / name
    content = DAMAGES[damage](file.read_bytes())
    file.unlink()
    if content is not None:
        file.write_bytes(content)
    told: list[str] = []
    found = load_newest(local, told.append)
    assert found is not None and found.manifest.step == 1
    assert all(same(found.sections[section], value) for section, value in state(1).items())
    assert newest_good(local, told.append) == Checkpoint.of(local, 1)
    if (name, damage) == (MANIFEST, "gone"):
        assert told == []  # without a manifest there is no checkpoint
    else:
        assert len(told) == 2 and all(
            f"step-000000002: {name}: " in line and "\n" not in line for line in told
        )


def test_every_flipped_bit_of_a_tensor_file_is_detected(saved: Path, local: RunFolder) -> None:
    file = saved / "model.a0001.r0000.safetensors"
    content = file.read_bytes()
    for position in range(0, len(content), 7):
        changed = bytearray(content)
        changed[position] ^= 1 << position % 8
        file.write_bytes(changed)
        with raises(problems.DAMAGED, got=re.compile("its hash is not the one in its manifest")):
            load(Checkpoint.of(local, 2))


def test_a_file_that_ends_while_it_is_read_is_told_as_such() -> None:
    entry = FileEntry("ledger.a0001.r0000.bin", "ledger", "bytes", 3, "0" * 64)
    with raises(problems.OTHER_CONTENT, got="it ends 1 bytes too early"):
        _Verified(io.BytesIO(b"12"), entry).all()


class Hostile:
    """Runs code when it is unpickled."""

    def __init__(self, sign: Path) -> None:
        self.sign = sign

    def __reduce__(self) -> tuple[Callable[[str], object], tuple[str]]:
        return os.mkdir, (str(self.sign),)


@pytest.mark.parametrize("form", ["pickle", "torch.save"])
@pytest.mark.parametrize("name", FILES)
def test_a_hostile_pickle_is_refused_and_not_run(
    local: RunFolder, saved: Path, tmp_path: Path, name: str, form: str
) -> None:
    """Also where whoever planted it has made the manifest fit."""
    sign = tmp_path / "it ran"
    if form == "pickle":
        (saved / name).write_bytes(pickle.dumps(Hostile(sign)))
    else:
        torch.save({"state": Hostile(sign)}, saved / name)
    told: list[str] = []
    assert newest_good(local, told.append) == Checkpoint.of(local, 1)
    if name != MANIFEST:
        fit_manifest(saved, name)
    if name.endswith(".bin"):
        found = load(Checkpoint.of(local, 2))  # bytes are handed out as they are
        assert found.sections["ledger"] == (saved / name).read_bytes()
    else:
        with raises(problems.DAMAGED, file=name):
            load(Checkpoint.of(local, 2))
    assert not sign.exists()
    pickle.loads(pickle.dumps(Hostile(sign)))
    assert sign.exists(), "the pickle would have run"


def fit_manifest(folder: Path, name: str) -> None:
    """Give the manifest the size and hash that a file now has, and a hash of its own that fits."""
    found = Manifest.decode((folder / MANIFEST).read_bytes())
    written = hashed([(folder / name).read_bytes()], lambda _: None)
    files = tuple(
        FileEntry(entry.name, entry.section, entry.kind, *written) if entry.name == name else entry
        for entry in found.files
    )
    forged = Manifest(found.run, found.step, found.attempt, found.written_at, files, found.facts)
    (folder / MANIFEST).write_bytes(forged.encode())


def test_a_skeleton_of_other_tensors_is_refused(local: RunFolder, saved: Path) -> None:
    (saved / "model.a0001.r0000.json").write_bytes((saved / "optimizer.a0001.r0000.json").read_bytes())
    fit_manifest(saved, "model.a0001.r0000.json")
    with raises(problems.DAMAGED, file="model.a0001.r0000.json", got=re.compile("tensor .* is missing")):
        load(Checkpoint.of(local, 2))


def test_sizes_alone_are_looked_at_where_that_is_asked_for(local: RunFolder, saved: Path) -> None:
    file = saved / FILES[1]
    file.write_bytes(flipped(file.read_bytes()))
    assert verify(Checkpoint.of(local, 2), hashes=False).step == 2
    with pytest.raises(BadCheckpointError):
        verify(Checkpoint.of(local, 2))


def test_a_bad_manifest_gives_its_place_free(local: RunFolder, saved: Path) -> None:
    """The run trains over the step again and publishes it anew."""
    (saved / MANIFEST).write_bytes(b"")
    attempt = local.attempt(1)
    assert write_part(attempt, 2, snapshot(state(2)))
    write_checkpoint(attempt, 2, state(2))
    assert newest_good(local, pytest.fail) == Checkpoint.of(local, 2)
