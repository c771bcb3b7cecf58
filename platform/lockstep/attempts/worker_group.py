"""One attempt's group of workers, which Ray Train starts and watches; and why one ended."""

from __future__ import annotations

import re
import tempfile
import threading
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lockstep.attempts.placement import Placement, anywhere_but
from lockstep.attempts.stages import Moments
from lockstep.checkpoint.run_folder import Origin
from lockstep.errors import ClusterError, LockstepError, first_line
from lockstep.spec.fields import Spec


class Attempt:
    """One start of the worker group, in a thread: `fit` of Ray Train blocks, and owns signals in the main thread."""

    def __init__(
        self,
        spec: Spec,
        origin: Origin,
        mailbox: Any,
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
            "mailbox": mailbox,
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

        from lockstep.attempts.noting import Noting
        from lockstep.attempts.scaling import Scaling
        from lockstep.attempts.standby import imports_ahead
        from lockstep.attempts.train_controller import DriverTrainer
        from lockstep.attempts.worker_main import worker_main
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
        return f"the attempt on {workers} workers ended: {first_line(error)}"
    ranks = ", ".join(str(rank) for rank in sorted(failures))
    text = " ".join(str(failure) for failure in failures.values())
    if of_memory(text):
        return (
            f"rank {ranks} of {workers} was killed: its node ran out of memory; lower batch.micro or "
            "data.loader_processes, raise workers.cpus_each so that fewer share a node, or set activation_checkpointing=true"
        )
    return f"rank {ranks} of {workers} was lost: {why_lost(text)}"


def of_memory(text: str) -> bool:
    """Whether Ray says that its memory monitor ended a process."""
    return "OutOfMemory" in text or "low on memory" in text


def why_lost(text: str) -> str:
    """Why a process is gone, in one line, as far as Ray tells."""
    if of_memory(text):
        return "it was killed: its node ran out of memory"
    exit_detail = re.search(r"Worker exit detail: ([^.\n]+)", text)
    return exit_detail[1] if exit_detail else next(iter(text.strip().splitlines()), "no message")
