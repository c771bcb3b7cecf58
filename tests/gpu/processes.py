"""Ranks as processes of their own on one device: NCCL with a host id a rank over loopback, else gloo."""

from __future__ import annotations

import multiprocessing as mp
import os
import pickle
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

ANSWER_S = 240
"""How long all ranks of one call may take together."""


class Lost(RuntimeError):
    """A process that ended without an answer: its exit code."""


class Processes:
    """`run` starts W processes with a group of `backend` and has each call one function."""

    def __init__(self, backend: str, answer_s: float = ANSWER_S) -> None:
        self.backend = backend
        self.answer_s = answer_s

    def run(self, workers: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        """What each rank returned, by rank. The first exception is raised, one that a rank told before one that was lost."""
        answers = self.answers(workers, function, *args)
        errors = [answer for answer in answers if isinstance(answer, Exception)]
        if errors:
            raise min(errors, key=lambda error: isinstance(error, Lost))
        return answers

    def answers(self, workers: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        """The same with exceptions in their places; `Lost` for a process that was killed or is silent."""
        context = mp.get_context("spawn")
        with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
            pairs = []
            for rank in range(workers):
                here, there = context.Pipe()
                call = (there, self.backend, rank, workers, str(Path(folder, "store")), function, args)
                process = context.Process(target=_serve, args=call)
                process.start()
                there.close()
                pairs.append((process, here))
            deadline = time.monotonic() + self.answer_s  # one for all: a hang of every rank costs it once
            return [_answer(process, pipe, deadline) for process, pipe in pairs]


def _answer(process: Any, pipe: Connection, deadline: float) -> Any:
    wait([pipe, process.sentinel], timeout=max(0.0, deadline - time.monotonic()))
    if not pipe.poll():
        process.kill()
        process.join()
        return Lost("no answer in time")
    try:
        answer = pickle.loads(pipe.recv_bytes())
    except EOFError:
        process.join(10)
        answer = Lost(f"exit code {process.exitcode}")
    process.join(10)
    if process.is_alive():
        process.kill()
        process.join()
    return answer


def _serve(
    pipe: Connection,
    backend: str,
    rank: int,
    workers: int,
    store: str,
    function: Callable[..., Any],
    args: Any,
) -> None:
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(workers),
        "LOCAL_RANK": "0",
        "NCCL_HOSTID": f"rank-{rank}",  # else NCCL refuses two ranks on one GPU
        "NCCL_SOCKET_IFNAME": "lo",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    try:
        dist.init_process_group(backend, store=dist.FileStore(store, workers), rank=rank, world_size=workers)
        if backend == "gloo" and torch.cuda.is_available():
            import lockstep.training.step.reduction

            lockstep.training.step.reduction.LATENCY_BYTES = (
                1 << 60
            )  # gloo sends no CUDA tensor to a single rank
        answer = function(*args)
    except Exception as error:  # noqa: BLE001 - carried to the caller
        answer = error
    try:
        told = pickle.dumps(
            answer
        )  # not `send`: it would share tensors out of the memory of a process that ends here
        pickle.loads(told)
    except Exception as error:  # noqa: BLE001 - what cannot be pickled is told as text
        told = pickle.dumps(RuntimeError(f"{type(answer).__name__}: {answer} ({error})"))
    pipe.send_bytes(told)
    os._exit(0)  # a group that lost a rank may never end in order


def backend_for(device: str) -> str:
    """The quickest backend in which several ranks on this one device can send to each other."""
    if device == "cpu":
        return "gloo"
    found = Processes("nccl").answers(2, _sums, device)
    return "nccl" if found == [3.0, 3.0] else "gloo"


def _sums(device: str) -> float:
    one = torch.ones(3, device=device)
    dist.all_reduce(one[:1])
    peer = 1 - dist.get_rank()
    calls = [dist.P2POp(dist.isend, one[1:2], peer), dist.P2POp(dist.irecv, one[2:], peer)]
    for work in dist.batch_isend_irecv(calls):
        work.wait()
    return float(one[0] + one[2])
