"""Ways to disturb processes, connections and file systems, and how many faults each run is given."""

from __future__ import annotations

import errno
import random
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

PATIENCE_S = 300.0
"""How long what has to come may take: a run or a trial that trains again after a fault; half of what the end may take after the last."""

MOST = 9
"""How much happens in one run of `--faults`: it has to last for it."""

DISK_BYTES = 256 << 20
"""Of the file system of a run's checkpoints and record."""


def shared_out(faults: int, jobs: Sequence[str]) -> str:
    """Runs of these jobs in turn, to each of which MOST happens, until it is as much as is wanted."""
    counts = [min(MOST, faults - begun) for begun in range(0, faults, MOST)]
    return ",".join(f"{jobs[number % len(jobs)]}={count}" for number, count in enumerate(counts))


def one_of(
    processes: list[psutil.Process], draw: random.Random, act: Callable[[psutil.Process], object]
) -> str | None:
    """Do something to one of them: which, or None where there is none any more."""
    if not processes:
        return None
    process = draw.choice(processes)
    try:
        act(process)
    except psutil.NoSuchProcess:
        return None
    return str(process.pid)


def cut_link(workers: list[psutil.Process], draw: random.Random) -> str | None:
    """Have the kernel end every connection between two of the workers. None where no two are connected."""
    ends: dict[tuple[Any, Any], int] = {}
    for worker in workers:
        with suppress(psutil.Error):
            for one in worker.net_connections("tcp"):
                if one.status == psutil.CONN_ESTABLISHED:
                    ends[one.laddr, one.raddr] = worker.pid
    links: dict[frozenset[int], list[tuple[Any, Any]]] = {}
    for (here, there), pid in ends.items():
        if (other := ends.get((there, here), pid)) != pid:
            links.setdefault(frozenset({pid, other}), []).append((here, there))
    if not links:
        return None
    pair = draw.choice(sorted(links, key=sorted))
    for here, there in links[pair]:
        ports = ["sport", "=", f":{here.port}", "dport", "=", f":{there.port}"]
        subprocess.run(["ss", "--kill", *ports], check=True, capture_output=True)
    return " and ".join(map(str, sorted(pair)))


def fill(folder: Path, seconds: float) -> None:
    """Leave no byte on the file system of `folder`, for so long."""
    filler, size = folder / ".filler", 1 << 20
    try:
        with filler.open("wb", buffering=0) as file:
            while size:
                try:
                    file.write(bytes(size))
                except OSError as error:
                    assert error.errno == errno.ENOSPC, error
                    size //= 2
            time.sleep(seconds)
    finally:
        filler.unlink()


def plant(fault: Path, over: Callable[[], bool], said: Callable[[], str]) -> str | None:
    """Have the next worker that looks meet the fault that a file names. None where all was over before one did."""
    fault.touch()
    until = time.monotonic() + PATIENCE_S
    while fault.exists():
        if over():
            fault.unlink(missing_ok=True)
            return None
        assert time.monotonic() < until, f"nobody meets {fault.name}\n{said()}"
        time.sleep(0.05)
    return "a worker"


def refused_second(
    second: subprocess.Popen[Any], first: subprocess.Popen[Any], log: Path, began: float
) -> str:
    """What became of a second command: one that is alive has to be left alone. `began` is when it was given."""
    code = second.wait(PATIENCE_S)
    if first.poll() is None:
        assert code == 2, log.read_text()[-3000:]
    return f"exit code {code} after {time.monotonic() - began:.1f} s"


@contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    """A file system of its own at `folder`, in memory, which `full` fills."""
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "none", folder], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)
