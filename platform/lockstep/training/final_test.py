"""The test of a finished run: its `test_data`, once, with the weights that it keeps. Nothing is decided by it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from lockstep.record.events.union import Alive, Document, Tell
from lockstep.training.auxiliary_state import beside_weights, copied, put_unlisted
from lockstep.training.setup import Run
from lockstep.training.state import TrainState, tensors
from lockstep.training.step.buffers import KeptBuffers
from lockstep.training.step.shards import Shard


def tested(run: Run, tell: Tell) -> dict[str, Any]:
    """What the summary says of the test: its metrics, the step of the weights, and which weights they are. Empty for a job without `test_data`.

    With `early_stop` the weights are the best ones, else those that the last evaluation saw. All ranks call it; the state is the same afterwards.
    """
    if run.evaluate is None or not run.evaluate.tests:
        return {}
    state = run.state
    has_best = state.best.weights is not None
    weights = "best" if has_best else "ema" if state.has_average else "final"
    with best_shown(state) if has_best else state.averaged():
        run.evaluate.restore_buffers_by(KeptBuffers(state.model).restore)
        try:
            metrics = run.evaluate(state.model, [*run.evaluate.tests], lambda: tell(Alive()))
        finally:
            run.evaluate.restore_buffers_by(run.step.buffers.restore)
    for name, text in run.evaluate.figures.items():
        tell(Document(f"test/{name}", text))
    step = state.best.step if has_best else state.counters.step
    return {"test": metrics, "tested": weights, "tested_step": step, "tested_at": time.time()}


@contextmanager
def best_shown(state: TrainState) -> Iterator[None]:
    """The model with the weights of the best evaluation, and what it computed with besides; afterwards as it was."""
    best, beside = state.best.weights, state.best.beside
    assert best is not None
    trained = {name: _values(value).detach().clone() for name, value in tensors(state).items()}
    own = copied(beside_weights(state.model, state.job, state.settings.changed))
    try:
        _put(state, {name: _values(value) for name, value in best.items()}, beside or {})
        yield
    finally:
        _put(state, trained, own)


def _put(state: TrainState, weights: Mapping[str, torch.Tensor], beside: Mapping[str, Any]) -> None:
    """Load weights, and what was beside them, into the state's model and job."""
    state.settings.load(beside.get("settings", {}))
    with torch.no_grad():
        whole = {**weights, **beside.get("extra", {})}
        for name, value in tensors(state).items():
            if isinstance(value, Shard):
                value.local.copy_(whole.pop(name))
        state.model.load_state_dict(whole, strict=state.sharding is None)
        put_unlisted(state.model, state.job, beside)


def _values(value: Any) -> torch.Tensor:
    """A tensor, or this worker's rows of one that is sharded."""
    tensor: torch.Tensor = value.local if isinstance(value, Shard) else value
    return tensor
