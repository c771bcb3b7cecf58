"""The rows of a run's ledger: a step, an evaluation, an observation beside a step. Their columns and types in Parquet follow from the fields here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

VERSION = 1
"""Of what is recorded, in journals, tables of rows and statements: raised with any change of an event or a row. Nothing else is read."""


class Digests(NamedTuple):
    """Digests of the results of a step, each a whole number below 2**64; `training.integrity.digests` defines them."""

    weights: int
    optimizer: int
    gradients: tuple[int, ...] | None
    """The digest of each micro-batch that is not empty, by index; None with `reduction: native`, which keeps none apart."""
    average: int | None = None
    """The digest of the moving average of the weights; None without `ema`."""


class StepRow(NamedTuple):
    """One finished optimizer step. Once it is told, a row and its `parts` must not change.

    `loss` and `parts` are means over the global batch, and `weight` is what the loss was divided by. `grad_norm` is the norm
    before clipping and `clipped_norm` the norm after it. `step_s` is the whole step, the wait for data included.
    """

    step: int
    """Number of the step in the run, counted from 1."""
    epoch: int
    """Epoch it belongs to, counted from 0."""
    samples: int
    """Training samples consumed by the run so far, including this step's."""
    loss: float
    weight: float
    parts: Mapping[str, float]
    lr: float
    grad_norm: float
    clipped_norm: float
    scale: float
    skipped: bool
    data_wait_s: float = 0.0
    step_s: float = 0.0
    wall_clock: float = 0.0
    """Unix time in seconds at which the step was done; its metrics carry this time, however late they are written."""
    attempt: int = 0
    digests: Digests | None = None
    """Set in the steps that have digests by the plan (`record.digest_every`)."""


class EvaluationRow(NamedTuple):
    """One evaluation, after step number `step`; `metrics` are named `eval/…` already."""

    step: int
    epoch: int
    metrics: Mapping[str, float]
    seconds: float
    wall_clock: float


class Observation(NamedTuple):
    """What was observed beside the row of a step, in the steps that `record.observe_every` selects.

    `values` have the names of their metrics. Those under `layers/` have the same bits in every execution of the run; the others do not.
    """

    step: int
    values: Mapping[str, float]
    wall_clock: float
    """Unix time in seconds at which it was made."""
