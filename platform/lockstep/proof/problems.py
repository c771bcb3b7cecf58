"""What can be wrong with a recorded run that is taken again or stated, and with two states of the code: each a row of docs/failures.md, and the line that is shown."""

from __future__ import annotations

from lockstep.checkpoint.errors import BadCheckpointError
from lockstep.errors import JobError, Problem, SpecError, StorageError
from lockstep.proof.errors import ProtocolError, UnfitError

# --- the recorded run -------------------------------------------------------------------------------------------

NO_STEP = Problem(
    "proof.no_step",
    SpecError,
    "run {run}: no step of it is recorded, so there is nothing to compare",
    "train some steps with `lockstep resume {run}`, or name another run",
    cause="a run that ended before its first step",
    advice="a run with steps",
)

NO_SUCH_STEP = Problem(
    "proof.no_such_step",
    SpecError,
    "{option}: got {got}, wanted a step of the run, which has {wanted}",
    shown="from: got …, wanted a step of the run, which has …`, `step: got …, …",
    cause="the run has no such step; a fork has only the steps after the fork",
    advice="a step that the run has",
)

RECORD_IN_STORE = Problem(
    "proof.record_in_store",
    SpecError,
    "run {run}: its folder is in {folder!r}, but its record is in MLflow",
    "give that store with --uri",
    cause="`--uri off` where MLflow recorded the run",
    advice="`--uri` with the store of the run",
)

NO_RECORD = Problem(
    "proof.no_record",
    SpecError,
    "run {run}: no record of it in {folder!r}",
    "give the folder of the runs with --storage, or its store with --uri",
    cause="another `--storage` than the run's, or a misspelt id",
    advice="follow the message; `lockstep runs` lists the ids",
)

NO_RUN_ID = Problem(
    "proof.no_run_id",
    SpecError,
    "run: {got}",
    "give the id of a run",
    shown="run: '…' leads elsewhere, wanted a path below the folder; …",
    cause="a path where the id of a run is wanted",
    advice="the id of a run, as `lockstep runs` lists it",
)

UNREADABLE = Problem(
    "proof.unreadable",
    SpecError,
    "run {run}: its {what} cannot be read: {got}",
    "look at it with `lockstep record check {run}`",
    cause="the fields, the environment or the ledger of the record was damaged or changed",
    advice="`lockstep record check RUN`; with `--repair` it writes again what the journal has",
)

ROW_TWICE = Problem(
    "proof.row_twice",
    SpecError,
    "run {run}: its {what} has more than one {kind} of step {step}, wanted one",
    "it was changed after it was written: look at it with `lockstep record check {run}`",
    cause="a record that was changed",
    advice="`lockstep record check RUN`; do not use a record that you do not trust",
)

LINK = Problem(
    "proof.link",
    StorageError,
    "run {run}: {got}, and a record has no such links",
    "put the file back",
    shown="run …: '…' leads out of '…' by a symbolic link, and a record has no such links; …",
    cause="a symbolic link in a record that leads out of its folder: nothing was read there",
    advice="the file itself; do not use a record that you do not trust",
)

NO_WHOLE_CHECKPOINT = Problem(
    "proof.no_checkpoint",
    BadCheckpointError,
    "checkpoint.storage: run {run} has no whole checkpoint{which}",
    shown="checkpoint.storage: run … has no whole checkpoint of step …",
    cause="the checkpoint from which steps are to be taken again is damaged, or was deleted meanwhile",
    advice="take steps from another one, with `--from` or `--steps`",
)

FOREIGN_FILE = Problem(
    "proof.foreign_file",
    BadCheckpointError,
    "checkpoint: its manifest names a file {got!r}, which no checkpoint has",
    cause="a checkpoint that was changed: nothing was written under that name",
    advice="do not use a record that you do not trust",
)

NO_COMMON_STEP = Problem(
    "diff.no_common_step",
    SpecError,
    "diff: the two have no step in common, but {got}",
    "give more --steps, or the run that was forked",
    cause="a fork and fewer steps of a spec than it was forked after, or two forks",
    advice="more `--steps`, or the run that was forked",
)

# --- executing a job --------------------------------------------------------------------------------------------

PROCESS_ENDED = Problem(
    "job.process_ended",
    JobError,
    "job: the process that executes it {got} before it had answered",
    "a job must not end its process; where it was killed, look whether memory ran out",
    shown="job: the process that executes it was killed by signal … before it had answered; …`, `… ended with …",
    cause="the job ended its process, or it was killed, often because memory ran out",
    advice="take `os._exit` out of the job, or free memory",
)

PROTOCOL = Problem(
    "job.protocol",
    ProtocolError,
    "job: the process that executes it answered with {got}, which is none of Lockstep's answers, so nothing of it is used",
    cause="code of the run that writes into the pipe of its process, by mistake or on purpose",
    advice="do not trust a stranger's run; code of your own prints to standard output",
)

NO_SANDBOX = Problem(
    "sandbox.none",
    SpecError,
    "sandbox: this system has nothing to confine the run's code with ({got})",
    "install bubblewrap, or where you trust whoever wrote the code, or are in a container of its own, go on with --no-sandbox",
    cause="bubblewrap is missing, and the system forbids user namespaces, as many containers do",
    advice="install bubblewrap; `--no-sandbox` for code that you trust",
)

# --- statements -------------------------------------------------------------------------------------------------

NO_WEIGHTS = Problem(
    "attest.no_weights",
    SpecError,
    "attest: run {run} has no file {file!r}",
    "put it back: the weights that a run ended with are part of its statement",
    cause="the weights of the run were deleted or moved",
    advice="put the file back that the run wrote",
)

WEIGHTS_UNREADABLE = Problem(
    "attest.weights_unreadable",
    StorageError,
    "weights: {file!r} cannot be read: {got}",
    "put the file back that the run wrote",
    cause="`lockstep attest`, or `verify --statement`: the file of weights is damaged",
    advice="put back the file that the run wrote",
)

NO_STATEMENT = Problem(
    "statement.none",
    SpecError,
    "statement: it cannot be read ({got})",
    "give one that lockstep attest wrote",
    cause="the file is no statement, or was damaged",
    advice="a file that `lockstep attest` wrote",
)

OTHER_KIND = Problem(
    "statement.other_kind",
    SpecError,
    "statement: got one of {got}, wanted {wanted}",
    cause="a statement of something else than a run of Lockstep, or of another version",
    advice="a file that `lockstep attest` wrote",
)

NO_ENVELOPE = Problem(
    "statement.no_envelope",
    SpecError,
    "statement: it is no DSSE envelope ({got})",
    "give one that lockstep attest --key wrote",
    cause="a signed statement that was damaged or changed",
    advice="a file that `lockstep attest --key` wrote",
)

OTHER_PAYLOAD = Problem(
    "statement.other_payload",
    SpecError,
    "statement: the envelope holds {got}, wanted {wanted!r}",
    cause="an envelope around something else than a statement",
    advice="a file that `lockstep attest --key` wrote",
)

NO_PRIVATE_KEY = Problem(
    "key.no_private",
    SpecError,
    "key: {file!r} holds no private key in PEM without a password ({got})",
    "make one with openssl genpkey -algorithm ed25519",
    cause="the file of `attest --key` is not there, or holds no such key",
    advice="a private key, as [openssl](attest.md) makes it",
)

NO_PUBLIC_KEY = Problem(
    "key.no_public",
    SpecError,
    "key: {file!r} holds no public key in PEM ({got})",
    "make it from the private one with openssl pkey -pubout",
    cause="the file of `verify --key` is not there, or holds no such key",
    advice="the public key of whoever signed",
)

KEY_UNFIT = Problem(
    "key.unfit",
    SpecError,
    "key: {file!r} cannot sign ({got})",
    "give an ed25519, ecdsa or rsa key",
    cause="a key of another kind, such as x25519",
    advice="an ed25519, ecdsa or rsa key",
)

NO_SIGNATURES = Problem(
    "key.package",
    SpecError,
    "key: signatures need securesystemslib ({got})",
    "pip install 'lockstep-train[attest]'",
    cause="the extra is missing",
    advice="install it",
)

# --- two states of the code -------------------------------------------------------------------------------------

NO_GIT = Problem(
    "guard.no_git",
    SpecError,
    "guard: there is no git on this machine",
    "install it",
    cause="git is not installed, or not on the path",
    advice="install git",
)

NO_REPOSITORY = Problem(
    "guard.no_repository",
    SpecError,
    "guard: {folder!r} is in no git repository that can be read ({got})",
    "run it in the one that has the job",
    cause="a folder outside of a repository, or a repository of another user",
    advice="the folder of the repository that has the job",
)

NO_COMMIT = Problem(
    "guard.no_commit",
    SpecError,
    "guard: there is no commit {got!r} in this repository",
    "{advice}",
    shown="guard: there is no commit '…' in this repository`, `…; this clone is shallow: …",
    cause="a wrong `--base` or `--bisect`, or a shallow clone",
    advice="a commit that the repository has",
)

NOT_BEFORE = Problem(
    "guard.not_before",
    SpecError,
    "guard: commit {got} is not before the working tree",
    "give one of its history",
    cause="`--bisect` with a commit of another branch",
    advice="a commit of this branch",
)

GIT_FAILED = Problem(
    "guard.git_failed",
    SpecError,
    "guard: git {command} failed: {got}",
    cause="git itself refuses, as where the disk is full or an object is missing",
    advice="what git's answer says",
)

UNFIT_FILE = Problem(
    "guard.unfit_file",
    UnfitError,
    "guard: {what} has no file {file!r}",
    cause="a state of the code without the spec",
    advice="another base; `--bisect` skips commits that cannot be trained",
)

UNFIT = Problem(
    "guard.unfit",
    UnfitError,
    "guard: {what} cannot be trained: {got}",
    cause="a state of the code that fails with an error of its own",
    advice="another base; `--bisect` skips commits that cannot be trained",
)
