"""What can be wrong with `job.use` and the class that it leads to, and with how it uses what it is given: each a row of docs/failures.md, and the line that is shown."""

from __future__ import annotations

from lockstep.errors import JobError, JobImportError, Problem, SpecError

FORM = Problem(
    "job.use.form",
    JobImportError,
    'job.use: got {got!r}, wanted "package.module:Class"',
    cause="no colon, or a path",
    advice="`package.module:Class`",
)

NO_MODULE = Problem(
    "job.use.no_module",
    JobImportError,
    "job.use: there is no module {got!r}",
    "modules are looked up from {folder!r}",
    shown="job.use: there is no module '…'; modules are looked up from '…'",
    cause="the command was started in another folder",
    advice="start it in the folder above the package",
)

IMPORT_FAILED = Problem(
    "job.use.import_failed",
    JobImportError,
    "job.use: cannot import {what!r}: {got}",
    "paths are looked up from {folder!r}",
    cause="the module, or one that it imports, raises an error",
    advice="fix that error",
)

SYNTAX = Problem(
    "job.use.syntax",
    JobImportError,
    "job.use: {file}, line {line}: SyntaxError: {got}",
    cause="a syntax error in the job",
    advice="fix that line",
)

NO_CLASS = Problem(
    "job.use.no_class",
    JobImportError,
    "job.use: {module!r} has no {got!r}{hint}",
    shown="job.use: '…' has no '…'; did you mean '…'?",
    cause="there is no such class",
    advice="the suggested name",
)

OTHER_MODULE = Problem(
    "job.use.other_module",
    JobImportError,
    "job.use: {module!r} has no {got!r}: it is {whose} module of that name, and not {file!r}",
    "rename that file",
    cause="the job's file has the name of a module that was imported before, or that is part of Python itself",
    advice="another name for the file, and that name in `job.use`",
)

HIDES_MODULE = Problem(
    "job.folder.hides_module",
    SpecError,
    "job folder: {file!r} would be imported in place of {hidden}",
    "rename it, or start the command in another folder",
    shown="job folder: '…' would be imported in place of Python's own module '…'; …",
    cause="a file or a package beside the job with the name of a module of Python's, of Lockstep's or of a library that Lockstep needs, such as `random.py`, `queue.py` or `numpy.py`. Python searches the job's folder first, for its own library too",
    advice="another name for that file, and for its imports in the job",
)

NO_JOB = Problem(
    "job.use.no_job",
    JobImportError,
    "job.use: {got!r} is no subclass of lockstep.Job",
    cause="the class has the wrong base",
    advice="derive it from that class",
)

NO_PARAMS = Problem(
    "job.use.no_params",
    JobImportError,
    "job.use: the Params of {got!r} are no subclass of lockstep.Params",
    cause="its `Params` have the wrong base",
    advice="derive them from that class",
)

METHOD_MISSING = Problem(
    "job.use.method_missing",
    JobImportError,
    "job.use: {got!r} has no {method}()",
    "a job has model(), train_data() and loss(model, batch)",
    shown="job.use: '…' has no …(); a job has model(), train_data() and loss(model, batch)",
    cause="a required method is missing",
    advice="write it",
)

METHOD_UNUSED = Problem(
    "job.use.method_unused",
    JobImportError,
    "job.use: nothing calls {method}() of {got!r}",
    "{hint}, or take it out",
    cause="a method that nearly has the name of one that a job may have, or that belongs to another library's trainer",
    advice="follow the message",
)

OPTIMIZER_BESIDE_PHASES = Problem(
    "job.use.optimizer_beside_phases",
    JobImportError,
    "job.use: nothing calls optimizer() of {got!r} beside its phases(), of which each has one",
    "give it to the phases (lockstep.Phase(…, optimizer=…)), or take it out",
    cause="`optimizer` and `phases` in one job",
    advice="an optimizer for each phase",
)

NO_EMBED = Problem(
    "job.use.no_embed",
    JobImportError,
    "job.use: {got!r} has batch_loss() and no embed(model, batch), which gives it a row for each sample",
    "write it, or take batch_loss() out",
    cause="a loss over the whole batch without its rows",
    advice="`embed(model, batch)`",
)

BATCH_LOSS_BESIDE_PHASES = Problem(
    "job.use.batch_loss_beside_phases",
    JobImportError,
    "job.use: nothing calls batch_loss() of {got!r} beside its phases()",
    "give it to one of them (lockstep.Phase(…, loss=…, embed=…)) under another name",
    cause="`batch_loss` and `phases` in one job",
    advice="a phase with `embed`",
)

STATISTICS_UNUSED = Problem(
    "job.use.statistics_unused",
    JobImportError,
    "job.use: nothing takes what step_statistics() of {got!r} returns",
    "write after_step(model, step, statistics), or take step_statistics() out",
    cause="statistics of a step that no method is given",
    advice="`after_step(model, step, statistics)`",
)

NO_OUTPUTS = Problem(
    "job.use.no_outputs",
    JobImportError,
    "job.use: {method}() of {got!r} has no outputs(model, batch) to work on",
    "write it, or take {method}() out",
    cause="a metric of the whole set without `outputs`",
    advice="write `outputs`",
)

OUTPUTS_UNUSED = Problem(
    "job.use.outputs_unused",
    JobImportError,
    "job.use: nothing uses outputs() of {got!r}",
    "write whole_set_metrics(outputs) or figures(outputs), or take it out",
    cause="`outputs` without a metric or figure of them",
    advice="write one, or take it out",
)

SIGNATURE = Problem(
    "job.use.signature",
    JobImportError,
    "job.use: {method}() of {use!r} cannot be called as {call}: {got}",
    cause="a method with other parameters than a job's",
    advice="the parameters that the message has",
)

# --- a class of a notebook or a script --------------------------------------------------------------------------

OF_SCRIPT = Problem(
    "job.use.of_script",
    JobImportError,
    "job.use: got {got!r}, a class of the script that runs",
    "workers cannot import it: give the class itself, lockstep.train(spec, job=Class), or put it into a module of its own",
    shown="job.use: got '__main__:…', a class of the script that runs; …",
    cause="workers cannot import the script",
    advice="give the class itself, `lockstep.train(spec, job=Class)`, or put it into a module",
)

OF_RECORD = Problem(
    "job.use.of_record",
    JobImportError,
    "job.use: got {got!r}, a class of a notebook or script, whose source is in the record of its run and nowhere else",
    "give the class itself, job=Class, or go on with the run, lockstep resume RUN_ID --fork",
    cause="the spec of a run whose job was a class of `__main__`",
    advice="give the class itself, or fork the run",
)

SOURCE_MISSING = Problem(
    "job.source_missing",
    JobImportError,
    "job: {name} uses {got} of __main__, of which its source has no definition",
    "define {them} in the same cell, import {them}, or make {them} params of the job",
    cause="[a value that the source text does not give](notebooks.md#what-is-recorded-of-a-class)",
    advice="define it in the cell of the class, import it, or make it a param",
)

NO_SOURCE = Problem(
    "job.no_source",
    JobImportError,
    "job: the source of {got} is not available: __main__ is neither a notebook nor a script",
    "put {got} into a file",
    cause="a class typed at a Python prompt",
    advice="put it into a file",
)

REPLACED = Problem(
    "job.replaced",
    JobImportError,
    "job: {got} is no longer the {got} of __main__",
    "pass the one that is",
    cause="another class of this name was defined since",
    advice="pass that one",
)

NESTED = Problem(
    "job.nested",
    JobImportError,
    "job: {got} is defined inside a function or class",
    "define it at the top",
    cause="no name at the top level leads to this class",
    advice="pass a class defined at the top level",
)

UPDATES_PER_EPOCH = Problem(
    "job.schedule.per_epoch",
    JobError,
    "job.schedule: reads updates.per_epoch, and batch.global changes during the run, so epochs have different numbers of updates",
    "count updates up to int(updates), return lockstep.PerEpoch(scheduler) for one that is stepped by epochs, or give batch.global one size",
    cause="a schedule that multiplies epochs by the updates of an epoch, where the global batch changes",
    advice="a schedule by updates, `lockstep.PerEpoch`, or one size",
)

NOT_MADE = Problem(
    "job.not_made",
    JobError,
    "job: {use!r} cannot be made{where}: {got}",
    shown="job: '…' cannot be made, …: …",
    cause="the job's `__init__` raised an error; the message has its line",
    advice="fix the job, or the params that it was given",
)

PARAM_DRAWN = Problem(
    "job.params.drawn",
    SpecError,
    "job.params.{name}: has another value each time that it is made, {got} and {again}, so no resume would have that of the run",
    "give it in the spec, or declare it as placement",
    cause="a default or a validator of `Params` that reads a clock or draws, such as `default_factory=time.time`",
    advice="give the value in the spec; declare as placement what decides about no bits, such as a label",
)

SOURCE_CHANGED = Problem(
    "job.source.changed",
    SpecError,
    "job.source: {got!r} was changed after it was imported, so the run would train other code than its identity and its record have",
    "put it back, or start again",
    cause="a file of the job was saved while the run started, or while a sweep's workers, which go on from trial to trial, have it imported",
    advice="put it back, or start again",
)
