"""The state of an optimizer that the workers share out, as the job's code finds it: refused, for each worker has a part alone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from lockstep.training.step import problems
from lockstep.training.step.phases import Optimizers, sharded_of


class _Refused(defaultdict[Any, Any]):
    """In the place of an optimizer's state: nothing would be in it, and what is written there lost."""

    def _refuse(self, *_: Any) -> NoReturn:
        raise problems.STATE_SHARED_OUT()

    __getitem__ = __setitem__ = __delitem__ = __contains__ = __iter__ = __len__ = __bool__ = _refuse
    get = items = keys = values = pop = clear = update = setdefault = _refuse  # type: ignore[assignment]


@contextmanager
def state_refused(optimizer: Optimizers) -> Iterator[None]:
    """In the block, in which the job's code runs: raise JobError where it looks for the state of an optimizer that is shared out.

    That may be the one that the job is given, or the one that it has made and kept.
    """
    sharded = sharded_of(optimizer).values()
    optimizers = [each for member in sharded for each in (member, *member.made_from)]
    states = [each.state for each in optimizers]
    for each in optimizers:
        each.state = _Refused()
    try:
        yield
    finally:
        for each, state in zip(optimizers, states, strict=True):
            each.state = state
