"""What can be wrong with a job's own code, its data and its state as training meets them: each a row of docs/failures.md, and the line that is shown."""

from __future__ import annotations

from lockstep.errors import DeterminismError, DriftError, JobError, Problem, SpecError, StorageError

# --- the job's code raised an exception --------------------------------------------------------------------------

JOB_FAILED = Problem(
    "job.failed",
    JobError,
    "the job failed ({where}): {kind}: {got}",
    cause="any other exception of the job, with its place: `step 7, micro-batch 3, rank 0, jobs/mine.py:58 in loss`",
    advice="fix the job",
    unclear=True,
)

CHANGED_IN_PLACE = Problem(
    "job.changed_in_place",
    JobError,
    "the job failed ({where}): {kind}: {got}",
    "write a new tensor where forward changes one in place, such as x = x + y for x += y",
    cause="`one of the variables needed for gradient computation has been modified by an inplace operation`",
    advice="write a new tensor there",
    check="gradients",
    unclear=True,
)

JOB_EXITED = Problem(
    "job.exited",
    JobError,
    "the job ended the process ({where}) with sys.exit({got})",
    "raise an exception instead, or return",
    cause="`sys.exit` in the job",
    advice="raise an exception",
)

LABEL_RANGE = Problem(
    "job.loss.label_range",
    JobError,
    "job.loss: a label is out of range ({where}): {got}",
    "labels must be 0 … classes - 1: check the labels of the data against the width of the model's output",
    cause="labels start at 1, or the output layer is too narrow",
    advice="labels from 0, or a wider output",
    check="labels",
)

GRADIENT_TWICE = Problem(
    "job.gradient_twice",
    JobError,
    "a parameter's gradient came twice in one backward ({where})",
    "where the job calls torch's checkpoint, set use_reentrant=False, and let no code of the job's call backward",
    cause="on several workers, which DDP joins: the job uses a layer twice through torch's reentrant checkpoint, or calls `backward` itself",
    advice="`use_reentrant=False`, or `activation_checkpointing`",
)

NO_PROCESS_GROUP = Problem(
    "job.no_process_group",
    JobError,
    "the job asked for torch's process group ({where}), and jobs see none ({kind})",
    "take an optimizer and layers that know of no ranks, such as AdamW for ZeroRedundancyOptimizer, and set sharding=optimizer",
    shown="the job asked for torch's process group (…), and jobs see none (ValueError); …",
    cause="a distributed optimizer, layer or metric in the job: what it does must not depend on the number of workers",
    advice="the plain one, with `sharding: optimizer`",
    unclear=True,
)

GPU_MEMORY = Problem(
    "job.gpu_memory",
    JobError,
    "out of GPU memory ({where}): {got}",
    "lower batch.micro, or set activation_checkpointing=true",
    cause="the micro-batch is too large for the GPU",
    advice="lower `batch.micro`, or set `activation_checkpointing=true`; either changes the identity",
)

NO_DETERMINISTIC_KERNEL = Problem(
    "determinism.no_kernel",
    DeterminismError,
    "determinism strict: {got} has no deterministic kernel on this device ({where})",
    "use another operator, or determinism=fast, whose runs cannot be repeated bit for bit",
    cause="the message names the operator",
    advice="another operator, or `determinism=fast`",
)

# --- the loss ---------------------------------------------------------------------------------------------------
# `label` is the method that returned it: `job.loss`, or `the loss of phase 'critic'`.

NO_LOSS = Problem(
    "job.loss.kind",
    JobError,
    "{label}: returned {got}{where}, wanted lockstep.Loss(total, weight)",
    shown="job.loss: returned …, wanted lockstep.Loss(total, weight)",
    cause="a bare tensor",
    advice="wrap it in `lockstep.Loss`",
)

TOTAL_FORM = Problem(
    "job.loss.total",
    JobError,
    "{label}: total is {got}{where}, wanted a tensor of no dimension: the sum of the losses",
    shown="job.loss: total is …, wanted a tensor of no dimension: the sum of the losses",
    cause='`reduction="none"`, or `.item()`',
    advice="return the sum of the losses as a tensor",
)

TOTAL_DETACHED = Problem(
    "job.loss.total_detached",
    JobError,
    "{label}: total has no gradient",
    "it must come from the model, without detach() or no_grad()",
    shown="job.loss: total has no gradient; …",
    cause="`detach()` or `no_grad()`",
    advice="compute the loss with gradients",
    check="gradients",
)

LOSS_WEIGHT = Problem(
    "job.loss.weight",
    JobError,
    "{label}: weight is {got}, wanted a number of samples or tokens, at least 0",
    shown="job.loss: weight is …, wanted a number of samples or tokens, at least 0",
    cause="the weight is not such a number",
    advice="the number of samples or tokens",
)

WEIGHT_LEARNS = Problem(
    "job.loss.weight_learns",
    JobError,
    "{label}: {what} has a gradient, and a step divides by it as by a constant, where a loop of torch would differentiate it too",
    "give it detached, or put what learns into the total",
    shown="job.loss: weight has a gradient, and a step divides by it as by a constant, …; …",
    cause="a weight that the model computes",
    advice="`weight.detach()`, or a total that has it",
)

OTHER_PARTS = Problem(
    "job.loss.other_parts",
    JobError,
    "{label}: parts are {got}{where}, wanted {wanted} as in the first micro-batch",
    "give every part in each, with a total and a weight of 0 where there is nothing to add",
    shown="job.loss: parts are … (…), wanted … as in the first micro-batch; …",
    cause="a part that only some micro-batches give",
    advice="every part in each micro-batch, with a total and a weight of 0 for nothing",
)

PART_NAME_TAKEN = Problem(
    "job.loss.part_name",
    JobError,
    "{label}: {got!r} is no name for a part: {recorded} is recorded already",
    "give it another name",
    shown="job.loss: '…' is no name for a part: …`, `the loss of phase '…': …",
    cause="a part called `loss`, `lr`, `grad_norm`, `clipped_norm`, `scale` or `skipped`, names that every step already records",
    advice="another name",
)

NO_GRADIENT = Problem(
    "job.parameter.no_gradient",
    JobError,
    "parameter{s} {got} got no gradient ({where})",
    "use {it} in the loss, set requires_grad to False, or name {it} in conditional_parameters if some micro-batches rightly leave {it} out",
    shown="parameter '…' got no gradient (…); …",
    cause="the loss does not use it",
    advice="use it, freeze it, or name it in `conditional_parameters`",
    check="gradients",
)

# --- what is held out -------------------------------------------------------------------------------------------

NO_SAMPLE = Problem(
    "job.eval_data.empty",
    JobError,
    "{field}: holds no sample",
    "leave it out, or return None for a run without it",
    shown="eval_data: holds no sample; …",
    cause="an empty dataset",
    advice="return None for a run without evaluation",
)

NO_SET = Problem(
    "job.eval_data.no_set",
    JobError,
    "{field}: returned an empty mapping, wanted datasets by name",
    "return None for a run without it",
    cause="a mapping without a set",
    advice="return None",
)

SET_NAME = Problem(
    "job.eval_data.set_name",
    JobError,
    "{field}: got a set with the name {got!r}, wanted letters, digits, _ and -",
    "give it another name: it becomes a part of the names of its metrics",
    shown="job.eval_data: got a set with the name '…', wanted letters, digits, _ and -; …",
    cause="a name that is no text, or has a slash, a dot or a space",
    advice="another name",
)

UNKNOWN_SET = Problem(
    "evaluate.sets.unknown",
    SpecError,
    "{field}: the job's eval_data has no set of that name, wanted {wanted}",
    "take it out, or rename it",
    cause="`evaluate.sets` names a set that `eval_data` does not return",
    advice="a name that `eval_data` returns",
)

TEST_DECIDES = Problem(
    "rule.test_metric",
    SpecError,
    "{field}: got {got!r}, which is of test_data and decides nothing",
    "name a metric of eval_data",
    shown="early_stop.metric: got 'test/…', which is of test_data and decides nothing; …",
    cause="a rule that would choose weights by the test",
    advice="a metric of `eval_data`",
)

EVAL_WEIGHTS_BESIDE = Problem(
    "job.eval_weights.beside",
    SpecError,
    "{field}: got {got}, and the job's eval_weights gives the weights to evaluate",
    "{remedy}",
    shown="ema: got …, and the job's eval_weights gives the weights to evaluate; …",
    cause="two answers to which weights are evaluated; or sharded parameters, of which no worker has all",
    advice="leave one of the two out",
)

EVAL_WEIGHTS_DIFFER = Problem(
    "job.eval_weights.differ",
    DriftError,
    "job.eval_weights: ranks {got} evaluate other weights than rank 0 after step {step}",
    "it must give the same on every worker: let it read nothing that only one worker has, such as the state of an optimizer with sharding=optimizer",
    cause="`eval_weights` reads what is not the same on every worker",
    advice="the model, the job's own state and `batches` alone",
)

EVAL_WEIGHTS_KIND = Problem(
    "job.eval_weights.kind",
    JobError,
    "job.eval_weights: returned {got}, wanted a context manager",
    "decorate it with contextlib.contextmanager, and yield once",
    cause="a plain function or generator",
    advice="`@contextlib.contextmanager`",
)

# --- gradients that are not dense real numbers --------------------------------------------------------------------

COMPLEX_SCALED = Problem(
    "job.model.complex_scaled",
    JobError,
    "job.model: parameter {name!r} is {dtype}, whose gradients torch's loss scaler does not take",
    "set precision: bf16 or fp32",
    shown="job.model: parameter '…' is torch.complex64, whose gradients torch's loss scaler does not take; …",
    cause="complex weights with `precision: fp16`",
    advice="`precision: bf16` or `fp32`",
)

DENSE_TABLE = Problem(
    "job.dense_table",
    JobError,
    "parameter {name!r} has a dense gradient ({where}), and had a sparse one in the first micro-batch",
    "set sparse=False, or use it in every micro-batch by the embedding alone",
    shown="parameter '…' has a dense gradient (step …), and had a sparse one in the first micro-batch; …",
    cause="the weight of an `nn.Embedding(sparse=True)` that some micro-batches use in another way too",
    advice="`sparse=False`",
)

SPARSE_LATER = Problem(
    "job.sparse_later",
    JobError,
    "parameter {name!r} has a sparse gradient ({where}), and had a dense one in the first micro-batch",
    "set sparse=False, or use it in every micro-batch by the embedding alone",
    shown="parameter '…' has a sparse gradient (step …), and had a dense one in the first micro-batch; …",
    cause="the weight of an `nn.Embedding(sparse=True)` that some micro-batches use in another way too",
    advice="`sparse=False`",
)

NO_UNIT = Problem(
    "sharding.no_unit",
    SpecError,
    "{field}: got {got!r}, which is the name or the class of no module of the model{near}",
    "name modules as model.named_modules() does, with * for any part of a name",
    shown="sharding.units: got '…', which is the name or the class of no module of the model; …`, `compile.units: got …",
    cause="a pattern of `sharding.units` or `compile.units` that fits nothing",
    advice="a name of `model.named_modules()`, such as `layers.*`, or the name of a class",
)

JOINED_KIND = Problem(
    "job.optimizer.joined_kind",
    JobError,
    "{label}: returned several optimizers, and {kind} {why}, which one of several cannot",
    "return it alone, with all parameters, or take another one",
    shown="job.optimizer: returned several optimizers, and … evaluates the loss again, which one of several cannot; …",
    cause="a list with `LBFGS`, SAM or a schedule-free optimizer",
    advice="one optimizer, or others",
)

JOINED_TWICE = Problem(
    "job.optimizer.joined_twice",
    JobError,
    "{label}: returned several optimizers, two of which hold one parameter",
    "give each parameter to one of them",
    cause="a list of optimizers that share a parameter, which both would update",
    advice="each parameter in one of them",
)

SPARSE_OPTIMIZER = Problem(
    "job.optimizer.sparse",
    JobError,
    "{kind}{settings} takes no sparse gradient, and parameter {name!r} has one",
    "update it by SparseAdam, or SGD without momentum and decay, in a list of optimizers from job.optimizer(model); or set sparse=False",
    shown="AdamW takes no sparse gradient, and parameter '…' has one; …",
    cause="an embedding with `sparse=True` under an optimizer that moves every row",
    advice="`SparseAdam` for it, in [a list](writing-a-job.md#several-optimizers-of-one-loss)",
)

# --- what the job returns ---------------------------------------------------------------------------------------

MODEL_KIND = Problem(
    "job.model.kind",
    JobError,
    "job.model: returned {got}, wanted a torch.nn.Module",
    cause="the method returned something else",
    advice="return a module",
)

HELD_OUTSIDE = Problem(
    "job.model.held_outside",
    JobError,
    "job.model: parameter {name!r} is held outside of its module, by the job or a plain list of the model's, and with sharding=full it would stay there as it was at the start",
    "take it from its module each time, or set sharding=optimizer",
    cause="with `sharding: full` the job or the model has the parameter, or a view of it, in a list or attribute of its own, which keeps the weights of the start, or a backward goes through a graph that was made before the model was sharded",
    advice="take it from its module each time, or `sharding=optimizer`",
)

KNOWN_BY_ID = Problem(
    "job.model.known_by_id",
    JobError,
    "job.model: {got!r} has what id() says of parameter {name!r}, and with sharding=full another object is in its place, which it would not match",
    "know it by its name, or by an attribute that it is given (parameter.kind = ...), or set sharding=optimizer",
    cause="with `sharding: full` the model has other objects for its parameters, which the job knows by their ids",
    advice="know them by their names, or by an attribute that each is given, or `sharding=optimizer`",
)

EMA_BESIDE = Problem(
    "job.optimizer.ema_beside",
    SpecError,
    "ema: got {got}, and the job's {name} has weights of its own to evaluate (train() and eval())",
    "leave ema out",
    cause="a schedule-free optimizer beside `ema`",
    advice="leave out `ema`",
)

SCHEDULE_METRIC = Problem(
    "job.schedule.metric",
    JobError,
    "job.schedule: follows {got!r}, and {wanted}",
    cause="a `lockstep.Plateau` names a metric that no evaluation gives",
    advice="a name as it is recorded, such as `eval/accuracy`",
)

IDENTITY_CONTENT = Problem(
    "job.identity.content",
    JobError,
    "job.identity: gave a {kind}, whose content cannot be read ({reason})",
    "give text, numbers, arrays or objects that pickle takes",
    cause="a lock, an open file or a lambda",
    advice="give text, numbers, arrays or objects that pickle takes",
)

SHARED_APART = Problem(
    "job.state.shared_apart",
    JobError,
    "job.load_state_dict: {name} and {other} share memory where state_dict() gives them, and not once they are restored: a write into the one would change the other, but not in a resumed run",
    "take both from the state as they are given, copy them into memory that they share (copy_), or give a copy of what is only read",
    cause="`load_state_dict` copies what `state_dict` gives as one piece of memory",
    advice="follow the message",
)

STATE_LEARNS = Problem(
    "job.state.learns",
    JobError,
    "job.state_dict: {name} is a tensor that requires a gradient, and would be restored as one that does not",
    "hold it in the model, which learns and is saved, or give tensor.detach()",
    cause="`state_dict` gives a parameter, or what was computed from one",
    advice="hold it in the model, or give `tensor.detach()`",
)

# --- data -------------------------------------------------------------------------------------------------------

NO_MAP_STYLE = Problem(
    "job.data.kind",
    JobError,
    "job.{name}: returned {got}, wanted a map-style dataset (__len__ and __getitem__)",
    "{remedy}",
    shown="job.train_data: returned …, wanted a map-style dataset (__len__ and __getitem__); …`, the same of `job.eval_data",
    cause="a DataLoader, a stream, or a tuple of tensors",
    advice="return the dataset itself",
)

NO_LENGTH = Problem(
    "job.data.no_length",
    JobError,
    "{name}: {got} has no __len__",
    "give it one: Lockstep reads map-style datasets, whose samples can be named by an index",
    cause="an iterable dataset",
    advice="a map-style dataset",
)

DRAWS_EPOCHS = Problem(
    "job.eval_data.draws",
    JobError,
    "{name}: {kind} draws epochs of {got} from {wanted} samples, and an evaluation takes each sample once, in the data's own order",
    "give it a dataset of the samples that are to be evaluated, such as a Mixture without `samples`",
    cause="a mixture whose `samples` are not all of its sources: an evaluation takes each sample once",
    advice="leave `samples` out, or give the samples that are to be evaluated",
)

NOTHING_EVALUATED = Problem(
    "job.eval_data.nothing_evaluated",
    JobError,
    "eval_data: the job has phases, and neither loss(model, batch), which is the evaluation's then, nor metrics(model, batch) nor outputs(model, batch), so there is nothing to evaluate",
    "write one of them, or return None",
    cause="nothing to evaluate",
    advice="`loss`, `metrics` or `outputs`, or None for `eval_data`",
)

NO_EVAL_DATA = Problem(
    "rule.no_eval_data",
    SpecError,
    "{field}: the job has no eval_data",
    "give it some, or leave {field} out",
    cause="there is nothing to watch",
    advice="give the job eval data, or leave out `early_stop` or `checkpoint.keep_best`",
)

NO_METRIC = Problem(
    "rule.no_metric",
    SpecError,
    "{field}: the job gives no {got!r}{hint}",
    shown="early_stop.metric: the job gives no '…'; did you mean '…'?",
    cause="the evaluation does not report this name; found before training",
    advice="a metric's recorded name",
)

ALL_LEFT_OUT = Problem(
    "data.without.all",
    SpecError,
    "data.without: leaves out all {got} samples of train_data",
    "leave out fewer",
    cause="ids that leave nothing to train on",
    advice="leave out fewer",
)

NO_SUCH_SAMPLE = Problem(
    "data.without.unknown",
    SpecError,
    "{field}: got id {got}, wanted samples of train_data, which has {wanted}, counted from 0",
    cause="ids that the data do not have",
    advice="ids that they have; ids count from 0",
)

NO_PLAN = Problem(
    "batch.global.no_step",
    SpecError,
    "batch.global: {got}",
    "{remedy}",
    shown="batch.global: … samples give no step of batch.global = …; …",
    cause="fewer samples than a global batch, with `drop_last`; or no sample at all",
    advice="a smaller batch, or `data.drop_last=false`; data with samples",
)

# --- metrics of the whole set -----------------------------------------------------------------------------------

OUTPUTS_FORM = Problem(
    "job.outputs.form",
    JobError,
    "job.outputs: {got}, wanted {wanted}",
    shown="job.outputs: …, wanted …",
    cause="outputs that are not rows by name, are given for some micro-batches only, or are of different types",
    advice="tensors or lists by name, with a row for each sample, the same in every micro-batch; [metrics of the whole set](writing-a-job.md#metrics-of-the-whole-set)",
)

WHOLE_SET_KIND = Problem(
    "job.whole_set.kind",
    JobError,
    "job.{name}: returned {got}, wanted a mapping by name, empty for none",
    cause="`whole_set_metrics` or `figures` returned something else",
    advice="a mapping by name",
)

WHOLE_SET_NAME = Problem(
    "job.whole_set.name",
    JobError,
    "job.whole_set_metrics: {got!r} is {taken}",
    "give one of them another name",
    shown="job.whole_set_metrics: '…' is given twice; …`, `… is the name of the loss, of one of its parts or of a metric; …",
    cause="two metrics of one name",
    advice="another name",
)

WHOLE_SET_NUMBER = Problem(
    "job.whole_set.number",
    JobError,
    "job.whole_set_metrics: {name!r} is {got}, wanted a number, some in a row or by name, or an object with update() and compute()",
    "give a matrix in figures",
    cause="a metric that is not a number",
    advice="a number, some in a row or by name; a matrix in `figures`",
)

FIGURE = Problem(
    "job.figures.form",
    JobError,
    "job.figures: {got}, wanted {wanted}",
    shown="job.figures: …, wanted …",
    cause="a figure whose name has folders, that is neither text, numbers nor of matplotlib, or that is too long",
    advice="text, a figure of matplotlib, or numbers in rows and columns, under the name of a file",
)

# --- what ranks must agree on -----------------------------------------------------------------------------------

INPUTS_DIFFER = Problem(
    "ranks.inputs_differ",
    DriftError,
    "{name}: rank {rank} has read {got}, a rank before it {wanted}",
    "give every worker the same variables, or have the job declare it in placement_variables",
    cause="workers were started with different environment variables, which the job reads",
    advice="the same variables everywhere, or `placement_variables`",
)

IDENTITIES_DIFFER = Problem(
    "ranks.identities_differ",
    DriftError,
    "{name}: rank 0 has {wanted}, rank {rank} has {got}",
    "{remedy}",
    shown="numerics_probe: rank 0 has …, rank … has …; …`, `initial_weights_digest: rank 0 has …, rank … has …; …`, `job.params.…: rank 0 has …, rank … has …; …`, `<field>: rank 0 has …, rank … has …; …",
    cause="machines of more than one kind; a model that is not built from the seeded generators; a default that differs between workers; or other sources, versions or files on one of the machines",
    advice="follow the message: machines of one kind, or `determinism=fast`; weights from the default generators; the param in the spec; the same code and data everywhere",
)

OTHER_BYTES = Problem(
    "ranks.other_bytes",
    DriftError,
    "rank {rank} has read other bytes of {what!r} than rank 0, which has them from the store",
    "resume: the memory of its machine, or the network between them, is at fault",
    cause="data that rank 0 read from a checkpoint changed in memory or on the way to this rank",
    advice="resume; take the node out if it happens again",
)

RESTORED_OTHERWISE = Problem(
    "ranks.restored_otherwise",
    DriftError,
    "after step {step} was restored ranks {ranks} hold another state than rank 0",
    "they read the same checkpoint: look for a job.load_state_dict that is not the same on every rank, or a fault of the machine",
    cause="`job.load_state_dict` gives different results on different ranks, or a hardware fault",
    advice="restore the same state on every rank",
)

# --- determinism ------------------------------------------------------------------------------------------------

HASH_SEED = Problem(
    "determinism.hash_seed",
    DeterminismError,
    "determinism strict: this python was not started with PYTHONHASHSEED=0 (it is {got}), so it orders sets of strings in another way than other runs",
    "start it with PYTHONHASHSEED=0, or use the lockstep command, which does",
    shown="determinism strict: this python was not started with PYTHONHASHSEED=0 …",
    cause="a call under torchrun from a Python that hashes strings in another way",
    advice="`PYTHONHASHSEED=0 torchrun …`",
)

THREADS = Problem(
    "determinism.threads",
    SpecError,
    "threads: got {got}, and OpenMP promises this process {wanted} (OMP_THREAD_LIMIT or OMP_DYNAMIC is set)",
    "set threads={wanted}, or start it without these variables",
    cause="a limit of OpenMP's threads in the environment",
    advice="fewer threads, or start it without these variables",
)

JOB_SETTING = Problem(
    "determinism.job_setting",
    DeterminismError,
    "determinism strict: the job has set {name} to {got}, wanted {wanted} ({reason})",
    "take that out of the job, and set threads or determinism in the spec",
    cause="the job changes the number of threads of torch or of NumPy's BLAS, or allows any kernel",
    advice="take that out of the job; `threads` and `determinism` are in the spec",
)

SETTING_CHANGED = Problem(
    "determinism.setting_changed",
    DeterminismError,
    "determinism strict: {where}, the job changed {name} from {wanted} to {got}, which no checkpoint keeps, so a resumed run would go on with {wanted}",
    "set it where the job is imported or in model(), for the whole run, or in loss, for the micro-batch",
    shown="determinism strict: between steps … and …, the job changed … from … to …, which no checkpoint keeps, …",
    cause="`after_step` or an optimizer of the job's own changes a setting of torch",
    advice="set it where the job is imported or in `model`, for the whole run, or in `loss`, which each micro-batch begins anew",
)

# --- what a run goes on from ------------------------------------------------------------------------------------

OTHER_IDENTITY = Problem(
    "resume.other_identity",
    SpecError,
    "resume: {name} is {got} and was {wanted} in the run, which would go on with other bits",
    "{remedy}, or start a new run from this state with --fork",
    shown="resume: <field> is … and was … in the run, which would go on with other bits; …",
    cause="the code, a version, the data or the machine changed",
    advice="restore it, or use `--fork`",
)

OTHER_POSITION = Problem(
    "resume.other_position",
    StorageError,
    "checkpoint {checkpoint}: {name} was {wanted} when it was saved and is now {got}: this Lockstep would go on with other bits",
    "resume with the version that saved it",
    shown="checkpoint …: <name> was … when it was saved and is now …: …",
    cause="this version of Lockstep computes another position of the data, the schedule or the generators",
    advice="use the version that saved it",
)

OTHER_STATE = Problem(
    "resume.other_state",
    StorageError,
    "checkpoint: its state does not fit this run: {got}",
    "resume with the job and the spec that saved it",
    cause="another model or optimizer than the one that was saved",
    advice="the job and spec that saved it",
)

FORK_EMPTY = Problem(
    "fork.run.empty",
    SpecError,
    "fork.run: run {run} has no good checkpoint to start from",
    "fork another run, or start a new one",
    cause="the run has no checkpoint that is complete",
    advice="fork another run",
)

FORK_PLACE = Problem(
    "fork.place",
    SpecError,
    "fork: {name} is {got} and was {wanted}, so the run's place in its data would not be the same",
    "keep it, or start a new run from its weights with initial_weights",
    shown="fork: batch.global is … and was …, …",
    cause="the position in the data would change",
    advice="a new run with `initial_weights`",
)

FORK_OPTIMIZER = Problem(
    "fork.optimizer",
    SpecError,
    "optimizer.name: the state of the run that is forked is that of another optimizer, {got}",
    "keep its optimizer, or start a new run from its weights with initial_weights",
    cause="the fork has another optimizer",
    advice="a new run with `initial_weights`",
)

FORK_PHASES = Problem(
    "fork.phases",
    SpecError,
    "fork: the run that is forked has optimizers of the phases {wanted}, and this job of {got}",
    "keep its phases, or start a new run from its weights with initial_weights",
    cause="the fork has other phases",
    advice="a new run with `initial_weights`",
)

WEIGHTS_UNREADABLE = Problem(
    "initial_weights.unreadable",
    SpecError,
    "initial_weights: cannot read {path!r}: {got}; wanted a safetensors file, a folder of them with model.safetensors.index.json, or a checkpoint",
    shown="initial_weights: cannot read '…': …; wanted a safetensors file, …",
    cause="the file has another format, or the index of the folder names what is not there",
    advice="a safetensors file, a folder of them with its index, or a checkpoint",
)

OTHER_WEIGHTS = Problem(
    "initial_weights.other",
    SpecError,
    "initial_weights: {path!r} does not fit the job's model: {got}",
    "give the job the params of the run that they come from",
    cause="the weights are those of another model",
    advice="the params of the run that they come from",
)

# --- what a run leaves ------------------------------------------------------------------------------------------

WEIGHTS_UNWRITABLE = Problem(
    "weights.unwritable",
    StorageError,
    "checkpoint.storage: cannot write {path!r}: {got}; the weights are not saved",
    "make room there, or correct the permissions, and resume the run",
    cause="the disk failed later",
    advice="free space, or mend the disk",
)

AUXILIARY_UNREADABLE = Problem(
    "weights.unreadable",
    StorageError,
    "weights: cannot read {path!r}: {got}",
    "restore the file",
    cause="a file beside the weights was changed or deleted",
    advice="restore the file",
)

OTHER_EVALUATOR = Problem(
    "evaluate.other_process",
    DriftError,
    "it has a different {got} than the run",
    cause="a warning with `evaluate.beside`: the code, a package or a variable has changed since the run began, so the workers evaluate by themselves",
    advice="nothing: the metrics are the same bits",
)
