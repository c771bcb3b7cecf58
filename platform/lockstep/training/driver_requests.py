"""What others may ask of a run while it trains: the only way back from those that receive its events."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class Requests(Protocol):
    """`stop`, `save` and `regroup` are asked on every rank and never wait; `run_id` and `go_on` are asked on rank 0 alone and may."""

    def stop(self) -> bool:
        """Whether someone asks the run to end after the next step."""

    def save(self) -> bool:
        """Whether someone asks for a checkpoint after the next step. Each request gives True once."""

    def regroup(self) -> bool:
        """Whether someone asks this group to form another one after the next step, because workers join or leave it."""

    def run_id(self) -> str:
        """Wait until the run exists in its record, and return its id. RecordError where it never will."""

    def go_on(self, look: Callable[[], object], *, ends: bool) -> bool:
        """Wait until the run may go on; called before the first step and after each evaluation. False where nobody wants more of the run.

        `look` is called now and then meanwhile, and its RuntimeError ends the wait: the group is broken off. `ends`: the run takes no more steps.
        """


class NoRequests:
    """Nobody asks anything: for ranks other than 0, and for runs that are neither recorded nor saved."""

    def stop(self) -> bool:
        return False

    def save(self) -> bool:
        return False

    def regroup(self) -> bool:
        return False

    def run_id(self) -> str:
        raise NotImplementedError("this run is not recorded, so it has no id")

    def go_on(self, look: Callable[[], object], *, ends: bool) -> bool:
        return True
