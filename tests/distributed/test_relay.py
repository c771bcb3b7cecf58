"""One rank reads a checkpoint and hands it on: the store sees one reader, and all ranks find the same, or meet the same error (G1, G5)."""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import struct
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.checkpoint.layout import MANIFEST, step_folder
from lockstep.checkpoint.reader import listed
from lockstep.checkpoint.runs.run_folder import RunFolder
from lockstep.checkpoint.storage.interface import Reading, Storage
from lockstep.checkpoint.storage.opening import open_storage
from lockstep.communication.group import Group
from lockstep.errors import ClusterError, DriftError, LockstepError, SpecError
from lockstep.training import problems, read_relay, start
from lockstep.training.failure import as_lockstep_error
from lockstep.training.integrity.state_digest import weights_digest
from lockstep.training.read_relay import Relay
from lockstep.training.stored_weights import load_weights
from lockstep.training.weights import save_weights
from tests.distributed.pool import Pool
from tests.forked import forking
from tests.network import WIRE, can_simulate, enter, sent_bytes, switched
from tests.raised import raises
from tests.unit.checkpoint.conftest import s3  # noqa: F401
from tests.unit.checkpoint.one_process import write_checkpoint
from tests.unit.checkpoint.states import FACTS, state
from tests.unit.checkpoint.test_damage import DAMAGES, FILES

RUN = "run-a"

SMALL = 1000
"""Bytes of a piece here, so that a file has several."""


class Counted:
    """A storage that counts the bytes which are read from it."""

    def __init__(self, storage: Storage) -> None:
        self.storage, self.bytes, self.requests = storage, 0, 0

    def __getattr__(self, name: str) -> Any:
        self.requests += name in {"list", "tree", "exists"}
        return getattr(self.storage, name)

    def read(self, path: str) -> bytes:
        content = self.storage.read(path)
        self.requests, self.bytes = self.requests + 1, self.bytes + len(content)
        return content

    @contextmanager
    def open(self, path: str) -> Iterator[Reading]:
        self.requests += 1
        with self.storage.open(path) as reading:
            yield CountedReading(reading, self)


class CountedReading:
    def __init__(self, reading: Reading, counted: Counted) -> None:
        self._reading, self._counted = reading, counted

    def readinto(self, buffer: memoryview, /) -> int | None:
        got = self._reading.readinto(buffer)
        self._counted.bytes += got or 0
        return got


Found = tuple[Any, ...]


def told(value: Any) -> Any:
    """A tree as text and hashes that differ where any of its bits does."""
    if isinstance(value, Tensor):
        held = value.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        return str(value.dtype), tuple(value.shape), value.stride(), hashlib.sha256(held).hexdigest()
    if isinstance(value, dict):
        return type(value).__name__, [(told(name), told(inner)) for name, inner in value.items()]
    if isinstance(value, list | tuple):
        return type(value).__name__, [told(inner) for inner in value]
    return struct.pack("d", value) if isinstance(value, float) else repr(value)


def found(
    storage: str, step: int | None, piece: int = SMALL, *, is_sharded: bool = False
) -> tuple[Found, tuple[int, int]]:
    """What a rank starts from, or the error it meets, with what it warns of; and what it reads from the store: bytes, requests."""
    stores: list[Counted] = []

    def opened(uri: str) -> Any:
        stores.append(Counted(open_storage(uri)))
        return stores[-1]

    warnings: list[str] = []
    with (
        mock.patch.object(start, "open_storage", opened),
        mock.patch.object(read_relay, "PIECE", piece),
    ):
        try:
            group = Group.join(torch.device("cpu"))
            loaded = start._load(storage, RUN, step, group, warnings.append, is_sharded=is_sharded)
            outcome = (loaded and (loaded.manifest.step, loaded.checkpoint.shown, told(loaded.sections)),)
        except LockstepError as error:
            outcome = (type(error), str(error))
    return (*outcome, warnings), (stores[0].bytes, stores[0].requests)


def each_for_itself(storage: str, step: int | None) -> tuple[Found, tuple[int, int]]:
    """The broken variant: what W ranks did before one of them read for all."""

    def directly(storage: Storage, group: Group) -> AbstractContextManager[Storage]:
        return nullcontext(storage)

    with mock.patch.object(start, "read_once", directly):
        return found(storage, step)


def written(uri: str) -> RunFolder:
    """A run with the checkpoints of two steps."""
    attempt = RunFolder.create(open_storage(uri), RUN).claim()
    for step in (1, 2):
        write_checkpoint(attempt, step, state(step), FACTS)
    return attempt.run


@pytest.fixture(params=["folder", "s3"])
def uri(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "folder":
        return str(tmp_path / "runs")
    return f"s3://key:secret@runs/{uuid.uuid4().hex}?{request.getfixturevalue('s3')}"


@pytest.mark.every(2)
def test_the_store_is_read_once_whatever_the_number_of_workers(pool: Pool, uri: str) -> None:
    run = written(uri)
    files = dict(listed(run))[2]
    alone, once = found(uri, None)
    assert alone[0][0] == 2
    assert once[0] >= sum(files.values())
    for workers in (2, 4):
        ranks = pool.run(workers, found, uri, None)
        assert [what for what, _ in ranks] == [alone] * workers
        assert [read for _, read in ranks] == [once] + [(0, 0)] * (workers - 1)
    control = pool.run(4, each_for_itself, uri, None)
    assert [read for _, read in control] == [once] * 4


def damaged(storage: str, name: str, damage: str) -> None:
    """Step 2's file of that name, damaged."""
    file = Path(storage, RUN, step_folder(2), name)
    content = DAMAGES[damage](file.read_bytes())
    file.unlink()
    if content is not None:
        file.write_bytes(content)


DAMAGED = [("model.a0001.r0000.safetensors", damage) for damage in DAMAGES] + [
    (name, "one bit flipped") for name in FILES
]


@pytest.mark.scenario
@pytest.mark.parametrize("step", [None, pytest.param(2, marks=pytest.mark.exact)])
def test_all_ranks_find_the_same_where_a_file_is_damaged(
    pool: Pool, tmp_path: Path, step: int | None
) -> None:
    """The older checkpoint and the warning of a single worker, or, of the step that was asked for, its error."""
    written(str(tmp_path / "sound"))
    for i, (name, damage) in enumerate(DAMAGED):
        storage = str(shutil.copytree(tmp_path / "sound", tmp_path / str(i)))
        damaged(storage, name, damage)
        alone, once = found(storage, step)
        assert len(alone[-1]) == (step is None) and (step or alone[0][0] == 1), alone
        ranks = pool.run(3, found, storage, step)
        assert [what for what, _ in ranks] == [alone] * 3
        assert [read for _, read in ranks] == [once, (0, 0), (0, 0)]


def found_by_rows(storage: str) -> tuple[Found, int]:
    """The same of a rank that takes only its rows, and the bytes of the files that it reads from beginning to end."""
    what, (nbytes, _) = found(storage, None, is_sharded=True)
    return what, nbytes


@pytest.mark.parametrize("damaged_file", ["", "model", "optimizer"])
def test_ranks_that_take_rows_share_out_the_files_to_verify(
    pool: Pool, tmp_path: Path, damaged_file: str
) -> None:
    """One rank reads each file of tensors, the largest to rank 0; all ranks learn that it is damaged, and pass its checkpoint over."""
    run = written(str(tmp_path))
    if damaged_file:
        damaged(str(tmp_path), f"{damaged_file}.a0001.r0000.safetensors", "one bit flipped")
    alone, (nbytes, _) = found(str(tmp_path), None)
    assert len(alone[-1]) == bool(damaged_file)
    ranks = pool.run(3, found_by_rows, str(tmp_path))
    assert [what for what, _ in ranks] == [alone] * 3
    if not damaged_file:
        files = {name: size for name, size in dict(listed(run))[2].items() if name.endswith(".safetensors")}
        smaller, larger = sorted(files.values())
        assert [read for _, read in ranks] == [nbytes - smaller, smaller, 0] and smaller < larger


def test_all_ranks_tell_that_there_is_nothing(pool: Pool, tmp_path: Path) -> None:
    """Neither a run nor a checkpoint of it."""
    run = written(str(tmp_path))
    for storage, step in ((str(tmp_path / "elsewhere"), None), (str(tmp_path), 3)):
        alone, _ = found(storage, step)
        assert issubclass(alone[0], LockstepError)
        assert [what for what, _ in pool.run(3, found, storage, step)] == [alone] * 3
    for step in (1, 2):
        Path(run.shown, step_folder(step), MANIFEST).unlink()
    assert [what for what, _ in pool.run(3, found, str(tmp_path), None)] == [(None, [])] * 3


def found_where_the_disk_fails(storage: str) -> Found:
    """Rank 0's disk gives back no second piece of a file."""

    class Failing(CountedReading):
        def readinto(self, buffer: memoryview, /) -> int | None:
            if self._counted.bytes > 2 * SMALL:
                raise OSError(5, "Input/output error")
            return super().readinto(buffer)

    with mock.patch(f"{__name__}.CountedReading", Failing):
        return found(storage, None)[0]


def test_a_disk_that_fails_is_told_on_every_rank(pool: Pool, tmp_path: Path) -> None:
    written(str(tmp_path))
    first, *others = pool.run(3, found_where_the_disk_fails, str(tmp_path))
    assert others == [first] * 2
    assert first[0] is None and len(first[-1]) == 2
    assert all("Input/output error; this checkpoint is passed over" in line for line in first[-1])


def found_with_another_byte(storage: str, stray: int) -> Found:
    """One byte of a tensor changes on its way to rank `stray`, or in rank 0's memory once it has handed it on."""
    move, own = Relay.move, dist.get_rank()

    def moved(self: Relay, tensor: Tensor) -> None:
        move(self, tensor)
        if own == stray and len(tensor) == SMALL:
            tensor[7] ^= 1

    with mock.patch.object(Relay, "move", moved):
        return found(storage, None)[0]


@pytest.mark.parametrize("stray", [0, 2])
def test_a_byte_that_changes_on_the_way_is_told(pool: Pool, tmp_path: Path, stray: int) -> None:
    written(str(tmp_path))
    ranks = "1|2|3" if stray == 0 else "2"
    with pytest.raises(DriftError, match=rf"rank ({ranks}) has read other bytes of .* than rank 0") as info:
        pool.run(4, raised, found_with_another_byte, str(tmp_path), stray)
    assert "\n" not in str(info.value)


def raised(function: Callable[..., Found], *args: Any) -> None:
    """Raise what the function met."""
    kind, *more = function(*args)
    if isinstance(kind, type):
        raise kind(more[0])


def found_and_dying(storage: str, rank: int) -> None:
    """Rank number `rank` is killed while it hands on a file."""
    move, own = Relay.move, dist.get_rank()
    pieces = 0

    def moved(self: Relay, tensor: Tensor) -> None:
        nonlocal pieces
        pieces += len(tensor) == SMALL
        if own == rank and pieces == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        move(self, tensor)

    with mock.patch.object(Relay, "move", moved):
        try:
            found(storage, None)
        except Exception as error:
            raise as_lockstep_error(error, f"rank {own}") from error


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_dies_meanwhile_is_a_lost_worker(pool: Pool, tmp_path: Path, rank: int) -> None:
    written(str(tmp_path))
    with pytest.raises(ClusterError, match="cannot be reached"):
        pool.run(4, found_and_dying, str(tmp_path), rank)


# --- initial weights --------------------------------------------------------------------------------------


def net() -> nn.Module:
    made = nn.Sequential(nn.Conv2d(2, 30, 3), nn.BatchNorm2d(30), nn.Conv2d(30, 2, 3))
    made.register_buffer("none", torch.empty(0, 3))
    return made.to(memory_format=torch.channels_last)


def loaded_by_one(path: Path) -> str:
    """The digest of weights, or the error. Only rank 0 can see the file."""
    model, group = net(), Group.join(torch.device("cpu"))
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(read_relay, "PIECE", SMALL))
        if group.rank:
            load = mock.patch("safetensors.torch.load_file", side_effect=AssertionError("read twice"))
            stack.enter_context(load)
        try:
            load_weights(model, str(path), group)
        except SpecError as error:
            return str(error)
    return weights_digest(model.state_dict())


def test_initial_weights_are_read_by_one_rank(pool: Pool, tmp_path: Path) -> None:
    saved = net()
    (path,) = save_weights(tmp_path, {"final": saved.state_dict()})
    assert pool.run(3, loaded_by_one, path) == [weights_digest(saved.state_dict())] * 3
    for content in (path.read_bytes()[:-1], None):
        path.unlink()
        if content:
            path.write_bytes(content)
        with raises(problems.WEIGHTS_UNREADABLE) as info:
            load_weights(net(), str(path))
        assert pool.run(3, loaded_by_one, path) == [str(info.value)] * 3


# --- two machines -----------------------------------------------------------------------------------------

PORT = 29412


def serve(rank: int, name: str, address: str, storage: str, pipe: Any) -> None:
    """One rank on a machine of its own, and what it reads and its machine sends."""
    enter(name)
    os.environ.update(GLOO_SOCKET_IFNAME=WIRE, MASTER_ADDR=address, MASTER_PORT=str(PORT))
    dist.init_process_group("gloo", rank=rank, world_size=4)
    try:
        dist.barrier()
        before = sent_bytes()
        what, read = found(storage, None, read_relay.PIECE)
        dist.barrier()
        pipe.send((what, read, sent_bytes() - before))
    finally:
        dist.destroy_process_group()


@pytest.mark.exact
def test_two_machines_read_once_and_the_network_carries_it_once(tmp_path: Path) -> None:
    """Two ranks on each of two network namespaces: the store gives one checkpoint, and so does the wire between them."""
    why_not = can_simulate(slow=True)
    if why_not is not None:
        pytest.skip(why_not)
    attempt = RunFolder.create(open_storage(str(tmp_path)), RUN).claim()
    write_checkpoint(attempt, 1, {**state(1), "model": {"w": torch.arange(5_000_000.0)}}, FACTS)
    size = sum(dict(listed(attempt.run))[1].values())
    alone, once = found(str(tmp_path), None)
    with switched(2, 1000) as machines:
        ranks, pipes = [], []
        try:
            for rank in range(4):
                here, there = forking().Pipe()
                (name, _), address = machines[rank // 2], machines[0][1]
                process = forking().Process(target=serve, args=(rank, name, address, str(tmp_path), there))
                process.start()
                there.close()
                ranks.append(process)
                pipes.append(here)
            answers = [pipe.recv() for pipe in pipes]
        finally:
            for process in ranks:
                process.join(10)
                process.kill()
    assert [what for what, _, _ in answers] == [alone] * 4
    assert [read for _, read, _ in answers] == [once, (0, 0), (0, 0), (0, 0)]
    assert size < answers[0][2] < 1.05 * size
    assert answers[2][2] < 0.05 * size
