"""What gloo does not tell of a rank that is lost in the middle of a message, and that nobody waits for it all the same."""

from __future__ import annotations

import os
import signal
import socket
import tempfile
import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lockstep.communication.gloo_sockets import still_open
from lockstep.communication.group import Group
from lockstep.communication.waits import Waits
from tests.forked import forking

NUMBERS = 1 << 24
"""So much that a connection holds a part of it alone."""
SO_MAX_PACING_RATE = 47
"""Linux's, which Python's `socket` does not name: bytes that a connection may send in a second."""
GIVEN_S = 3.0


def live(pipe: Any, rank: int, folder: str, case: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2)
    group = Group.join(torch.device("cpu"))
    large = torch.zeros(NUMBERS)
    sends = case.startswith("send")
    if rank == 1:
        for fd in group.sockets:  # that the message is still under way when the process stops
            with socket.socket(fileno=os.dup(fd)) as sending:
                sending.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, 1 << 24)
        pipe.recv()
        (dist.irecv if sends else dist.isend)(large, 0, group.channel)
        pipe.send("under way")
        os.kill(os.getpid(), signal.SIGSTOP)
    pipe.recv()
    work = (dist.isend if sends else dist.irecv)(large, 1, group.channel)
    assert work is not None
    pipe.send("under way")
    group.waits.on_cut = group.break_off  # as a rendezvous does, once it is known that a member is lost
    began = time.monotonic()
    try:
        if case.endswith("gloo"):
            work.wait(timedelta(seconds=GIVEN_S))
        else:
            group.wait_for_messages([work])
        told = "done"
    except RuntimeError as error:
        told = str(error)
    seconds = time.monotonic() - began
    group.abort()
    pipe.send((told, seconds, still_open(group.inodes), time.process_time()))
    time.sleep(1.0)
    pipe.send(time.process_time())
    os._exit(0)


def lost_in_mid_message(case: str) -> tuple[str, float, float]:
    """What rank 0 is told, after how many seconds, and what its process computes in the second after that."""
    context = forking()
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(2):
            here, there = context.Pipe()
            process = context.Process(target=live, args=(there, rank, folder, case))
            process.start()
            there.close()
            pipes.append(here)
            processes.append(process)
        try:
            for rank in (1, 0) if case.startswith("send") else (0, 1):  # who receives comes first
                pipes[rank].send("begin")
                assert pipes[rank].recv() == "under way"
                time.sleep(0.5)
            processes[1].kill()
            assert pipes[0].poll(60)
            told, seconds, opened, before = pipes[0].recv()
            assert opened == []
            computed: float = pipes[0].recv() - before
        finally:
            for process in processes:
                process.kill()
                process.join()
    return told, seconds, computed


@pytest.mark.every(2)
@pytest.mark.parametrize("what", ["send", "receive"])
def test_whoever_waits_for_a_message_of_a_rank_that_is_lost_is_told(what: str) -> None:
    told, seconds, computed = lost_in_mid_message(f"{what} by our own")
    assert "connection closed by peer" in told.lower()
    assert seconds < GIVEN_S
    assert computed < 0.5  # no thread looks for what is gone


@pytest.mark.scenario
@pytest.mark.parametrize("what", ["send", "receive"])
def test_gloo_does_not_tell_it(what: str) -> None:
    """The control. Where it fails, gloo has learnt to tell: `communication.waits` is then no longer needed."""
    told, _, _ = lost_in_mid_message(f"{what} by gloo")
    assert "Timed out waiting" in told


def test_a_wait_gives_what_the_call_gives_or_raises() -> None:
    waits = Waits()

    def fails() -> None:
        raise TimeoutError("of its own")

    assert waits.for_call(lambda: 3) == 3
    with pytest.raises(TimeoutError, match="of its own"):
        waits.for_call(fails)
    assert waits.for_call(lambda: time.sleep(0.3)) is None
    waits.end()


def test_the_thread_that_waits_ends_with_the_last_reference() -> None:
    waits = Waits()
    thread = waits.for_call(threading.current_thread)
    assert thread.name == "lockstep-waits"
    del waits
    thread.join(10.0)
    assert not thread.is_alive()


def test_a_wait_that_is_ended_raises_and_asks_before() -> None:
    asked = threading.Event()
    waits = Waits(lambda: True)
    waits.on_cut = asked.set
    threading.Thread(target=lambda: asked.wait() and waits.end(), daemon=True).start()
    with pytest.raises(RuntimeError, match="broken off"):
        waits.for_call(lambda: time.sleep(60))
