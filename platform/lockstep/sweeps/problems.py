"""What can be wrong with a sweep and its trials: each a row of docs/failures.md, and the line that is shown."""

from __future__ import annotations

from lockstep.errors import ClusterError, Problem, RecordError, SilentError, SpecError, StorageError

# --- resuming a sweep -------------------------------------------------------------------------------------------

LOCAL_OR_CHAOS = Problem(
    "sweep.local",
    SpecError,
    "resume: got --local or --chaos, and a sweep runs on Ray and kills nothing",
    "leave out both",
    cause="`--local` or `--chaos` with the id of a sweep",
    advice="leave them out",
)

FORK_OR_STEP = Problem(
    "sweep.fork",
    SpecError,
    "resume: got --fork or --from-step, and each trial of sweep {sweep} goes on from its own newest checkpoint",
    "leave out both, or give them with the run id of a trial",
    cause="`--fork` or `--from-step` with the id of a sweep",
    advice="leave it out, or name a trial's run",
)

SECRET_FIELD = Problem(
    "sweep.secret",
    SpecError,
    "resume: {field} of sweep {sweep} is or has a secret, which is not recorded",
    "give it again: {field}=…",
    shown="resume: <field> of sweep … is or has a secret, which is not recorded; …",
    cause="secrets are not recorded",
    advice="give it again",
)

FIELD_CHANGED = Problem(
    "sweep.field_changed",
    SpecError,
    "resume: {field} is {wanted} in sweep {sweep}, got {got}",
    "a resumed sweep is the same sweep: leave it, or begin a new one",
    shown="resume: <field> is … in sweep …, got …; …",
    cause="an override would change the bits of the sweep's trials",
    advice="drop it, or begin a new sweep",
)

FILE_CHANGED = Problem(
    "sweep.file_changed",
    SpecError,
    "resume: {field} is {got} in {file} of sweep {sweep}, which began with {wanted}",
    "a resumed sweep is the same sweep: put {wanted} back, or begin a new one",
    shown="resume: <field> is … in sweep.yaml of sweep …, which began with …; …",
    cause="the `sweep.yaml` in the sweep's folder was edited since the sweep began",
    advice="put the value back, or begin a new sweep",
)

DECISION_DAMAGED = Problem(
    "sweep.decision_damaged",
    StorageError,
    "sweep: line {line} of {file!r} is damaged",
    "put a copy of the file back, or begin a new sweep",
    cause="a line of a sweep's `decisions.jsonl` was changed, or its disk is damaged",
    advice="put a copy back, or begin a new sweep",
)

# --- the search -------------------------------------------------------------------------------------------------

NO_OPTUNA = Problem(
    "search.no_optuna",
    SpecError,
    "search: got optuna, and it is not installed",
    "pip install 'lockstep-train[optuna]', or set search=random",
    cause="the extra is missing",
    advice="install it, or `search=random`",
)

OTHER_SUGGESTION = Problem(
    "search.other_suggestion",
    SpecError,
    "sweep: Optuna suggests {got} for trial {trial}, and suggested {wanted} before",
    "resume the sweep with the version of optuna that it began with, or begin a new one",
    cause="another version of Optuna than the sweep began with",
    advice="that version, or a new sweep",
)

# --- the trials -------------------------------------------------------------------------------------------------

NO_ROOM = Problem(
    "sweep.no_room",
    ClusterError,
    "no trial could be placed for {seconds} s (faults.wait_for_workers_s): each has {workers} workers of {cpus} CPU",
    "add nodes, then lockstep resume goes on with the sweep",
    cause="the cluster has lost nodes, or others use it",
    advice="add nodes, then `lockstep resume SWEEP_ID`",
)

TUNE_ENDED = Problem(
    "sweep.tune_ended",
    ClusterError,
    "Ray Tune ended: {got}",
    "where the cluster was lost, lockstep resume goes on with the sweep",
    cause="Ray Tune raised an error, mostly since its cluster was lost",
    advice="`lockstep resume SWEEP_ID`; what Ray says, where it comes again",
)

GPU_WORKER_LOST = Problem(
    "sweep.gpu_worker_lost",
    ClusterError,
    "a worker with a GPU, which was to prepare a trial, was lost: {got}",
    cause="its process was killed, often because memory ran out, or its node was lost; the trial is first prepared again",
    advice="look at its node",
)

PROCESS_LOST = Problem(
    "trial.process_lost",
    ClusterError,
    "{what} is gone: {got}",
    shown="a worker of the trial is gone: …`, `a process of the sweep is gone: …",
    cause="a worker of a trial, or its node, is lost; the trial starts again from its checkpoint",
    advice="if it keeps happening, look at Ray's logs",
)

UNSAVED = Problem(
    "trial.unsaved",
    StorageError,
    "the checkpoint of step {step} could not be saved: {got}",
    cause="the storage refused a checkpoint from which a trial has to go on or to be copied",
    advice="what the message says, then `lockstep resume SWEEP_ID`",
)

# --- the recorders ----------------------------------------------------------------------------------------------

NO_RUN = Problem(
    "trial.no_run",
    RecordError,
    "record: the run of the trial was not created",
    cause="the trial ended before its run existed in its store",
    advice="what the sweep says of the trial's end",
)

UNWRITTEN = Problem(
    "sweep.unwritten",
    RecordError,
    "record: the recorders of some trials did not write what is left within {seconds} s",
    "`lockstep record sync RUN`, with the run id of each trial, sends what its folder has",
    cause="their store is slow or does not answer, at the end of a sweep",
    advice="`lockstep record sync`, with the run ids of the trials",
)

RECORDERS_UNREACHABLE = Problem(
    "sweep.recorders_unreachable",
    SilentError,
    "the process of the sweep's recorders cannot be reached",
    cause="a cut network, as a worker of a trial sees it",
    advice="look at the driver's node, and at the network",
)

RECORDERS_LOST = Problem(
    "sweep.recorders_lost",
    SilentError,
    "the process of the sweep's recorders was lost: it was killed from outside or crashed",
    "{then}",
    cause="its process was killed, often because memory ran out",
    advice="`lockstep resume SWEEP_ID`; before the first trial, the command again",
)
