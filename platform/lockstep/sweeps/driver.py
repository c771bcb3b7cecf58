"""A sweep from its spec to its end: the first trial is prepared, then Tune and the record."""

from __future__ import annotations

import logging
import os
import shutil
import time
import traceback
import uuid
from collections.abc import Iterable, Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Unpack

from lockstep.checkpoint.runs.lease import Lease
from lockstep.checks.start_checks import advise, check_storage, check_sweep, find_initial_weights
from lockstep.clusters.reachability import LOCAL, cluster_address
from lockstep.driver.guardian import Guardian, ending_line
from lockstep.driver.notebook import as_table
from lockstep.driver.notification import Notifications
from lockstep.driver.options import RunOptions, SweepCallOptions, options_of_call
from lockstep.driver.resume_hint import look_at, resume_command
from lockstep.driver.signals import StopSignal, was_signalled
from lockstep.durations import duration_text
from lockstep.errors import ClusterError, LockstepError, SilentError
from lockstep.job.job_folder import search_job_folder
from lockstep.job.main_source import main_use
from lockstep.job.recorded_source import imported_from
from lockstep.job.source import check_job_source
from lockstep.record.mirror.store_uri import check_uri
from lockstep.record.redaction import without_uri_secrets
from lockstep.spec.locations import RECORD_OFF
from lockstep.spec.sweep import SweepSpec, load_sweep
from lockstep.sweeps import problems, sweep_end
from lockstep.sweeps.sweep_resume import leased_sweep
from lockstep.sweeps.trial_standings import best_of, tally

if TYPE_CHECKING:
    from lockstep.sweeps.decisions import Decisions
    from lockstep.sweeps.sweep_progress import SweepTable

TUNE_SETTINGS = {
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",  # the record is elsewhere
    "TUNE_DISABLE_SIGINT_HANDLER": "1",
    "TUNE_DISABLE_STRICT_METRIC_CHECKING": "1",  # a trial that fails has no metric
    "TUNE_GLOBAL_CHECKPOINT_S": "3600",  # a sweep is taken up from its decisions, not from Tune's own state
    "TUNE_WARN_EXCESSIVE_EXPERIMENT_CHECKPOINT_SYNC_THRESHOLD_S": "0",
    "RAY_AIR_NEW_OUTPUT": "0",
}

_AT_ONCE = "ended at once by a second signal"

PRELOADED = ("lockstep.sweeps.trial", "torch._dynamo", "ray.tune", "pyarrow.parquet")
"""What a trial's worker imports by its first step."""


@dataclass(frozen=True, slots=True)
class SweepResult:
    """The outcome of a sweep. `best` is the row of the best trial, `trials` all of them; times in seconds."""

    sweep_id: str
    status: str
    metric: str
    mode: str
    trials: list[dict[str, Any]]
    best: dict[str, Any] | None
    counts: dict[str, int]
    seconds: float
    url: str
    tracking_uri: str
    folder: str
    signal_number: int | None = None
    """The signal that ended it, where `status` is KILLED."""
    warnings: list[str] = field(default_factory=list)

    def _repr_html_(self) -> str:
        """The result as a notebook shows it."""
        shown = {
            "status": f"{self.status}, {len(self.trials)} trials in {duration_text(self.seconds)}",
            "trials": ", ".join(f"{count} {status}" for status, count in self.counts.items()),
        }
        if self.best is not None:
            shown |= {
                "best": f"{self.metric} {self.best['metric']:.6g} (trial {self.best['trial']})",
                **{name: str(value) for name, value in self.best["fields"].items()},
                "weights_digest": str(self.best["weights_digest"]),
            }
        shown |= {"sweep": self.sweep_id, "folder": self.folder}
        if self.status != "FINISHED":
            shown["resume it with"] = resume_command(self.sweep_id, self.tracking_uri, self.folder)
        if self.tracking_uri != RECORD_OFF:
            shown["look at it"] = look_at(self.url, self.tracking_uri)
        return as_table(shown)

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for JSON, which is printed: passwords in the store's URI are hidden."""
        return {**asdict(self), "tracking_uri": without_uri_secrets(self.tracking_uri)}


def sweep(
    source: SweepSpec | str | Path | Mapping[str, Any],
    overrides: Iterable[str] = (),
    *,
    uri: str | None = None,
    job: type | None = None,
    **options: Unpack[SweepCallOptions],
) -> SweepResult:
    """Search the space of a sweep with Ray Tune, on the cluster at `address` or a local one.

    `source` is a SweepSpec, a YAML file or plain data. `job` is the class of the job and replaces `spec.job.use`; the source of a
    class that a notebook or the running script defines is recorded with the sweep and with each trial. A SIGTERM or SIGINT ends the
    trials after their next step, with a checkpoint. `notify` is a command, words or a text for the shell, that is run at the start, failure and
    end of the sweep. Raises LockstepError.
    """
    files = None
    if job is not None:
        use, files = main_use(job)
        overrides = [f"spec.job.use={use}", *overrides]
        if isinstance(source, SweepSpec):
            spec = {**source.spec, "job": {**source.spec["job"], "use": use}}
            source = load_sweep({**source.document(), "spec": spec})
    loaded = source if isinstance(source, SweepSpec) else load_sweep(source, overrides, uri=uri)
    return run_sweep(options_of_call(files, SweepCallOptions, **options), loaded)


def run_sweep(
    options: RunOptions, spec: SweepSpec, sweep_id: str | None = None, lease: Lease | None = None
) -> SweepResult:
    """As `sweep`, with the options of the call as one value; with `sweep_id` the sweep of that id goes on, which `hold` holds."""
    with imported_from(options.source) if options.source else nullcontext():
        return _run_sweep(options, spec, sweep_id, lease)


def _run_sweep(
    options: RunOptions, spec: SweepSpec, sweep_id: str | None, lease: Lease | None
) -> SweepResult:
    search_job_folder()
    base = find_initial_weights(spec.base)
    if base != spec.base:
        spec = load_sweep({**spec.document(), "spec": {**spec.spec, "initial_weights": base.initial_weights}})
    warnings = advise(base)
    check_job_source(base.job.use)
    check_sweep(spec, elsewhere=cluster_address(options.address) != LOCAL)
    check_storage(base)
    check_uri(base.record.uri or RECORD_OFF)
    from lockstep.clusters.connection import connected, importing_ahead
    from lockstep.clusters.core_watch import CoreWatch
    from lockstep.clusters.driver_restarter import kept

    verbose, say = options.verbose, options.progress.say
    notifications = Notifications(options.notify, base.folder, say, sweep_id, webhook=options.webhook)
    with (
        StopSignal() as stop,
        Guardian(
            base.document(),
            base.folder,
            sweep=spec.document(),
            recorded_by=sweep_end.__name__,
            notify=options.notify,
            webhook=options.webhook,
            say=say,
        ) as guardian,
    ):
        driver = _Driver(spec, sweep_id, options, stop, warnings, lease, notifications, guardian)
        try:
            with (
                importing_ahead(options.address),
                connected(
                    options.address,
                    verbose=verbose,
                    for_workers=True,
                    preload=PRELOADED,
                    stop=stop,
                    say=say,
                    core=CoreWatch(guardian, base.folder),
                ),
                kept(options.retries, say),
            ):
                result = driver.run()
        except BaseException as error:
            notifications.failed(error, driver.steps)
            raise
        notifications.ended(result.status, driver.steps)
    return replace(result, warnings=[*result.warnings, *guardian.warnings, *notifications.warnings])


class _OpenSweep(NamedTuple):
    """A sweep whose run exists, and which this command holds. All nodes see its folder."""

    sweep_id: str
    url: str
    folder: Path
    lease: Lease

    @property
    def tune_folder(self) -> Path:
        """For Tune's own files."""
        return self.folder / "tune"


class _Driver:
    """One sweep on a connected cluster."""

    def __init__(
        self,
        spec: SweepSpec,
        sweep_id: str | None,
        options: RunOptions,
        stop: StopSignal,
        warnings: list[str],
        lease: Lease | None,
        notifications: Notifications,
        guardian: Guardian,
    ) -> None:
        self.spec, self.options, self.stop, self.warnings = spec, options, stop, warnings
        self.progress = options.progress
        self.steps = 0
        """Those of all trials, known when the search has ended."""
        self._sweep_id, self._lease, self._notifications = sweep_id, lease, notifications
        self._guardian = guardian
        self._ended = False
        """Whether the recorders have recorded the end."""

    def run(self) -> SweepResult:
        """Search until the trials, the budget or a signal end it."""
        from lockstep.clusters.core_watch import lost_core

        try:
            return self._run()
        except (KeyboardInterrupt, LockstepError) as error:
            if (
                self._ended or lost_core() is not None
            ):  # the recorders have recorded it, or the watch has it recorded
                raise
            raise self._recorded_by_guardian(error) from error

    def _recorded_by_guardian(self, error: KeyboardInterrupt | LockstepError) -> BaseException:
        """Have the guardian record the end of a sweep whose recorders cannot, as where they are lost. The error that says so."""
        if self._guardian.run_id is None and not isinstance(error, ClusterError):
            return error  # there is no sweep yet; recorders that are lost may have begun it, and not lived to name it
        status, text = ("KILLED", _AT_ONCE) if was_signalled(error) else ("FAILED", str(error))
        sweep_id, problem = self._guardian.record(text, traceback.format_exc(), status)
        if isinstance(error, KeyboardInterrupt) or sweep_id is None:
            return error
        return error.with_message(ending_line(str(error), sweep_id, self.spec.base.folder, problem, "sweep"))

    def _run(self) -> SweepResult:
        from lockstep.attempts.shared_files import check_shared
        from lockstep.sweeps.recorders import recorders_here

        concurrency, bundles = self._places()
        for text in (warnings := check_shared(self.spec.base, self.stop, self.progress.say)):
            self.progress.say(f"warning: {text}")
        self.warnings += warnings
        self._guardian.tell(new=True)
        with ExitStack() as stack, recorders_here(concurrency, self._guardian.recorded_by) as recorders:
            facts = self._prepare(recorders, gpu="GPU" in bundles[0])
            opened = self._open(recorders, stack)
            self.progress.say(f"sweep {opened.sweep_id}: {self.spec.total} trials, {concurrency} at a time")
            table, error = self._search(recorders, opened, facts, concurrency, bundles)
            return self._end(recorders, opened, table, error)

    def _prepare(self, recorders: Any, *, gpu: bool) -> Mapping[str, int]:
        """Prepare the first trial, before the sweep's run is created, which a mistake would leave behind."""
        from lockstep.sweeps.first_trial import first_trial
        from lockstep.sweeps.recorders import AGAIN, GOES_ON

        recorders.prepare.remote(self.spec.base.record.uri or "")
        return first_trial(
            self.spec,
            self.options.source,
            gpu=gpu,
            stop=self.stop,
            say=self.progress.say,
            then=GOES_ON if self._sweep_id else AGAIN,
        )

    def _open(self, recorders: Any, stack: ExitStack) -> _OpenSweep:
        """Create the sweep's run, or reopen it. It is held as long as `stack` is open."""
        from lockstep.sweeps.recorders import AGAIN, ANSWER_S, answer_of_recorders

        opened = recorders.open_sweep.remote(self.spec, self._sweep_id, self.options.source)
        sweep_id, url, folder = answer_of_recorders(opened, ANSWER_S, AGAIN)
        self._guardian.tell(run_id=sweep_id)
        lease = self._lease or stack.enter_context(leased_sweep(self.spec, sweep_id))
        lease.when_taken(self.stop.ask)
        self._notifications.began(sweep_id, 0)
        return _OpenSweep(sweep_id, url, Path(folder), lease)

    def _search(
        self,
        recorders: Any,
        opened: _OpenSweep,
        facts: Mapping[str, int],
        concurrency: int,
        bundles: list[dict[str, float]],
    ) -> tuple[SweepTable, LockstepError | None]:
        """Have Tune run the trials. Their table, and the error that ended the search."""
        from lockstep.sweeps.decisions import Decisions
        from lockstep.sweeps.schedulers import RecordedScheduler, make_scheduler
        from lockstep.sweeps.search import Search
        from lockstep.sweeps.sweep_progress import SweepTable
        from lockstep.sweeps.trial import was_begun

        decisions = Decisions(opened.folder, self.stop.wait, self.progress.say)
        table = SweepTable(
            self.spec,
            decisions,
            recorders,
            self.progress,
            self.stop,
            lambda number: self._guardian.tell(signal=number),
        )
        error: LockstepError | None = None
        try:
            rule = make_scheduler(self.spec, facts["total_steps"], facts["first_evaluation"])
            begun = partial(was_begun, self.spec, opened.sweep_id)
            scheduler = RecordedScheduler(rule, self.spec, decisions, table.pruned, concurrency, begun)
            search = Search(self.spec, decisions, lambda: table.over is None and scheduler.room())
            self._tune(search, scheduler, table, recorders, opened, decisions, bundles)
        except LockstepError as raised:
            error = raised
        except Exception as raised:  # noqa: BLE001 - whatever ends a sweep is recorded, and raised
            error = problems.TUNE_ENDED(got=repr(raised))
        shutil.rmtree(opened.tune_folder, ignore_errors=True)
        self.steps = table.standing.steps
        return table, error

    def _end(
        self, recorders: Any, opened: _OpenSweep, table: SweepTable, error: LockstepError | None
    ) -> SweepResult:
        """Have the end of the sweep recorded. Raises the error that ended it, or what could not be recorded."""
        from lockstep.attempts.recording import CLOSING_S
        from lockstep.sweeps.recorders import ANSWER_S, answer_of_recorders

        status = "KILLED" if self.stop.asked else "FAILED" if error else "FINISHED"
        if isinstance(error, SilentError):  # they can write nothing any more
            raise error
        closed = recorders.close.remote(table.over or "the sweep is over")
        failures = answer_of_recorders(closed, CLOSING_S + ANSWER_S)
        verdict = str(error or table.over or f"{len(table.rows)} trials")
        trials = table.trials
        ended = recorders.end_sweep.remote(trials, status, verdict)
        unsaid = answer_of_recorders(ended, ANSWER_S)
        self._ended = True
        for failure in filter(None, [error, *failures, unsaid]):
            raise failure
        if status == "KILLED":
            opened.lease.ensure()
        return SweepResult(
            sweep_id=opened.sweep_id,
            status=status,
            metric=self.spec.metric,
            mode=self.spec.mode,
            trials=trials,
            best=best_of(trials, self.spec.mode),  # type: ignore[arg-type]
            counts=tally(trials),
            seconds=time.time() - self.options.began_at,
            url=opened.url,
            tracking_uri=self.spec.base.record.uri or "",
            folder=str(opened.folder),
            signal_number=self.stop.number,
            warnings=self.warnings,
        )

    def _places(self) -> tuple[int, list[dict[str, float]]]:
        """How many trials run at a time, and what the workers of one are given."""
        from lockstep.attempts.cluster_capacity import most_resources, node_resources
        from lockstep.attempts.placement import fit_workers, room_on

        pbt = self.spec.scheduler.has_population
        # A trial more than there is room for is what asks for a node. A population begins all at once.
        nodes = node_resources() if pbt else most_resources()
        _, each = fit_workers(self.spec.base, nodes)
        workers, room = self.spec.base.workers.min, room_on(each, nodes)
        most = min(self.spec.concurrency or room, self.spec.total)
        if pbt and most < self.spec.total:  # so many bundles that no more trials than that fit
            workers = max(workers, room // (most + 1) + 1)
        return min(room // workers, most), [dict(each) for _ in range(workers)]

    def _tune(
        self,
        search: Any,
        scheduler: Any,
        table: SweepTable,
        recorders: Any,
        opened: _OpenSweep,
        decisions: Decisions,
        bundles: list[dict[str, float]],
    ) -> None:
        begin = self.spec.total if self.spec.scheduler.has_population else 1
        os.environ.update({**TUNE_SETTINGS, "TUNE_MAX_PENDING_TRIALS_PG": str(begin)})
        from ray import tune

        if not self.options.verbose:
            logging.getLogger("ray.tune").setLevel(
                logging.CRITICAL
            )  # how each attempt of a trial ended is said here

        from lockstep.sweeps.trial import Trial

        trainable = tune.with_parameters(
            Trial,
            sweep=self.spec,
            sweep_id=opened.sweep_id,
            recorders=recorders,
            folder=str(Path.cwd()),
            ends=dict(decisions.ends),
            source=self.options.source,
        )
        tune.Tuner(
            tune.with_resources(trainable, tune.PlacementGroupFactory(bundles)),
            tune_config=tune.TuneConfig(
                search_alg=search,
                scheduler=scheduler,
                num_samples=self.spec.total,
                reuse_actors=True,
                trial_dirname_creator=lambda trial: str(trial.trial_id),
            ),
            run_config=tune.RunConfig(
                name=f"lockstep-{uuid.uuid4().hex[:12]}",
                storage_path=str(opened.tune_folder),
                callbacks=[table],
                stop=table,
                failure_config=tune.FailureConfig(max_failures=self.spec.base.faults.max_worker_failures),
                checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=False),
                verbose=0,
            ),
        ).fit()
