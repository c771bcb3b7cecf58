"""Notes when an attempt passes from one of Ray's stages to the next. Workers get a copy, so this module imports little."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ray.train.v2._internal.execution.callback import ControllerCallback, WorkerGroupCallback


class StageTimes(ControllerCallback, WorkerGroupCallback):  # type: ignore[misc]  # untyped bases
    """Calls `note` with the name of each of Ray's stages as an attempt reaches its end."""

    def __init__(self, note: Callable[[str], None]) -> None:
        self.note = note
        self.placement: Any = None
        """Ray's handle of the placement group of the newest workers."""

    def after_worker_group_training_start(self, worker_group: Any) -> None:
        self.note("group")

    def after_controller_state_update(self, previous_state: Any, current_state: Any) -> None:
        if type(current_state).__name__ == "ShuttingDownState":
            self.note("detection")
