"""A run on Ray: Ray Train starts the workers, a recorder actor listens to them, the driver watches."""

from __future__ import annotations

import importlib
import logging
import os
import re
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.checkpoint.run_folder import Origin
from lockstep.errors import ClusterError, LockstepError
from lockstep.orchestration.authentication import (
    LOOPBACK_ONLY,
    guard_rays_token,
    show_token,
    starts_own_cluster,
)
from lockstep.orchestration.progress import Progress
from lockstep.orchestration.result import Result
from lockstep.orchestration.shared_files import check_shared
from lockstep.orchestration.signals import StopSignal
from lockstep.orchestration.stages import Moments
from lockstep.spec import Spec
from lockstep.training.worker_environment import WORKER_ENVIRONMENT

if TYPE_CHECKING:
    from lockstep.orchestration.placement import Placement

RAY_SETTINGS = {
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",  # 2 s by default: it delays the end of every attempt
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",  # an actor for what the driver looks at itself
    "RAY_TRAIN_METRICS_ENABLED": "0",
    "RAY_TRAIN_ENABLE_CONTROLLER_STRUCTURED_LOGGING": "0",  # the controller is in the driver: it would take over its logging
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",  # relative paths in a job mean the same in a worker
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}


def train_on_ray(
    spec: Spec,
    progress: Progress,
    stop: StopSignal,
    origin: Origin,
    *,
    address: str | None,
    verbose: bool,
    began_at: float,
    warnings: list[str],
    on_run_id: Callable[[str], None] | None = None,
    chaos: str | None = None,
) -> Result:
    """Train on the Ray cluster at `address`, on one that runs here, or on a new local one."""
    with connected(address, verbose=verbose) as own_cluster:
        from lockstep.orchestration.chaos import Chaos, parse
        from lockstep.orchestration.supervisor import Supervisor

        stop.listen()  # Ray takes SIGTERM for itself when it connects
        environment = {} if own_cluster else WORKER_ENVIRONMENT
        for text in (found := check_shared(spec)):
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


@contextmanager
def connected(address: str | None, *, verbose: bool, for_workers: bool = False) -> Iterator[bool]:
    """A connection to Ray; gives whether the cluster was started here and ends with the run. `for_workers`: every process that it starts there trains."""
    for name, value in {**RAY_SETTINGS, **WORKER_ENVIRONMENT}.items():
        os.environ.setdefault(name, value)  # a cluster that is started here hands them on to its workers
    if starts_own_cluster(address):
        os.environ.update(LOOPBACK_ONLY)
        guard_rays_token()
    show_token(address or os.environ.get("RAY_ADDRESS"))
    import ray

    threading.Thread(
        target=importlib.import_module, args=("torch",), name="lockstep-import", daemon=True
    ).start()
    if ray.is_initialized():
        yield False
        return
    quiet: dict[str, Any] = {} if verbose else {"log_to_driver": False, "logging_level": logging.ERROR}
    if for_workers and not starts_own_cluster(address):
        quiet["runtime_env"] = {"env_vars": WORKER_ENVIRONMENT}
    try:
        context = ray.init(address=address, include_dashboard=None if address else False, **quiet)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ClusterError(
            f"ray: cannot connect to {address or 'a local cluster'}: {_first_line(error)}"
        ) from error
    try:
        yield address == "local" or _is_new(context)
    except KeyboardInterrupt:
        raise  # at once: to part from Ray under an attempt that goes on would crash the process
    except BaseException:
        ray.shutdown()
        raise
    else:
        ray.shutdown()


def _is_new(context: Any) -> bool:
    """Whether `ray.init` without an address started a cluster, rather than found one."""
    import ray

    return bool(ray._private.worker._global_node is not None and ray._private.worker._global_node.head)


class Attempt:
    """One start of the worker group, in a thread: `fit` of Ray Train blocks, and owns signals in the main thread."""

    def __init__(
        self,
        spec: Spec,
        origin: Origin,
        recorder: Any,
        place: Placement,
        environment: Mapping[str, str],
    ) -> None:
        self.over = threading.Event()
        self.error: LockstepError | None = None
        self.moments = Moments()
        self.origin = origin
        self._spec = spec
        self._trainer: Any = None
        self._started = False
        self._config = {
            "spec": spec.document(),
            "origin": origin,
            "recorder": recorder,
            "folder": str(Path.cwd()),
        }
        self._place = place
        self._environment = environment

    def start(self) -> None:
        self._started = True
        threading.Thread(target=self._fit, name="lockstep-attempt", daemon=True).start()

    def end(self) -> None:
        """End its workers, and wait until that is known; nothing where it was not started."""
        if not self._started:
            return
        if self._trainer is not None:
            self._trainer.end_workers()
        self.over.wait()

    def _fit(self) -> None:
        from ray.train import FailureConfig, RunConfig
        from ray.train.torch import TorchConfig

        from lockstep.orchestration.noting import Noting
        from lockstep.orchestration.placement import Scaling, anywhere_but
        from lockstep.orchestration.standby import imports_ahead
        from lockstep.orchestration.train_controller import DriverTrainer
        from lockstep.orchestration.worker_main import worker_main
        from lockstep.training.group import COLLECTIVE_TIMEOUT

        place, self.moments.at["decision"] = self._place, time.time()
        gpu = "GPU" in place.each
        ahead = imports_ahead(self._config["folder"], self._spec.job.use.partition(":")[0])
        try:
            self._trainer = DriverTrainer(
                worker_main,
                train_loop_config=self._config,
                scaling_config=Scaling(
                    num_workers=place.workers,
                    use_gpu=gpu,
                    resources_per_worker=place.each,
                    label_selector=anywhere_but(place.unfit),
                    first=place.first,
                ),
                torch_config=TorchConfig(
                    backend="nccl" if gpu else "gloo", timeout_s=int(COLLECTIVE_TIMEOUT.total_seconds())
                ),
                run_config=RunConfig(
                    name=f"lockstep-{uuid.uuid4().hex[:12]}",  # Ray resumes a name that it has seen
                    storage_path=str(Path(tempfile.gettempdir(), "lockstep-ray-train")),
                    failure_config=FailureConfig(max_failures=0),
                    worker_runtime_env={"env_vars": {**self._environment, **ahead}},
                    callbacks=[Noting(self.moments)],
                ),
            )
            self._trainer.fit()
        except Exception as error:  # noqa: BLE001 - whatever ended the attempt is told by the driver
            self.error = ClusterError(ended_by(error, place.workers))
        finally:
            self.moments.note("teardown")
            self.over.set()


def ended_by(error: BaseException, workers: int) -> str:
    """Why Ray ended an attempt, in one line: which ranks were lost, and of what, where it tells."""
    failures: Mapping[int, BaseException] = getattr(error, "worker_failures", {})
    if not failures:
        return f"the attempt on {workers} workers ended: {_first_line(error)}"
    ranks = ", ".join(str(rank) for rank in sorted(failures))
    text = " ".join(str(failure) for failure in failures.values())
    if of_memory(text):
        return (
            f"rank {ranks} of {workers} was ended for want of memory on its node; lower batch.micro or "
            "data.loader_processes, raise workers.cpus_each so that fewer share a node, or set activation_checkpointing=true"
        )
    return f"rank {ranks} of {workers} was lost: {why_lost(text)}"


def of_memory(text: str) -> bool:
    """Whether Ray says that its memory monitor ended a process."""
    return "OutOfMemory" in text or "low on memory" in text


def why_lost(text: str) -> str:
    """Why a process is gone, in one line, as far as Ray tells."""
    if of_memory(text):
        return "it was ended for want of memory on its node"
    exit_detail = re.search(r"Worker exit detail: ([^.\n]+)", text)
    return exit_detail[1] if exit_detail else next(iter(text.strip().splitlines()), "no message")


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"
