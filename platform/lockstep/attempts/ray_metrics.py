"""The state of a run as Ray metrics: its dashboard and Prometheus have them under `ray_lockstep_…`."""

from __future__ import annotations

from ray.util.metrics import Gauge

from lockstep.record.ledger.rows import StepRow

_TOLD = {
    "step": "Optimizer steps that the run has done",
    "loss": "Loss of the newest step",
    "lr": "Learning rate of the newest step",
    "step_seconds": "How long the newest step took",
    "attempt": "Number of the attempt at hand",
    "workers": "Workers of the attempt at hand",
}


class Gauges:
    """The metrics of one run, labelled with its id and its name. Setting them costs microseconds; Ray collects them in its own time."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._gauges = {
            key: Gauge(f"lockstep_{key}", description, ("run", "name")) for key, description in _TOLD.items()
        }

    def show(self, run_id: str, row: StepRow, workers: int) -> None:
        """Set the metrics after a step."""
        values = {
            "step": row.step,
            "loss": row.loss,
            "lr": row.lr,
            "step_seconds": row.step_s,
            "attempt": row.attempt,
            "workers": workers,
        }
        for key, value in values.items():
            self._gauges[key].set(value, {"run": run_id, "name": self._name})
