"""The driver restarter of a submitted run: a small actor that outlives the run's driver, and starts the run again if the driver is lost.

It is detached: it ends when the run does, not with the job that made it. If its node is lost, Ray starts it on another. It
watches the job by Ray's job API. If the driver was killed, or ended for a reason that may pass, it submits the same command again,
which finds its run by name. An end that the run decided itself shows in the exit code, and is left as it is.

The driver restarter stores nothing: how often a run was started again is read from the cluster's list of jobs.
"""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

from lockstep.clusters import problems
from lockstep.clusters.background import answered, in_background, leaving
from lockstep.clusters.bounded_calls import answer_of, unanswered, within
from lockstep.clusters.reachability import LOCAL, cluster_address
from lockstep.driver.signals import was_signalled
from lockstep.errors import ClusterError, LockstepError, SilentError, SpecError, TransientStorageError
from lockstep.exit_codes import DECIDED, ExitCode

KEPT = "LOCKSTEP_KEPT"
"""Environment variable of a driver that a driver restarter has started: the id of the run's first job."""

JOB = "LOCKSTEP_JOB"
"""Environment variable of a driver that `lockstep submit` has started: the id of its job."""

LOOK_S = 2.0
"""Seconds between two looks at a job."""

LONGEST_PAUSE_S = 60.0

AWAY_S = 600.0
"""How long the job API may not answer before the driver restarter gives up."""

ANSWER_S = 60.0
"""How long one call of the job API may take."""

READY_S = 180.0
"""How long the driver restarter may take to start."""

NAMESPACE = "lockstep"

_log = logging.getLogger(__name__)


def was_lost(status: str, exit_code: int | None) -> bool:
    """Whether a job has ended, but not by its run's own decision."""
    return status == "FAILED" and exit_code not in DECIDED


def pause_s(retry: int) -> float:
    """Seconds to wait before retry number `retry`, counted from 1."""
    return min(LONGEST_PAUSE_S, 2.0 ** (retry - 1))


def first_of(job: str) -> str:
    """The first job of the run that a job belongs to."""
    return re.sub(r"-retry-\d+$", "", job)


def retry_of(first: str, number: int) -> str:
    """The job that starts a run again for the `number`-th time; 0 is the first job itself."""
    return f"{first}-retry-{number}" if number else first


def retries_so_far(first: str, jobs: Collection[str | None]) -> int:
    """How often a run was started again, judging by the ids of the cluster's jobs."""
    number = 0
    while retry_of(first, number + 1) in jobs:
        number += 1
    return number


class DriverRestarter:
    """Keeps the run whose first job is `first`, for up to `retries` more starts. It begins at once, also when Ray restarts it."""

    def __init__(self, first: str, retries: int) -> None:
        import ray

        self._first, self._retries = first, retries
        context = ray.get_runtime_context()
        self._address, self._self = context.gcs_address, context.current_actor
        self._client = self._connected()
        threading.Thread(target=self._keep, name="lockstep-driver-restarter", daemon=True).start()

    def ready(self) -> bool:
        """True once the actor has started and the job API has answered."""
        return True

    def _connected(self) -> Any:
        from ray.job_submission import JobSubmissionClient

        return within(ANSWER_S, "the cluster's job API", lambda: JobSubmissionClient(self._address))

    def _keep(self) -> None:
        import ray

        heard = time.monotonic()
        while True:
            time.sleep(LOOK_S)
            try:
                if self._is_over():
                    break
                heard = time.monotonic()
            except Exception as error:  # noqa: BLE001 - the client raises what requests does; the API may come back
                _log.warning("job API: %r", error)
                if time.monotonic() - heard > AWAY_S:
                    break
        ray.kill(self._self, no_restart=True)

    def _is_over(self) -> bool:
        """Look at the newest job of the run, and start the next one if it was lost. True when the driver restarter has nothing left to do."""
        listed = within(ANSWER_S, "the cluster's job API", self._client.list_jobs)
        jobs_by_id = {job.submission_id: job for job in listed}
        number = retries_so_far(self._first, jobs_by_id)
        newest = jobs_by_id.get(retry_of(self._first, number))
        if newest is None:
            return True  # someone has deleted it
        status = str(getattr(newest.status, "value", newest.status))
        if status in ("PENDING", "RUNNING"):
            return False
        if not was_lost(status, newest.driver_exit_code) or number >= self._retries:
            return True
        time.sleep(pause_s(number + 1))
        within(ANSWER_S, "the cluster's job API", lambda: self._submit(newest, number + 1))
        return False

    def _submit(self, lost: Any, number: int) -> None:
        environment = dict(lost.runtime_env or {})
        environment["env_vars"] = {**environment.get("env_vars", {}), KEPT: self._first}
        self._client.submit_job(
            entrypoint=lost.entrypoint,
            submission_id=retry_of(self._first, number),
            runtime_env=environment,
            metadata=lost.metadata,
        )


def refuse_without_a_job(address: str | None) -> None:
    """SpecError if this command would start a cluster of its own, which has no jobs. `first_job` finds out the rest."""
    if not {KEPT, JOB} & os.environ.keys() and cluster_address(address) == LOCAL:
        raise _no_job()


def first_job() -> str:
    """The first job of the run whose driver this connected process is. SpecError if it is no job of a cluster; ClusterError if the cluster does not say."""
    first = os.environ.get(KEPT) or os.environ.get(JOB) or _job_of_this_driver()
    if first is None:
        raise _no_job()
    return first


def _job_of_this_driver() -> str | None:
    """The id under which this driver's job was submitted, by the cluster's own list of jobs: `lockstep submit` says it, other commands do not."""
    import ray
    from ray.job_submission import JobSubmissionClient

    context = ray.get_runtime_context()
    driver, address = context.get_job_id(), context.gcs_address

    def listed() -> list[Any]:
        return list(JobSubmissionClient(address).list_jobs())

    try:
        jobs = within(ANSWER_S, "the cluster's job API", listed)
    except (ConnectionError, RuntimeError, ValueError):  # a cluster without a job API has no jobs
        return None
    return next((job.submission_id for job in jobs if job.job_id == driver), None)


def _no_job() -> SpecError:
    return problems.NO_JOB_TO_RETRY()


def _start_driver_restarter(first: str, retries: int) -> Any:
    """The driver restarter of the run: the one that has started this job, or a new one."""
    import ray

    strategy = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
        ray.get_runtime_context().get_node_id(), soft=True
    )
    return (
        ray.remote(num_cpus=0, max_restarts=-1)(DriverRestarter)
        .options(
            name=f"driver restarter-{first}",
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            scheduling_strategy=strategy,
        )
        .remote(first, retries)
    )


@contextmanager
def kept(retries: int, say: Callable[[str], None]) -> Iterator[None]:
    """With `retries`, let a driver restarter watch the run while the block trains it on a connected cluster.

    An error that ends the block for a reason that may pass gets the exit code MAY_PASS, unless a signal ended the run.
    """
    if not retries:
        yield
        return
    ready = _start_driver_restarter(first_job(), retries).ready.remote()
    in_background(_watch_start, ready, say, name="lockstep-driver-restarter")
    try:
        yield
    except LockstepError as error:
        if isinstance(error, ClusterError | TransientStorageError) and not was_signalled(error):
            error.exit_code = ExitCode.MAY_PASS
        raise


def _watch_start(ready: Any, say: Callable[[str], None]) -> None:
    """Warn if the driver restarter does not start: the run goes on without one."""
    from ray.exceptions import RayError

    try:
        if not answered(ready, READY_S):
            if leaving.is_set():
                return
            raise unanswered("it", READY_S)
        answer_of(ready, "it", ANSWER_S)
    except (SilentError, RayError) as error:
        line = next(iter(str(error).strip().splitlines()), type(error).__name__)
        say(
            f"warning: retries: the run has no driver restarter ({line}); if its driver is lost, nothing starts it again"
        )
