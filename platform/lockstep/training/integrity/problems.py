"""What the rehearsal, the comparisons of ranks and the check of a resume find: each a row of docs/failures.md, and the line that is shown."""

from __future__ import annotations

from lockstep.errors import (
    CorruptionError,
    DeterminismError,
    DriftError,
    JobError,
    NumericsError,
    Problem,
    ResumeError,
    SpecError,
)

# --- what ranks compare while they train -------------------------------------------------------------------------

OTHER_BITS = Problem(
    "integrity.other_bits",
    CorruptionError,
    "{got}",
    "no checkpoint has it: the last agreement is after step {since}",
    shown="after step … rank … (host …, …, process …) had other … than the majority of the workers, first in '…'; …`, `after step … the workers have different …, first in '…'; which is wrong cannot be told from these alone: …",
    cause="its memory, its device or its processor changed bits; with two workers the next attempt shows which",
    advice="take the machine out, and test its memory",
)

OTHER_GRADIENTS = Problem(
    "integrity.other_gradients",
    CorruptionError,
    "{got}; the step is not taken with it",
    shown="in step …, micro-batch …, rank … had other gradients than …; the step is not taken with it",
    cause="its device or processor computed wrong bits, found by [`determinism.recheck`](attempts.md#wrong-bits)",
    advice="take the machine out, and test its memory",
)

RANKS_DIFFER = Problem(
    "integrity.ranks_differ",
    DriftError,
    "after step {step} ranks {ranks} hold other {what} than rank 0, first in {got!r}; this run is void",
    cause="something random that the seeds do not cover, or a hardware fault",
    advice="see [what is not promised](guarantees.md#what-is-not-promised)",
)

KEPT_IN_TRAINING = Problem(
    "integrity.kept_in_training",
    JobError,
    "{got} is kept from one micro-batch to the next, and the gradient of step {step}, micro-batch {micro_batch} depends on it: workers that run other micro-batches, and a resume, would get other bits",
    "keep it in a buffer of the model, where the step's first micro-batch alone updates it, or change it once a step in job.after_step(model, step)",
    cause="the same as in the rehearsal, found by `determinism.recheck`: the job begins to keep something during the run",
    advice="a buffer, or `after_step`",
)

# --- the check of a resume ---------------------------------------------------------------------------------------

RESUMED_OTHERWISE = Problem(
    "integrity.resumed_otherwise",
    ResumeError,
    "resume: a process that took up the checkpoint of step {step} {got}",
    "{remedy}",
    shown="resume: a process that took up the checkpoint of step … computes step … otherwise, first …; no checkpoint restores …`, `resume: a process that took up the checkpoint of step … cannot take step …: …",
    cause="state of the job that no checkpoint has, [found while the run trains](exact-step.md#before-the-first-step)",
    advice="`state_dict` and `load_state_dict`, a buffer, or the optimizer's state; begin anew, or go on with `--fork`",
)

# --- the model ---------------------------------------------------------------------------------------------------

NOTHING_LEARNS = Problem(
    "rehearsal.nothing_learns",
    JobError,
    "job.model: no parameter asks for a gradient",
    "there is nothing to train: leave requires_grad to at least one parameter",
    cause="everything is frozen",
    advice="leave at least one parameter trainable",
)

BATCH_NORM = Problem(
    "rehearsal.batch_norm",
    JobError,
    "job.model: {name!r} is a BatchNorm, and {reason}, which has no variance",
    "{remedy}",
    shown="job.model: '…' is a BatchNorm, and the last step … one sample, …`, `job.model: '…' is a BatchNorm, and batch.tokens = … leaves a micro-batch with one sample, …",
    cause="a ragged step, or a micro-batch of one long sample, would give it a single sample",
    advice="`data.drop_last=true`, or another `batch.global`; a higher `batch.tokens`, or a norm within each sample",
)

SYNC_BATCH_NORM = Problem(
    "rehearsal.sync_batch_norm",
    JobError,
    "job.model: {name!r} is a SyncBatchNorm, whose statistics depend on how many workers share a step",
    "use BatchNorm (statistics of a micro-batch) or GroupNorm",
    cause="its statistics depend on the number of workers",
    advice="BatchNorm or GroupNorm",
)

COMPILED = Problem(
    "rehearsal.compiled",
    JobError,
    "job.model: {name!r} is compiled by {got}",
    "{remedy}, and set compile=true in the spec",
    shown="job.model: … is compiled by the job itself, …`, `job.model: '…' is compiled by torch.jit, …",
    cause="`torch.compile`, `torch.jit.script` or `torch.jit.load` in the job",
    advice="take it out, and return the module itself; `compile=true`",
)

TENSOR_FORM = Problem(
    "rehearsal.tensor_form",
    JobError,
    "job.model: {name} {got}",
    "{remedy}",
    shown="job.model: … is of the layout torch.sparse_…, …`, `job.model: … is a nested tensor, …`, `job.model: … is of torch.…, which no file of weights can hold`, `job.model: … is on the meta device, …`, `job.model: … was made in torch.inference_mode(), …`, `job.model: … is a view that torch conjugates or negates when it is read, …`, `job.model: … is expanded: …",
    cause="a buffer or parameter that is sparse, nested, quantized, on the meta device, of a type that safetensors has no name for (complex128, complex32, float4 …), or made by `torch.inference_mode()`, `conj()` or `expand`",
    advice="hold it dense, or as indices and values in buffers; as a type that safetensors has, as real numbers or as bytes; `torch.no_grad()`, or `.clone()` outside; `.resolve_conj()`; `.contiguous()`",
)

ONE_MEMORY = Problem(
    "rehearsal.one_memory",
    JobError,
    "job.model: {name} and {other} are two parameters in one piece of memory, which each update and average would change twice",
    "tie weights by the parameter itself: b.weight = a.weight",
    cause="weights tied by their memory (`b.weight.data = a.weight.data`)",
    advice="tie them by the parameter: `b.weight = a.weight`",
)

BUFFER_OF_PARAMETER = Problem(
    "rehearsal.buffer_of_parameter",
    JobError,
    "job.model: {name} is part of the memory of {other}, so putting it back after a micro-batch would undo updates",
    "register a copy (.detach().clone()), and move it in job.after_step(model, step)",
    cause="a buffer that is a view of a weight",
    advice="register a copy",
)

STATE_CONVERTED = Problem(
    "rehearsal.state_converted",
    JobError,
    "job.model: its state_dict() gives other bits for {name!r} ({got}) than the model computes with ({wanted}, {where}), so a resumed run would go on with other weights",
    "give every tensor as it is, and convert or merge weights after training",
    cause="a `state_dict`, or a hook of it, that converts or merges weights: a resumed run would go on with these",
    advice="give every tensor as it is; convert or merge after training",
)

NAME_OF_FORMAT = Problem(
    "rehearsal.name_of_format",
    JobError,
    "job.model: its state_dict() has a tensor named {got!r}, under which a safetensors file keeps facts about itself, so its final weights could not be read",
    "give the parameter or buffer another name",
    cause="a parameter or buffer with the one name that files of weights keep for themselves",
    advice="give it another name",
)

STATE_REFUSED = Problem(
    "rehearsal.state_refused",
    JobError,
    "job.model: its load_state_dict() does not take what its state_dict() gives, so no checkpoint could be resumed: {got}",
    "what state_dict leaves out load_state_dict must not miss: with strict=False in one of the model's own",
    cause="the model leaves a part out of its `state_dict`, such as a teacher, and loads strictly",
    advice="`strict=False` in a `load_state_dict` of its own",
)

PARAMETER_OF_LOSS = Problem(
    "rehearsal.parameter_of_loss",
    JobError,
    "parameter {name!r} was made by the loss ({where}), so no optimizer holds it",
    "make it in job.model, or with one of torch's lazy modules",
    cause="the first forward registers a parameter, which no optimizer holds",
    advice="make it in `job.model`, or use torch's lazy modules",
)

WEIGHTS_MERGED = Problem(
    "rehearsal.weights_merged",
    JobError,
    "job.model: parameter {name!r} has other bits after train() and eval() of its modules, so the weights would depend on how often its worker evaluates",
    "add nothing to weights in evaluation mode (in loralib merge_weights=False)",
    cause="a module adds something to its weights in evaluation mode and takes it away again, as loralib does",
    advice="`merge_weights=False`, or add it in the forward",
)

# --- the loss ----------------------------------------------------------------------------------------------------

BACKWARD_CALLED = Problem(
    "rehearsal.backward_called",
    JobError,
    "job.loss: it has called backward() ({where}: {name!r} has a gradient already), which Lockstep does",
    "return the total, and take inner gradients with torch.autograd.grad",
    cause="`loss` takes gradients by itself",
    advice="return the total; inner gradients come from `torch.autograd.grad`",
)

STATISTICS_UNTAKEN = Problem(
    "rehearsal.statistics_untaken",
    JobError,
    "{label}: gives the statistic {got!r}, which nothing takes",
    "write after_step(model, step, statistics)",
    shown="job.loss: gives the statistic …, which nothing takes; …",
    cause="statistics that are taken by nobody",
    advice="[statistics of a step](writing-a-job.md#statistics-of-a-step)",
)

FIRST_NOT_FINITE = Problem(
    "rehearsal.first_not_finite",
    NumericsError,
    "{label}: total is {got} on the very first micro-batch",
    "look for inputs or labels that are not finite, a division by zero or a logarithm of zero",
    shown="job.loss: total is … on the very first micro-batch; …",
    cause="inputs or labels that are not finite, a division by zero",
    advice="look at that batch",
)

MEAN_FOR_SUM = Problem(
    "rehearsal.mean_for_sum",
    JobError,
    "{got}: a mean, wanted the sum, for it is divided by the weight ({weight}) later",
    "use reduction='sum', or multiply the mean by the weight",
    shown="job.loss: total is … for the first micro-batch …, and … and … for its halves: a mean, wanted the sum, …",
    cause="the loss of a micro-batch is a mean",
    advice="`reduction='sum'`, or the mean times the weight",
)

KEEPS_DRAWS = Problem(
    "rehearsal.keeps_draws",
    JobError,
    "{label}: it keeps what it drew: a micro-batch, computed again under one seed, draws other random numbers, so a draw depends on the worker that needed it first",
    "draw it in job.model and keep it in a buffer, or draw at each call",
    shown="job.loss: it keeps what it drew: …`, `the loss of phase '…': …",
    cause="a loss or a model caches random numbers by what first asked for them, so they depend on the worker",
    advice="draw in `job.model` and keep them in a buffer, or draw at each call",
)

KEPT = Problem(
    "rehearsal.kept",
    JobError,
    "{name} is kept from one micro-batch to the next, and {got} depends on it: workers that run other micro-batches would get other bits",
    "keep it in a buffer of the model, where the step's first micro-batch alone updates it, or change it once a step in job.after_step(model, step)",
    shown="… is kept from one micro-batch to the next, and … depends on it: …",
    cause="a counter, a cache or a running value in the job or in a plain attribute of the model",
    advice="a buffer, or `after_step`",
)

REPEATED_OTHERWISE = Problem(
    "rehearsal.repeated_otherwise",
    DeterminismError,
    "determinism strict: {got}, computed again under one seed, has other bits",
    "an operator is not deterministic, or the job draws from a generator of its own, reads a clock, keeps hidden state, or reads what job.after_step changes outside the model: draw from the default generators or from lockstep.rng(), and return state from job.state_dict()",
    shown="determinism strict: …, computed again under one seed, has other bits; …",
    cause="a generator of the job's own, a clock, hidden state, or an operator that torch wrongly considers deterministic",
    advice="draw from the default generators or `lockstep.rng()`; `determinism=fast` does not check",
)

# --- the data ----------------------------------------------------------------------------------------------------

DATA_KEEP_DRAWS = Problem(
    "rehearsal.data_keep_draws",
    JobError,
    "data: train_data keeps what it drew: the first micro-batch, fetched again under one seed, draws other random numbers, so a sample depends on the process that fetched it first",
    "cache what is read, and draw at each fetch",
    shown="data: train_data keeps what it drew: …",
    cause="the dataset caches an augmented sample, so its draw is that of the first fetch",
    advice="cache what is read, and draw at each fetch",
)

DATA_GENERATOR = Problem(
    "rehearsal.data_generator",
    JobError,
    "data: {name} is a generator of the job's own that each fetch draws on from, so a sample depends on what its process fetched before",
    "draw from the default generators or lockstep.rng(), which are seeded for each micro-batch, or seed {name} from the sample's index in each fetch",
    cause="a generator in the dataset, in a transform or in the job, which goes on from one fetch to the next",
    advice="draw from the default generators or `lockstep.rng()`, or seed it from the sample's index in each fetch",
)

DATA_CHANGED = Problem(
    "rehearsal.data_changed",
    JobError,
    "data: {name} is changed by an update, and the first micro-batches differ{where} with it: a batch is fetched before its step, with data.loader_processes in another process, so it is undefined which batch sees the change",
    "after_step(model, step) must change nothing that the data read",
    shown="data: … is changed by an update, and the first micro-batches differ … with it: …",
    cause="`after_step` changes a dataset whose batches are fetched ahead",
    advice="let the data depend on the sample alone",
)

NO_SAMPLE_TO_REHEARSE = Problem(
    "rehearsal.no_sample",
    SpecError,
    "data.without: leaves no sample to micro-batches 0 and 1 of any step, and a run is rehearsed on them",
    "leave out fewer",
    cause="ids that leave nothing to rehearse on",
    advice="leave out fewer; ids count from 0",
)

# --- updates and resumes -----------------------------------------------------------------------------------------

LAST_MICRO_BATCH = Problem(
    "rehearsal.last_micro_batch",
    JobError,
    "job.optimizer: the first update of {name} depends on which micro-batch its worker ran last",
    "a hook reads what the loss left behind: keep nothing from the loss for the update",
    cause="a hook of the optimizer reads an attribute that the loss sets",
    advice="keep nothing from the loss for the update",
)

NOT_RESUMED = Problem(
    "rehearsal.not_resumed",
    JobError,
    "resume: {name} has other bits after the second step if the run is taken up from a checkpoint after the first: {got}",
    "return it from job.state_dict() and restore it in job.load_state_dict(), or keep it in the optimizer's state",
    shown="resume: … has other bits after the second step if the run is taken up from a checkpoint after the first: …",
    cause="something that changes with an update is in no checkpoint",
    advice="`state_dict` and `load_state_dict` of the job, or the optimizer's state",
)

SAVING_CHANGES = Problem(
    "rehearsal.saving_changes",
    JobError,
    "job.state_dict: {name} has another value after each save, and the state that is saved follows it: a run that saves more often would learn something else",
    "give the state in state_dict() as it is, and change it in after_step()",
    cause="a `state_dict` of the job, or a module's `get_extra_state`, changes what it gives",
    advice="give the state as it is, and change it in `after_step`",
)

UNITS_UNKNOWN = Problem(
    "rehearsal.units_unknown",
    SpecError,
    "sharding: the units of the model could not be found out: {got}",
    "set rehearsal=quick, with which every worker begins with the whole model",
    cause="where a run [begins by shards](models-that-do-not-fit.md#the-start) the first micro-batch is computed in a process of its own, which ended without a result or used what a fork cannot use",
    advice="`rehearsal: quick`, with which every worker begins with the whole model",
)

# --- evaluation --------------------------------------------------------------------------------------------------

EVALUATION_LEAVES = Problem(
    "rehearsal.evaluation_leaves",
    JobError,
    "evaluation: {name} is left behind by an evaluation, and {got} of the first training micro-batch depends on it: each worker evaluates other micro-batches, and a run that evaluates less often would learn something else",
    "keep nothing in evaluation that training reads",
    shown="evaluation: … is left behind by an evaluation, and … depends on it: …",
    cause="the job or its model keeps something in evaluation that the training loss reads",
    advice="keep nothing in evaluation",
)

EVALUATION_KEEPS = Problem(
    "rehearsal.evaluation_keeps",
    JobError,
    "evaluation: {name} is kept from one micro-batch to the next, and {got} depends on it: workers share out the micro-batches, so each would have another value",
    "return each micro-batch's own total and weight (lockstep.Mean)",
    shown="evaluation: … is kept from one micro-batch to the next, and … depends on it: …",
    cause="a metric that adds up over micro-batches",
    advice="each micro-batch's own total and weight",
)

EVALUATION_DIFFERS = Problem(
    "rehearsal.evaluation_differs",
    DeterminismError,
    "evaluation: {got} of the first micro-batch, computed again under one seed, has other bits",
    "an operator is not deterministic, or the job draws from a generator of its own, or keeps hidden state",
    cause="a generator of the job's own, hidden state, or an operator that torch wrongly considers deterministic",
    advice="draw from the default generators or `lockstep.rng()`; `determinism=fast` does not check",
)

WHOLE_SET_KEEPS = Problem(
    "rehearsal.whole_set_keeps",
    JobError,
    "evaluation: {got} is changed by job.whole_set_metrics or job.figures, which rank 0 alone calls, so no other worker has it",
    "keep nothing in them: return what is to be recorded, and compute what training goes by in job.after_step(model, step), on every worker",
    shown="evaluation: … is changed by job.whole_set_metrics or job.figures, …",
    cause="a function that only rank 0 calls keeps something; found before training, or in the evaluation where it begins",
    advice="keep nothing there; use `after_step` for what training depends on",
)
