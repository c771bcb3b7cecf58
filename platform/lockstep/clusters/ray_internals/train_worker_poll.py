"""Ray Train's worker, from which the controller hears without a call at each look. See `unavailable`."""

from __future__ import annotations

import time
from typing import Any

from ray.train.v2._internal.execution.context import get_train_context
from ray.train.v2._internal.execution.worker_group import worker

HELD_S = 5.0
"""How long a worker that trains may leave a call open."""

LOOK_S = 0.1
"""How often it looks whether it has ended."""


class RayTrainWorker(worker.RayTrainWorker):  # type: ignore[misc]  # an untyped base
    """Answers the controller when it has something to say. It has the name that Ray's own has, by which its process is known.

    The controller looks five times a second, and waits for a call that is open rather than make another. Ray fails an open call of a
    process that is gone, so a lost worker is noticed as early as by a call at each look, which would cost a training some milliseconds of
    each processor in every second.
    """

    def poll_status(self) -> Any:
        execution = get_train_context().execution_context
        training, until = execution.training_thread_runner, time.monotonic() + HELD_S
        while training.is_running() and training.get_error() is None and execution.result_queue.empty():
            if time.monotonic() > until:
                break
            time.sleep(LOOK_S)
        return super().poll_status()
