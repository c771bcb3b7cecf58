"""A run on Ray: Ray Train starts the workers, a recorder actor listens to them, the driver watches."""

from __future__ import annotations

from collections.abc import Callable

from lockstep.attempts.shared_files import check_shared
from lockstep.checkpoint.run_folder import AttemptOrigin
from lockstep.clusters.connection import connected
from lockstep.clusters.ray_internals import warnings_of_ray
from lockstep.driver.progress import Progress
from lockstep.driver.result import Result
from lockstep.driver.signals import StopSignal
from lockstep.spec.fields import Spec
from lockstep.training.worker_environment import WORKER_ENVIRONMENT


def train_on_ray(
    spec: Spec,
    progress: Progress,
    stop: StopSignal,
    origin: AttemptOrigin,
    *,
    address: str | None,
    verbose: bool,
    began_at: float,
    warnings: list[str],
    on_run_id: Callable[[str], None] | None = None,
    chaos: str | None = None,
) -> Result:
    """Train on the Ray cluster at `address`, on the one that `cluster_address` finds, or on a new local one."""
    with connected(address, verbose=verbose, stop=stop, say=progress.say) as own_cluster:
        from lockstep.attempts.chaos import Chaos, parse
        from lockstep.attempts.supervisor import Supervisor

        environment = {} if own_cluster else WORKER_ENVIRONMENT
        for text in (found := [*warnings_of_ray(), *check_shared(spec)]):
            progress.say(f"warning: {text}")

        def tell(run_id: str) -> None:
            progress.say(f"run {run_id}")
            if on_run_id is not None:
                on_run_id(run_id)

        supervisor = Supervisor(
            spec, progress, stop, origin, environment, began_at, [*warnings, *found], tell
        )
        if chaos is not None:
            supervisor.chaos = Chaos(parse(chaos), spec.seed, progress.say)
        return supervisor.run()
