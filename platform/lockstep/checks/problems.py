"""What a check or a measurement before a run can refuse: each a row of docs/failures.md, and the line that is shown."""

from __future__ import annotations

from lockstep.errors import Problem, RecordError, SpecError, StorageError

# --- measuring -----------------------------------------------------------------------------------------------

WORKER_COUNTS = Problem(
    "checks.worker_counts",
    SpecError,
    "workers: got {got}, wanted different whole numbers above 0, such as 1,2,4",
    cause="a wrong `--workers` of `bench`",
    advice="different whole numbers above 0",
)

TOO_MANY_WORKERS = Problem(
    "checks.too_many_workers",
    SpecError,
    "workers: got {got}, and a step has {most} micro-batches (batch.global / batch.micro)",
    "give at most as many workers, or lower batch.micro",
    cause="more workers than micro-batches of a step",
    advice="fewer workers, or a lower `batch.micro`",
)

STEP_COUNT = Problem(
    "checks.step_count",
    SpecError,
    "steps: got {got}, wanted 1 or more",
    cause="a wrong `--steps`",
    advice="a number of at least 1",
)

GPUS_MISSING = Problem(
    "checks.gpus_missing",
    SpecError,
    "workers: got {got}, and this machine has {available} GPUs",
    "bench fewer, or the processors with workers.gpus_each=0",
    cause="`bench` with more workers than GPUs of this machine",
    advice="follow the message",
)

# --- learning rates ------------------------------------------------------------------------------------------

RATES = Problem(
    "checks.rates",
    SpecError,
    "lr-find: got rates {lowest} … {highest} in {steps} steps, wanted 0 < lowest < highest, with a finite ratio, in at least 10",
    cause="a wrong range of `lr-find`",
    advice="follow the message",
)

FIRST_LOSS = Problem(
    "checks.first_loss",
    SpecError,
    "lr-find: the loss is not finite at the first step already, with a rate of {rate}",
    "lower the rate, or look at the loss",
    cause="the lowest rate of the range is too high already, or the job gives no finite loss",
    advice="lower the rate, or look at the loss",
)

NO_RATE = Problem(
    "checks.no_rate",
    SpecError,
    "lr-find: the first group of the job's optimizer has a rate of {got}, wanted one above 0: the range is a multiple of it",
    cause="the range is a multiple of the rate of the job's optimizer",
    advice="a rate above 0",
)

# --- plots ---------------------------------------------------------------------------------------------------

PLOT_FILE = Problem(
    "checks.plot_file",
    SpecError,
    "plot: got {got!r}, wanted a folder that is there, or a file that ends with .svg or .png",
    cause="a wrong `--plot`",
    advice="a folder, or a file that ends with .svg or .png",
)

NO_PLOT_FOLDER = Problem(
    "checks.no_plot_folder",
    SpecError,
    "plot: there is no folder {folder!r}",
    "make it, or name another",
    cause="the folder above is not there",
    advice="make it, or name another",
)

# --- before a run --------------------------------------------------------------------------------------------

NO_WEIGHTS = Problem(
    "checks.no_weights",
    SpecError,
    "initial_weights: there is no file {path!r}",
    "give a safetensors file, a folder with an index of several, a checkpoint, or the id of a run in record.folder",
    cause="the value is neither a path nor the id of a run in `record.folder`",
    advice="a path that is there, or a run id",
)

BROKEN_LINK = Problem(
    "checks.broken_link",
    StorageError,
    "{field}: {folder!r} is a link to {target!r}, which is not there",
    "make that folder, or name another",
    cause="a symbolic link whose folder is gone, or not mounted; found before training",
    advice="make the folder, or name another",
)

UNWRITABLE = Problem(
    "checks.unwritable",
    StorageError,
    "{field}: cannot write in {folder!r}: {got}",
    "name a writable folder",
    cause="the folder is not writable; found before training",
    advice="a writable folder",
)

# --- stores --------------------------------------------------------------------------------------------------

NO_DATABASE = Problem(
    "checks.no_database",
    RecordError,
    "record.uri: {path!r} is no SQLite database that can be opened ({got})",
    "name another with --uri",
    cause="`lockstep check` found a file there that it cannot open",
    advice="name another one with `--uri`",
)

DATABASE_SILENT = Problem(
    "checks.database_silent",
    RecordError,
    "record.uri: {database} does not answer ({got})",
    cause="a database that cannot be opened or written: the message says why",
    advice="what the message says, or another `--uri`",
)

SERVER_SILENT = Problem(
    "checks.server_silent",
    RecordError,
    "record.uri: {uri} does not answer ({got})",
    cause="no server answers there: the message says why",
    advice="start the server, or name another with `--uri`",
)
