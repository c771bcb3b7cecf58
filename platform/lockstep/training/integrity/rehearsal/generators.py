"""Generators of a job's own that its data draw from, and which of them go on from one fetch to the next.

One that a fetch seeds anew, from the sample's index say, comes to the same state each time: its draws depend on the sample alone.
One that goes on never does, whether or not its draws show in the samples that are looked at.
"""

from __future__ import annotations

import functools
import sys
import types
from collections import deque
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from torch.utils.data import Dataset

from lockstep.job.interface import Job
from lockstep.training.integrity import problems
from lockstep.training.integrity.rehearsal.object_state import (
    LONGEST,
    PLAIN,
    digest_of_state,
    generator_state,
    is_data,
    is_generator,
    is_open,
    top_is_closed,
)

MOST = 10_000
"""The most objects that are looked at each time."""


class OwnGenerators:
    """The generators that `roots`, objects by their names in messages, and the classes and modules of the datasets among them lead to."""

    def __init__(self, roots: Mapping[str, Any]) -> None:
        self._roots = roots
        self._looks: list[dict[str, str]] = []

    def look(self) -> None:
        """Note the state of each."""
        self._looks.append(dict(_states(self._roots)))

    def gone_on(self) -> list[str]:
        """The places of those that are in a state in which they were not seen before."""
        *earlier, latest = self._looks
        return [place for place, state in latest.items() if all(look.get(place) != state for look in earlier)]

    def refuse(self, places: list[str]) -> None:
        """JobError if any of these has gone on once more since."""
        still = [place for place in self.gone_on() if place in places]
        if still:
            raise problems.DATA_GENERATOR(name=still[0])


def of_training(job: Job, data: Any) -> OwnGenerators:
    """Those that the fetch of a training micro-batch can reach: by the dataset, and by the job, whose method collates."""
    return OwnGenerators({"train_data": data, "job": job, **_code_of(job)})


def _states(roots: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    alive: list[Any] = []  # an id means something only while its object lives
    seen: set[int] = set()
    waiting = deque(roots.items())
    while waiting and len(alive) < MOST:
        path, value = waiting.popleft()
        if isinstance(value, PLAIN) or id(value) in seen:
            continue
        seen.add(id(value))
        alive.append(value)
        if is_generator(value):
            yield path, digest_of_state(generator_state(value))
        else:
            waiting.extend(_held(path, value))


def _held(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for i, (key, child) in enumerate(islice(list(value.items()), LONGEST)):
            yield f"{path}[{key!r}]" if isinstance(key, PLAIN) else f"{path}[#{i}]", child
    elif isinstance(value, list | tuple | deque):
        yield from ((f"{path}[{i}]", child) for i, child in enumerate(islice(value, LONGEST)))
    elif isinstance(value, types.ModuleType | type):
        yield from (
            (f"{path}.{n}", child)
            for n, child in list(vars(value).items())
            if n[:2] != "__" and is_data(child)
        )
    elif isinstance(value, types.FunctionType):
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            if cell != types.CellType():
                yield f"{path}.{name}", cell.cell_contents
        yield path, value.__defaults__
        yield path, value.__kwdefaults__
    elif isinstance(value, types.MethodType):
        yield path, value.__self__
    elif isinstance(value, functools.partial):
        yield from ((path, child) for child in (value.func, *value.args, *value.keywords.values()))
    elif isinstance(value, Dataset) or is_open(value):
        yield from ((f"{path}.{name}", child) for name, child in list(getattr(value, "__dict__", {}).items()))
        for kind in type(value).__mro__:
            for name in vars(kind).get("__slots__", ()):
                if name not in {"__dict__", "__weakref__"} and hasattr(value, name):
                    yield f"{path}.{name}", getattr(value, name)
        if isinstance(value, Dataset):
            yield from _code_of(value).items()


def _code_of(value: Any) -> dict[str, Any]:
    """The classes of an object and the modules that they are from, where these are the user's own."""
    kinds = [kind for kind in type(value).__mro__ if not top_is_closed(kind)]
    modules = {f"module {kind.__module__}": sys.modules.get(kind.__module__) for kind in kinds}
    return {**{f"class {kind.__name__}": kind for kind in kinds}, **modules}
