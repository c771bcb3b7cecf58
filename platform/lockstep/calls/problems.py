"""What a call on a run or a spec can refuse: each a row of docs/failures.md, and the line that is shown."""

from __future__ import annotations

from lockstep.errors import (
    ClusterError,
    JobError,
    LockstepError,
    Problem,
    RecordError,
    SpecError,
    StorageError,
)

# --- training and resuming --------------------------------------------------------------------------------------

TAKEOVER_OF_NOTHING = Problem(
    "takeover.new_run",
    SpecError,
    "takeover: a new run has no holder to take over from",
    "give the name of the run with --run, or use `lockstep resume`",
    cause="`train --takeover` without `--run`",
    advice="`--run`, or `lockstep resume`",
)

RUN_NAME = Problem(
    "run.name",
    SpecError,
    "run: got {got!r}, wanted a name of letters, digits, dots, dashes and underscores",
    cause="a wrong `--run`",
    advice="follow the message",
)

CHAOS_LOCAL = Problem(
    "chaos.local",
    SpecError,
    "chaos: kills what runs on Ray",
    "leave out --local",
    cause="`--chaos` with `--local`",
    advice="leave out one of the two",
)

SECRET_FIELD = Problem(
    "resume.secret",
    SpecError,
    "resume: {field} of run {run} is or has a secret, which is not recorded",
    "give it again: {field}=…",
    cause="secrets are not recorded",
    advice="give it again",
)

FIELD_CHANGED = Problem(
    "resume.field_changed",
    SpecError,
    "resume: {field} is {wanted} in run {run}, got {got}",
    "a resumed run is the same run: leave it, or start a new run from its state with --fork",
    shown="resume: <field> is … in run …, got …; …",
    cause="an override would change the bits",
    advice="drop it, or use `--fork`",
)

NOTHING_TO_FORK = Problem(
    "fork.no_checkpoint",
    SpecError,
    "resume: run {run} has no checkpoint in {storage!r} to fork from",
    "start a new run",
    cause="the run was killed before its first save, or its checkpoints are elsewhere",
    advice="start a new run, or say where they are with `checkpoint.storage=…`",
)

STORAGE_LOST = Problem(
    "resume.storage_lost",
    SpecError,
    "resume: the record of run {run} names a checkpoint of step {step}, {wanted}, and {got!r} has none of the run's",
    "mount the storage, or say where the checkpoints are with checkpoint.storage=…; if they are lost, start a new run with its spec",
    cause="the storage is not mounted here, or another folder is in its place",
    advice="follow the message",
)

PIN_WITHOUT_CHECKPOINT = Problem(
    "pin.no_checkpoint",
    SpecError,
    "pin: run {run} has no checkpoint of step {got}",
    "it has {wanted}",
    cause="`lockstep pin` of a step that was never saved, or was deleted, perhaps at the same moment",
    advice="a step that has a checkpoint",
)

# --- promoting a checkpoint -------------------------------------------------------------------------------------

PROMOTION_NAME = Problem(
    "promote.name",
    SpecError,
    "as: got {got!r}, wanted NAME@ALIAS, such as digits@champion: each of letters, digits, dots, dashes and underscores, the alias not a number",
    cause="a wrong `--as` of `lockstep promote`",
    advice="a name and an alias with `@` between them",
)

PROMOTION_STORE = Problem(
    "promote.store",
    SpecError,
    "uri: got off, and the model registry is MLflow's",
    "name the store of the run with --uri",
    cause="`lockstep promote` of a run that MLflow does not have",
    advice="the store that knows the run",
)

PROMOTION_CHOICES = Problem(
    "promote.choices",
    SpecError,
    "promote: got --best and --step, wanted one of them",
    "leave out one; without both the newest checkpoint is promoted",
    cause="two choices of a checkpoint",
    advice="leave out one",
)

PROMOTION_STEP = Problem(
    "promote.no_checkpoint",
    SpecError,
    "step: run {run} has no checkpoint of step {got}",
    "it has {wanted}",
    cause="`lockstep promote` of a step that was never saved, or was deleted",
    advice="a step that has a checkpoint",
)

PROMOTION_BEST = Problem(
    "promote.no_best",
    SpecError,
    "best: no checkpoint of run {run} was evaluated with {wanted}",
    "choose one with --step; it has {got}",
    cause="the run does not evaluate, or not at the steps whose checkpoints it has kept; `checkpoint.keep_best` keeps them",
    advice="`--step`",
)

PROMOTION_REFUSED = Problem(
    "promote.not_verified",
    RecordError,
    "promote: run {run} does not verify: step {step}: {quantity} is recorded as {wanted} and was found as {got}",
    "nothing was registered; `lockstep verify {run}` tells more",
    shown="promote: run … does not verify: …",
    cause="steps up to the checkpoint, taken again, have other bits than the record",
    advice="find out why with `lockstep verify`; do not serve these weights",
)

PROMOTION_COPY = Problem(
    "promote.other_copy",
    RecordError,
    "promote: what the store has of the checkpoint of step {step} of run {run} is not the one that was verified: {got}",
    "nothing was registered; delete the model checkpoint-{step} of the run in MLflow, and promote again",
    shown="promote: what the store has of the checkpoint of step … of run … is not the one that was verified: …",
    cause="the copy in the store was damaged or changed after it was sent, or the checkpoint's files changed while it was promoted",
    advice="delete that model, so that the verified files are sent; find out who can write to the store",
)

# --- leaving samples out ----------------------------------------------------------------------------------------

IDS_UNREADABLE = Problem(
    "without.unreadable",
    SpecError,
    "without: {file!r} cannot be read ({got})",
    "give a file with an id a line",
    cause="the file given to `resume --without`",
    advice="one id on each line, counted from 0",
)

NO_ID = Problem(
    "without.line",
    SpecError,
    "without: line {line} of {file!r} is {got!r}, wanted the number of a sample, counted from 0",
    cause="the same",
    advice="the same",
)

NO_IDS = Problem(
    "without.empty",
    SpecError,
    "without: {file!r} has no ids",
    "give one a line",
    cause="the same",
    advice="the same",
)

NOT_USED = Problem(
    "without.not_used",
    SpecError,
    "without: run {run} uses none of these samples",
    "it is what it would be without them",
    cause="there is nothing to leave out",
    advice="nothing to do",
)

LEFT_OUT_ALREADY = Problem(
    "without.already",
    SpecError,
    "without: run {run} leaves out all samples of {file!r} already",
    cause="there is nothing to leave out",
    advice="nothing to do",
)

LEARNT_BEFORE_FORK = Problem(
    "without.before_fork",
    SpecError,
    "without: run {run} is a fork of run {parent}, which used one of these samples in step {step} already",
    "give that run",
    cause="the samples were learnt before the fork",
    advice="`resume --without` of that run",
)

# --- proofs -----------------------------------------------------------------------------------------------------

SEVERAL_CHOICES = Problem(
    "verify.several",
    SpecError,
    "verify: got more than one of --from or --steps, --all and --sample",
    "give one",
    cause="options that choose steps in different ways",
    advice="one of them",
)

SHARE = Problem(
    "verify.share",
    SpecError,
    "sample: got {got}, wanted a share of the run's steps, above 0 and at most 1",
    cause="a wrong `--sample`",
    advice="such as `0.1`",
)

WORKERS_LOCAL = Problem(
    "verify.workers_local",
    SpecError,
    "workers: got {got} with --local, which is one process",
    "leave out one of the two",
    cause="`verify --workers --local`",
    advice="leave out one of the two",
)

WORKERS_MOST = Problem(
    "verify.workers_most",
    SpecError,
    "workers: got {got}, wanted at most the {wanted} micro-batches of a step",
    cause="`verify --workers` with more workers than the run could have",
    advice="fewer",
)

MICRO_BATCH = Problem(
    "replay.micro_batch",
    SpecError,
    "micro-batch: got {got}, wanted one of the {wanted} of step {step}, counted from 0",
    cause="`replay --micro-batch` of one that the step has not",
    advice="a smaller number",
)

SANDBOX_ON_RAY = Problem(
    "sandbox.on_ray",
    SpecError,
    "sandbox: it holds one process of this machine, and the steps are to be taken on Ray",
    "add --local, or --no-sandbox",
    cause="`--sandbox` with several workers or an address",
    advice="follow the message",
)

SANDBOX_NATIVE = Problem(
    "sandbox.native",
    SpecError,
    "sandbox: it holds one worker, and run {run} has the bits of {got} (reduction: native)",
    "give --no-sandbox",
    cause="a run with `reduction: native`, whose bits one worker cannot give",
    advice="`--no-sandbox`, on as many workers",
)

NOT_FINISHED = Problem(
    "attest.not_finished",
    SpecError,
    "attest: run {run} is {got}, wanted one that is finished",
    "resume it first",
    cause="the run has not ended",
    advice="resume it first",
)

SUMMARY_LACKS = Problem(
    "attest.summary",
    SpecError,
    "attest: the summary of run {run} has no {got}",
    "`lockstep record check {run} --repair` writes it again",
    cause="its `summary.json` was changed",
    advice="`lockstep record check RUN --repair`",
)

RECORD_CONTRADICTS = Problem(
    "attest.contradiction",
    SpecError,
    "attest: the record of run {run} contradicts itself: {what} is {wanted} and was found as {got}",
    "lockstep record check and lockstep verify tell more",
    cause="the record was changed",
    advice="`lockstep record check`, `lockstep verify`",
)

OUT_UNWRITABLE = Problem(
    "attest.out",
    StorageError,
    "out: cannot write {file!r}: {got}",
    "name another file with --out",
    cause="the folder for the statement is not there or not writable, or its disk is full",
    advice="another `--out`",
)

OTHER_STATEMENT = Problem(
    "statement.other_run",
    SpecError,
    "statement: it is of run {got}, and not of {wanted}",
    cause="the statement of another run",
    advice="the statement of this run",
)

STATEMENT_UNREADABLE = Problem(
    "statement.unreadable",
    SpecError,
    "statement: {file!r} cannot be read: {got}",
    cause="there is no such file, or it is no statement",
    advice="a file that `lockstep attest` wrote",
)

GUARD_OTHER_BASE = Problem(
    "guard.other_base",
    SpecError,
    "guard: commit {good} does not train as {base} does",
    "give one that does",
    cause="the commit of `--bisect` trains other bits than `--base`",
    advice="a commit that trains the same bits",
)

GUARD_NO_FILE = Problem(
    "guard.no_file",
    SpecError,
    "guard: there is no file {got!r}",
    "give a spec file",
    cause="there is no such spec here",
    advice="the spec's path",
)

GUARD_OUTSIDE = Problem(
    "guard.outside",
    SpecError,
    "guard: {got!r} is not below the working directory",
    "run it where the spec's commands are given",
    cause="a spec of another folder",
    advice="start in a folder above the spec",
)

DIFF_NO_FILE = Problem(
    "diff.no_file",
    SpecError,
    "diff: there is no file {got!r}",
    "give the id of a run or a spec file",
    cause="a misspelled file, or an id that is not whole",
    advice="follow the message",
)

# --- models -----------------------------------------------------------------------------------------------------

NO_EXAMPLE = Problem(
    "export.no_example",
    SpecError,
    "format: {format} needs an example of the model's input, and {job!r} has no example_input",
    "write one and train, or export safetensors",
    cause="the job has no `example_input`",
    advice="write one and train, or export safetensors",
)

RTOL = Problem(
    "export.rtol",
    SpecError,
    "rtol: got {got}, wanted a relative difference from 0 to below 1",
    cause="a wrong `--rtol`",
    advice="such as `1e-4`",
)

NO_BEST = Problem(
    "export.no_best",
    SpecError,
    "best: run {run} has no best weights; a run with early_stop keeps them",
    "leave out --best",
    cause="`--best` of a run without `early_stop`",
    advice="leave out `--best`",
)

NO_FINAL_WEIGHTS = Problem(
    "export.no_weights",
    SpecError,
    "run {run} is {got} and has no final weights; they are written when a run ends",
    "wait, or resume it",
    cause="the run has not ended",
    advice="wait, or resume it",
)

REUSES = Problem(
    "export.reuses",
    SpecError,
    "run {run} reuses the result of run {owner} and has no weights of its own",
    "give run {owner}",
    cause="a trial of a sweep that was trained before",
    advice="the run that the message names",
)

FOLDER_ELSEWHERE = Problem(
    "export.folder",
    SpecError,
    "run {run}: its folder {got!r} is not here",
    "name the folder of runs with --storage",
    cause="the run was recorded on another machine, or moved",
    advice="`--storage`",
)

WEIGHTS_UNREADABLE = Problem(
    "export.weights_unreadable",
    SpecError,
    "weights: cannot read {file!r}: {got}",
    cause="the file of the weights is gone or damaged",
    advice="restore it",
)

WEIGHTS_UNFIT = Problem(
    "export.weights_unfit",
    JobError,
    "job.model: the weights of run {run} do not fit it: {got}",
    "it has to make the model that the run trained, from the params alone: look for what else it reads, such as a file or a variable",
    cause="`job.model` makes another model here than where the run trained",
    advice="a model that follows from the params alone",
)

REPLACES_INPUTS = Problem(
    "predict.replaces_inputs",
    SpecError,
    "output: got {got!r}, the file of the inputs, which it would replace",
    "name another",
    cause="`predict --output` with the file of the inputs",
    advice="another file",
)

NOT_EXPORTED = Problem(
    "predict.not_exported",
    SpecError,
    "predict: run {run} has no {got}",
    "make it with `{command}`",
    cause="the model was not exported in this format",
    advice="export it first",
)

EXPORTED_BEFORE = Problem(
    "predict.exported_before",
    SpecError,
    "predict: {got} is of step {step}, and the run has other weights since",
    "make it again with `{command}`",
    cause="the run went on after the export",
    advice="export it again",
)

# --- a new job, the UI, a bench ---------------------------------------------------------------------------------

STARTER_KIND = Problem(
    "init.kind",
    SpecError,
    "kind: got {got!r}, wanted {wanted}",
    cause="a wrong `init --kind`",
    advice="one that the message names",
)

NO_NAME = Problem(
    "init.no_name",
    SpecError,
    "init: got '', wanted the name of the folder to make",
    cause="an empty name",
    advice="a name",
)

NO_PARENT = Problem(
    "init.no_parent",
    SpecError,
    "init: there is no folder {folder!r} to write {got!r} into",
    "make it first",
    cause="the folder above is not there",
    advice="make it first",
)

STARTER_NAME = Problem(
    "init.name",
    SpecError,
    "init: got {got!r}, wanted a name without backslashes and control characters",
    cause="a name that a spec cannot have",
    advice="letters, digits, dashes",
)

STARTER_EXISTS = Problem(
    "init.exists",
    SpecError,
    "init: {got!r} exists already",
    "give a name that is free",
    cause="nothing is overwritten",
    advice="another name",
)

STARTER_UNWRITABLE = Problem(
    "init.unwritable",
    StorageError,
    "init: cannot write {folder!r}: {got}",
    "give a name in a folder that you can write and that has room",
    cause="the folder above is not writable, or its disk is full",
    advice="another folder",
)

UI_WITHOUT_PASSWORD = Problem(
    "ui.no_password",
    SpecError,
    "host: {got!r} can be reached from other machines, and anyone who reaches MLflow can read and delete what is recorded",
    "export {password} of {least} characters or more for the user admin, or {users}, or stay on 127.0.0.1",
    shown="host: '…' can be reached from other machines, and anyone who reaches MLflow …",
    cause="`lockstep ui --host` without a password",
    advice="set `MLFLOW_AUTH_ADMIN_PASSWORD`, or listen on 127.0.0.1",
)

PORT = Problem(
    "ui.port",
    SpecError,
    "port: got {got}, wanted from 1 to 65535",
    cause="a wrong `--port`",
    advice="a number in that range",
)

BENCH_ON_CLUSTER = Problem(
    "bench.cluster",
    SpecError,
    "bench: a run would join the cluster at {got}, and a bench measures processes of this machine",
    "give --local",
    cause="a cluster that a run would join",
    advice="`--local`",
)

# --- a run in a process of its own ------------------------------------------------------------------------------

PROCESS_LOST = Problem(
    "run.process_lost",
    ClusterError,
    "the process of the run ended without a result ({got})",
    "where it was short of memory, free some; lockstep resume goes on with the run",
    cause="a [local run of a notebook](notebooks.md#the-process-of-a-local-run) whose process was killed, often because memory ran out",
    advice="free memory, then resume it",
)

EXECUTION_BROKE = Problem(
    "run.code_broke",
    LockstepError,
    "the run's code broke: {got}",
    cause="steps of a recorded run were taken again, and its code, or a package that it uses, failed in a way that no rule knows",
    advice="the traceback above it",
)

RUN_BROKE = Problem(
    "run.broke",
    LockstepError,
    "the run broke: {got}",
    "this is a mistake of Lockstep's: its traceback is above",
    cause="a mistake of Lockstep's, in the process of a [local run of a notebook](notebooks.md#the-process-of-a-local-run)",
    advice="report it, with the traceback",
)

# --- the repair of a record --------------------------------------------------------------------------------------

FILE_DAMAGED = Problem(
    "record_check.file_damaged",
    RecordError,
    "run {run}: {got}; nothing was sent or sealed",
    "{remedy}, then give the command again",
    shown="run …: weights/… has …, where the journal has …; nothing was sent or sealed; …`, `run …: … has …, where the seal has …; …",
    cause="`lockstep record check --repair`, or `record sync`, of a run whose weights, or other files that its journal does not have, were lost, damaged or changed in its folder: its store would get them, and its seal would cover them",
    advice="the copy that the message names, put in the place of the file; without one, a deleted `seal.json` accepts files that are no weights as they are",
)
