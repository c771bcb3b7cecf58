"""What can be wrong with a job's own code as training meets it: each a row of docs/failures.md, and the line that is shown."""

from __future__ import annotations

from lockstep.errors import DeterminismError, DriftError, JobError, Problem, SpecError

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

SPARSE_SHARDED = Problem(
    "job.model.sparse_sharded",
    SpecError,
    "sharding: got {got!r}, and parameter {name!r} has a sparse gradient, whose rows no worker has a fixed part of",
    "set sharding=none, or sparse=False",
    shown="sharding: got '…', and parameter '…' has a sparse gradient, …",
    cause="an embedding with `sparse=True`, and a sharded optimizer or model",
    advice="`sharding=none`, or a dense embedding",
)

NO_UNIT = Problem(
    "sharding.no_unit",
    SpecError,
    "sharding.units: got {got!r}, which is the name or the class of no module of the model{near}",
    "name modules as model.named_modules() does, with * for any part of a name",
    shown="sharding.units: got '…', which is the name or the class of no module of the model; …",
    cause="a pattern of `sharding.units` that fits nothing",
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
