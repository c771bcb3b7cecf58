"""A run among the Train runs of Ray's dashboard, where RAY_TRAIN_ENABLE_STATE_TRACKING is 1.

Ray's own callback expects the controller to be an actor, and shows each `fit` as a run. Here the controller is in the driver, and each
attempt of a run is a `fit`. So one run is shown with its attempts, and the mailbox stands in for its controller.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.train.v2._internal.callbacks.state_manager import StateManagerCallback
from ray.train.v2._internal.state.state_manager import TrainStateManager


@dataclass(frozen=True, slots=True)
class Shown:
    """What the dashboard shows of a run."""

    key: str
    """The same for all attempts of a command."""
    name: str
    run_id: Callable[[], str | None]
    """None until the run exists."""
    alive: Any
    """An actor that lives as long as the run."""


class TrainPage(StateManagerCallback):  # type: ignore[misc]  # an untyped base
    """Reports an attempt to Ray's dashboard."""

    def __init__(self, shown: Shown) -> None:
        super().__init__(datasets={})
        self._shown = shown
        self._named = False

    def after_controller_start(self, train_run_context: Any) -> None:
        """Show the run, without the workers' configuration: a spec and an environment may hold passwords."""
        self._state_manager = TrainStateManager()
        self._run_id = self._shown.key
        self._state_manager.create_train_run(
            id=self._run_id,
            name=self._shown.name,
            job_id=ray.get_runtime_context().get_job_id(),
            controller_actor_id=self._shown.alive._actor_id.hex(),
            controller_log_file_path="",
            run_config=replace(
                train_run_context.run_config, name=self._shown.name, worker_runtime_env={}, callbacks=None
            ),
            train_loop_config={},
            scaling_config=train_run_context.scaling_config,
            backend_config=train_run_context.backend_config,
            datasets={},
            dataset_config=train_run_context.dataset_config,
        )
        self._name()

    def after_worker_group_poll_status(self, worker_group_status: Any) -> None:
        self._name()

    def _name(self) -> None:
        """Show the run's id as soon as there is one."""
        run_id = None if self._named else self._shown.run_id()
        if run_id is None:
            return
        self._named = True
        run = self._state_manager._runs[self._run_id]
        run.name = f"{self._shown.name} {run_id}"
        self._state_manager._create_or_update_train_run(run)
