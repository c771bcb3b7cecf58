"""The test of a finished run: its `test_data`, once, with the weights that it keeps. Nothing is decided by it."""

from __future__ import annotations

import time
from typing import Any

from lockstep.record.events.union import Alive, Document, Tell
from lockstep.training.run import Run
from lockstep.training.step.buffers import KeptBuffers
from lockstep.training.swapped_weights import weights_shown


def tested(run: Run, tell: Tell) -> dict[str, Any]:
    """What the summary says of the test: its metrics, the step of the weights, and which weights they are. Empty for a job without `test_data`.

    With `early_stop` the weights are the best ones, else those that the last evaluation saw. All ranks call it; the state is the same afterwards.
    """
    if run.evaluate is None or not run.evaluate.tests:
        return {}
    state = run.state
    best = state.best.weights
    weights = "best" if best is not None else "ema" if state.has_average else "final"
    with weights_shown(state, best, state.best.beside or {}) if best is not None else state.averaged():
        run.evaluate.restore_buffers_by(KeptBuffers(state.model).restore)
        try:
            metrics = run.evaluate(state.model, [*run.evaluate.tests], lambda: tell(Alive()))
        finally:
            run.evaluate.restore_buffers_by(run.step.compute.buffers.restore)
    for name, text in run.evaluate.figures.items():
        tell(Document(f"test/{name}", text))
    step = state.best.step if best is not None else state.counters.step
    return {"test": metrics, "tested": weights, "tested_step": step, "tested_at": time.time()}
