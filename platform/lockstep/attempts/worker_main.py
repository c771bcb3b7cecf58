"""What each worker runs: it joins the group, loads the job and calls `fit`, or `join` if it is a joining worker."""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import ray.train
import ray.train.torch

from lockstep.attempts.event_sender import Sender
from lockstep.attempts.hung_workers import listening
from lockstep.attempts.mailbox import MailboxRendezvousClient, wait_for_run_id, wait_until_named
from lockstep.attempts.worker_output import keep_private, output_sent
from lockstep.checkpoint.runs.run_folder import AttemptOrigin
from lockstep.communication.group import Group, assigned_device
from lockstep.errors import DeviceError, LockstepError
from lockstep.job.interface import Job
from lockstep.job.loading import load_job
from lockstep.job.recorded_source import imported_from
from lockstep.record.events.union import Broke, Printed, Sampled, StageEnded, Tell, tell_nobody
from lockstep.record.system_metrics import sampled
from lockstep.spec.fields import Spec
from lockstep.spec.loading import validate
from lockstep.training.driver_requests import NoRequests
from lockstep.training.elastic.recovery import Seat, next_attempt
from lockstep.training.elastic.rendezvous import RendezvousHandler
from lockstep.training.failure import as_lockstep_error
from lockstep.training.loop import fit, join
from lockstep.training.observe.memory_snapshot import memory_watched


class RankZeroRequests:
    """What the driver asks of rank 0, which comes with the answers to its events."""

    def __init__(self, sender: Sender, mailbox: Any, attempt: int) -> None:
        self._sender, self._mailbox, self._attempt = sender, mailbox, attempt
        self._named = False

    def stop(self) -> bool:
        return self._sender.stop()

    def save(self) -> bool:
        return self._sender.save()

    def regroup(self) -> bool:
        return self._sender.regroup() == self._attempt

    def run_id(self) -> str:
        return wait_for_run_id(self._mailbox)

    def go_on(self, look: Callable[[], object], *, ends: bool) -> bool:
        """Wait, before the first step, until the run's id is announced: from then on a run that is stopped can be resumed."""
        if not self._named:
            wait_until_named(self._mailbox)
            self._named = True
        return True


class WorkerContext:
    """What a worker is in its run: its attempt, its number, which is the rank that it began with, and its link to the driver.

    The driver gives a joining worker its number; it belongs to no attempt before it is let in.
    """

    def __init__(self, config: dict[str, Any], number: int, *, joining_worker: bool = False) -> None:
        """`config` is that of `worker_main`."""
        mailbox, attempt = config["mailbox"], config["origin"].attempt
        self.attempt, self._first, self._number = 0 if joining_worker else attempt, attempt, number
        self._mailbox, self._joining_worker, self._secret = mailbox, joining_worker, config["secret"]
        self.sender = Sender(lambda events: mailbox.tell.remote(self.attempt, events))

    def rendezvous(self) -> RendezvousHandler:
        """The rendezvous at which this worker forms another group with the others."""

        def seated(group: Group, attempt: int, previous: Seat) -> Seat:
            return self.seated(group, attempt, next_attempt(previous.origin, attempt))

        joined = listening(self._number) if self._joining_worker else None
        client = MailboxRendezvousClient(self._mailbox, self._first, self._number, joined)
        host = ray.util.get_node_ip_address()
        return RendezvousHandler(self._first, self._number, host, self._secret, client, seated)

    def seated(self, group: Group, attempt: int, origin: AttemptOrigin | None) -> Seat:
        """The seat in a group: rank 0 reports the run's events, and receives what is asked of the run."""
        self.attempt = attempt
        if group.rank > 0:
            return Seat(group, tell_nobody, NoRequests(), origin)
        return Seat(group, self.sender.tell, RankZeroRequests(self.sender, self._mailbox, attempt), origin)


def own_node() -> str | None:
    """The name of this worker's node, if it is Ray Train's first worker there; else None."""
    context = ray.train.get_context()
    return None if context.get_local_rank() > 0 else f"node-{context.get_node_rank()}"


def system_recorded(tell: Tell, node: str | None) -> AbstractContextManager[None]:
    """Sample the load of this worker's node under the name `node`; nothing for None."""
    if node is None:
        return nullcontext()
    return sampled(lambda values: tell(Sampled(node, time.time(), values)))


def worker_main(config: dict[str, Any]) -> None:
    """Train as one worker.

    `config` has the spec's document, the mailbox, the folder that the run was started in, which attempt of which run this is, the secret
    by which its workers recognise each other, and the job's files if they are in no folder.
    """
    train_as(config, ray.train.get_context().get_world_rank(), own_node)


def train_as(config: dict[str, Any], rank: int, ready: Callable[[], str | None]) -> None:
    """Train as one of the first workers. `ready` sees to the default process group; it returns the name of this worker's node if it is the first there."""
    arrived = time.time()
    context = WorkerContext(config, rank)
    context.sender.tell(listening(rank))
    if rank == 0:
        context.sender.tell(StageEnded("arrival", arrived))
    with _errors_reported(context.sender, f"rank {rank}", rank):
        node = ready()
        group = Group.join(ray.train.torch.get_device(), outlives=True)
        seat = context.seated(group, context.attempt, config["origin"])
        with (
            memory_watched(context.sender.tell, rank, context.attempt),
            _worker_setup(config, context, rank, node) as (spec, job, rendezvous),
        ):
            fit(spec, job, seat.group, seat.tell, seat.requests, seat.origin, rendezvous)


def joining_worker_main(config: dict[str, Any], number: int, node: str | None) -> None:
    """Train as a worker that joins a running attempt: `number` is its number, `node` the name of its node if nobody samples that yet.

    `config` is that of the other workers.
    """
    context = WorkerContext(config, number, joining_worker=True)
    with (
        _errors_reported(context.sender, f"worker {number}", number),
        memory_watched(context.sender.tell, number, config["origin"].attempt),
        _worker_setup(config, context, number, node) as (spec, job, rendezvous),
    ):
        join(spec, job, assigned_device(bool(ray.get_gpu_ids())), rendezvous, config["origin"])


@contextmanager
def _errors_reported(sender: Sender, who: str, number: int) -> Iterator[None]:
    """Report the error that ends a worker, and make sure that all its events arrive. One whose device failed ends its process: the others go on without it."""
    lockstep_error: LockstepError | None = None
    try:
        yield
    except Exception as error:
        lockstep_error = as_lockstep_error(error, who)
        sender.tell(Broke(lockstep_error.with_message(str(lockstep_error)), traceback.format_exc(), number))
        raise
    finally:
        sender.close()
        if isinstance(lockstep_error, DeviceError):
            os._exit(1)  # a device that failed may hold up every other end


@contextmanager
def _worker_setup(
    config: dict[str, Any], context: WorkerContext, number: int, node: str | None
) -> Iterator[tuple[Spec, Job, RendezvousHandler]]:
    """Set up a worker's surroundings: its output is recorded and its node sampled. Yields the spec, the job, and the rendezvous with the others."""
    folder, tell = config["folder"], context.sender.tell
    if folder not in sys.path:
        sys.path.insert(0, folder)
    name = f"attempt-{config['origin'].attempt}-rank-{number}"

    def print_on(stream: str, text: str) -> None:
        tell(Printed(f"{name}-{stream}", text))

    spec, replay = validate(config["spec"]), config["origin"].replay
    if spec.record.private:
        keep_private()
    source = replay.source if replay is not None else config["source"]
    recorded = imported_from(source) if source else nullcontext()
    with system_recorded(tell, node), output_sent(print_on), recorded, context.rendezvous() as rendezvous:
        yield spec, load_job(spec.job.use, spec.job.params), rendezvous
