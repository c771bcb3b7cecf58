"""Long-lived gloo processes for tests: importing torch once keeps a large matrix cheap."""

from __future__ import annotations

import gc
import importlib
import os
import tempfile
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

from lockstep.errors import LockstepError
from tests.forked import forking
from tests.network import WIRE, enter

ANSWER_S = 300
"""How long a worker may take for one call; the slowest here takes a tenth of it."""


class Worker(NamedTuple):
    """A process of a pool, the pipe to it, and the network namespace in which it is, if any."""

    process: Any
    pipe: Connection
    machine: str | None


class Pool:
    """Up to `size` processes; `run` gives the first W of them a process group and one function to call."""

    def __init__(self, size: int, machines: Sequence[str] = ()) -> None:
        """Each worker is on one of `machines`, network namespaces of `tests.network`; on this machine's loopback where there are none."""
        self._folder = tempfile.TemporaryDirectory(prefix="lockstep-pool-")
        self._calls = 0
        self._workers = [_start(machine) for machine in [*machines[:size]] or [None] * size]

    def run(self, workers: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        """`function(*args)` in each of `workers` processes, in one gloo group; what each returned, by rank.

        The first exception is raised here, one of Lockstep's before any other: where one rank fails, the others
        meet a broken connection. A group with a failed rank is beyond use, so all its processes are replaced.
        """
        self._calls += 1
        store = Path(self._folder.name, f"store-{self._calls}")
        for rank, (_, pipe, _) in enumerate(self._workers[:workers]):
            pipe.send((function.__module__, function.__qualname__, args, rank, workers, str(store)))
        answers = [_answer(process, pipe) for process, pipe, _ in self._workers[:workers]]
        errors = [value for value in answers if isinstance(value, Exception)]
        if not errors:
            return answers
        if workers > 1 or not self._workers[0].process.is_alive():
            failed = self._workers[:workers]
            # Behind the others, which are called first while these start.
            self._workers = self._workers[workers:] + [_start(worker.machine) for worker in failed]
            for process, pipe, _ in failed:
                _end(process, pipe, patience_s=0)
        first = next((error for error in errors if isinstance(error, LockstepError)), errors[0])
        for error in errors:
            if error is not first:  # the cause may be here, and the first one only how it was noticed
                first.add_note(f"Another rank: {error!r}\n" + "\n".join(getattr(error, "__notes__", ())))
        raise first

    def close(self) -> None:
        for _, pipe, _ in self._workers:
            pipe.close()
        for process, pipe, _ in self._workers:
            _end(process, pipe, patience_s=10)
        self._folder.cleanup()


def _start(machine: str | None) -> Worker:
    context = forking()
    here, there = context.Pipe()
    process = context.Process(
        target=_serve, args=(there, machine), daemon=False
    )  # a daemon may have no loader processes
    process.start()
    there.close()
    return Worker(process, here, machine)


def _answer(process: Any, pipe: Connection) -> Any:
    """What the worker returned, or the exception that it, or its silence, came to."""
    wait([pipe, process.sentinel], timeout=ANSWER_S)
    try:
        value, trace = pipe.recv() if pipe.poll() else (RuntimeError(f"no answer for {ANSWER_S} s"), "")
    except EOFError:
        process.join()
        return RuntimeError(f"a worker of the pool ended with {process.exitcode}")
    if trace:
        value.add_note(trace)
    return value


def _end(process: Any, pipe: Connection, *, patience_s: float) -> None:
    pipe.close()
    process.join(patience_s)
    if process.is_alive():
        process.kill()
        process.join()


def _serve(pipe: Connection, machine: str | None) -> None:
    """A worker's life: calls come through the pipe until it is closed."""
    import torch.distributed as dist

    if machine is not None:
        enter(machine)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo" if machine is None else WIRE
    gc.freeze()  # what was imported stays: to collect garbage between two runs costs milliseconds
    while True:
        try:
            module, name, args, rank, workers, store = pipe.recv()
        except EOFError:
            return
        try:
            function = getattr(importlib.import_module(module), name)
            # As launchers do, and for a job that must differ: the others' names are kept from it.
            told = {"RANK": rank, "WORLD_SIZE": workers, "LOCAL_RANK": rank, "POOL_RANK": rank}
            os.environ |= {name: str(value) for name, value in told.items()}
            dist.init_process_group(
                "gloo", store=dist.FileStore(store, workers), rank=rank, world_size=workers
            )
            dist.barrier()  # a function that asks nobody would be through, and close, while another rank still connects
            pipe.send((function(*args), ""))
        except Exception as error:  # noqa: BLE001 - carried to the test
            pipe.send((error, traceback.format_exc()))
            if workers > 1:
                os._exit(1)  # the others wait for this rank; a closed connection tells them
        if dist.is_initialized():
            dist.destroy_process_group()
