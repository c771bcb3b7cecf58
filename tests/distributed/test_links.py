"""Small messages past gloo: each comes whole and in order, and who waits for one is told of a lost rank."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lockstep.communication import group as group_module
from lockstep.communication import links
from lockstep.communication.gloo_sockets import connected, shut, still_open
from lockstep.communication.group import Group
from lockstep.communication.links import DIRECT_BYTES, Links, linked
from tests.distributed.pool import Pool


@pytest.fixture
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[Links, Links]]:
    """Ranks 0 and 1 of a group of two; a parameter is how many bytes the system shall keep of what is on its way.

    Less than a segment (64 KiB on loopback) makes TCP wait for its persist timer, minutes in all.
    """
    kept = getattr(request, "param", None)
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        other, _ = server.accept()
    for opened in (one, other):
        opened.setblocking(False)
        for buffer in (socket.SO_SNDBUF, socket.SO_RCVBUF) if kept else ():
            opened.setsockopt(socket.SOL_SOCKET, buffer, kept)
    both = Links({1: one}, 2.0), Links({0: other}, 2.0)
    yield both
    for each in both:
        each.close()


def both(*calls: Callable[[], object]) -> list[object]:
    with ThreadPoolExecutor(len(calls)) as threads:
        return [future.result() for future in [threads.submit(call) for call in calls]]


@pytest.mark.parametrize("pair", [None, 1 << 16], indirect=True)
def test_messages_come_whole_and_in_order(pair: tuple[Links, Links]) -> None:
    """Also those of more than a connection takes at once, which both send before they read, and of nothing."""
    sizes = (3, 1 << 20, 0, 7)

    def swaps(rank: int) -> list[torch.Tensor]:
        own = [torch.full((size + rank * (size > 0),), float(10 * rank + size)) for size in sizes]
        received = [torch.zeros(size + (1 - rank) * (size > 0)) for size in sizes]
        waits = [
            pair[rank].pass_on([(1 - rank, message)], [(1 - rank, into)])
            for message, into in zip(own, received, strict=True)
        ]
        for wait in reversed(waits):  # the last one waits for those before it
            wait()
        return received

    for rank, received in enumerate(both(lambda: swaps(0), lambda: swaps(1))):
        for size, message in zip(sizes, received, strict=True):  # type: ignore[call-overload]
            assert torch.equal(
                message, torch.full((size + (1 - rank) * (size > 0),), float(10 * (1 - rank) + size))
            )


@pytest.mark.parametrize("how", ["before", "in the middle"])
def test_a_rank_that_is_lost_is_told_at_once(pair: tuple[Links, Links], how: str) -> None:
    """By its closed connection: the time that a rank has runs out with another error."""
    if how == "in the middle":
        pair[1].pass_on([(0, torch.zeros(5))], [])
    wait = pair[0].pass_on([(1, torch.zeros(0))], [(1, torch.zeros(10))])
    threading.Timer(0.2, pair[1].close).start()
    with pytest.raises(RuntimeError, match="connection closed by peer: rank 1"):
        wait()


def test_a_connection_that_is_shut_from_another_thread_ends_the_wait(pair: tuple[Links, Links]) -> None:
    ends = pair[0].ends
    assert {fd: connected()[fd] for fd in ends} == ends
    wait = pair[0].pass_on([(1, torch.zeros(1))], [(1, torch.zeros(1))])
    threading.Timer(0.2, shut, [ends]).start()
    with pytest.raises(RuntimeError, match="connection closed by peer"):
        wait()


def test_a_rank_that_says_nothing_is_waited_for_so_long(pair: tuple[Links, Links]) -> None:
    looked: list[None] = []
    pair[0].look = lambda: looked.append(None)
    wait = pair[0].pass_on([(1, torch.zeros(1))], [(1, torch.zeros(1))])
    with pytest.raises(RuntimeError, match=r"timed out waiting 2000 ms for recv operation with ranks 1"):
        wait()
    assert len(looked) > 5

    def broken_off() -> None:
        raise RuntimeError("the group was broken off")

    pair[0].look = broken_off
    with pytest.raises(RuntimeError, match="the group was broken off"):
        wait()


def test_a_forked_process_closes_nothing_that_it_may_not_have(pair: tuple[Links, Links]) -> None:
    """It may have another file by the number of a connection that it let go of."""
    read, write = os.pipe()
    if not (pid := os.fork()):
        fd = next(iter(pair[0].ends))
        os.dup2(write, fd)
        pair[0].close()
        os.write(fd, b"there")
        os._exit(0)
    os.close(write)
    assert os.read(read, 9) == b"there"
    os.close(read)
    os.waitpid(pid, 0)


def grouped(size: int, hosts: dict[int, str], meanwhile: Callable[[Any], None]) -> list[Links | None]:
    """What `linked` gives each rank of a group that is threads of this process; `meanwhile` sees what rank 0 has gathered."""
    values: dict[int, Any] = {}
    barrier = threading.Barrier(size)

    def of(rank: int) -> Links | None:
        def gather(value: Any) -> list[Any]:
            values[rank] = value
            barrier.wait(30)
            every = [values[r] for r in range(size)]
            if rank == 0 and isinstance(value, tuple):
                meanwhile(value)
            barrier.wait(30)
            return every

        return linked(rank, size, hosts.get(rank, "127.0.0.1"), gather, 30.0)

    return both(*[lambda rank=rank: of(rank) for rank in range(size)])  # type: ignore[misc, return-value]


def test_a_stranger_that_connects_is_none_of_the_ranks() -> None:
    def strangers(address: tuple[str, int, bytes]) -> None:
        silent, wrong = (socket.create_connection(address[:2]) for _ in range(2))
        wrong.sendall(bytes(16) + (1).to_bytes(2))
        opened.extend([silent, wrong])

    opened: list[socket.socket] = []
    found = grouped(3, {}, strangers)
    received = [torch.zeros(3, dtype=torch.int64) for _ in found]

    def swap(rank: int) -> None:
        link = found[rank]
        assert link is not None
        received[rank][rank] = rank
        others = [other for other in range(3) if other != rank]
        incoming = [(other, received[rank][other : other + 1]) for other in others]
        link.pass_on([(other, torch.tensor([rank])) for other in others], incoming)()

    both(*[lambda rank=rank: swap(rank) for rank in range(3)])  # type: ignore[misc]
    assert [each.tolist() for each in received] == [[0, 1, 2]] * 3
    for each in [*found, *opened]:
        assert each is not None
        each.close()


def test_where_one_rank_cannot_connect_none_has_links(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "CONNECT_S", 0.5)
    assert grouped(3, {1: "192.0.2.1"}, lambda _: None) == [None] * 3
    assert linked(0, links.MOST_RANKS + 1, "127.0.0.1", list, 30.0) is None


def left_at_once() -> str:
    """What rank 1, slow to form the group, is told of rank 0, which has formed it and left before that."""
    real = group_module.linked

    def slowly(*args: Any) -> Links | None:
        found = real(*args)
        time.sleep(0.5)  # gloo closes its end meanwhile
        return found

    if dist.get_rank() == 0:
        Group.join(torch.device("cpu")).close()
        return ""
    group_module.linked = slowly  # type: ignore[assignment]
    try:
        group = Group.join(torch.device("cpu"))
    finally:
        group_module.linked = real
    assert group.can_abort
    assert set(group.inodes) == set(group.sockets)
    assert not set(still_open(group.inodes)) & (group.sockets.keys() - group.links.ends.keys())  # type: ignore[union-attr]
    try:
        group.gather(1)
    except RuntimeError as error:
        group.abort()
        return str(error)
    return "nothing"


def test_a_rank_that_leaves_while_another_forms_the_group_is_lost(pool: Pool) -> None:
    """It had ended the other one with an error about a file descriptor, which stood for a mistake of the job's."""
    assert "connection closed by peer" in pool.run(2, left_at_once)[1].lower()


def swapped(sizes: list[int], past_gloo: bool) -> list[list[float]]:
    """What a rank receives of messages of so many numbers, each rank's of its own length and values, and of what the last one gives to all."""
    group = Group.join(torch.device("cpu"))
    if group.size > 1:
        assert group.links is not None
    if not past_gloo:
        group = replace(group, links=None)
    found = []
    for size in sizes:
        lengths = [size + rank for rank in range(group.size)]
        largest, own = max(lengths), torch.arange(lengths[group.rank]) + 0.5 * group.rank
        lengths[group.rank] = 0
        received, wait = group.swap(own, lengths, largest)
        wait()
        found.append(received.tolist())
        given = torch.arange(2 * size).view(2, size) + 0.5 * group.rank
        group.broadcast(given, source=group.size - 1)
        found.append(given.view(-1).tolist())
    return found


@pytest.mark.every(2)
@pytest.mark.parametrize("workers", [2, 3])
def test_both_ways_bring_the_same(pool: Pool, workers: int) -> None:
    sizes = [1, 5, DIRECT_BYTES // 4 + 1, 2]  # the third is a large one
    ours = pool.run(workers, swapped, sizes, True)
    assert ours == pool.run(workers, swapped, sizes, False)
    first = [number + 0.5 * rank for rank in range(1, workers) for number in range(1 + rank)]
    assert ours[0][:2] == [first, [0.5 * (workers - 1), 1 + 0.5 * (workers - 1)]]
