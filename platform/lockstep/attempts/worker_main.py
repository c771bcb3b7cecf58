"""What each Ray Train worker runs: it joins the group, loads the job and hands over to `fit`."""

from __future__ import annotations

import sys
import time
import traceback
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import ray.train
import ray.train.torch

from lockstep.attempts.mailbox import MailboxRollCalls, wait_for_run_id, wait_until_named
from lockstep.attempts.sender import Sender
from lockstep.attempts.standby import imported_at
from lockstep.attempts.watchdog import listening
from lockstep.attempts.worker_output import output_told
from lockstep.checkpoint.run_folder import AttemptOrigin
from lockstep.job.loading import load_job
from lockstep.job.recorded_source import imported_from
from lockstep.record.events import Broke, Printed, Sampled, StageEnded, Tell, tell_nobody
from lockstep.record.system import sampled
from lockstep.spec.loading import validate
from lockstep.training.failure import as_lockstep_error
from lockstep.training.group import Group
from lockstep.training.loop import fit
from lockstep.training.meeting import Meeting
from lockstep.training.recovery import Seat, next_attempt
from lockstep.training.requests import NoRequests


class RankZeroRequests:
    """What the driver asks of rank 0: it comes with the answers to what is told."""

    def __init__(self, sender: Sender, mailbox: Any) -> None:
        self._sender, self._mailbox = sender, mailbox
        self._named = False

    def stop(self) -> bool:
        return self._sender.stop()

    def save(self) -> bool:
        return self._sender.save()

    def run_id(self) -> str:
        return wait_for_run_id(self._mailbox)

    def go_on(self) -> bool:
        """Before the first step, once the run's id is told: whoever stops the run from then on can resume it."""
        if not self._named:
            wait_until_named(self._mailbox)
            self._named = True
        return True


class Place:
    """A worker's place in the run: the attempt that it is part of, and its number, the rank that it began with."""

    def __init__(self, mailbox: Any, attempt: int, number: int) -> None:
        self.attempt, self._first, self._number = attempt, attempt, number
        self._mailbox = mailbox
        self.sender = Sender(lambda events: mailbox.tell.remote(self.attempt, events))

    def meeting(self) -> Meeting:
        """How this worker meets the others that are left after a loss."""

        def seated(group: Group, attempt: int, before: Seat) -> Seat:
            return self.seated(group, attempt, next_attempt(before.origin, attempt))

        client = MailboxRollCalls(self._mailbox, self._first, self._number)
        return Meeting(self._first, self._number, ray.util.get_node_ip_address(), client, seated)

    def seated(self, group: Group, attempt: int, origin: AttemptOrigin | None) -> Seat:
        """The place in a group: its rank 0 tells of the run, and hears what is asked of it."""
        self.attempt = attempt
        if group.rank > 0:
            return Seat(group, tell_nobody, NoRequests(), origin)
        return Seat(group, self.sender.tell, RankZeroRequests(self.sender, self._mailbox), origin)


def system_recorded(tell: Tell) -> AbstractContextManager[None]:
    """Sample the node that this worker is on, where it is the first one there."""
    place = ray.train.get_context()
    if place.get_local_rank() > 0:
        return nullcontext()
    node = f"node-{place.get_node_rank()}"
    return sampled(lambda values: tell(Sampled(node, time.time(), values)))


def worker_main(config: dict[str, Any]) -> None:
    """Train as one worker.

    `config`: the spec's document, the mailbox, the folder that it was started in, which attempt of which run this is, and the
    job's files where they lie in no folder.
    """
    arrived, folder = time.time(), config["folder"]
    if folder not in sys.path:
        sys.path.insert(0, folder)
    group = Group.join(ray.train.torch.get_device())
    place = Place(config["mailbox"], config["origin"].attempt, group.rank)
    sender = place.sender
    sender.tell(listening(group.rank, imported_at()))
    if group.rank == 0:
        sender.tell(StageEnded("arrival", arrived))
    try:
        _train(config, place, place.seated(group, place.attempt, config["origin"]))
    except Exception as error:
        known = as_lockstep_error(error, f"rank {group.rank}")
        sender.tell(Broke(type(known)(str(known)), traceback.format_exc(), group.rank, known.place))
        raise
    finally:
        sender.close()


def _train(config: dict[str, Any], place: Place, seat: Seat) -> None:
    name = f"attempt-{config['origin'].attempt}-rank-{seat.group.rank}"
    tell = place.sender.tell

    def print_on(stream: str, text: str) -> None:
        tell(Printed(f"{name}-{stream}", text))

    spec, replay = validate(config["spec"]), config["origin"].replay
    source = replay.source if replay is not None else config["source"]
    recorded = imported_from(source) if source else nullcontext()
    with system_recorded(tell), output_told(print_on), recorded, place.meeting() as meeting:
        job = load_job(spec.job.use, spec.job.params)
        fit(spec, job, seat.group, seat.tell, seat.requests, seat.origin, meeting)
