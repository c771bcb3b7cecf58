"""What can be wrong with checkpoints, and with the storage and the folder of a run that they lie in: each a row of docs/failures.md, and the line that is shown."""

from __future__ import annotations

from lockstep.checkpoint.errors import (
    BadCheckpointError,
    LostFileError,
    OtherFormatError,
    StaleAttemptError,
    TakenError,
)
from lockstep.errors import JobError, Problem, SpecError, StorageError

# --- what a checkpoint holds -------------------------------------------------------------------------------------

UNSTORABLE = Problem(
    "checkpoint.unstorable",
    JobError,
    "checkpoint: {where} is {got}, which a checkpoint cannot hold",
    "wanted tensors, arrays of NumPy's, numbers, text, true, false, None, and lists, tuples or mappings of these",
    cause="an object of the job's own in `state_dict`, in the optimizer's state or in the model's",
    advice="its content as tensors and plain values; make the object anew in `load_state_dict`",
)

# --- a checkpoint that is read -----------------------------------------------------------------------------------

DAMAGED = Problem(
    "checkpoint.damaged",
    BadCheckpointError,
    "checkpoint {checkpoint}: {file}: {got}",
    shown="checkpoint …: <file>: <what is wrong>",
    cause="a damaged or missing file; without `--from-step` this is a warning, and the previous checkpoint is used",
    advice="resume without `--from-step`",
)

UNREADABLE = Problem(
    "checkpoint.unreadable",
    BadCheckpointError,
    "it is no {wanted}: {got}",
    shown="checkpoint …: <file>: it is no manifest of a checkpoint: …`, `… it is no safetensors file: …`, `… it is no skeleton of its tensors: …",
    cause="the file was replaced by another, or damaged before its manifest was written",
    advice="resume without `--from-step`",
)

OTHER_CONTENT = Problem(
    "checkpoint.other_content",
    BadCheckpointError,
    "it is not what was written: {got}",
    shown="checkpoint …: <file>: it is not what was written: …",
    cause="a disk or a person has changed the file",
    advice="resume without `--from-step`",
)

OTHER_FORMAT = Problem(
    "checkpoint.other_format",
    OtherFormatError,
    "it has format version {got}, wanted {wanted}: it was made by another Lockstep",
    "use that one",
    shown="checkpoint …: manifest.json: it has format version …, wanted …: it was made by another Lockstep; …",
    cause="the checkpoint is in another version of the format; nothing in it was used, and it is passed over",
    advice="the Lockstep that made it",
)

# --- a checkpoint that is written --------------------------------------------------------------------------------

NO_MEMORY = Problem(
    "checkpoint.no_memory",
    StorageError,
    "checkpoint: no host memory for a copy of {size_gb} GB of state",
    "give the worker more memory",
    cause="a save copies the state to host memory first",
    advice="more memory for the worker",
)

SILENT_RANKS = Problem(
    "checkpoint.silent_ranks",
    StorageError,
    "checkpoint: ranks {ranks} have not written their parts of step {step} after {waited_s} s",
    cause="a worker whose disk or network is slow or down, or which was lost; the next save is tried",
    advice="look at the storage of these ranks",
)

PART_FAILED = Problem(
    "checkpoint.part_failed",
    StorageError,
    "checkpoint: rank {rank} could not write its part of step {step}: {got}",
    cause="the disk or the network of that rank's machine; the next save is tried",
    advice="what the message says of that rank",
)

RECEIPT = Problem(
    "checkpoint.receipt",
    StorageError,
    "checkpoint: the receipt of rank {rank} cannot be understood: {got}",
    cause="a file that one rank wrote for another was damaged; the next save is tried",
    advice="check the storage",
)

OTHER_STATE = Problem(
    "checkpoint.other_state",
    StorageError,
    "checkpoint: ranks {ranks} hold another state at step {step} than rank {rank}",
    "let job.state_dict return the same names and shapes on every worker",
    cause="`state_dict` of the job, the model or the optimizer depends on the worker",
    advice="the same names and shapes on every worker",
)

FILE_CHANGED = Problem(
    "checkpoint.file_changed",
    StorageError,
    "checkpoint: {file!r} of step {step} was written with {wanted} bytes and now has {got}; the step is not published",
    cause="something deleted or changed the file while the checkpoint was written; the next save is tried",
    advice="keep clean-up scripts away from runs that go on",
)

NOT_SAVED = Problem(
    "checkpoint.not_saved",
    StorageError,
    "checkpoint: the save {got}",
    cause="the run ended before its last save was done, or the save met an error that Lockstep does not know",
    advice="what the message says; `lockstep resume` goes on from the checkpoint before",
)

# --- storage -----------------------------------------------------------------------------------------------------

SCHEME = Problem(
    "checkpoint.storage.scheme",
    SpecError,
    "checkpoint.storage: got {got}://…, wanted a path or a URI of file://, s3:// or gs://",
    cause="a storage of another kind",
    advice="follow the message",
)

CREDENTIALS_HIDDEN = Problem(
    "checkpoint.storage.credentials_hidden",
    SpecError,
    "checkpoint.storage: got {got!r}, as it is recorded, without its credentials; wanted those",
    "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE",
    shown="checkpoint.storage: got 's3://<redacted: …>:***@…', as it is recorded, without its credentials; …",
    cause="a run whose `checkpoint.storage` was a URI with credentials, which are not recorded",
    advice="the credentials in the environment, where they belong for the next run too; `lockstep resume` also takes the whole `checkpoint.storage=…`",
)

BOTO3_MISSING = Problem(
    "checkpoint.storage.boto3_missing",
    SpecError,
    "checkpoint.storage: s3:// needs boto3, to make sure that only one of two commands starts an attempt",
    "pip install 'lockstep-train[stores]'",
    cause="the package is not installed",
    advice="`pip install 'lockstep-train[stores]'`",
)

CANNOT_OPEN = Problem(
    "checkpoint.storage.cannot_open",
    SpecError,
    "checkpoint.storage: cannot open {storage!r}: {got}",
    cause="a URI with wrong options or credentials",
    advice="correct the URI, or the credentials in the environment",
)

LOST = Problem(
    "checkpoint.storage.lost",
    LostFileError,
    "checkpoint.storage: cannot {verb} {path!r}: {got}",
    shown="checkpoint.storage: cannot … '…': No such file or directory`, `… Not a directory`, `… Input/output error",
    cause="the file was deleted, or its disk cannot read it",
    advice="put it back, or mend the disk",
)

FAILED = Problem(
    "checkpoint.storage.failed",
    StorageError,
    "checkpoint.storage: cannot {verb} {path!r}: {got}",
    cause="the disk is full or fails, a service does not answer, or this user may not write there",
    advice="free space, mend the storage, or correct the permissions",
)

TAKEN = Problem(
    "checkpoint.storage.taken",
    TakenError,
    "checkpoint.storage: {path!r} is there already",
    cause="another process made it at the same moment",
    advice="let the other one continue",
)

FILE_SHORT = Problem(
    "checkpoint.storage.file_short",
    StorageError,
    "checkpoint.storage: {path!r} ends {missing} bytes too early",
    cause="the file became shorter after it was verified",
    advice="resume; check the storage if it happens again",
)

TOO_LARGE = Problem(
    "checkpoint.storage.too_large",
    BadCheckpointError,
    "checkpoint.storage: {path!r} has {got} bytes, and at most {wanted} are read at once",
    cause="another file in the place of one of Lockstep's",
    advice="put the run's own file back",
)

LEADS_OUT = Problem(
    "checkpoint.storage.leads_out",
    BadCheckpointError,
    "checkpoint.storage: {got}",
    "put the folder itself there, or a link of its owner's to a folder of the same name",
    shown="checkpoint.storage: '…' leads out of '…' by a symbolic link; …",
    cause="a name in a manifest leads out of the storage, by itself or through a symbolic link; nothing was read or written there",
    advice="the folder itself, or a link to it that bears its name, made by the owner of both, in the place of the run's folder; do not use checkpoints that you do not trust",
)

KEY_LEADS_OUT = Problem(
    "checkpoint.storage.key_leads_out",
    BadCheckpointError,
    "checkpoint.storage: {got}",
    "do not use checkpoints that you do not trust",
    shown="checkpoint.storage: '…' leads elsewhere, wanted a path below the folder; …",
    cause="a name in a manifest leads out of the storage; nothing was read or written there",
    advice="do not use checkpoints that you do not trust",
)

# --- the folder of a run -----------------------------------------------------------------------------------------

RUN_ID = Problem(
    "checkpoint.run.id",
    StorageError,
    "checkpoint.storage: {run!r} cannot name a run's folder; wanted letters, digits and . _ -",
    cause="an id that no run has",
    advice="the id as `lockstep runs` lists it",
)

NO_RUN = Problem(
    "checkpoint.run.none",
    LostFileError,
    "checkpoint.storage: no run {run} in {storage!r}",
    "look for it with another checkpoint.storage",
    cause="the storage was moved, or belongs to another machine",
    advice="`checkpoint.storage=…` with its new place",
)

OWNED = Problem(
    "checkpoint.run.owned",
    TakenError,
    "checkpoint.storage: {folder!r} already belongs to run {owner}",
    "resume that run, or give the new one another storage",
    cause="two runs with the same id",
    advice="another storage",
)

OTHER_OWNER = Problem(
    "checkpoint.run.other_owner",
    StorageError,
    "checkpoint.storage: {folder!r} belongs to run {got}, not to {wanted}",
    "give the folder the name of its run, or put its {file} back",
    cause="the folder of a run was renamed or copied, or its `owner.json` is damaged",
    advice="follow the message: a run's folder bears its id",
)

NOTHING_LEFT = Problem(
    "checkpoint.run.nothing_left",
    StorageError,
    "checkpoint.storage: nothing is left of run {run} in {storage!r}, though it has trained",
    "mount the storage, or put its folder back, and resume the run; if its checkpoints are lost, start a new run with its spec",
    cause="the storage was unmounted, moved or deleted while the run trained, and a worker was lost then",
    advice="mount the storage or put its folder back, then `lockstep resume`; if the checkpoints are lost, start a new run",
)

FOLDER_DELETED = Problem(
    "checkpoint.run.folder_deleted",
    StorageError,
    "checkpoint.storage: the folder of {what}, {folder!r}, was deleted while it trained, and its checkpoints with it",
    "keep what deletes there, such as a clean-up script, away from runs that go on, and begin the run again",
    shown="checkpoint.storage: the folder of run …, '…', was deleted while it trained, and its checkpoints with it; …",
    cause="a clean-up script, or a person",
    advice="keep it away from runs that go on, and begin the run again",
)

NO_STEP = Problem(
    "checkpoint.run.no_step",
    SpecError,
    "resume: run {run} has no checkpoint of step {got}; it has {wanted}",
    cause="the step was never saved, or was deleted",
    advice="a step that has a checkpoint",
)

NOT_DOWNLOADED = Problem(
    "checkpoint.run.not_downloaded",
    StorageError,
    "checkpoint.storage: cannot write {folder!r}: {got}; the checkpoint is not downloaded",
    cause="the disk, when the record's copy of a checkpoint was to be used",
    advice="free space, mend the disk, or correct the permissions",
)

# --- attempts ----------------------------------------------------------------------------------------------------

FENCE = Problem(
    "checkpoint.attempt.fence",
    StorageError,
    "checkpoint.storage: {file} {got}",
    "resume the run to begin a new attempt",
    shown="checkpoint.storage: …/attempt.json was deleted while the run trained; …`, `checkpoint.storage: …/attempt.json cannot be understood (…); …",
    cause="the file that says which attempt is current was deleted or damaged",
    advice="`lockstep resume`",
)

LATE = Problem(
    "checkpoint.attempt.late",
    StaleAttemptError,
    "checkpoint.storage: attempt {attempt} of run {run} cannot begin, {reason}",
    cause="a newer attempt has started, through `lockstep resume`",
    advice="let the newer attempt continue",
)

OVER = Problem(
    "checkpoint.attempt.over",
    StaleAttemptError,
    "checkpoint.storage: attempt {attempt} of run {run} is over, {reason}; it can neither publish nor delete",
    cause="a newer attempt has started, through `lockstep resume`",
    advice="let the newer attempt continue",
)

# --- who holds a run ---------------------------------------------------------------------------------------------

HELD = Problem(
    "checkpoint.lease.held",
    SpecError,
    "{what} is held by {holder}, {heard}",
    "let it continue, or take over from it with --takeover",
    shown="… is held by process … on host … at step …, heard … s ago; …`, `… which lives, but was not heard for 3.5 s; …`, `… which has just begun; …",
    cause="another command works on the run or the sweep",
    advice="let it continue, or `--takeover`",
)

TAKEN_OVER = Problem(
    "checkpoint.lease.taken_over",
    StaleAttemptError,
    "{what} was taken over by {taker} (--takeover) after step {step}",
    "this command has ended, the other one continues",
    cause="another command was given `--takeover`",
    advice="let it continue",
)

# --- names of runs -----------------------------------------------------------------------------------------------

NAME_TAKEN = Problem(
    "checkpoint.name.taken",
    SpecError,
    "run: {name!r} already belongs to run {owner}, which another command began",
    "start one of them",
    cause="two commands started the same name at once",
    advice="start only one",
)

NAME_FILE = Problem(
    "checkpoint.name.file",
    StorageError,
    "run: the file of the name {name!r} has no run's id: {got}",
    "write the id of its run into {file}, as `lockstep runs` lists it",
    cause="the file that says which run has a name is damaged",
    advice="the run's id in that file",
)
