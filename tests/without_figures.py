"""Runs that end without figures: to draw them takes a process a good part of a second, many times what a test's run takes.

A recorder in a process of its own draws them as ever.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from lockstep.record.plots import run_plots

DRAW = run_plots.draw


@contextmanager
def without_figures() -> Iterator[None]:
    """Until the end of the block, in this process."""
    with mock.patch.object(run_plots, "draw", lambda *_, **__: []):
        yield


@contextmanager
def with_figures() -> Iterator[None]:
    """The other way round, within such a block."""
    with mock.patch.object(run_plots, "draw", DRAW):
        yield
