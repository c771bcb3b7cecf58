"""What a worker runs in Ray's public `TorchTrainer`, where each is a replica group of its own that Ray replaces alone.

Ray's controller starts the workers, and another one in the place of each that is lost. Which of them train together is none of its
business: the first ones meet at a rendezvous of which the run's mailbox knows, and one that comes later joins as any joining worker does.
"""

from __future__ import annotations

import os
import time
from dataclasses import replace
from typing import Any

import ray
import ray.train
import torch.distributed as dist

from lockstep.attempts.liveness import end_with, is_over
from lockstep.attempts.mailbox import ANSWER_S, TrainerSlot
from lockstep.attempts.process_group import form_group, set_torchrun_variables
from lockstep.attempts.worker_main import joining_worker_main, train_as
from lockstep.clusters.bounded_calls import answer_of
from lockstep.communication.store import connect_store, serve_store
from lockstep.communication.waits import COLLECTIVE_TIMEOUT

ASK_S = 0.05
"""Seconds between two questions for what another process has yet to say."""


def replica_main(config: dict[str, Any]) -> None:
    """Train as the worker of this rank, or join in the place of a lost one. `config` is that of `worker_main`, with the lifeline.

    Returns at once where the attempt is over: Ray's controller does not know that. An error is reported, and ends the process.
    """
    mailbox, lifeline, attempt = config["mailbox"], config["lifeline"], config["origin"].attempt
    rank = ray.train.get_context().get_world_rank()
    if is_over(lifeline):
        return
    reference = lifeline.hold.remote()
    # In one call: between two this process could be lost, and nobody would know that it had taken a slot.
    slot: TrainerSlot = _until_known(mailbox.take_slot, attempt, rank, [reference])
    if slot.number is None:
        return
    end_with(reference)
    try:
        if slot.number == rank:
            train_as(config, rank, lambda: _first_group(config, rank))
        else:
            origin = replace(config["origin"], table_versions=slot.table_versions)
            joining_worker_main({**config, "origin": origin}, slot.number, None)
    except Exception:  # noqa: BLE001 - it is reported, and Ray would begin the function again in another process
        os._exit(1)
    answer_of(mailbox.leave_slot.remote(attempt, slot.number), "the run's mailbox", ANSWER_S)


def _first_group(config: dict[str, Any], rank: int) -> str | None:
    """Make the default process group of the attempt's first workers. Returns the name of this worker's node if it is the first worker there."""
    mailbox, secret, attempt = config["mailbox"], config["secret"], config["origin"].attempt
    size = ray.train.get_context().get_world_size()
    if rank == 0:
        store = serve_store(ray.util.get_node_ip_address(), secret, size, COLLECTIVE_TIMEOUT)
        answer_of(mailbox.meet_at.remote(attempt, (store.host, store.port)), "the run's mailbox", ANSWER_S)
    else:
        host, port = _until_known(mailbox.rendezvous_address, attempt)
        store = connect_store(host, port, secret, COLLECTIVE_TIMEOUT)
    form_group("gloo", store, rank, size)
    nodes: list[str] = [""] * size
    dist.all_gather_object(nodes, ray.get_runtime_context().get_node_id())
    local_rank = nodes[:rank].count(nodes[rank])
    node_rank = list(dict.fromkeys(nodes)).index(nodes[rank])
    set_torchrun_variables(rank, size, local_rank, nodes.count(nodes[rank]), node_rank, "cpu")
    return f"node-{node_rank}" if local_rank == 0 else None


def _until_known(method: Any, *arguments: Any) -> Any:
    """The answer of a method of the mailbox, once it has one."""
    while (answer := answer_of(method.remote(*arguments), "the run's mailbox", ANSWER_S)) is None:
        time.sleep(ASK_S)
    return answer
