"""Asks what a lost worker means for the others, and keeps it from Ray where they go on without it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ray.exceptions import RayActorError
from ray.train.v2._internal.execution.callback import WorkerGroupCallback
from ray.train.v2._internal.execution.worker_group.poll import WorkerStatus


class Losses(WorkerGroupCallback):  # type: ignore[misc]  # untyped base
    """`outlived` is given the texts of Ray's errors by rank, and says whether the other workers go on without these."""

    def __init__(self, outlived: Callable[[Mapping[int, str]], bool]) -> None:
        self._outlived = outlived

    def __reduce__(self) -> tuple[Any, ...]:
        """Ray gives each worker a copy, which is asked nothing."""
        return Losses, (_not_outlived,)

    def leave_out(self, status: Any) -> None:
        """Have the workers whose processes are gone count as ended, if they are all that is wrong and the others go on."""
        lost: dict[int, str] = {}
        for rank, error in status.errors.items():
            cause = getattr(error, "health_check_failure", None)
            if not isinstance(cause, RayActorError):
                return
            lost[rank] = str(error)
        if len(lost) < len(status.worker_statuses) and lost and self._outlived(lost):
            for rank in lost:
                status.worker_statuses[rank] = WorkerStatus(running=False)


def _not_outlived(lost: Mapping[int, str]) -> bool:
    return False
