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
from typing import Any, Literal, NamedTuple, NewType, TypeVar

import numpy as np
import torch

T = TypeVar("T")

Key = NewType("Key", tuple[int | str, ...])
"""What a draw is for. Only the functions of this module make one, so that a draw that is made again has the same key."""

Phase = tuple[str, ...]
"""What a phase of a step adds to a key: nothing where the step has one phase."""

# --- the keys ---------------------------------------------------------------------------------------------------
# Steps and updates are counted from 0. A key is part of every recorded run: another one trains another run.


def model_key(seed: int) -> Key:
    """The initial weights."""
    return Key((seed, "model"))


def datasets_key(seed: int) -> Key:
    """The opening of a dataset: the same for both, so that a split that both draw is one split."""
    return Key((seed, "train data"))


def fetch_key(seed: int, purpose: Literal["data", "eval data"], step: int, micro_batch: int) -> Key:
    """The fetch of a micro-batch; an evaluation is a step of its own."""
    return Key((seed, purpose, step, micro_batch))


def step_key(seed: int, step: int, micro_batch: int, phase: Phase = ()) -> Key:
    """Forward and backward of a micro-batch, whoever computes it, and however often."""
    return Key((seed, "step", step, micro_batch, *phase))


def update_key(seed: int, step: int, phase: Phase = (), call: int | None = None) -> Key:
    """The update of an optimizer with code of the job's own; `call` is how often it has evaluated the loss again."""
    return Key((seed, "update", step, *phase, *(() if call is None else ("call", call))))


def whole_batch_key(seed: int, step: int, phase: Phase = ()) -> Key:
    """The loss of all rows of a global batch."""
    return Key((seed, "batch loss", step, *phase))


def after_step_key(seed: int, step: int) -> Key:
    """The job's `after_step`."""
    return Key((seed, "after step", step))


def frozen_key(seed: int, step: int) -> Key:
    """The job's `frozen_parameters`."""
    return Key((seed, "frozen", step))


def evaluation_key(seed: int, micro_batch: int) -> Key:
    """A micro-batch of an evaluation: the same in each evaluation."""
    return Key((seed, "eval", micro_batch))


def evaluation_batch_key(seed: int, batch: int) -> Key:
    """The loss of all rows of one batch of an evaluation: the same in each evaluation."""
    return Key((seed, "eval batch", batch))


def whole_set_key(seed: int) -> Key:
    """The metrics and figures of a whole evaluation set."""
    return Key((seed, "eval set"))


def eval_weights_key(seed: int, *micro_batch: int) -> Key:
    """The job's `eval_weights`, and each micro-batch that it computes: the same in each evaluation."""
    return Key((seed, "eval weights", *micro_batch))


def rehearsal_key(seed: int, *computation: int | str) -> Key:
    """A micro-batch before the first step; `computation` tells those apart that must not draw the same."""
    return Key((seed, "rehearsal", *computation))


def recheck_key(seed: int, step: int, *draw: int | str) -> Key:
    """Which micro-batches the SDC check computes again; `draw` tells its draws of a step apart."""
    return Key((seed, "recheck", step, *draw))


def epoch_order_key(seed: int, epoch: int) -> Key:
    """A dataset's own order of an epoch."""
    return Key((seed, "epoch order", epoch))


def sample_key(seed: int, purpose: Literal["fingerprint", "leakage"], *sample: int) -> Key:
    """Samples that are read only to be described."""
    return Key((seed, purpose, *sample))


def code_key(purpose: Literal["import", "job"], name: str) -> Key:
    """Code of the job that runs before the seed is known: the import of a module, `__init__` of the job."""
    return Key((purpose, name))


def final_model_key() -> Key:
    """What the job writes of its trained model."""
    return Key(("final model",))


# --- what is drawn by them --------------------------------------------------------------------------------------

_current: ContextVar[Key | None] = ContextVar("lockstep_key", default=None)
_streams = itertools.count()
"""Counts the generators that `rng` has given."""


def digest64(key: tuple[int | str, ...]) -> int:
    """A key hashed to 64 bits (BLAKE2b over its parts)."""
    text = "\x1f".join(map(str, key)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def seed_all(key: Key, device: torch.device | None = None) -> None:
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
    t: Any = _Variable("t")
    m: Any = _Variable("m")
    phase = (_Variable("phase"),) if phases else ()
    return {
        "model": str(digest64(model_key(seed))),
        "train_data and eval_data, each opened": str(digest64(datasets_key(seed))),
        "micro-batch m of step t, computed": f"digest64({step_key(seed, t, m, phase)})",
        "micro-batch m of step t, fetched": f"digest64({fetch_key(seed, 'data', t, m)})",
        "the loss of the whole batch of step t": f"digest64({whole_batch_key(seed, t, phase)})",
        "update t of an optimizer with code of the job's own": f"digest64({update_key(seed, t, phase)})",
        "after_step of step t": f"digest64({after_step_key(seed, t)})",
        **({"frozen_parameters of step t": f"digest64({frozen_key(seed, t)})"} if frozen else {}),
        "order of epoch e": f"torch.Generator seeded with {seed} + e",
        "generators": "torch: those 64 bits; numpy: their lower 32; python: all of them",
    }


class _Variable(str):
    """A part of a key that differs from draw to draw, for a person: its name without quotation marks."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


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

    def called(*arguments: Any, **options: Any) -> T:
        saved = _States(_current.get(), random.getstate(), np.random.mtrand._rand.get_state(legacy=False))
        if not first:
            first.append(saved)
            return function(*arguments, **options)
        first[0].put()
        try:
            return function(*arguments, **options)
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
        self._first = next(_streams)

    def state(self) -> tuple[object, ...]:
        """The states of the default generators, and how many generators `rng` has given since."""
        return (
            next(_streams) - self._first,
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
