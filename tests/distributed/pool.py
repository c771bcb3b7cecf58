"""Long-lived gloo processes for tests: importing torch once a process keeps a large matrix cheap."""

from __future__ import annotations

import importlib
import multiprocessing as mp
import os
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any


class Pool:
    """Up to `size` processes; `run` gives the first W of them a process group and one function to call."""

    def __init__(self, size: int) -> None:
        context = mp.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory(prefix="lockstep-pool-")
        self._calls = 0
        self._workers: list[tuple[Any, Connection]] = []
        for _ in range(size):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(there,), daemon=False)
            process.start()
            there.close()
            self._workers.append((process, here))

    def run(self, workers: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        """`function(*args)` in each of `workers` processes, in one gloo group; what each returned, by rank.

        The first exception is raised here. A group in which one rank failed is beyond use, so the others are ended.
        """
        self._calls += 1
        store = Path(self._folder.name, f"store-{self._calls}")
        chosen = self._workers[:workers]
        for rank, (_, pipe) in enumerate(chosen):
            pipe.send((function.__module__, function.__qualname__, args, rank, workers, str(store)))
        return [self._answer(process, pipe) for process, pipe in chosen]

    def _answer(self, process: Any, pipe: Connection) -> Any:
        wait([pipe, process.sentinel], timeout=300)
        if not pipe.poll():
            raise RuntimeError(f"a worker of the pool ended with {process.exitcode} or gave no answer for 300 s")
        done, value = pipe.recv()
        if done:
            return value
        error, text = value
        error.add_note(text)
        raise error

    def close(self) -> None:
        for process, pipe in self._workers:
            pipe.close()
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()
        self._folder.cleanup()


def _serve(pipe: Connection) -> None:
    import torch.distributed as dist

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    while True:
        try:
            module, name, args, rank, workers, store = pipe.recv()
        except EOFError:
            return
        function = getattr(importlib.import_module(module), name)
        dist.init_process_group("gloo", store=dist.FileStore(store, workers), rank=rank, world_size=workers)
        try:
            pipe.send((True, function(*args)))
        except Exception as error:  # noqa: BLE001 - carried to the test
            pipe.send((False, (error, traceback.format_exc())))
            os._exit(1) if workers > 1 else None
        finally:
            dist.destroy_process_group()
