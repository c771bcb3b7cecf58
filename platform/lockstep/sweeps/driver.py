"""A sweep from its spec to its end: the first trial is prepared, then Tune and the record."""

from __future__ import annotations

import logging
import os
import shutil
import sys
import time
import uuid
from collections.abc import Iterable, Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lockstep.checkpoint.holder import Hold
from lockstep.checks.preflight import advise, check_storage, check_sweep, find_initial_weights
from lockstep.clusters.reachability import LOCAL, cluster_address
from lockstep.driver.notebook import as_table, default_progress
from lockstep.driver.options import RunOptions
from lockstep.driver.progress import Progress
from lockstep.driver.signals import StopSignal
from lockstep.errors import ClusterError, LockstepError, SilentError
from lockstep.job.main_source import main_use
from lockstep.job.recorded_source import imported_from
from lockstep.job.source import check_job_source
from lockstep.record.store_uri import check_uri
from lockstep.spec.locations import RECORD_OFF
from lockstep.spec.sweep import SweepSpec, load_sweep
from lockstep.sweeps.resumption import held_sweep
from lockstep.sweeps.standing import best_of, tally

TUNE_SETTINGS = {
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",  # the record is elsewhere
    "TUNE_DISABLE_SIGINT_HANDLER": "1",
    "TUNE_DISABLE_STRICT_METRIC_CHECKING": "1",  # a trial that fails has no metric
    "TUNE_GLOBAL_CHECKPOINT_S": "3600",  # a sweep is taken up from its decisions, not from Tune's own state
    "TUNE_WARN_EXCESSIVE_EXPERIMENT_CHECKPOINT_SYNC_THRESHOLD_S": "0",
    "RAY_AIR_NEW_OUTPUT": "0",
}

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
            "status": f"{self.status}, {len(self.trials)} trials in {self.seconds:.0f} s",
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
            shown["resume it with"] = f"lockstep resume {self.sweep_id}"
        if self.tracking_uri != RECORD_OFF:
            shown["look at it"] = self.url or f"lockstep ui --uri {self.tracking_uri}"
        return as_table(shown)

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return asdict(self)


def sweep(
    source: SweepSpec | str | Path | Mapping[str, Any],
    overrides: Iterable[str] = (),
    *,
    address: str | None = None,
    uri: str | None = None,
    progress: Progress | None = None,
    verbose: bool = False,
    job: type | None = None,
) -> SweepResult:
    """Search the space of a sweep with Ray Tune, on the cluster at `address` or a local one.

    `source` is a SweepSpec, a YAML file or plain data. `job` is the class of the job, in the place of `spec.job.use`; one of a
    notebook or of the script that runs has its source recorded, with the sweep and with each trial. A SIGTERM or SIGINT ends its
    trials after their next step with a checkpoint. Raises LockstepError.
    """
    files = None
    if job is not None:
        use, files = main_use(job)
        overrides = [f"spec.job.use={use}", *overrides]
        if isinstance(source, SweepSpec):
            spec = {**source.spec, "job": {**source.spec["job"], "use": use}}
            source = load_sweep({**source.document(), "spec": spec})
    options = RunOptions(
        progress=progress or default_progress(), address=address, verbose=verbose, source=files or None
    )
    loaded = source if isinstance(source, SweepSpec) else load_sweep(source, overrides, uri=uri)
    return run_sweep(options, loaded)


def run_sweep(
    options: RunOptions, spec: SweepSpec, sweep_id: str | None = None, hold: Hold | None = None
) -> SweepResult:
    """As `sweep`, with the options of the call as one value; with `sweep_id` the sweep of that id goes on, which `hold` holds."""
    with imported_from(options.source) if options.source else nullcontext():
        return _run_sweep(options, spec, sweep_id, hold)


def _run_sweep(options: RunOptions, spec: SweepSpec, sweep_id: str | None, hold: Hold | None) -> SweepResult:
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    base = find_initial_weights(spec.base)
    if base != spec.base:
        spec = load_sweep({**spec.document(), "spec": base.document()})
    warnings = advise(base)
    check_job_source(base.job.use)
    check_sweep(spec, elsewhere=cluster_address(options.address) != LOCAL)
    check_storage(base)
    check_uri(base.record.uri or RECORD_OFF)
    from lockstep.clusters.connection import connected, importing_ahead
    from lockstep.clusters.keeper import kept

    verbose, say = options.verbose, options.progress.say
    with (
        StopSignal() as stop,
        importing_ahead(options.address),
        connected(options.address, verbose=verbose, for_workers=True, preload=PRELOADED, stop=stop, say=say),
        kept(options.retries, say),
    ):
        return _Driver(spec, sweep_id, options, stop, warnings, hold).run()


class _Driver:
    """One sweep on a connected cluster."""

    def __init__(
        self,
        spec: SweepSpec,
        sweep_id: str | None,
        options: RunOptions,
        stop: StopSignal,
        warnings: list[str],
        hold: Hold | None,
    ) -> None:
        self.spec, self.options, self.stop, self.warnings = spec, options, stop, warnings
        self.progress = options.progress
        self._sweep_id, self._hold = sweep_id, hold

    def run(self) -> SweepResult:
        """Search until the trials, the budget or a signal end it."""
        from lockstep.attempts.shared_files import check_shared
        from lockstep.sweeps.recorders import recorders_here

        concurrency, bundles = self._places()
        for text in (found := check_shared(self.spec.base, self.stop, self.progress.say)):
            self.progress.say(f"warning: {text}")
        self.warnings += found
        with ExitStack() as stack, recorders_here(concurrency) as recorders:
            return self._search(recorders, concurrency, bundles, stack)

    def _search(
        self, recorders: Any, concurrency: int, bundles: list[dict[str, float]], stack: ExitStack
    ) -> SweepResult:
        from lockstep.attempts.recording import CLOSING_S
        from lockstep.sweeps.decisions import Decisions
        from lockstep.sweeps.first_trial import first_trial
        from lockstep.sweeps.recorders import AGAIN, ANSWER_S, GOES_ON, answer_of_recorders
        from lockstep.sweeps.schedulers import RecordedScheduler, make_scheduler
        from lockstep.sweeps.search import Search
        from lockstep.sweeps.table import SweepTable

        recorders.prepare.remote(self.spec.base.record.uri or "")
        # Before the sweep's run is created, which a mistake would leave behind.
        facts = first_trial(
            self.spec,
            self.options.source,
            gpu="GPU" in bundles[0],
            stop=self.stop,
            say=self.progress.say,
            then=GOES_ON if self._sweep_id else AGAIN,
        )
        opened = recorders.open_sweep.remote(self.spec, self._sweep_id, self.options.source)
        sweep_id, url, folder = answer_of_recorders(opened, ANSWER_S, AGAIN)
        hold = self._hold or stack.enter_context(held_sweep(self.spec, sweep_id))
        hold.when_taken(self.stop.ask)
        self.progress.say(f"sweep {sweep_id}: {self.spec.total} trials, {concurrency} at a time")

        decisions = Decisions(Path(folder), self.stop.wait, self.progress.say)
        board = SweepTable(self.spec, decisions, recorders, self.progress, self.stop)
        error: LockstepError | None = None
        try:
            rule = make_scheduler(self.spec, facts["total_steps"], facts["first_evaluation"])
            scheduler = RecordedScheduler(rule, self.spec, decisions, board.pruned, concurrency)
            search = Search(self.spec, decisions, lambda: board.over is None and scheduler.room())
            self._tune(
                search, scheduler, board, recorders, sweep_id, decisions, bundles, Path(folder, "tune")
            )
        except LockstepError as raised:
            error = raised
        except Exception as raised:  # noqa: BLE001 - whatever ends a sweep is recorded, and raised
            error = ClusterError(f"Ray Tune ended: {raised!r}")
        shutil.rmtree(Path(folder, "tune"), ignore_errors=True)
        status = "KILLED" if self.stop.asked else "FAILED" if error else "FINISHED"
        if isinstance(error, SilentError):  # nothing can be written any more; the sweep can be resumed
            raise error
        closed = recorders.close.remote(board.over or "the sweep is over")
        failures = answer_of_recorders(closed, CLOSING_S + ANSWER_S)
        verdict = str(error or board.over or f"{len(board.rows)} trials")
        ended = recorders.end_sweep.remote(board.table, status, verdict)
        unsaid = answer_of_recorders(ended, ANSWER_S)
        for failure in filter(None, [error, *failures, unsaid]):
            raise failure
        if status == "KILLED":
            hold.ensure()
        return SweepResult(
            sweep_id=sweep_id,
            status=status,
            metric=self.spec.metric,
            mode=self.spec.mode,
            trials=board.table,
            best=best_of(board.table, self.spec.mode),  # type: ignore[arg-type]
            counts=tally(board.table),
            seconds=time.time() - self.options.began_at,
            url=url,
            tracking_uri=self.spec.base.record.uri or "",
            folder=folder,
            signal_number=self.stop.number,
            warnings=self.warnings,
        )

    def _places(self) -> tuple[int, list[dict[str, float]]]:
        """How many trials run at a time, and what the workers of one are given."""
        import ray

        from lockstep.attempts.cluster_watch import most_resources
        from lockstep.attempts.placement import place

        resources = ray.cluster_resources()
        if self.spec.scheduler.name != "pbt":  # a trial more than there is room for is what asks for a node
            resources = {**resources, **most_resources()}
        _, each = place(self.spec.base, resources)
        workers = self.spec.base.workers.min
        room = min(int(resources.get(kind, 0.0) / (amount * workers) + 1e-9) for kind, amount in each.items())
        concurrency = min(room, self.spec.concurrency or room, self.spec.total)
        bundles = [dict(each) for _ in range(workers)]
        if self.spec.scheduler.name == "pbt":  # all of it begins at once, so each trial takes its whole share
            bundles[0]["CPU"] += resources["CPU"] // concurrency - workers * each["CPU"]
        return concurrency, bundles

    def _tune(
        self,
        search: Any,
        scheduler: Any,
        board: Any,
        recorders: Any,
        sweep_id: str,
        decisions: Any,
        bundles: list[dict[str, float]],
        aside: Path,
    ) -> None:
        """`aside` is for Tune's own files; all nodes see it."""
        begin = self.spec.total if self.spec.scheduler.name == "pbt" else 1
        os.environ.update({**TUNE_SETTINGS, "TUNE_MAX_PENDING_TRIALS_PG": str(begin)})
        from ray import tune

        if not self.options.verbose:
            logging.getLogger("ray.tune").setLevel(logging.ERROR)

        from lockstep.sweeps.trial import Trial

        trainable = tune.with_parameters(
            Trial,
            sweep=self.spec,
            sweep_id=sweep_id,
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
                storage_path=str(aside),
                callbacks=[board],
                stop=board,
                failure_config=tune.FailureConfig(max_failures=self.spec.base.faults.max_worker_failures),
                checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=False),
                verbose=0,
            ),
        ).fit()
