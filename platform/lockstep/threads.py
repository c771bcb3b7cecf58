"""How many threads the code of a job computes with. The bits of its sums and products depend on it, and by default it is as many as the machine has cores.

Torch has a number of its own, which a spec decides (`threads`). NumPy's products are those of a BLAS, and other libraries compute
with OpenMP: they have one thread, in every process of an exact run. Autograd's own threads decide no bit, but whether a process can be forked.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from threadpoolctl import ThreadpoolController

LIBRARIES = {
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "BLIS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
}
"""What a library reads that is loaded later, or by a process that the job starts."""


@contextmanager
def one_library_thread() -> Iterator[None]:
    """One thread for a while for BLAS and OpenMP, in libraries that are loaded and in those to come. It costs milliseconds.

    Torch computes with OpenMP too: give it its own number inside the block.
    """
    previous = {name: os.environ.get(name) for name in LIBRARIES}
    os.environ.update(LIBRARIES)
    try:
        with ThreadpoolController().limit(limits=1):
            yield
    finally:
        for name, value in previous.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def one_thread_here() -> None:
    """One thread for what the calling thread computes from now on with OpenMP, which counts for each thread by itself: torch does."""
    torch.get_num_threads()  # else torch's first operator here would set its number anew
    ThreadpoolController().select(user_api="openmp").limit(limits=1)


@contextmanager
def one_thread() -> Iterator[None]:
    """One intra-op thread of torch for a while; it costs half a microsecond."""
    previous = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(previous)


def start_autograd() -> None:
    """Have autograd start its threads now, one for each device beside the CPU: none on a machine that has none.

    It starts them at the first backward of a process, and forked processes of one that has them cannot compute gradients. The first fake tensor
    would make a build for CUDA count eight devices from then on, on a machine without any.
    """
    torch.ones((), requires_grad=True).backward()  # type: ignore[no-untyped-call]


def autograd_has_threads() -> bool:
    """Whether autograd runs threads in this process, which a fork does not inherit; False where the system does not tell (no /proc)."""
    tasks = Path("/proc/self/task")
    if not tasks.exists():
        return False
    return any(name.startswith("pt_autograd") for name in map(_name, tasks.iterdir()))


def _name(task: Path) -> str:
    try:
        return (task / "comm").read_text()
    except (FileNotFoundError, ProcessLookupError):  # the thread has ended meanwhile
        return ""


def openmp_limit() -> int:
    """How many threads the loaded OpenMP libraries are sure to give to whoever asks for them, as they tell it themselves.

    It is OMP_THREAD_LIMIT, a very large number without it, and 1 under OMP_DYNAMIC, with which they give as many as the load allows.
    """
    libraries = [
        library.dynlib for library in ThreadpoolController().select(user_api="openmp").lib_controllers
    ]
    return min(
        (1 if library.omp_get_dynamic() else int(library.omp_get_thread_limit()) for library in libraries),
        default=2**31 - 1,
    )


def library_threads() -> int:
    """The most threads that a loaded BLAS computes with, MKL aside: where NumPy has MKL too, it has torch's number, which a spec decides."""
    libraries = ThreadpoolController().select(user_api="blas").info()
    return max(
        (library["num_threads"] for library in libraries if library["internal_api"] != "mkl"), default=1
    )
