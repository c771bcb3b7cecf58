"""Trains a run: `lockstep.train`, which is what `lockstep train` does, and one attempt of a run, which every call that trains ends in."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Unpack

from lockstep.calls import problems
from lockstep.calls.leased_storages import HeldProgress, leads, leased_run
from lockstep.calls.named_runs import train_named
from lockstep.calls.subprocess_call import apart, unfit
from lockstep.checkpoint.runs.lease import Lease
from lockstep.checkpoint.runs.run_folder import AttemptOrigin
from lockstep.checks.start_checks import advise, check_job, check_storage, find_initial_weights
from lockstep.clusters.connection import importing_ahead
from lockstep.clusters.reachability import LOCAL, cluster_address
from lockstep.driver.notification import Notifications
from lockstep.driver.options import CallOptions, RunOptions, options_of_call
from lockstep.driver.result import Result
from lockstep.driver.signals import StopSignal
from lockstep.exit_codes import ExitCode
from lockstep.job.job_folder import search_job_folder
from lockstep.job.main_source import main_use
from lockstep.job.recorded_source import imported_from
from lockstep.job.source import check_job_source
from lockstep.proof.recorded_run import recorded_main
from lockstep.record.mirror.store_uri import check_uri
from lockstep.spec.fields import Spec
from lockstep.spec.loading import load_spec
from lockstep.spec.locations import RECORD_OFF


def train(
    spec: Spec | str | Path | Mapping[str, Any],
    overrides: Iterable[str] = (),
    *,
    uri: str | None = None,
    run: str | None = None,
    takeover: bool = False,
    on_run_id: Callable[[str], None] | None = None,
    job: type | None = None,
    **options: Unpack[CallOptions],
) -> Result:
    """Train one run to its end, as `lockstep train` does.

    `spec` is a Spec, a YAML file or plain data; `overrides` are `key=value` strings. `job` is the class of the job and replaces
    `job.use` in the spec; the source of a class that a notebook or the running script defines is recorded. `run` is a name: the first
    call starts the run of this name, later ones resume it; with `takeover` from the command that holds it. `local` trains without Ray, in this process or as one rank under torchrun; in a notebook, or if Python hashes strings at random, the run gets its own process.
    Without `local`, `address` names the Ray cluster. A SIGTERM or SIGINT stops the run after the next step, and its result says KILLED.
    `on_run_id` is called once the run exists. `chaos`, such as `worker:0.02`, kills parts of the run on purpose. `notify` is a
    command, a list of words or a text for the shell, that is run at the run's start, failure and end. Raises LockstepError.
    """
    source = None
    if job is not None:
        use, source = main_use(job)
        overrides = [f"job.use={use}", *overrides]
        if isinstance(spec, Spec):
            spec = spec.model_copy(update={"job": spec.job.model_copy(update={"use": use})})
    how = options_of_call(source, **options)
    loaded = spec if isinstance(spec, Spec) else load_spec(spec, overrides, uri=uri)
    call = partial(train_named, spec=loaded, name=run, takeover=takeover)
    if how.local and (source or unfit()):
        return apart(call, how, on_run_id)
    return call(how, on_run_id=on_run_id)


def run_attempt(
    spec: Spec,
    origin: AttemptOrigin,
    options: RunOptions,
    *,
    on_run_id: Callable[[str], None] | None = None,
    lease: Lease | None = None,
) -> Result:
    """Train one attempt of a run, to its end or to a signal. `lease` is that of a run that goes on; a new one is leased as soon as it exists."""
    parent = spec.fork.run if spec.fork is not None else None
    source = options.source or recorded_main(spec, origin.run_id or parent)
    with started_ahead(spec, options), imported_from(source) if source else nullcontext():
        return _run_attempt(spec, origin, replace(options, source=source), on_run_id, lease)


def started_ahead(spec: Spec, options: RunOptions) -> AbstractContextManager[None]:
    """What imports for seconds by itself begins now, beside the import and the checks of the job."""
    if not options.local:
        return importing_ahead(options.address)
    if spec.record.uri == RECORD_OFF or not leads():
        return nullcontext()
    from lockstep.record.writer_process import writer_ahead

    return writer_ahead(spec.record.uri)


def _run_attempt(
    spec: Spec,
    origin: AttemptOrigin,
    options: RunOptions,
    on_run_id: Callable[[str], None] | None,
    lease: Lease | None,
) -> Result:
    options.start.note("command")
    search_job_folder()
    warnings = advise(spec)
    for text in warnings:
        options.progress.say(f"warning: {text}")
    spec = find_initial_weights(spec)
    check_job_source(spec.job.use)
    if options.local or cluster_address(options.address) == LOCAL:
        check_job(spec, elsewhere=False)
        options.start.note("job")
    check_storage(spec)
    check_uri(spec.record.uri or RECORD_OFF)
    if options.local and options.chaos is not None:
        raise problems.CHAOS_LOCAL()
    shown = HeldProgress(options.progress)
    options = replace(options, progress=shown)
    command, webhook = (options.notify, options.webhook) if leads() else (None, None)
    notifications = Notifications(command, spec.folder, shown.say, origin.run_id, webhook=webhook)
    options = replace(options, on_alert=notifications.alerted)
    with ExitStack() as stack, StopSignal() as stop:

        def keep(held_lease: Lease | None) -> None:
            shown.lease = held_lease
            if held_lease is not None:
                held_lease.when_taken(stop.ask)

        def begun(run_id: str) -> None:
            if lease is None:
                keep(stack.enter_context(leased_run(spec, run_id, shown)))
            if on_run_id is not None:
                on_run_id(run_id)
            notifications.began(run_id, shown.step)

        keep(lease)
        try:
            if options.local:
                from lockstep.driver.local import train_here

                result = train_here(spec, options, stop, origin, warnings, begun)
            else:
                from lockstep.attempts.on_ray import train_on_ray

                result = train_on_ray(spec, options, stop, origin, warnings, begun)
            if result is not None and result.status == "KILLED" and shown.lease is not None:
                shown.lease.ensure()
        except BaseException as error:
            notifications.failed(error, shown.step)
            raise
        if result is None:
            raise SystemExit(ExitCode.DONE)  # a rank of torchrun that has nothing to tell
        notifications.ended(result.status, result.step)
    return replace(result, warnings=[*result.warnings, *notifications.warnings])
