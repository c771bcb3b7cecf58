"""Ray Train's controller in the driver's own process, which notes when an attempt passes from one stage to the next.

`TorchTrainer` keeps its controller in an actor, with three more actors around it: each is a process that takes seconds to
start and may be lost on its own. Here the driver decides what follows an attempt, and holds Ray's job: when the driver ends, so do the
placement group and the workers. See docs/decisions/0010.
"""

from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import replace
from typing import Any

import ray
from ray.train import Result
from ray.train.torch import TorchTrainer
from ray.train.v2._internal.callbacks.datasets import DatasetsCallback
from ray.train.v2._internal.callbacks.placement_group_callback import PlacementGroupCleanerCallback
from ray.train.v2._internal.callbacks.state_manager import StateManagerCallback
from ray.train.v2._internal.exceptions import WorkerGroupStartupTimeoutError
from ray.train.v2._internal.execution.controller import TrainController
from ray.train.v2._internal.execution.failure_handling import FailureDecision, FailurePolicy
from ray.train.v2._internal.execution.scaling_policy import FixedScalingPolicy
from ray.train.v2._internal.execution.worker_group import WorkerGroup

from lockstep.clusters.ray_internals import unavailable
from lockstep.clusters.ray_internals.chosen_nodes import ChosenNodes
from lockstep.clusters.ray_internals.losses import Losses
from lockstep.clusters.ray_internals.nodes import free_resources
from lockstep.clusters.ray_internals.stage_times import StageTimes
from lockstep.clusters.ray_internals.train_page import Shown, TrainPage
from lockstep.clusters.ray_internals.train_worker_poll import RayTrainWorker

FIRST_S = 3.0
"""How long to wait for room: what the previous attempt held is free only once Ray has noticed."""

LOOK_S = 0.05
"""Pause between two looks at what is free."""

CONTEXT_S = 300.0
"""How long the workers may take to receive their context."""


class DriverWorkerGroup(WorkerGroup):  # type: ignore[misc]
    """A group of workers without a controller actor, which ends at once."""

    _worker_cls = RayTrainWorker

    def _start(self) -> None:
        """Start, or leave nothing behind: Ray leaves the workers of a group that fails during its start to live as long as the controller's process."""
        try:
            super()._start()
        except Exception:
            if self.has_started():
                for worker in self.get_workers():
                    ray.kill(worker.actor)
                self._worker_group_state.shutdown()
                self._clear_state()
            raise

    def _create_placement_group(self, scaling_config: ChosenNodes, worker_group_context: Any) -> Any:
        """Reserve the chosen nodes if they have room soon, else whatever Ray finds."""
        handle = self._handle_of(scaling_config, worker_group_context)
        for callback in self._callbacks:
            if isinstance(callback, StageTimes):
                callback.placement = handle
        return handle

    def _handle_of(self, scaling_config: ChosenNodes, worker_group_context: Any) -> Any:
        chosen = _chosen(scaling_config)
        if chosen is not None:
            handle = super()._create_placement_group(
                scaling_config, replace(worker_group_context, label_selector=chosen)
            )
            if handle.wait(FIRST_S):
                return handle
            handle.shutdown()
        return super()._create_placement_group(scaling_config, worker_group_context)

    def _create_workers(self, *args: Any, **settings: Any) -> Any:
        self._note("placement")
        workers = super()._create_workers(*args, **settings)
        self._note("processes")
        return workers

    def poll_status(self, timeout: float | None = None) -> Any:
        """The state of the workers, in which those that the others outlive count as ended."""
        status = super().poll_status(timeout)
        for callback in self._callbacks:
            if isinstance(callback, Losses):
                callback.leave_out(status)
        return status

    def _note(self, stage: str) -> None:
        for callback in self._callbacks:
            if isinstance(callback, StageTimes):
                callback.note(stage)

    def _init_train_context_on_workers(self, workers: Any, sync_actor: Any, arguments: Any) -> None:
        """As in Ray, whose own version needs the handle of the controller's actor: only validation calls that, and it is not used."""
        ray.get(
            [
                worker.actor.init_train_context.remote(
                    train_run_context=self._train_run_context,
                    distributed_context=worker.distributed_context,
                    synchronization_actor=sync_actor,
                    storage_context=self._storage_context,
                    worker_callbacks=self._worker_callbacks_to_propagate,
                    controller_actor=None,
                    **{name: values[i] for name, values in arguments.items()},
                )
                for i, worker in enumerate(workers)
            ],
            timeout=CONTEXT_S,
        )
        self._decorate_worker_log_file_paths(workers)

    def shutdown(self) -> None:
        """Kill the processes rather than wait for their work: nothing of it is needed any more."""
        if self.has_started():
            for worker in self.get_workers():
                ray.kill(worker.actor)
        super().shutdown()


def _chosen(scaling_config: ChosenNodes) -> list[dict[str, str]] | None:
    """A selector for each worker if there is room soon, else None."""
    choose = scaling_config.choose
    if choose is None or unavailable("nodes"):
        return None
    until = time.monotonic() + FIRST_S
    while (selectors := choose(free_resources())) is None and time.monotonic() < until:
        time.sleep(LOOK_S)
    return selectors


class DriverController(TrainController):  # type: ignore[misc]
    """Ray Train's controller for a `DriverWorkerGroup`."""

    worker_group_cls = DriverWorkerGroup


class UnreservedScaling(FixedScalingPolicy):  # type: ignore[misc]
    """A fixed number of workers for which there is known to be room: no actor is asked to reserve it first."""

    def after_controller_start(self, train_run_context: Any) -> None: ...

    def _maybe_send_resource_request(self) -> None: ...


class SupervisorDecides(FailurePolicy):  # type: ignore[misc]
    """Leaves every end of an attempt to the supervisor: Ray itself would restart the workers of a preempted node from where the attempt began.

    Only a start that waits for resources that others hold is retried, until the supervisor sets `ending`.
    """

    def __init__(self, failure_config: Any, ending: threading.Event) -> None:
        super().__init__(failure_config)
        self._ending = ending

    def make_decision(self, training_failed_error: Any) -> FailureDecision:
        cause = getattr(training_failed_error, "controller_failure", None)
        retry = isinstance(cause, WorkerGroupStartupTimeoutError) and not self._ending.is_set()
        return FailureDecision.RETRY if retry else FailureDecision.RAISE


class DriverTrainer(TorchTrainer):  # type: ignore[misc]
    """A TorchTrainer whose controller runs in the thread that calls `fit`."""

    def __init__(self, *args: Any, shown: Shown, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._ending = threading.Event()
        self._shown = shown

    def _create_default_callbacks(self) -> list[Any]:
        """Ray's callbacks without two actors, each a process: one removes the placement group of a controller that died, which Ray does
        for a driver; the other distributes Ray datasets, of which there are none. Where Ray would show the attempt, the run is shown.
        """
        unneeded = (PlacementGroupCleanerCallback, DatasetsCallback)
        callbacks = [
            callback for callback in super()._create_default_callbacks() if not isinstance(callback, unneeded)
        ]
        return [
            TrainPage(self._shown) if isinstance(callback, StateManagerCallback) else callback
            for callback in callbacks
        ]

    def _initialize_and_run_controller(self, **settings: Any) -> Result:
        self._controller = DriverController(
            **{
                **settings,
                "scaling_policy": UnreservedScaling(self.scaling_config),
                "failure_policy": SupervisorDecides(self.run_config.failure_config, self._ending),
            }
        )
        asyncio.run(self._controller.run())
        return self._controller.get_result()

    def bundles(self) -> tuple[Any, dict[int, int]]:
        """The workers' placement group, and the index of each one's bundle by rank; None and {} if Ray does not say."""
        controller = getattr(self, "_controller", None)
        group = controller.get_worker_group() if controller is not None else None
        placed = [
            callback.placement
            for callback in self.run_config.callbacks or ()
            if isinstance(callback, StageTimes)
        ]
        if group is None or not group.has_started() or not placed:
            return None, {}
        indices = [getattr(worker, "placement_group_bundle_index", None) for worker in group.get_workers()]
        return placed[0].placement_group, {
            rank: index for rank, index in enumerate(indices) if index is not None
        }

    def end_workers(self) -> None:
        """Kill the current workers; the controller treats it as their loss. A group that is still starting loses its place."""
        self._ending.set()
        controller = getattr(self, "_controller", None)
        group = controller.get_worker_group() if controller is not None else None
        if group is not None and group.has_started():
            for worker in group.get_workers():
                ray.kill(worker.actor)
            return
        for callback in self.run_config.callbacks or ():
            if isinstance(callback, StageTimes) and callback.placement is not None:
                callback.placement.shutdown()
