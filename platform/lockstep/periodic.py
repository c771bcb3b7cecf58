"""A thread that does something now and then while a block runs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

END_S = 60.0
"""How long the last call may take after the block is left: one that asks a broken device may never return."""


@contextmanager
def periodically(begin: Callable[[], Callable[[], object]], every_s: float, name: str) -> Iterator[None]:
    """Call what `begin` returns every `every_s` seconds while the block runs. Both run in a thread of that name.

    The thread has ended when the block has been left, unless its last call takes longer than END_S.
    """
    over = threading.Event()

    def work() -> None:
        act = begin()
        while not over.wait(every_s):
            act()

    thread = threading.Thread(target=work, name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(END_S)
