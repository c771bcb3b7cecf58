"""Asks whether the others outlive a lost worker, and hides the loss from Ray if they do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ray.exceptions import RayActorError
from ray.train.v2._internal.execution.callback import WorkerGroupCallback
from ray.train.v2._internal.execution.worker_group.poll import WorkerStatus


class Losses(WorkerGroupCallback):  # type: ignore[misc]  # untyped base
    """`outlived` gets the texts of Ray's errors by rank, and says whether the other workers go on without these.

    `others` says whether workers outside Ray Train's group train too: the group then lasts as long as they do.
    """

    def __init__(self, outlived: Callable[[Mapping[int, str]], bool], others: Callable[[], bool]) -> None:
        self._outlived, self._others = outlived, others

    def __reduce__(self) -> tuple[Any, ...]:
        """Ray gives each worker a copy, which is never asked."""
        return Losses, (_not_outlived, _no_others)

    def leave_out(self, status: Any) -> None:
        """Mark the workers whose processes are gone as ended, if nothing else is wrong and the others go on."""
        lost: dict[int, str] = {}
        for rank, error in status.errors.items():
            cause = getattr(error, "health_check_failure", None)
            if not isinstance(cause, RayActorError):
                return
            lost[rank] = str(error)
        others = self._others()
        survivors = len(lost) < len(status.worker_statuses) or others
        if lost and not (survivors and self._outlived(lost)):
            return
        for rank in lost:
            status.worker_statuses[rank] = WorkerStatus(running=False)
        if others and not any(worker_status.running for worker_status in status.worker_statuses.values()):
            status.worker_statuses[min(status.worker_statuses)] = WorkerStatus(running=True)


def _no_others() -> bool:
    return False


def _not_outlived(lost: Mapping[int, str]) -> bool:
    return False
