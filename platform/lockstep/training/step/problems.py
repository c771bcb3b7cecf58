"""What can be wrong with a step of training: with the losses, optimizers and schedules of the job, and with how the step is computed. Each is a row of docs/failures.md, and the line that is shown.

`label` is the method of the job that a line is about: `job.loss`, `the loss of phase 'critic'`, `job.optimizer`, …
"""

from __future__ import annotations

from lockstep.errors import (
    ClusterError,
    DeterminismError,
    DriftError,
    JobError,
    NumericsError,
    Problem,
    SpecError,
    StorageError,
)

# --- what the loss and the metrics return ------------------------------------------------------------------------

EVALUATION_LOSS = Problem(
    "step.loss.evaluation",
    JobError,
    "job.loss: returned {got} in evaluation, wanted lockstep.Loss(total, weight) as in training",
    cause="a loss that returns something else where the model is in evaluation mode",
    advice="a `lockstep.Loss` in both",
)

NO_MAPPING = Problem(
    "step.means.mapping",
    JobError,
    "{what} {got}, wanted a dict of lockstep.Mean(total, weight) by name, empty for none",
    shown="job.metrics: returned …, wanted a dict of lockstep.Mean(total, weight) by name, …`, `job.loss: parts is …, wanted a dict of lockstep.Mean(total, weight) by name, …",
    cause="a tensor or a number, or a list",
    advice="a dict of means by name",
)

MEAN_NAME = Problem(
    "step.means.name",
    JobError,
    "{label}: got {got} as a name, wanted text that one line can show",
    shown="job.loss: got … as a name, wanted text that one line can show`, the same of `job.metrics` and `job.whole_set_metrics",
    cause="the name of a part or metric is a number, empty, or has a newline or another character that cannot be shown",
    advice="another name",
)

METRIC_NAME_TAKEN = Problem(
    "step.means.name_taken",
    JobError,
    "job.metrics: {got!r} is the name of the loss or of one of its parts",
    "give the metric another name",
    cause="a metric with a name that the loss already has",
    advice="another name",
)

NO_MEAN = Problem(
    "step.means.kind",
    JobError,
    "{label}: {name} is {got}, wanted lockstep.Mean(total, weight): the sum over the micro-batch, and the number of samples or tokens that it is divided by in the end",
    shown="job.loss: part '…' is …, wanted lockstep.Mean(total, weight): …`, `job.metrics: …",
    cause="a part or metric that is not a `Mean`",
    advice="wrap it in `lockstep.Mean`",
)

MEAN_NUMBER = Problem(
    "step.means.number",
    JobError,
    "{label}: {part} of {name} is {got}, wanted one number",
    cause="the total or the weight of a mean is a tensor of several numbers, or none",
    advice="the sum over the micro-batch",
)

TOO_LARGE = Problem(
    "step.means.too_large",
    JobError,
    "{what} is {got} beyond 1.8e308, wanted a number that a float64 can hold",
    shown="job.…: … is … beyond 1.8e308, wanted a number that a float64 can hold",
    cause="an int with more than 308 digits as a part or metric",
    advice="a smaller one, or its logarithm",
)

STEP_WEIGHT = Problem(
    "step.loss.weight",
    JobError,
    "{label}: the weight of step {step}, micro-batch {micro_batch} is {got}, wanted a number of samples or tokens, at least 0",
    shown="job.loss: the weight of step …, micro-batch … is …, wanted a number of samples or tokens, at least 0",
    cause="a weight that is negative or not finite, found in the step",
    advice="the number of samples or tokens",
)

NO_WEIGHT = Problem(
    "step.loss.no_weight",
    JobError,
    "{label}: the weights of step {step} add up to {got}, wanted more than 0",
    "a step without any weight has no mean{hint}: leave such samples out of the data",
    shown="job.loss: the weights of step … add up to …, wanted more than 0; …",
    cause="the step contains only padding",
    advice="leave out such samples",
)

# --- losses over the whole batch, their rows and terms -----------------------------------------------------------

ROWS_KIND = Problem(
    "step.rows.kind",
    JobError,
    "{label}: {got}{where}, wanted a tensor with a row for each {wanted}",
    shown="job.embed: returned …, wanted a tensor with a row for each …",
    cause="what `embed`, `outputs` or a statistic returns is no tensor, or has fewer or more rows than samples",
    advice="a tensor with a row for each sample; [a loss over the whole batch](writing-a-job.md#a-loss-over-the-whole-batch)",
)

OTHER_ROWS = Problem(
    "step.rows.other",
    JobError,
    "{label}: gives {got}{where}, wanted {wanted} as in the micro-batch before",
    "give rows of the same names, types and shapes in every micro-batch",
    shown="job.embed: gives …, wanted … as in the micro-batch before; …",
    cause="rows of another name, type or shape than in the micro-batch before",
    advice="the same in every micro-batch",
)

NO_ROWS = Problem(
    "step.rows.none",
    JobError,
    "{label}: gives no rows in this step, for no micro-batch of it has a sample",
    cause="a step whose samples are all left out",
    advice="leave out fewer samples in `data.without`",
)

ROWS_DETACHED = Problem(
    "step.rows.detached",
    JobError,
    "{label}: total has no gradient",
    "it must come from the rows, without detach() or no_grad(), and {embed} must compute them from the model",
    shown="job.batch_loss: total has no gradient; …",
    cause="it does not come from the rows, or these do not come from the model",
    advice="no `detach()` on the way",
    check="gradients",
)

EMBED_DIFFERS = Problem(
    "step.rows.differ",
    DeterminismError,
    "determinism strict: {label} gives other bits{name} when it is called again for the same micro-batch{where}, so its gradient would be that of other rows",
    "draw from the default generators or from lockstep.rng(), and keep nothing from one call to the next",
    shown="determinism strict: job.embed gives other bits … when it is called again for the same micro-batch …; …",
    cause="it keeps something, or draws from a generator of its own",
    advice="draw from the default generators, and keep nothing",
)

TERM_WEIGHTS = Problem(
    "step.terms.weights",
    JobError,
    "job.term_weights: returned {got}, wanted a weight for each of {wanted}",
    cause="a weight that is missing, or one of a term that the loss has not",
    advice="a weight for each term of the loss; [terms](writing-a-job.md#terms-with-weights-of-their-own)",
)

OTHER_TERMS = Problem(
    "step.terms.other",
    JobError,
    "{label}: the terms are {got}{where}, wanted {wanted} as in the first micro-batch",
    "give every term in each, with a total and a weight of 0 where there is nothing to add",
    shown="job.loss: the terms are …, wanted … as in the first micro-batch; …",
    cause="a term that some micro-batches leave out",
    advice="total and weight of 0 there",
)

TERM_WEIGHT_DIFFERS = Problem(
    "step.terms.weight_differs",
    JobError,
    "{label}: the weight of the term {name!r} is {got} over the step, and {source} gave {wanted}",
    "both must be the same, for the gradient was divided by the latter",
    shown="job.loss: the weight of the term … is … over the step, and … gave …; …",
    cause="`term_weights` counts something else than the loss",
    advice="the same weights in both; [terms](writing-a-job.md#terms-with-weights-of-their-own)",
)

# --- statistics of a step ----------------------------------------------------------------------------------------

STATISTICS_KIND = Problem(
    "step.statistics.kind",
    JobError,
    "{label}: {what} {got}, wanted {wanted}",
    shown="job.step_statistics: returned …, wanted means or tensors of rows by name, empty for none`, `job.step_statistics: the statistic '…' is …, wanted lockstep.Mean(total, weight), or a tensor with a row for each sample",
    cause="statistics that are neither means nor rows",
    advice="[statistics of a step](writing-a-job.md#statistics-of-a-step)",
)

STATISTICS_LATE = Problem(
    "step.statistics.late",
    JobError,
    "{label}: gives statistics ({where}), and gave none in the first micro-batch",
    "give them in every micro-batch",
    shown="job.loss: gives statistics …, and gave none in the first micro-batch; …",
    cause="statistics that only some micro-batches give",
    advice="[statistics of a step](writing-a-job.md#statistics-of-a-step)",
)

OTHER_STATISTICS = Problem(
    "step.statistics.other",
    JobError,
    "{label}: {got}",
    "every micro-batch gives the same means, of one type and shape",
    shown="the statistics of the step: the mean '…' is …, and … in the micro-batch before; …`, `the statistics of the step: the means differ in type or shape from one micro-batch to another; …",
    cause="means of another type or shape than in the micro-batch before",
    advice="[statistics of a step](writing-a-job.md#statistics-of-a-step)",
)

# --- values that are not finite ----------------------------------------------------------------------------------

LOSS_NOT_FINITE = Problem(
    "step.loss.not_finite",
    NumericsError,
    "the loss of step {step}, micro-batch {micro_batch}{phase} is {got}",
    "usual causes: a learning rate that is too high (optimizer.lr is {rate}), a label or an input that is not finite, a division by zero",
    shown="the loss of step …, micro-batch … is …; …",
    cause="the learning rate is too high, or a sample is bad",
    advice="lower the rate, warm up, or set `clip_norm`",
)

NORM_NOT_FINITE = Problem(
    "step.norm.not_finite",
    NumericsError,
    "the gradient of step {step}{phase} has the norm {got} though its loss is finite",
    "lower optimizer.lr (now {rate}), or look for a square root or a logarithm at zero in the model",
    shown="the gradient of step … has the norm … though its loss is finite; …",
    cause="a square root or a logarithm at zero",
    advice="avoid it, for example with a small epsilon",
)

SCALE_FELL = Problem(
    "step.scale_fell",
    NumericsError,
    "precision fp16: {got} and the loss scale fell to {scale}: the loss or its gradients are not finite at any scale",
    "lower optimizer.lr, or use precision bf16 or fp32",
    shown="precision fp16: … steps in a row overflowed and the loss scale fell to …: …",
    cause="the values are not finite at any scale",
    advice="`precision=bf16` or `fp32`, or a lower rate",
)

# --- optimizers --------------------------------------------------------------------------------------------------

OPTIMIZER_KIND = Problem(
    "step.optimizer.kind",
    JobError,
    "{label}: returned {got}, wanted one torch.optim.Optimizer or a list of them",
    "the schedule is the spec's or job.schedule's, and each loss of several has a phase of its own (job.phases)",
    shown="job.optimizer: returned …, wanted one torch.optim.Optimizer or a list of them; …",
    cause="a pair of optimizers and schedules, a dict, or no optimizer",
    advice="return one optimizer, or a list; the schedule is the spec's, or `schedule(optimizer, updates)`",
)

OPTIMIZER_TWICE = Problem(
    "step.optimizer.twice",
    JobError,
    "{label} is that of another phase",
    "make one for each",
    cause="`optimizer` of two phases returned one object",
    advice="an optimizer for each phase",
)

NO_SUPER_INIT = Problem(
    "step.optimizer.no_super_init",
    JobError,
    "{label}: {got} does not call super().__init__(params, defaults), so it has neither hooks nor a state of its own",
    "call it in __init__, with the parameters of the optimizer that it wraps",
    shown="job.optimizer: … does not call super().__init__(params, defaults), …",
    cause="a wrapper of an optimizer that is not an optimizer itself",
    advice="call it, with the parameters of the wrapped one",
)

STRANGE_PARAMETER = Problem(
    "step.optimizer.strange_parameter",
    JobError,
    "{label}: a parameter of shape {got} is none of {wanted} and would get no gradient",
    "build the optimizer from {source} that it is given",
    shown="job.optimizer: a parameter of shape … is none of the model's and would get no gradient; …",
    cause="the optimizer was built from another model than the one given",
    advice="build it from the model that is given",
)

NO_GROUP = Problem(
    "step.optimizer.no_group",
    JobError,
    "{label}: parameter {got} is in no group and would never learn",
    "add it, or set requires_grad to False",
    shown="job.optimizer: parameter '…' is in no group and would never learn; …",
    cause="the job's optimizer leaves the parameter out",
    advice="add it, or freeze it",
)

NO_RATE = Problem(
    "step.optimizer.no_rate",
    JobError,
    "{label}: a group of {got} has no learning rate, which the schedule sets before each update",
    "call it lr in defaults, or give lr=1.0 where the optimizer needs none",
    shown="job.optimizer: a group of … has no learning rate, …",
    cause="an optimizer of the job's own whose rate has another name, or that needs none",
    advice="call it `lr`, or give `lr=1.0`",
)

SCHEDULER_CARRIED = Problem(
    "step.optimizer.scheduler",
    JobError,
    "{label}: the optimizer carries a learning-rate scheduler, which the schedule of the spec would overwrite",
    "return it without one: use the spec's schedule, or return the scheduler from job.schedule(optimizer, updates)",
    shown="job.optimizer: the optimizer carries a learning-rate scheduler, …",
    cause="a scheduler that was made over the optimizer in `optimizer`",
    advice="the spec's schedule, or `schedule(optimizer, updates)`",
)

PARAMETER_ORDER = Problem(
    "step.optimizer.order",
    JobError,
    "job.optimizer: {where} is {got!r} {here} and {wanted!r} {there}, so the optimizer's state would go to another parameter",
    "a set has another order in each process: give parameters in a list, in the model's order",
    shown="job.optimizer: parameter … of group … is '…' … and '…' …; …",
    cause="the optimizer was given a set of parameters, whose order differs between processes; found between ranks, when the optimizer is made again, or in a resume",
    advice="lists, in the model's order",
)

RATE_CHANGED = Problem(
    "step.optimizer.rate_changed",
    JobError,
    "job.optimizer: the learning rate of group {group} was changed from {previous} to {got} {when}, and the schedule would overwrite it",
    "use the spec's schedule or job.schedule(optimizer, updates){remedy}",
    cause="`after_step` or the optimizer sets a rate, which the schedule would set back",
    advice="the spec's schedule, or `job.schedule(optimizer, updates)`",
)

GROUPS_CHANGED = Problem(
    "step.optimizer.groups_changed",
    JobError,
    "job.optimizer: got {got} parameter groups after an update, wanted the {wanted} that it was made with: the schedule and every checkpoint go by its groups",
    "give it all of them in job.optimizer(model), and leave those that are to rest to job.frozen_parameters(model, step)",
    cause="a group is added or taken out during the run, as to unfreeze a layer",
    advice="all groups from the start; `frozen_parameters`",
)

OPTIMIZER_MIRROR_LOST = Problem(
    "step.optimizer.mirror_lost",
    ClusterError,
    "a part of the state was lost with its worker and its mirror: of {ranks} parts some are on no worker that is left",
    "the next attempt reads the newest checkpoint",
    cause="a worker and the one that keeps its [mirror](attempts.md#sharded-state) were lost at once; [retried](attempts.md) from a checkpoint",
    advice="nothing",
)

MIRROR_DIFFERS = Problem(
    "step.optimizer.mirror_differs",
    ClusterError,
    "when a worker was lost, another one and its mirror had made different weights in the newest update: no worker that is left can be relied on",
    "the next attempt reads the newest checkpoint",
    cause="a bit flipped in the part of the state that a worker or its [mirror](attempts.md#sharded-state) keeps, just before another worker was lost; [retried](attempts.md) from a checkpoint",
    advice="nothing",
)

AVERAGE_SHAPE = Problem(
    "step.average_shape",
    StorageError,
    "checkpoint: the average of {name!r} has the shape {got}, and the parameter {wanted}",
    "resume with the model that was saved",
    cause="another model than the one that was saved",
    advice="the job and spec that saved it",
)

# --- optimizers that evaluate the loss again ---------------------------------------------------------------------

CLOSURE_CALLS = Problem(
    "step.closure.calls_unsaid",
    JobError,
    "job.optimizer: {name} evaluates the loss again within an update (it needs a closure)",
    "say how often at most by an attribute of the job's class, such as closure_calls = 2",
    cause="the job does not say how often",
    advice="[`closure_calls`](writing-a-job.md#optimizers-that-evaluate-the-loss-again) in its class",
)

CLOSURE_OFTEN = Problem(
    "step.closure.often",
    JobError,
    "job.optimizer: {name} has called its closure more than {wanted} times in one update, wanted at most so many",
    "look for a search that does not end, or raise closure_calls of the job's class",
    cause="a search that does not end, or a bound that is too low",
    advice="look at the search, or raise `closure_calls`",
)

CLOSURE_DIFFERS = Problem(
    "step.closure.differs",
    DriftError,
    "job.optimizer: {name} has called its closure {got} times on the ranks in turn",
    "it got the same bits on each: let it decide by these alone",
    cause="the optimizer decides by something that only one worker has, such as a clock or a generator of its own",
    advice="decide by the loss and the gradients alone",
)

CLOSURE_FP16 = Problem(
    "step.closure.fp16",
    SpecError,
    "precision: got 'fp16', and {name} evaluates the loss again within an update, which torch's loss scaler does not allow",
    "set precision to bf16 or fp32",
    cause="torch's loss scaler takes one gradient an update",
    advice="bf16 or fp32",
)

CLOSURE_OFFLOAD = Problem(
    "step.closure.offload",
    SpecError,
    "sharding.offload: got true, and {name} evaluates the loss again within an update: its rows are on the device then, and the model would be gathered from those in host memory",
    "set sharding.offload=false",
    cause="an optimizer that evaluates the loss again, with its rows in host memory",
    advice="`sharding.offload=false`",
)

# --- settings that an optimizer, a phase or a resting parameter does not allow -----------------------------------

MIRROR = Problem(
    "step.mirror",
    SpecError,
    "faults.mirror: got true, and {reason}",
    "set faults.mirror=false, with which the run resumes from its last checkpoint when a worker is lost",
    cause="phases, or an optimizer that evaluates the loss again",
    advice="`faults.mirror=false`",
)

NATIVE = Problem(
    "step.native",
    SpecError,
    "reduction: got 'native', and the job has {feature}: their gradients are summed along the exact tree alone",
    "set reduction=exact",
    cause="phases, or parameters that rest",
    advice="`reduction=exact`",
)

RECHECK = Problem(
    "step.recheck",
    SpecError,
    "determinism.recheck: got {got}, and the job has phases: a micro-batch is computed again for one loss alone",
    "set determinism.recheck=0",
    cause="a job with phases",
    advice="`determinism.recheck=0`",
)

# --- sharding ----------------------------------------------------------------------------------------------------

NOT_ELEMENT_WISE = Problem(
    "step.sharding.not_element_wise",
    SpecError,
    "sharding: the job's optimizer is {got}, wanted one of {wanted}, or one that updates each element alone",
    "{reason}; or set sharding=none",
    cause="the update may need more of a parameter than the part that a worker has",
    advice="[`elementwise = True`](writing-a-job.md#the-optimizer) in its class if it does not, else `sharding=none`",
)

PARTS_DIFFER = Problem(
    "step.sharding.parts_differ",
    SpecError,
    "sharding: the job's {name} says elementwise, and {got} in two parts than whole: the workers would get other bits than one that has all",
    "let it compute each element from that element's own numbers, or set sharding=none",
    cause="tried on a few numbers, the optimizer computes with more than an element's own numbers",
    advice="compute each element by itself, or `sharding=none`",
)

NO_PARTS = Problem(
    "step.sharding.no_parts",
    SpecError,
    "sharding: the job's {name} {got}",
    "{remedy}set sharding=none",
    shown="sharding: the job's … has hooks, …`, `… comes with state, …`, `… changes …`, `… keeps … of the shape …`, `… has weights of its own to evaluate …`, `… has parameters, or an optimizer over them, in its attribute …",
    cause="the optimizer keeps or changes what no worker has a part of",
    advice="follow the message, or `sharding=none`",
)

SHORT_THREADS = Problem(
    "step.sharding.short_threads",
    SpecError,
    "sharding: got {got!r} with threads={threads}, and parameter {name!r} is {dtype}, which torch rounds otherwise where a thread's share of it ends, and that is elsewhere in a part",
    "set threads=1, hold it in float32 and set precision: bf16, or set sharding=none",
    cause="several threads update parameters of a short type: the bits would depend on the part that a worker has",
    advice="`threads: 1`, parameters in float32 with `precision: bf16`, or `sharding=none`",
)

STATE_SHARED_OUT = Problem(
    "step.sharding.state_shared_out",
    JobError,
    "the job looks into the state of its optimizer, of which each worker has a part alone where sharding shares it out",
    "keep what it needs in tensors of its own, or set sharding=none",
    cause="`after_step` or `eval_weights` reads or resets the optimizer's `state`",
    advice="`sharding=none`, or tensors of the job's own",
)

NO_FSDP = Problem(
    "step.sharding.no_fsdp",
    SpecError,
    "sharding: got 'full', and torch {got} has no {missing}",
    "install torch>=2.11, or set sharding=optimizer",
    cause="a torch without the calls",
    advice="another torch, or `sharding=optimizer`",
)

NOT_GATHERED = Problem(
    "step.sharding.not_gathered",
    JobError,
    "{got} of a parameter that is not gathered (a DTensor)",
    cause="with `sharding: full` the loss uses parameters outside of their modules (a penalty on all weights)",
    advice="`sharding=optimizer`",
)

UNIT_COPIED = Problem(
    "step.sharding.unit_copied",
    JobError,
    "a copy of a {got} whose parameters are sharded, which would share its shards",
    "copy the tensors of its state_dict() in job.after_step(model, step), or set sharding=optimizer",
    cause="with `sharding: full` the job makes a `copy.deepcopy` of a module after the start",
    advice="copy the tensors of its `state_dict()` in `after_step`, or `sharding=optimizer`",
)

ONLY_GATHERED = Problem(
    "step.sharding.only_gathered",
    JobError,
    "{got}: with sharding=full a parameter has its values only while its own module computes",
    "use parameters in their modules, or set sharding=optimizer",
    cause="the loss uses parameters outside of their modules (a penalty on all weights)",
    advice="`sharding=optimizer`",
)

GRADIENT_WENT_ON = Problem(
    "step.sharding.gradient_went_on",
    JobError,
    "parameter {name!r}: a backward went on through its module after FSDP had reduced the module's gradients ({where}), and with sharding=full the rest would be lost",
    "set sharding=optimizer",
    cause="with `sharding: full` a backward returns to a module that FSDP takes to be done",
    advice="`sharding=optimizer`",
)

COMPUTED_AGAIN = Problem(
    "step.sharding.computed_again",
    JobError,
    "parameter {name!r}: its module was computed {got} times ({where}), and once in the first micro-batch",
    "with sharding=full a module of a list is computed once in each micro-batch, or never once: set sharding=optimizer",
    cause="with `sharding: full` samples decide which modules are computed",
    advice="`sharding=optimizer`",
)

DIVERGED = Problem(
    "step.sharding.diverged",
    JobError,
    "sharding: in {where} the workers did not compute the same modules in the same order, so one may have had the weights of another module",
    "with sharding=full what is computed must not depend on the samples: set sharding=optimizer",
    cause="with `sharding: full` samples decide which modules are computed",
    advice="`sharding=optimizer`",
)

# --- schedules ---------------------------------------------------------------------------------------------------

SCHEDULE_KIND = Problem(
    "step.schedule.kind",
    JobError,
    "job.schedule: returned {got}, wanted a function of the number of updates, a torch LRScheduler, a lockstep.PerEpoch, a lockstep.Plateau, or None",
    cause="something else than a schedule",
    advice="one of these",
)

SCHEDULER_HELD = Problem(
    "step.schedule.held",
    JobError,
    "job.schedule: lockstep.{holder} holds a {got}, wanted {wanted}",
    cause="a `lockstep.PerEpoch` or `Plateau` over something else",
    advice="a torch scheduler of the kind that the message names",
)

SCHEDULER_KEPT = Problem(
    "step.schedule.kept",
    JobError,
    "job.schedule: made a scheduler and did not return it, so nothing would step it",
    "return it",
    cause="`schedule` returns None, or another schedule",
    advice="return the scheduler",
)

PLATEAU_RISES = Problem(
    "step.schedule.plateau_rises",
    JobError,
    "job.schedule: {got} waits for a metric to rise (mode 'max') and names none, and {metric}, which it would follow, falls as the model improves",
    "return lockstep.Plateau(scheduler, metric='eval/accuracy') with the name of the metric",
    cause='a `ReduceLROnPlateau(…, "max")`, which would be stepped with `eval/loss`',
    advice='`lockstep.Plateau(scheduler, metric="eval/accuracy")`',
)

PLATEAU_UNEVALUATED = Problem(
    "step.schedule.plateau_unevaluated",
    JobError,
    "job.schedule: {got} goes by {metric}, and the job has no eval_data, or phases and no loss for it",
    "give it some, name another metric by lockstep.Plateau(scheduler, metric=…), or use a schedule by updates",
    cause="a `ReduceLROnPlateau` where nothing is evaluated",
    advice="`eval_data`, another metric, or a schedule by updates",
)

OTHER_OPTIMIZER = Problem(
    "step.schedule.other_optimizer",
    JobError,
    "job.schedule: the {got} is over another optimizer",
    "make it with the one that is given",
    cause="a scheduler that was made over an optimizer of the job's own",
    advice="the optimizer that is given",
)

SCHEDULE_FACTOR = Problem(
    "step.schedule.factor",
    JobError,
    "job.schedule: gave {got} for update {update}, wanted a factor on the learning rate, finite and at least 0",
    cause="the function gives no rate for some update",
    advice="a factor for every update",
)

SCHEDULE_DIFFERS = Problem(
    "step.schedule.differs",
    JobError,
    "job.schedule: returned {wanted} for the first and the last update, and {got} when called again, so a resumed run would have other rates",
    "make it a function of the number of updates alone, or return a torch LRScheduler, whose state is kept",
    cause="a schedule that keeps state",
    advice="a function of the number of updates alone, or a torch scheduler over the given optimizer",
)

SCHEDULE_LACKS = Problem(
    "step.schedule.lacks",
    JobError,
    "job.schedule: another {name} that took up its state after {steps} updates has the rates {got} then, wanted {wanted}: a resumed run would learn otherwise",
    "return all that the rates follow from in its state_dict(), and take it up in load_state_dict()",
    cause="a scheduler of the job's own whose `state_dict` leaves something out",
    advice="return it there, or leave `state_dict` to torch's `LRScheduler`, which returns every attribute",
)

FORK_SCHEDULE = Problem(
    "step.schedule.fork",
    SpecError,
    "fork: the run that is forked {got}, and this job's schedule goes on from its own with {wanted}",
    "keep schedule and rates, or start a new run from its weights with initial_weights",
    shown="fork: the run that is forked has no state of a scheduler of torch, …`, `… began with the rates …",
    cause="the job's [torch scheduler](writing-a-job.md#the-schedule) has no state to continue from",
    advice="keep schedule and learning rates, or use `initial_weights`",
)

# --- phases and parameters that rest -----------------------------------------------------------------------------

PHASES_KIND = Problem(
    "step.phases.kind",
    JobError,
    "job.phases: returned {got}, wanted a list of lockstep.Phase",
    cause="`phases` returned something else",
    advice="a list; [phases](writing-a-job.md#several-losses-and-optimizers)",
)

PHASE_NAME = Problem(
    "step.phases.name",
    JobError,
    "job.phases: got {got}, wanted {wanted}",
    shown="job.phases: got the name '…', wanted letters, digits, '_', '-' and '.'`, `job.phases: got the names …, wanted each once",
    cause="a name with other characters, or two phases of one name",
    advice="another name",
)

DRAWS_AS = Problem(
    "step.phases.draws_as",
    JobError,
    "job.phases: phase {name!r} draws as {got!r}, which is none of {wanted}{hint}",
    shown="job.phases: phase '…' draws as '…', which is none of …",
    cause="a `draws_as` that names no phase",
    advice="the name of a phase",
)

NOT_IN_PHASE = Problem(
    "step.phases.not_in_phase",
    JobError,
    "job.phases: parameter {got} is in no phase and would never learn",
    "add it to one, or set requires_grad to False",
    shown="job.phases: parameter '…' is in no phase and would never learn; …",
    cause="a parameter in no phase",
    advice="add it to one, or freeze it",
)

PHASE_LEARNS_NOTHING = Problem(
    "step.phases.learns_nothing",
    JobError,
    "job.phases: no parameter of phase {got!r} asks for a gradient",
    "take the phase out, or give it parameters that learn",
    cause="all parameters of a phase are frozen",
    advice="take it out, or give it parameters that learn",
)

NAMES_KIND = Problem(
    "step.names.kind",
    JobError,
    "{label}: got {got}, wanted a list of names of parameters or modules",
    cause="one text, or parameters instead of their names",
    advice="names as in `named_parameters()` or `named_modules()`",
)

NO_SUCH_NAME = Problem(
    "step.names.unknown",
    JobError,
    "{label}: the model has no {what} {got!r}{hint}",
    shown="job.frozen_parameters: the model has no parameter and no module with parameters named '…'`, `job.conditional_parameters: the model has no parameter '…'",
    cause="a wrong name",
    advice="names as in `named_parameters()` or `named_modules()`",
)

PROBED_PHASES = Problem(
    "step.phases.probed",
    SpecError,
    "job.use: the job has {got} phases, and {who} can look at one loss with one optimizer alone",
    "give each phase an optimizer with a rate of its own, and compare short runs (length.steps=100)",
    cause="`lr-find` on a job with phases",
    advice="short runs with other rates; `lockstep check` looks at each phase",
)

FROZEN_DIFFER = Problem(
    "step.frozen.differ",
    JobError,
    "job.frozen_parameters: returned {wanted} for step {step}, and {got} when called again, so a resumed run would train other parameters",
    "make it a function of the number of the step",
    cause="another answer to a second call",
    advice="a function of the step number",
)

ALL_REST = Problem(
    "step.frozen.all",
    JobError,
    "job.frozen_parameters: all parameters rest in step {step}, which would learn nothing",
    "leave one out",
    cause="a step in which all parameters rest",
    advice="at least one that learns in each step",
)

# --- parameters and buffers that change --------------------------------------------------------------------------

PARAMETER_REPLACED = Problem(
    "step.parameter.replaced",
    JobError,
    "parameter {name!r} was replaced ({where}), and the optimizer and the other workers hold the old one",
    "write into it: parameter.copy_(…) in job.after_step(model, step)",
    cause="`after_step` or a hook assigns a new parameter, or with `sharding: full` gives one another type or layout",
    advice="write into the one that is there: `parameter.copy_(…)`",
)

PARAMETER_MADE = Problem(
    "step.parameter.made",
    JobError,
    "parameter {name!r} was made after training had begun ({where}), so no optimizer holds it, and no checkpoint could be loaded into a new model",
    "make it in job.model",
    cause="the model registers a parameter when some sample first asks for it",
    advice="make it in `job.model`",
)

PARAMETER_WRITTEN = Problem(
    "step.parameter.written",
    JobError,
    "parameter {name!r} was written to by the job itself ({where}), which a worker with more micro-batches does more often",
    "do it once a step in job.after_step(model, step), or register a buffer in its place",
    cause="the loss, or a hook, writes to a weight",
    advice="`after_step`, or a buffer",
)

ASKS_OTHERWISE = Problem(
    "step.parameter.asks",
    JobError,
    "parameter {name!r} {got} for a gradient ({where}): which parameters learn is fixed before each step, because the workers sum exactly their gradients",
    "leave requires_grad as job.model sets it, and name frozen parameters in job.frozen_parameters(model, step)",
    shown="parameter '…' now asks for a gradient (…): …`, `… no longer asks …",
    cause="the loss or a hook freezes or unfreezes a layer during the run",
    advice="leave `requires_grad` alone, and name resting parameters in [`frozen_parameters`](writing-a-job.md#parameters-that-rest); a phase updates only its own parameters anyway",
)

HALF_PARAMETER = Problem(
    "step.parameter.half",
    JobError,
    "job.model: parameter {name!r} is torch.float16, which precision fp16 cannot scale: it computes in float16, and needs the gradients in more digits",
    "hold it in float32",
    cause="a model in half, and a loss scaler",
    advice="`float32`; `precision: fp16` computes in float16",
)

MODULE_CHANGED = Problem(
    "step.module.changed",
    JobError,
    "module {name!r} {got} after training had begun ({where}): the optimizer and the other workers hold what was there before, and no checkpoint could be loaded into a new model",
    "make all modules in job.model, and write into those that are there: module.load_state_dict(…) in job.after_step(model, step)",
    shown="module '…' was made after training had begun (…): …`, `… was replaced …`, `… was taken out …",
    cause="a layer that some sample first asks for, or a copy of another module that `after_step` puts in its place",
    advice="make it in `job.model`, and write into it: `module.load_state_dict(…)`",
)

BUFFER_IN_BACKWARD = Problem(
    "step.buffer.backward",
    JobError,
    "buffer {name!r} was written to in backward, and not in the rehearsal: its value would be lost",
    "write to it in every backward from the first one on, or in job.after_step(model, step)",
    cause="a hook on gradients begins to write to a buffer after the first step",
    advice="write to it from the first backward on, or in `after_step`",
)

BUFFER_TYPE = Problem(
    "step.buffer.type",
    JobError,
    "buffer {name!r} became {got} in training, wanted {wanted} as at the start",
    "write into it: a buffer keeps its type",
    cause="a buffer was taken away, or has another type",
    advice="write into it; its shape may change",
)

BUFFER_MADE = Problem(
    "step.buffer.made",
    JobError,
    "buffer {name!r} was made after training had begun, and not in the rehearsal: other workers have none, and no checkpoint could be loaded into a new model",
    "make it in job.model, or hold it in a plain attribute that job.state_dict() returns, or that every step computes anew",
    cause="the model registers a buffer when some sample first asks for it, which those of the rehearsal did not; only workers with such samples would have it",
    advice="register it in `job.model`, or keep it in a plain attribute that `job.state_dict()` returns",
)

BUFFER_UNCOUNTED = Problem(
    "step.buffer.uncounted",
    JobError,
    "buffer {name!r} was written to past torch's count of writes ({where}), and not in the rehearsal, so each worker would keep what its own micro-batches wrote",
    "write to it by torch: buffer.copy_(…), not buffer.data",
    cause="a write by `.data` or NumPy that the rehearsal did not meet",
    advice="`buffer.copy_(…)`",
)

SUMMED_ALONE = Problem(
    "step.summed_alone",
    DriftError,
    "a gradient was summed over this worker alone ({where}): DDP was not given all that learns",
    cause="a parameter that the loss makes or takes from elsewhere, with `reduction: native`",
    advice="make all parameters in `job.model`",
)

# --- compiling and recomputing -----------------------------------------------------------------------------------

NO_MODULE_RECOMPUTED = Problem(
    "step.recomputed.none",
    JobError,
    "activation_checkpointing: the job names no module for it",
    "return some from activation_checkpoints(model)",
    cause="`activation_checkpoints` returns no module",
    advice="return some modules",
)

NO_COMPILER = Problem(
    "step.compile.no_compiler",
    SpecError,
    "compile: got true or units, but {got} does not run on this machine, and inductor needs a C++ compiler",
    "install g++ on every node (or name one by CXX), or set compile=false",
    shown="compile: got true or units, but g++ does not run on this machine, …",
    cause="inductor needs a C++ compiler",
    advice="install g++ on every node, name one by `CXX`, or `compile=false`",
)

NO_UNITS_TO_COMPILE = Problem(
    "step.compile.no_units",
    SpecError,
    "compile: got units, and the model repeats no blocks: it has no list of modules, and names none that must not be split",
    "name modules in compile.units, or set compile=true",
    cause="`compile: units` for a model without an `nn.ModuleList`, an `nn.Sequential` or `_no_split_modules`",
    advice="`compile.units`, or `compile=true`",
)

UNIT_INSIDE = Problem(
    "step.compile.unit_inside",
    SpecError,
    "sharding.units: got {got!r}, which is inside of {name!r}, and that is compiled as one program: its parameters would be gathered in the middle of it",
    "name {name!r} or what has it inside, or name the modules that are compiled in compile.units",
    shown="sharding.units: got '…', which is inside of '…', and that is compiled as one program, …",
    cause="a unit of `sharding.units` inside of a module that `compile: units` compiles",
    advice="units that are compiled, or that have them inside; or `compile.units`",
)

COMPILE_DISABLED = Problem(
    "step.compile.disabled",
    SpecError,
    "compile: with {got} torch compiles nothing",
    "take it back, or set compile=false",
    cause="`TORCH_COMPILE_DISABLE` or `TORCHDYNAMO_DISABLE`, with which torch returns functions as they are",
    advice="unset it, or `compile=false`",
)

NOT_COMPILED = Problem(
    "step.compile.refused",
    JobError,
    "compile: the loss cannot be compiled: {got}",
    "change what the message names, or set compile=false",
    cause="torch's compiler refuses something in the loss, and says what",
    advice="change that, or `compile=false`",
)

COMPILED_AGAIN = Problem(
    "step.compile.again",
    JobError,
    "compile: the loss would have to be compiled more than {limit} times ({got}): something other than the batch's shapes changes from one micro-batch to the next, such as a counter of the job's",
    "hold it in a tensor, or set compile=false",
    shown="compile: the loss would have to be compiled more than 64 times …",
    cause="a plain number or attribute that changes from one micro-batch to the next",
    advice="hold it in a tensor, or `compile=false`",
)

COMPILED_DIFFERS = Problem(
    "step.compile.differs",
    JobError,
    "compile: the gradient of the first micro-batch is {distance} of its norm away from that of an eager one, which no rounding explains (parameter {name!r}: by {got} where the largest is {largest})",
    "{remedy}, or set compile=false",
    shown="compile: the gradient of the first micro-batch is … away from that of an eager one, …",
    cause="the compiled loss computes something else, as with dropout that is recomputed (`activation_memory_budget`)",
    advice="leave that setting at 1, or `compile=false`",
)
