"""What can be wrong with a record, and with the store that it is mirrored to: each a row of docs/failures.md, and the line that is shown."""

from __future__ import annotations

from lockstep.errors import (
    LockstepError,
    NoSuchRunError,
    Problem,
    RecordError,
    SpecError,
    StorageError,
    first_line,
)
from lockstep.record.errors import LockedError, UnavailableError

# --- the files of a record ---------------------------------------------------------------------------------------

RUN_JSON = Problem(
    "record.run_json",
    RecordError,
    "run {run}: its run.json in {folder!r} {got}",
    "`lockstep record check {run} --repair` writes it again",
    cause="the file that describes a run without MLflow was deleted or damaged",
    advice="what the message says",
)

DAMAGED = Problem(
    "record.damaged",
    RecordError,
    "run {run}: its {file} in {where} {got}",
    "`lockstep record check {run} --repair` writes again what its journal has",
    shown="run …: its summary.json in … …; …`, `run …: its record in … cannot be understood: …; …",
    cause="a file of the record is missing or damaged, or Lockstep did not make this run",
    advice="`lockstep record check RUN --repair`",
)

UNREADABLE = Problem(
    "record.unreadable",
    RecordError,
    "run {run}: its {file} cannot be read: {got}",
    cause="the file is damaged, larger than any that Lockstep writes, made by another version of Lockstep, or not readable for this user",
    advice="follow the message; `lockstep record check RUN --repair` writes again what the journal has",
)

DENIED = Problem(
    "record.denied",
    RecordError,
    "run {run}: {folder!r} cannot be read: {got}",
    "it may be another user's",
    cause="`record.private: true`, or a folder that others may not read",
    advice="that user",
)

CANNOT_READ = Problem(
    "record.cannot_read",
    UnavailableError,
    "record: cannot read {path!r}: {got}",
    cause="the disk or the network file system fails; it is tried again",
    advice="mend it",
)

CANNOT_WRITE = Problem(
    "record.cannot_write",
    RecordError,
    "record.folder: cannot write {path!r}: {got}",
    "make room there, or name a folder that can be written",
    cause="the disk is full or fails, or the folder is not writable; it is tried again",
    advice="free space, mend the disk, or name a writable folder",
)

CANNOT_COPY = Problem(
    "record.cannot_copy",
    RecordError,
    "record: cannot copy {path!r} to {target!r}: {got}",
    cause="the file that was to be recorded is gone, or the disk of the record fails",
    advice="free space, or mend the disk",
)

LEADS_OUT = Problem(
    "record.leads_out",
    RecordError,
    "run {run}: {got}",
    "do not use a record that you do not trust",
    shown="run …: '…' leads out of '…' by a symbolic link; …`, `run …: '…' leads elsewhere, wanted a path below the folder; …",
    cause="a name in a journal, manifest or store leads out of its folder, by itself or through a symbolic link; nothing was read or written there",
    advice="put the folder itself there, or a link to it that bears its name, made by the owner of both, in the place of the run's folder; do not use a record that you do not trust",
)

# --- the journal and the ledger ----------------------------------------------------------------------------------

LOCKED = Problem(
    "record.locked",
    LockedError,
    "run {run}: another process records it now",
    "wait for it, or end it",
    cause="two commands that record one run",
    advice="follow the message",
)

FOLDER_LOCKS = Problem(
    "record.folder_locks",
    RecordError,
    "record.folder: no file can be locked on the file system of {folder!r} ({got}), so two processes could write one record",
    "name a folder elsewhere, or mount that one with locks (Lustre: -o flock)",
    cause="a file system without locks, such as Lustre mounted without `flock`; other locks were tried",
    advice="a folder elsewhere, or mount it with locks",
)

JOURNAL_CHANGED = Problem(
    "record.journal_changed",
    RecordError,
    "record: {file!r} was damaged since it was opened",
    "resume the run",
    cause="a line of the journal changed on the disk during the run",
    advice="resume the run",
)

OTHER_JOURNAL = Problem(
    "record.other_journal",
    RecordError,
    "run {run}: {file} in {folder!r} is that of run {got}",
    "put the run's own back there",
    cause="a file of another run was put into the run's folder",
    advice="put the run's own there; without one, `--fork` starts a new run from its newest checkpoint",
)

NOT_WHOLE = Problem(
    "record.not_whole",
    RecordError,
    "the record is not whole: {got}",
    "resume the run, or `lockstep record check RUN --repair`: what is missing is taken from its newest checkpoint",
    shown="the record is not whole: its ledger lacks steps …; …`, `the record is not whole: lines of its journal are damaged (…); …",
    cause="rows were not written, or were damaged on the disk; the run is `FAILED`, not `FINISHED`",
    advice="resume the run, or `lockstep record check RUN --repair`",
)

STEPS_LOST = Problem(
    "record.steps_lost",
    RecordError,
    "the record is not whole: its ledger lacks {got}",
    "restore the storage's folder `shared` or the record's folder, then resume the run",
    shown="the record is not whole: its ledger lacks steps … to …: …; …",
    cause="the record lost these steps, and so did the checkpoint storage",
    advice="restore the storage's folder `shared` or the record's folder, then resume the run",
)

FOLDER_DELETED = Problem(
    "record.folder_deleted",
    RecordError,
    "the record is not whole: the run's folder, {folder!r}, was deleted while it trained",
    "keep what deletes there, such as a clean-up script, away from runs that go on, and begin the run again",
    cause="a clean-up script, or a person; the run is `FAILED`",
    advice="keep it away from runs that go on, and begin the run again",
)

EVENTS_LOST = Problem(
    "record.events_lost",
    RecordError,
    "{got}; {count} events of the run are not recorded",
    shown="record.folder: cannot write …; … events of the run are not recorded",
    cause="the disk of the record failed until the patience at the run's end was over",
    advice="mend the disk, then `lockstep resume`",
)

LEDGER_UNREADABLE = Problem(
    "record.ledger.unreadable",
    StorageError,
    "ledger: cannot read {what}: {got}",
    cause="the disk, or a damaged file",
    advice="mend the disk; `lockstep record check RUN --repair` writes the tables of a run again",
)

LEDGER_UNWRITABLE = Problem(
    "record.ledger.unwritable",
    StorageError,
    "ledger: cannot write {path!r}: {got}",
    cause="the disk",
    advice="free space, or mend the disk",
)

# --- finding a run -----------------------------------------------------------------------------------------------

NO_RUN = Problem(
    "record.no_run",
    NoSuchRunError,
    "run {run}: no record of it in {where}",
    "`lockstep runs` lists those that it has; {advice}, or its store with --uri",
    cause="a misspelt id, or a run of another store",
    advice="`lockstep runs` lists them; `--uri`, `record.folder`",
)

PART_OF_ID = Problem(
    "record.part_of_id",
    NoSuchRunError,
    "run {run}: no record of it in {where}; wanted a whole id, 32 hexadecimal digits",
    "`lockstep runs` lists them",
    cause="a part of an id, or a name",
    advice="the whole id, as `lockstep runs` lists it",
)

NO_SPEC = Problem(
    "record.no_spec",
    NoSuchRunError,
    "run {run} in {where} has no spec.yaml",
    "either it ended before it began, so start it again with its spec, or Lockstep did not create it",
    cause="a run that Lockstep did not make, or that ended before it began",
    advice="a run of Lockstep; start it again with its spec",
)

NO_STORE = Problem(
    "record.no_store",
    RecordError,
    "{what}: there is no record at {uri!r}",
    "name its store with --uri",
    cause="the run is in another store",
    advice="`--uri`, or `record.folder=…` with `--uri off`",
)

NO_EXPERIMENT = Problem(
    "record.no_experiment",
    RecordError,
    "experiment: there is no {got!r}; known here: {wanted}",
    cause="a misspelt name, or the experiment of another store",
    advice="one that the message names",
)

NO_EXPERIMENTS = Problem(
    "record.no_experiments",
    SpecError,
    "experiment: runs that are recorded in folders alone have none",
    "leave it out",
    cause="`--experiment` with `--uri off`",
    advice="leave it out",
)

SWEEP_FILE = Problem(
    "record.sweep_file",
    SpecError,
    "sweep {run}: its {file} {got}",
    "put a copy of it back",
    shown="sweep …: its sweep.yaml is no sweep: …; …`, `sweep …: its sweep.yaml cannot be read: …; …",
    cause="the file was changed or cut off",
    advice="put a copy of it back",
)

# --- the store ---------------------------------------------------------------------------------------------------

URI_MISSING = Problem(
    "record.uri.missing",
    RecordError,
    "record.uri: missing",
    "read the spec with load_spec, which fills it in, or set record.uri=off",
    cause="a `Spec` that was made by hand",
    advice="`load_spec`",
)

FOLDER_URI = Problem(
    "record.uri.folder",
    SpecError,
    "record.uri: got {got!r}, a folder, in which MLflow keeps no runs any more; wanted a database such as sqlite:///mlflow.db, a server, or off",
    "`mlflow migrate-filestore` moves the runs of a folder into a database",
    cause="a folder of runs, as older versions of MLflow had them",
    advice="a database; `mlflow migrate-filestore`",
)

ODD_PATH = Problem(
    "record.uri.odd_path",
    SpecError,
    "record.uri: got {got!r}, with a `%` or a `?` in its path, which a URI takes for something else; wanted a path without them",
    "name another database or a server with --uri, or set record.uri=off",
    cause="a path of a database with `%` or `?`",
    advice="a path without them",
)

IN_MEMORY = Problem(
    "record.uri.in_memory",
    RecordError,
    "record.uri: got {got!r}, which is gone with its process; wanted a file: sqlite:///mlflow.db",
    cause="a database in memory",
    advice="a file",
)

DATABASE_IS_FOLDER = Problem(
    "record.uri.database_is_folder",
    SpecError,
    "record.uri: {path!r} is a folder; wanted a file, such as sqlite:///{path}/mlflow.db",
    cause="a folder where a database is to be",
    advice="a file in it",
)

OTHER_PROGRAM = Problem(
    "record.uri.other_program",
    SpecError,
    "record.uri: {path!r} is the database of another program, with the table {got!r}, and is left alone",
    "name another with --uri",
    cause="an SQLite database that MLflow did not make",
    advice="another file",
)

DATABASE_DAMAGED = Problem(
    "record.uri.database_damaged",
    RecordError,
    "record.uri: {path!r} cannot be used: {got}",
    "{remedy}",
    cause="the file is damaged, or is not an SQLite database",
    advice="a copy of it, or another database",
)

BESIDE_DATABASE = Problem(
    "record.uri.beside_database",
    RecordError,
    "record.uri: cannot write beside {database!r}: {got}",
    "name another database with --uri",
    cause="the database's folder is not writable",
    advice="a writable folder",
)

DATABASE_LOCKS = Problem(
    "record.uri.database_locks",
    RecordError,
    "record.uri: no file can be locked on the file system of {database!r} ({got}), and SQLite needs locks",
    "name a database elsewhere, or a server, with --uri",
    cause="a file system without locks, such as Lustre mounted without `flock`; other locks were tried",
    advice="a database elsewhere, or mount it with locks",
)

DATABASE_BUSY = Problem(
    "record.uri.database_busy",
    RecordError,
    "record.uri: another process has been opening {database!r} for {waited_s} s",
    "stop it, or name another database with --uri",
    cause="another process hangs while it holds the lock",
    advice="stop that process",
)

MLFLOW_MISSING = Problem(
    "record.uri.mlflow_missing",
    RecordError,
    "record.uri: mlflow is not installed",
    "pip install mlflow, or set record.uri=off",
    cause="MLflow is missing",
    advice="install it, or `record.uri=off`",
)

UNREACHABLE = Problem(
    "record.uri.unreachable",
    UnavailableError,
    "record.uri: {uri!r} does not answer ({got})",
    "{remedy}",
    cause="no server answers there, or a database cannot be opened or written: the message says why, and what to do. At the start Lockstep tries for 10 s while training goes on, and then ends the run; at the end of a run it tries for up to a minute",
    advice="start the server, name another one, or `record.uri=off`",
)

REFUSES = Problem(
    "record.uri.refuses",
    RecordError,
    "record.uri: {uri!r} refuses: {got}",
    "{remedy}",
    shown="record.uri: '…' refuses: …`, `… refuses: its tables have version …; …`, `… refuses: … Can't locate revision …; …`, `… refuses: … database disk image is malformed …; …",
    cause="MLflow itself or a proxy before it refuses; another version of MLflow made the database; or its file is damaged",
    advice="what the answer says; that version of MLflow, or `mlflow db upgrade` of a copy if it is older; a copy of the file",
)

NO_MLFLOW = Problem(
    "record.uri.no_mlflow",
    RecordError,
    "record.uri: {uri!r} answers, and not as an MLflow server does: what it returns has no id",
    "see that the address is MLflow's own, and no other program's or proxy's",
    cause="another program answers at that address",
    advice="MLflow's own address",
)

EXPERIMENT_DELETED = Problem(
    "record.experiment_deleted",
    RecordError,
    "record.experiment: {got!r} was deleted in MLflow",
    "restore it or name another",
    cause="the experiment was deleted",
    advice="restore it, or name another",
)

RUN_DELETED = Problem(
    "record.run_deleted",
    RecordError,
    "run {run}: was deleted in MLflow",
    "restore it to go on",
    cause="the run was deleted",
    advice="restore it",
)

HALF_PROMOTED = Problem(
    "record.half_promoted",
    RecordError,
    "promote: {got}; and taking it back failed as well: {further}",
    "look at {name!r} and its alias {alias!r} in MLflow, and give the command again",
    cause="the registry failed during a promotion, and again when its steps were undone",
    advice="follow the message",
)

SLOW_STORE = Problem(
    "record.slow_store",
    RecordError,
    "record: the store has kept {what} waiting for {waited_s} s",
    cause="a server that takes calls and does not answer",
    advice="look at the server; `lockstep record sync` completes the record of a run that has trained",
)

NOT_RECORDED = Problem(
    "record.not_recorded",
    RecordError,
    "{got}; not recorded: {what}",
    "{remedy}",
    shown="record.uri: '…' refuses: …; not recorded: …; …",
    cause="the store does not take one file, tag or point; everything else is recorded",
    advice="fix what the answer names (a proxy's limit, say), then `lockstep record sync`",
)

NOT_SENT = Problem(
    "record.not_sent",
    RecordError,
    "{got}; calls not made: {count}",
    "{remedy}",
    shown="record.uri: '…' does not answer (…); …; calls not made: …; …",
    cause="the store did not answer until the patience at the run's end was over",
    advice="start the store, then `lockstep record sync`",
)

END_UNTOLD = Problem(
    "record.end_untold",
    RecordError,
    "record: the store was not told how the run ended",
    "{remedy}",
    cause="the store could not even record what it lacks",
    advice="start the store, then `lockstep record sync`",
)

PROCESS_LOST = Problem(
    "record.process_lost",
    RecordError,
    "record: the process that writes it {got}",
    "`lockstep record sync {run}` sends what the run's folder has",
    cause="the process was killed, often for want of memory, or was silent for too long",
    advice="`lockstep record sync RUN`",
)

PROCESS_LOST_EARLY = Problem(
    "record.process_lost_early",
    RecordError,
    "record: the process that writes it {got} before it told of a run",
    "start the run again",
    cause="the process was killed, often for want of memory, or could not import what it needs, before there was a run",
    advice="start the run again; what ended the process may be among its last lines",
)

# --- sending a record again --------------------------------------------------------------------------------------

CONTINUED = Problem(
    "record.sync.continued",
    SpecError,
    "run {run}: it was continued in {folder!r}, up to step {step} ({status})",
    "sync that folder: --storage {storage!r}",
    cause="`lockstep record sync`, or `record check --repair`, from a folder that is not the newest of the run",
    advice="the folder that it names",
)

LIVING = Problem(
    "record.sync.living",
    RecordError,
    "run {run}: it is RUNNING, and the process that records it, on host {host}, may live",
    "it counts as gone once its beat has not moved for {silent_s} s while this machine watched: give the command again then",
    cause="`lockstep record sync`, or `record check --repair`, of a run without an end, whose process is on another machine",
    advice="the same command after 150 s, if its [heartbeat](record.md#status) has not moved by then",
)

END_LOST = Problem(
    "record.sync.end_lost",
    SpecError,
    "run {run}: it is {status}, and its {file} in {folder!r} has lost that end: it goes up to step {step}",
    "`lockstep record check {run} --repair` writes the end again, or put a whole copy of the file back",
    cause="the last lines of the journal are gone: it was copied in part, or its disk is damaged; the store's status stays",
    advice="`lockstep record check RUN --repair`, or a whole copy of the file",
)

NO_JOURNAL = Problem(
    "record.sync.no_journal",
    SpecError,
    "run {run}: there is no {file} in {folder!r}",
    "name the run's folder, or its --storage",
    cause="a wrong folder or `--storage`",
    advice="the run's folder",
)

PASSWORD = Problem(
    "record.sync.password",
    SpecError,
    "run {run}: the password of {uri!r} is not recorded",
    "give the whole --uri",
    cause="passwords are not recorded",
    advice="`--uri` with the password",
)

# --- anything else ----------------------------------------------------------------------------------------------

OTHER = Problem(
    "record.other",
    RecordError,
    "record: {got}",
    cause="anything else that could not be recorded",
    advice="the run's folder has what was recorded",
)


def as_record_error(error: Exception) -> RecordError:
    """The error itself, or one that tells it."""
    if isinstance(error, RecordError):
        return error
    return OTHER(got=error if isinstance(error, LockstepError) else first_line(error))
