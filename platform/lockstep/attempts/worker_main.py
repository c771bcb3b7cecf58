"""What each Ray Train worker runs: it joins the group, loads the job and hands over to `fit`."""

from __future__ import annotations

import sys
import time
import traceback
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import ray.train
import ray.train.torch

from lockstep.attempts.mailbox import wait_for_run_id, wait_until_named
from lockstep.attempts.sender import Sender
from lockstep.attempts.standby import imported_at
from lockstep.attempts.watchdog import listening
from lockstep.attempts.worker_output import output_told
from lockstep.job.loading import load_job
from lockstep.job.recorded_source import imported_from
from lockstep.record.events import Broke, Printed, Sampled, StageEnded, Tell, tell_nobody
from lockstep.record.system import sampled
from lockstep.spec.loading import validate
from lockstep.training.failure import as_lockstep_error
from lockstep.training.group import Group
from lockstep.training.loop import fit
from lockstep.training.requests import NoRequests, Requests


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


def system_recorded(tell: Tell) -> AbstractContextManager[None]:
    """Sample the node that this worker is on, where it is the first one there."""
    place = ray.train.get_context()
    if place.get_local_rank() > 0:
        return nullcontext()
    node = f"node-{place.get_node_rank()}"
    return sampled(lambda values: tell(Sampled(node, time.time(), values)))


def worker_main(config: dict[str, Any]) -> None:
    """Train as one worker. `config`: the spec's document, the mailbox, the folder that it was started in, and which attempt of which run this is."""
    arrived, folder = time.time(), config["folder"]
    if folder not in sys.path:
        sys.path.insert(0, folder)
    group = Group.join(ray.train.torch.get_device())
    mailbox, attempt = config["mailbox"], config["origin"].attempt
    sender = Sender(lambda events: mailbox.tell.remote(attempt, events))
    sender.tell(listening(group.rank, imported_at()))
    tell: Tell = tell_nobody
    requests: Requests = NoRequests()
    if group.rank == 0:
        sender.tell(StageEnded("arrival", arrived))
        tell, requests = sender.tell, RankZeroRequests(sender, mailbox)
    try:
        _train(config, group, sender, tell, requests)
    except Exception as error:
        known = as_lockstep_error(error, f"rank {group.rank}")
        sender.tell(Broke(type(known)(str(known)), traceback.format_exc(), group.rank))
        raise
    finally:
        sender.close()


def _train(config: dict[str, Any], group: Group, sender: Sender, tell: Tell, requests: Requests) -> None:
    name = f"attempt-{config['origin'].attempt}-rank-{group.rank}"

    def print_on(stream: str, text: str) -> None:
        sender.tell(Printed(f"{name}-{stream}", text))

    spec, replay = validate(config["spec"]), config["origin"].replay
    recorded = imported_from(replay.source) if replay is not None and replay.source else nullcontext()
    with system_recorded(sender.tell), output_told(print_on), recorded:
        fit(spec, load_job(spec.job.use, spec.job.params), group, tell, requests, config["origin"])
