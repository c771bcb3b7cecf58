"""A run on Ray: TorchTrainer starts the workers, a recorder actor listens to them, the driver watches."""

from __future__ import annotations

import importlib
import logging
import os
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lockstep.checkpoint.run_folder import Origin
from lockstep.errors import ClusterError, LockstepError, RecordError, SpecError
from lockstep.orchestration.authentication import (
    LOOPBACK_ONLY,
    guard_rays_token,
    show_token,
    starts_own_cluster,
)
from lockstep.orchestration.progress import Progress
from lockstep.orchestration.result import Result, result_of
from lockstep.orchestration.shared_files import check_shared
from lockstep.orchestration.signals import StopSignal
from lockstep.spec import Spec
from lockstep.training.worker_environment import WORKER_ENVIRONMENT

POLL_S = 0.3
"""How often the driver looks at a run."""

RAY_SETTINGS = {
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",  # 2 s by default: it delays the end of every run
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
) -> Result:
    """Train on the Ray cluster at `address`, on one that runs here, or on a new local one."""
    with connected(address, verbose=verbose) as own_cluster:
        stop.listen()  # Ray takes SIGTERM for itself when it connects
        return _Driver(spec, progress, stop, origin, own_cluster, began_at, warnings, on_run_id).run()


@contextmanager
def connected(address: str | None, *, verbose: bool) -> Iterator[bool]:
    """A connection to Ray; gives whether the cluster was started here and ends with the run."""
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
    quiet = {} if verbose else {"log_to_driver": False, "logging_level": logging.ERROR}
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


class _Driver:
    """One run on a connected cluster."""

    def __init__(
        self,
        spec: Spec,
        progress: Progress,
        stop: StopSignal,
        origin: Origin,
        own_cluster: bool,
        began_at: float,
        warnings: list[str],
        on_run_id: Callable[[str], None] | None,
    ) -> None:
        self.spec = spec
        self.on_run_id = on_run_id
        self._named = False
        self.progress = progress
        self.stop = stop
        self.origin = origin
        self.began_at = began_at
        self.warnings = list(warnings)
        self._warned = 0
        self.environment: dict[str, str] = {} if own_cluster else dict(WORKER_ENVIRONMENT)

    def run(self) -> Result:
        import ray

        from lockstep.orchestration.recorder_actor import Ending, start_recorder

        for text in check_shared(self.spec, ray.nodes(), ray.util.get_node_ip_address()):
            self.progress.say(f"warning: {text}")
            self.warnings.append(text)
        workers, resources = place(self.spec, ray.cluster_resources())
        recorder = start_recorder(self.spec, self.environment, self.origin.run_id)
        attempt = Attempt(self.spec, self.origin, recorder, workers, resources, self.environment)
        try:
            self._watch(attempt, recorder)
            ending: Ending = ray.get(recorder.ending.remote())
            if ending.summary is not None:
                self._name(recorder)
            self._warn(ray.get(recorder.news.remote()).warnings)
            if ending.summary is None:
                error = ending.error or attempt.error or ClusterError("the workers ended without a result")
                ray.get(recorder.ended.remote(str(error), ending.details, "FAILED"))
                raise error
        except KeyboardInterrupt:
            ray.get(recorder.ended.remote("ended at once by a second signal", "", "KILLED"))
            self._close(recorder)
            raise
        except LockstepError:
            self._close(recorder)  # what ended the run is told; that it could not be recorded comes second
            raise
        failure = self._close(recorder)
        if failure is not None:
            raise failure
        run_id, url, folder = ray.get(recorder.names.remote())
        return result_of(
            ending.summary,
            run_id=run_id,
            url=url,
            tracking_uri=self.spec.record.uri or "",
            folder=folder,
            began_at=self.began_at,
            warnings=self.warnings,
            attempts=self.origin.attempt,
            signal_number=self.stop.number,
        )

    def _close(self, recorder: Any) -> RecordError | None:
        """Let the recorder write what is left; what it could not write."""
        import ray

        failure: RecordError | None = ray.get(recorder.close.remote())
        return failure

    def _watch(self, attempt: Attempt, recorder: Any) -> None:
        """Until the attempt ends: show its progress, hand on a signal, end it where nothing can be recorded."""
        import ray

        attempt.start()
        told = False
        while not attempt.over.wait(POLL_S):
            if self.stop.asked and not told:
                told = True
                recorder.stop.remote()
                self.progress.say("stopping after the next step; a second signal ends the run at once")
            news = ray.get(recorder.news.remote())
            if news.failure is not None and not news.recording:
                recorder.stop.remote()
                attempt.over.wait()
                raise news.failure
            self._warn(news.warnings)
            if news.recording:
                self._name(recorder)
            self.progress.show(news.step, news.evaluation, news.total_steps)

    def _name(self, recorder: Any) -> None:
        """Tell once which run this is: what is then lost can be resumed."""
        import ray

        if self._named:
            return
        self._named = True
        run_id = ray.get(recorder.run_id.remote())
        self.progress.say(f"run {run_id}")
        if self.on_run_id is not None:
            self.on_run_id(run_id)

    def _warn(self, texts: Sequence[str]) -> None:
        """Show the warnings that are new."""
        for text in texts[self._warned :]:
            self.progress.say(f"warning: {text}")
            self.warnings.append(text)
        self._warned = len(texts)


def place(spec: Spec, resources: Mapping[str, float]) -> tuple[int, dict[str, float]]:
    """How many workers the cluster's resources give, and what each is given."""
    wanted = spec.workers
    gpus = float(resources.get("GPU", 0.0) >= 1) if wanted.gpus_each == "auto" else float(wanted.gpus_each)
    each = {"CPU": float(wanted.cpus_each)} | ({"GPU": gpus} if gpus else {})
    fit = min(int(resources.get(kind, 0.0) / amount + 1e-9) for kind, amount in each.items())
    workers = min(wanted.max, fit, spec.batch.micro_batches)
    if workers < wanted.min:
        have = ", ".join(f"{resources.get(kind, 0.0):g} {kind}" for kind in each)
        need = ", ".join(f"{amount:g} {kind}" for kind, amount in each.items())
        raise SpecError(
            f"workers.min: got {wanted.min} workers of {need} each, but the cluster has {have}, enough for {fit}; "
            "lower workers.min or workers.cpus_each, or add nodes"
        )
    return workers, each


class Attempt:
    """One start of the worker group, in a thread: `fit` of Ray Train blocks, and owns signals in the main thread."""

    def __init__(
        self,
        spec: Spec,
        origin: Origin,
        recorder: Any,
        workers: int,
        resources: dict[str, float],
        environment: Mapping[str, str],
    ) -> None:
        self.over = threading.Event()
        self.error: LockstepError | None = None
        self._config = {
            "spec": spec.document(),
            "origin": origin,
            "recorder": recorder,
            "folder": str(Path.cwd()),
        }
        self._workers = workers
        self._resources = resources
        self._environment = environment

    def start(self) -> None:
        threading.Thread(target=self._fit, name="lockstep-attempt", daemon=True).start()

    def _fit(self) -> None:
        from ray.train import FailureConfig, RunConfig, ScalingConfig
        from ray.train.torch import TorchConfig, TorchTrainer

        from lockstep.orchestration.worker_main import worker_main
        from lockstep.training.group import COLLECTIVE_TIMEOUT

        gpu = "GPU" in self._resources
        try:
            TorchTrainer(
                worker_main,
                train_loop_config=self._config,
                scaling_config=ScalingConfig(
                    num_workers=self._workers, use_gpu=gpu, resources_per_worker=self._resources
                ),
                torch_config=TorchConfig(
                    backend="nccl" if gpu else "gloo", timeout_s=int(COLLECTIVE_TIMEOUT.total_seconds())
                ),
                run_config=RunConfig(
                    name=f"lockstep-{uuid.uuid4().hex[:12]}",  # Ray resumes a name that it has seen
                    storage_path=str(Path(tempfile.gettempdir(), "lockstep-ray-train")),
                    failure_config=FailureConfig(max_failures=0),
                    worker_runtime_env={"env_vars": dict(self._environment)} if self._environment else None,
                ),
            ).fit()
        except Exception as error:  # noqa: BLE001 - whatever ended the attempt is told by the driver
            self.error = ClusterError(f"the attempt on {self._workers} workers ended: {_first_line(error)}")
        finally:
            self.over.set()


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"
