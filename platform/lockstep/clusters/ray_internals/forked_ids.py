"""Ids that Ray draws at random, in processes that are forked from one. See `unavailable`.

Ray's generator is seeded when it is used first, and a fork copies it. Had it been used by then, all forked processes would draw the same
ids: of two that put an object into the store of their node at the same moment, one is ended by Ray.
"""

from __future__ import annotations

import os
from contextlib import suppress

import ray.actor
from ray._raylet import ActorClassID, ObjectRef


class _ActorClassID(ActorClassID):
    @classmethod
    def from_random(cls) -> ActorClassID:  # type: ignore[override]  # not of this class, which other processes lack
        return ActorClassID(os.urandom(cls.size()))


def leave_generator_unused() -> None:
    """Have Ray draw the id of a class of actors from the system: what a process draws that imports modules in which there are such classes."""
    ray.actor.ActorClassID = _ActorClassID


def would_repeat() -> bool:
    """Whether two processes that are forked now draw the same id."""
    return _drawn_by_a_child() == _drawn_by_a_child()


def _drawn_by_a_child() -> bytes:
    readable, writable = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.write(writable, ObjectRef.from_random().binary())
        finally:
            os._exit(0)
    os.close(writable)
    with os.fdopen(readable, "rb") as file:
        drawn = file.read()
    with suppress(ChildProcessError):  # where this process waits for no child
        os.waitpid(child, 0)
    return drawn


leave_generator_unused()
