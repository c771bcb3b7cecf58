"""A run on Ray: Ray Train starts the workers, a recorder actor listens to them, the driver watches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from lockstep.attempts.preloaded_modules import AHEAD
from lockstep.attempts.shared_files import check_shared
from lockstep.checkpoint.runs.run_folder import AttemptOrigin
from lockstep.checks.start_checks import check_job
from lockstep.clusters.connection import connected
from lockstep.clusters.core_watch import CoreWatch
from lockstep.clusters.driver_restarter import kept
from lockstep.clusters.ray_internals import warnings_of_ray
from lockstep.driver.guardian import Guardian
from lockstep.driver.options import RunOptions
from lockstep.driver.result import Result
from lockstep.driver.signals import StopSignal
from lockstep.spec.fields import Spec
from lockstep.training.worker_environment import sent_environment


def train_on_ray(
    spec: Spec,
    options: RunOptions,
    stop: StopSignal,
    origin: AttemptOrigin,
    warnings: list[str],
    on_run_id: Callable[[str], None],
) -> Result:
    """Train on the Ray cluster that `options` name, on the one that `cluster_address` finds, or on a new local one.

    The job is checked for a cluster that is there: it starts the run's first processes meanwhile. SpecError, with nothing recorded.
    """
    say = options.progress.say
    with (
        Guardian(
            spec.document(), spec.folder, notify=options.notify, webhook=options.webhook, say=say
        ) as guardian,
        connected(
            options.address,
            verbose=options.verbose,
            preload=AHEAD,
            stop=stop,
            say=say,
            core=CoreWatch(guardian, spec.folder),
        ) as own_cluster,
    ):
        options.start.note("cluster")
        from lockstep.attempts.chaos import Chaos, parse
        from lockstep.attempts.recording import Recording
        from lockstep.attempts.supervisor import Supervisor

        environment = {} if own_cluster else sent_environment()

        def tell(run_id: str) -> None:
            say(f"run {run_id}")
            on_run_id(run_id)

        guardian.tell(run_id=origin.run_id, new=True)
        # Its processes start, and nothing is recorded yet, beside what is found out here.
        with Recording(spec, environment, origin.run_id, say, guardian) as recording:
            if not own_cluster:
                check_job(spec, elsewhere=True)
                options.start.note("job")
            for text in (cluster_warnings := [*warnings_of_ray(), *check_shared(spec, stop, say)]):
                say(f"warning: {text}")
            chaos = None if options.chaos is None else Chaos(parse(options.chaos), spec.seed, say)
            every = [*warnings, *cluster_warnings]
            supervisor = Supervisor(
                spec, options, stop, origin, recording, environment, every, tell, chaos=chaos
            )
            with kept(options.retries, say):
                result = supervisor.run()
                return replace(result, warnings=[*result.warnings, *guardian.warnings])
