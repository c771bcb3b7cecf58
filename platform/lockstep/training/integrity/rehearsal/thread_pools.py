"""Thread pools in an unusual order: what depends on the order, such as draws from one generator, then gives another result."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from concurrent.futures import thread as thread_pools
from contextlib import contextmanager
from typing import Any

LATE_S = 0.02
"""Seconds by which the first task of a pool is delayed; the tasks behind it begin meanwhile."""


@contextmanager
def out_of_order() -> Iterator[None]:
    """Delay the first task of any ThreadPoolExecutor in the block. It costs nothing where there is none."""
    original, number = thread_pools._WorkItem.run, itertools.count()

    def run(self: Any, *arguments: Any) -> None:
        if next(number) == 0:
            time.sleep(LATE_S)
        original(self, *arguments)

    thread_pools._WorkItem.run = run  # type: ignore[method-assign]
    try:
        yield
    finally:
        thread_pools._WorkItem.run = original  # type: ignore[method-assign]
