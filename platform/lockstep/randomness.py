"""Counter-based randomness: every draw is keyed by what it is for, never by what was drawn before.

Before each micro-batch is computed or fetched, the default generators of torch, numpy and python are seeded
from a key such as (seed, "step", t, m). Any process that runs that micro-batch, on any machine and after
any interruption, draws the same numbers, and there is no generator state to save.
"""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

T = TypeVar("T")

Key = tuple[int | str, ...]

_current: ContextVar[Key | None] = ContextVar("lockstep_key", default=None)
_streams = itertools.count()
"""Counts the generators that `rng` has given."""


def digest64(key: Key) -> int:
    """A key hashed to 64 bits (BLAKE2b over its parts)."""
    text = "\x1f".join(map(str, key)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def seed_all(*key: int | str, device: torch.device | None = None) -> None:
    """Seed the default generators of torch, numpy and python, and that of `device` where it is a CUDA device, from one key.

    It calls the generators' own `manual_seed`: `torch.manual_seed` seeds every device and costs twenty times as much.
    """
    bits = digest64(key)
    torch.default_generator.manual_seed(bits)
    np.random.mtrand._rand.seed(bits & 0xFFFFFFFF)
    random.seed(bits)
    if device is not None and device.type == "cuda":
        torch.cuda.init()  # type: ignore[no-untyped-call]  # before it there are no generators
        torch.cuda.default_generators[device.index or 0].manual_seed(bits)
    _current.set(key)


def seeds(seed: int, *, phases: bool = False, frozen: bool = False) -> dict[str, str]:
    """The seed of each source of randomness of a run, for the record.

    `phases` is whether its steps have phases, and `frozen` whether the job has a rule for parameters that rest.
    """
    phase = ", phase" if phases else ""
    return {
        "model": str(digest64((seed, "model"))),
        "train_data and eval_data, each opened": str(digest64((seed, "train data"))),
        "micro-batch m of step t, computed": f"digest64(({seed}, 'step', t, m{phase}))",
        "micro-batch m of step t, fetched": f"digest64(({seed}, 'data', t, m))",
        "the loss of the whole batch of step t": f"digest64(({seed}, 'batch loss', t{phase}))",
        "update t of an optimizer with code of the job's own": f"digest64(({seed}, 'update', t{phase}))",
        "after_step of step t": f"digest64(({seed}, 'after step', t))",
        **({"frozen_parameters of step t": f"digest64(({seed}, 'frozen', t))"} if frozen else {}),
        "order of epoch e": f"torch.Generator seeded with {seed} + e",
        "generators": "torch: those 64 bits; numpy: their lower 32; python: all of them",
    }


def rng(stream: str = "") -> np.random.Generator:
    """A generator for the job's own use, keyed like the default ones by the current micro-batch.

    Two calls with the same `stream` in one micro-batch give the same numbers; use different stream names for independent numbers.
    Raises RuntimeError outside a micro-batch.
    """
    key = _current.get()
    if key is None:
        raise RuntimeError(
            "lockstep.rng() is keyed by the micro-batch at hand: call it in loss, metrics or a dataset"
        )
    next(_streams)
    return np.random.Generator(np.random.Philox(key=digest64((*key, "rng", stream))))


def drawing_alike(function: Callable[..., T]) -> Callable[..., T]:
    """`function`, whose later calls draw from python's and NumPy's generators, and from `rng`, what its first call drew.

    A later call leaves the generators as it found them. torch's are the caller's affair.
    """
    first: list[_States] = []

    def called(*given: Any, **named: Any) -> T:
        saved = _States(_current.get(), random.getstate(), np.random.mtrand._rand.get_state(legacy=False))
        if not first:
            first.append(saved)
            return function(*given, **named)
        first[0].put()
        try:
            return function(*given, **named)
        finally:
            saved.put()

    return called


class _States(NamedTuple):
    """Where the generators beside torch's stand."""

    key: Key | None
    of_python: Any
    of_numpy: Any

    def put(self) -> None:
        _current.set(self.key)
        random.setstate(self.of_python)
        np.random.mtrand._rand.set_state(self.of_numpy)


class Draws:
    """Watches what is drawn from here on: two computations that draw the same from one seed leave the same `state`."""

    def __init__(self) -> None:
        self._before = next(_streams)

    def state(self) -> tuple[object, ...]:
        """The states of the default generators, and how many generators `rng` has given since."""
        return (
            next(_streams) - self._before,
            random.getstate(),
            torch.default_generator.get_state().numpy().tobytes(),
            _numpy_state(),
        )


def _numpy_state() -> dict[str, Any]:
    """The state of NumPy's default generator, in values that `==` can compare."""
    state: dict[str, Any] = dict(np.random.mtrand._rand.get_state(legacy=False))
    inner = {
        name: value.tobytes() if isinstance(value, np.ndarray) else value
        for name, value in state["state"].items()
    }
    return {**state, "state": inner}
