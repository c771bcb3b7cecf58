"""The other ranks of a trial: actors in its placement group, warm from one trial to the next."""

from __future__ import annotations

import gc
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import ray
import torch
import torch.distributed as dist
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from lockstep.attempts.hung_workers import listening
from lockstep.attempts.worker_output import keep_private
from lockstep.checkpoint.runs.run_folder import AttemptOrigin
from lockstep.communication.credentials import Secret
from lockstep.communication.group import Group, assigned_device, form_default_group
from lockstep.communication.store import connect_store
from lockstep.communication.waits import COLLECTIVE_TIMEOUT
from lockstep.errors import ClusterError, LockstepError
from lockstep.job.loading import load_job
from lockstep.job.recorded_source import imported_from
from lockstep.record.events.union import tell_nobody
from lockstep.spec.fields import Spec
from lockstep.sweeps.trial_rendezvous import TrialRendezvousClient, trial_rendezvous
from lockstep.training.driver_requests import NoRequests
from lockstep.training.elastic.recovery import Seat
from lockstep.training.failure import as_lockstep_error
from lockstep.training.loop import fit


class Peer:
    """Another rank of a trial, in a process that stays for the trials that follow."""

    def __init__(self, folder: str, source: Mapping[str, bytes] | None) -> None:
        if folder not in sys.path:
            sys.path.insert(0, folder)
        self._source = ExitStack()
        if source:
            self._source.enter_context(imported_from(source))

    def leave(self) -> None:
        """Take away what was written for this process: it is killed next."""
        self._source.close()

    def train(
        self,
        spec: Spec,
        origin: AttemptOrigin,
        address: tuple[str, int],
        secret: Secret,
        rank: int,
        size: int,
        recorders: Any,
        key: str,
    ) -> None:
        """Train as this rank. What the job raises comes back as it is told on one line."""
        if spec.record.private:
            keep_private()
        recorders.tell.remote(key, origin.attempt, [listening(rank)])
        try:
            store = connect_store(*address, secret, COLLECTIVE_TIMEOUT, gpus=device().type == "cuda")
            client = TrialRendezvousClient(recorders, key, origin.attempt, rank)
            with (
                joined(store, rank, size),
                trial_rendezvous(client, origin.attempt, rank, secret, _silent) as rendezvous,
            ):
                job, group = load_job(spec.job.use, spec.job.params), Group.join(device(), outlives=True)
                fit(spec, job, group, tell_nobody, NoRequests(), origin, rendezvous)
        except Exception as error:
            lockstep_error = as_lockstep_error(error, f"rank {rank}")
            raise lockstep_error.with_message(str(lockstep_error)) from error


def _silent(group: Group, origin: AttemptOrigin | None) -> Seat:
    """The seat of a rank that reports nothing: rank 0 does, whose process is not outlived."""
    return Seat(group, tell_nobody, NoRequests(), origin)


def start_peers(spec: Spec, folder: str, source: Mapping[str, bytes] | None) -> list[Any]:
    """The other ranks of this actor's trials, in its placement group. `source` are the files of a job of `__main__`."""
    group = ray.util.get_current_placement_group()
    bundles = group.bundle_specs if group is not None else []
    return [
        ray.remote(Peer)
        .options(
            num_cpus=bundles[rank]["CPU"],
            num_gpus=bundles[rank].get("GPU", 0),
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank),
        )
        .remote(folder, source)
        for rank in range(1, spec.workers.min)
    ]


@contextmanager
def joined(store: Any, rank: int, size: int) -> Iterator[None]:
    """The process group of a trial, ended on the way out, in whatever step that is.

    Its connections are closed with its last reference, for which the peers of a rank that has left wait.
    """
    form_default_group("nccl" if device().type == "cuda" else "gloo", store, rank, size)
    try:
        yield
    except BaseException as error:
        traceback.clear_frames(error.__traceback__)  # in which `fit` has the group
        raise
    finally:
        dist.destroy_process_group()
        gc.collect()


def device() -> torch.device:
    """The device of this process, a worker of a trial."""
    return assigned_device(gpu=bool(ray.get_gpu_ids()))


def first_cause(others: list[Any], error: Exception) -> Exception:
    """The error that another rank ended with, where rank 0 has only lost it."""
    if not isinstance(error, ClusterError) and not isinstance(
        as_lockstep_error(error, "rank 0"), ClusterError
    ):
        return error
    for done in ray.wait(others, num_returns=len(others), timeout=10.0)[0]:
        try:
            ray.get(done)
        except ray.exceptions.RayTaskError as failure:
            if isinstance(failure.cause, LockstepError) and not isinstance(failure.cause, ClusterError):
                return failure.cause
        except ray.exceptions.RayError:
            continue  # it is gone: that is what rank 0 says
    return error
