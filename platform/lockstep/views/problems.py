"""What can be wrong with a view of recorded runs: each a row of docs/failures.md, and the line that is shown."""

from __future__ import annotations

from lockstep.errors import Problem, RecordError, SpecError, StorageError

NO_STEP = Problem(
    "view.no_step",
    SpecError,
    "run {run}: no step of it is recorded yet, so there is nothing to show",
    "wait for its first step, or name another run",
    cause="a view of a run before its first step",
    advice="a run with steps",
)

NO_SPEC = Problem(
    "view.no_spec",
    RecordError,
    "run {run}: {file!r} is no spec: {got}",
    "put a copy of it back",
    cause="the `spec.yaml` in the run's folder was changed or damaged",
    advice="a copy of it",
)

UNREADABLE = Problem(
    "view.unreadable",
    RecordError,
    "run {run}: cannot read {folder!r}: {got}",
    "look at who may read it, and at its disk",
    cause="the run's folder is another user's, or its disk fails",
    advice="the permissions, or the disk",
)

WHERE_FORM = Problem(
    "where.form",
    SpecError,
    "where: got {got!r}, wanted name, comparison and value, such as 'eval/accuracy > 0.9'",
    "put `and` between several",
    cause="a condition of `--where` that is no comparison",
    advice="follow the message",
)

WHERE_NAME = Problem(
    "where.name",
    SpecError,
    "where: no run has {got!r}{hint}",
    shown="where: no run has '…'; did you mean '…'?",
    cause="a name of `--where` that no run has a value of",
    advice="the suggested name",
)

PLOT_KEY = Problem(
    "plot.key",
    SpecError,
    "plot: run {run} has no {got!r}{hint}",
    shown="plot: run … has no '…'; did you mean '…'?",
    cause="a key of `--plot` that the run has no value of",
    advice="the suggested key",
)

PACKAGE = Problem(
    "view.package",
    SpecError,
    "{package}: the package is not installed",
    "pip install 'lockstep-train[{package}]'",
    cause="the extra for TensorBoard or for Weights & Biases is missing",
    advice="install it, as the message says",
)

UNWRITABLE = Problem(
    "view.unwritable",
    StorageError,
    "{option}: cannot write {file!r}: {got}",
    "name another with --{option}",
    cause="the disk, or the folder for TensorBoard's event files or for offline runs of Weights & Biases",
    advice="another `--logdir` or `--dir`",
)
