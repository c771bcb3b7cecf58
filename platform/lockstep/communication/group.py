"""The processes that execute a run together, and what they exchange."""

from __future__ import annotations

import ctypes
import json
import os
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _abort_process_group, _get_default_store, _world

from lockstep.communication import problems
from lockstep.communication.communicator_abort import (
    KernelWaits,
    backend_of,
    errors_left_alone,
    has_kernels,
    options_of,
)
from lockstep.communication.credentials import Secret
from lockstep.communication.gloo_sockets import (
    Ends,
    Inodes,
    Sockets,
    close,
    connected,
    inodes,
    is_cut,
    listening,
    opened_since,
    refuse_connections,
    shared,
    shut,
    still_open,
    take_away,
)
from lockstep.communication.links import DIRECT_BYTES, Links, Messages, linked
from lockstep.communication.store import connect_store, serve_store
from lockstep.communication.waits import COLLECTIVE_TIMEOUT, Waits
from lockstep.errors import LockstepError
from lockstep.failure_kinds import kind_of
from lockstep.spec.fields import Spec

T = TypeVar("T")

FIRST_FORMED = 1_000_000
"""Numbers of `formed` groups start here: no process makes as many groups in any other way."""

DRAINED_S = 1.0
"""How long to wait for gloo to close connections that were shut. Normally it takes a moment."""

SPARE_DESCRIPTORS = 128
"""Files that a worker opens beside its connections: data, loader processes, checkpoints, the record."""


@dataclass(frozen=True, slots=True)
class Group:
    """One worker's view of the group: its `rank` of `size`, its `device`, and a channel of their own.

    `channel` is a process group apart from the default one, on which DDP itself talks. Everything Lockstep
    sends in a step goes through it, or if small through `links`, in one order: the exchange, then the buckets,
    then the buffers. `channel` is None in a group of one.
    """

    rank: int
    size: int
    device: torch.device
    channel: Any = None
    store: Any = None
    """Where the members of a `formed` group met: a `AuthenticatedStore`, which ends with the group."""
    sockets: Sockets = field(default_factory=dict, compare=False)
    """The channel's connections, one to every other rank; empty where they are not known."""
    inodes: Inodes = field(default_factory=dict, compare=False)
    """Their inodes, which still identify them when the connections have ended."""
    waits: Waits = field(default_factory=Waits, compare=False)
    links: Links | None = field(default=None, compare=False)
    """For small messages; None in a group of one, on GPUs, in a large group, and where the channel's connections are not known."""

    outlives: bool = False
    """Where the group's messages are kernels of a device: whether they can be aborted, and the group is to go on without a member that is lost."""

    @classmethod
    def join(cls, device: torch.device, *, outlives: bool = False) -> Group:
        """The group of the initialised default process group, or a group of one without any.

        With `outlives`, one on GPUs can be broken off as well, and nothing but `break_off` ends its waits.
        """
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return cls(rank=0, size=1, device=device, outlives=outlives)
        rank, size = dist.get_rank(), dist.get_world_size()
        ensure_descriptors(size, groups=1)
        if has_kernels(None):  # which connect later
            with errors_left_alone() if outlives else nullcontext():
                options = options_of(dist.get_backend()) if outlives else None
                channel = dist.new_group(timeout=COLLECTIVE_TIMEOUT, pg_options=options)
            return cls(rank, size, device, channel, outlives=outlives)._with_kernels()
        sockets_before, listeners = connected(), listening()
        channel = dist.new_group(timeout=COLLECTIVE_TIMEOUT)
        if device.type == "cpu":
            refuse_connections(listening() - listeners)
        return cls(rank, size, device, channel)._with_sockets(sockets_before, _get_default_store())

    @classmethod
    def formed(cls, rank: int, size: int, device: torch.device, store: Any, number: int) -> Group:
        """A group of processes that have met at `store`, apart from any default process group.

        `number` is the same on all members, and different for each group that any of them forms. Raises torch's RuntimeError where a member is
        lost meanwhile.
        """
        backend = backend_of(device)
        if size == 1:
            return cls(rank=0, size=1, device=device, outlives=backend != "gloo")
        ensure_descriptors(size, groups=1)
        sockets_before, listeners = connected(), listening()
        hidden, dist.group.WORLD = dist.group.WORLD, None
        # torch names a group by the number of groups its process has made, and members meet under that name: a joining worker has made fewer.
        group_count, _world.group_count = _world.group_count, FIRST_FORMED + number
        try:
            with errors_left_alone():
                dist.init_process_group(
                    backend,
                    store=store if backend == "gloo" else store_of_kernels(store, rank, size),
                    rank=rank,
                    world_size=size,
                    timeout=COLLECTIVE_TIMEOUT,
                    pg_options=options_of(backend),
                )
            channel = dist.group.WORLD
            refuse_connections(listening() - listeners)
        finally:
            dist.group.WORLD, _world.group_count = hidden, group_count
        if has_kernels(channel):
            return cls(rank, size, device, channel, store, outlives=True)._with_kernels()
        return cls(rank, size, device, channel, store)._with_sockets(sockets_before, store)

    def _with_kernels(self) -> Group:
        """The group of kernels with waits of theirs, if it is to outlive a member."""
        return replace(self, waits=KernelWaits(self.channel, self.device)) if self.outlives else self

    def _with_sockets(self, earlier: Sockets, store: Any) -> Group:
        """The group with its connections: those that are not among the `earlier` ones and whose other end is a member's, as the members say at `store`."""
        if self.device.type != "cpu":
            return self
        opened = opened_since(earlier)
        inode_of = inodes(opened)  # while all members are here: what one of them leaves afterwards is closed
        sockets = between_members(opened, store, self.channel.group_name, self.rank, self.size)
        if len(sockets) < self.size - 1:
            return self
        host = next(iter(sockets.values())).local[0]
        links = linked(self.rank, self.size, host, self.gather, COLLECTIVE_TIMEOUT.total_seconds())
        if links is not None:
            sockets, inode_of = {**sockets, **links.ends}, {**inode_of, **links.inodes}
        waits = Waits(partial(is_cut, sockets))
        if links is not None:
            links.look = waits.look
        return replace(
            self,
            sockets=sockets,
            inodes={fd: inode_of[fd] for fd in sockets if fd in inode_of},
            waits=waits,
            links=links,
        )

    @property
    def can_abort(self) -> bool:
        """Whether this group can be broken off: on gloo, where the system lists its connections; on NCCL, if it was made for that. A single rank has none to break."""
        return bool(self.sockets) or self.outlives or (self.size == 1 and self.device.type == "cpu")

    @property
    def gives_anything(self) -> bool:
        """Whether the group's kernels were aborted: what it has given since is anything, and so is what failed by it."""
        return isinstance(self.waits, KernelWaits) and self.waits.is_ended

    def settle(self) -> None:
        """Wait until all that was received from other ranks is there: before a state is changed by it, or the host decides by it.

        On gloo each wait has seen to that. RuntimeError where the group is broken off.
        """
        self.waits.settle()

    def break_off(self) -> None:
        """Break off what is under way, from any thread: every wait in a collective of the group raises an error."""
        shut(self.sockets)
        self.waits.end()

    def let_go(self) -> None:
        """In a forked process: close its copies of the connections, which would stay open if it outlives its parent."""
        close(self.sockets)

    def abort(self) -> None:
        """End a group that has lost a member: break off what is under way, while the memory that it reads and writes still exists.

        Kernels of a device have ended when this returns. A gloo thread may wait for a lost rank until its timeout, and destroying the group would wait for that thread. So the
        group object is never freed.
        """
        if self.channel is None:
            return
        self.break_off()
        if self.links is not None:
            self.links.close()
        if self.store is not None:
            self.store.close()
        if isinstance(self.waits, KernelWaits):
            self.waits.drain()
            _abort_process_group(self.channel)  # it is aborted by now: torch forgets it
            return
        until = time.monotonic() + DRAINED_S
        while still_open(self.inodes) and time.monotonic() < until:
            time.sleep(0.001)
        # gloo keeps a connection open whose message is for memory that is gone; its thread would look for it for ever.
        take_away(still_open(self.inodes))
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self.channel))  # not even at the end of the process
        dist.destroy_process_group(self.channel)

    def close(self) -> None:
        """End a group in which nobody waits any more."""
        if self.channel is not None:
            if isinstance(self.waits, KernelWaits):
                self.settle()  # nobody waits in a kernel: to abort them would be no end for those of others
            else:
                self.break_off()
            if self.links is not None:
                self.links.close()
            if self.store is not None:
                self.store.close()
            dist.destroy_process_group(self.channel)

    def wait(self, work: Any) -> None:
        """Wait for a collective of the channel."""
        if self.can_abort:
            self.waits.for_collective(work)
        else:
            work.wait()

    def pass_on(self, outgoing: Messages, incoming: Messages) -> Callable[[], None]:
        """Send a tensor to each rank in `outgoing` and receive one from each in `incoming`. Returns at once, with a function that waits for all.

        An empty tensor is not sent. A small one bypasses gloo where there are links: sender and receiver both know its size.
        """
        waits: list[Callable[[], None]] = []
        if self.links is not None:
            small = [
                [message for message in each if message[1].nbytes <= DIRECT_BYTES]
                for each in (outgoing, incoming)
            ]
            outgoing, incoming = (
                [message for message in each if message[1].nbytes > DIRECT_BYTES]
                for each in (outgoing, incoming)
            )
            waits = [self.links.pass_on(*small)] if any(small) else []
        sends = [dist.P2POp(dist.isend, part, peer, self.channel) for peer, part in outgoing if part.numel()]
        receives = [
            dist.P2POp(dist.irecv, part, peer, self.channel) for peer, part in incoming if part.numel()
        ]
        if sends or receives:
            waits.append(partial(self.wait_for_messages, dist.batch_isend_irecv(sends + receives)))
        return partial(_each, waits)

    def wait_for_messages(self, works: Sequence[Any]) -> None:
        """Wait for messages to and from single ranks, in this order."""

        def wait() -> None:
            for work in works:
                work.wait()

        self.called(wait)

    def swap(
        self, message: Tensor, lengths: Sequence[int], largest: int
    ) -> tuple[Tensor, Callable[[], None]]:
        """Send `message` to every other rank and receive one from each, without waiting. Returns what is received, by rank, and what waits for both.

        All tensors have one dimension and one dtype. `lengths` has how many elements each rank sends, 0 for this one. `largest` is the most
        that any rank sends, by which all ranks choose the same way. `message` must not change before the wait is over.
        """
        received = message.new_empty(sum(lengths))
        if self.links is not None and largest * message.element_size() <= DIRECT_BYTES:
            others = [rank for rank in range(self.size) if rank != self.rank]
            parts = torch.split(received, list(lengths))
            sent, into = [(r, message) for r in others], [(r, parts[r]) for r in others]
            return received, self.links.pass_on(sent, into)
        outgoing = message.repeat(self.size - 1) if self.size > 2 else message
        splits = [message.numel()] * self.size
        splits[self.rank] = 0
        work = dist.all_to_all_single(
            received,
            outgoing,
            output_split_sizes=list(lengths),
            input_split_sizes=splits,
            group=self.channel,
            async_op=True,
        )

        def wait() -> None:
            self.wait(work)
            # A backend thread keeps the tensors of a finished work until it gets a turn to run: free the memory now.
            if outgoing is not message:
                outgoing.untyped_storage().resize_(0)

        return received, wait

    def meet(self) -> None:
        """Wait until every rank is here."""
        if self.size > 1:
            lengths = [int(rank != self.rank) for rank in range(self.size)]
            _, wait = self.swap(torch.zeros(1, dtype=torch.uint8, device=self.device), lengths, 1)
            wait()

    def called(self, call: Callable[[], T]) -> T:
        """The result of a call that waits for the other ranks by itself."""
        return self.waits.for_call(call) if self.can_abort else call()

    def gather(self, value: Any) -> list[Any]:
        """`value` of every rank, by rank. For small objects outside the step."""
        if self.size == 1:
            return [value]
        gathered: list[Any] = [None] * self.size
        self.called(lambda: dist.all_gather_object(gathered, value, group=self.channel))
        return gathered

    def gather_first(self, value: Any) -> list[Any] | None:
        """`value` of every rank, by rank, on rank 0; None on the others, which receive nothing."""
        if self.size == 1:
            return [value]
        gathered: list[Any] | None = [None] * self.size if self.rank == 0 else None
        self.called(lambda: dist.gather_object(value, gathered, dst=0, group=self.channel))
        return gathered

    def broadcast_object(self, value: Any, source: int) -> Any:
        """`value` of rank `source`, on every rank. For objects outside the step."""
        if self.size == 1:
            return value
        object_list = [value if self.rank == source else None]
        self.called(lambda: dist.broadcast_object_list(object_list, group_src=source, group=self.channel))
        return object_list[0]

    def together(self, action: Callable[[], T]) -> T:
        """The result of `action`, which is no collective, on this rank. An error of the job on any rank is raised on all: their own, or the first.

        If a rank left alone, the others would only see a closed connection. Other errors do leave alone: where a machine failed,
        the error is about that machine only.
        """
        wrong: LockstepError | None = None
        try:
            result = action()
        except LockstepError as error:
            if kind_of(error).kind != "job":
                raise
            wrong = error
        first = next((error for error in self.gather(wrong) if error is not None), None)
        if first is not None:
            raise wrong or first
        return result

    def mesh(self) -> Any:
        """The group as a one-dimensional `DeviceMesh` of torch's, over the channel. Every member makes its own."""
        from torch.distributed.device_mesh import DeviceMesh

        # It asks for the rank in the default group, which a job in this process must not see.
        hidden, dist.group.WORLD = dist.group.WORLD, self.channel
        try:
            return DeviceMesh.from_group(self.channel, self.device.type)
        finally:
            dist.group.WORLD = hidden

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        """Overwrite `tensor`, of one shape and layout on all ranks, with that of rank `source`."""
        if self.size == 1:
            return
        if self.links is not None and tensor.nbytes <= DIRECT_BYTES and tensor.is_contiguous():
            others = [(rank, tensor) for rank in range(self.size) if rank != source]
            is_source = self.rank == source
            self.links.pass_on(others if is_source else [], [] if is_source else [(source, tensor)])()
        else:
            self.wait(dist.broadcast(tensor, group_src=source, group=self.channel, async_op=True))


def _each(waits: Sequence[Callable[[], None]]) -> None:
    for wait in waits:
        wait()


def local_device(spec: Spec) -> torch.device:
    """The device of this process: the GPU of its local rank, unless the spec wants none or there is none."""
    if not torch.cuda.is_available() or spec.workers.gpus_each == 0:
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


def assigned_device(gpu: bool) -> torch.device:
    """The device of a process that Ray starts: the GPU that it was assigned, the only one that it sees, or else the CPU."""
    return torch.device("cuda", 0) if gpu else torch.device("cpu")


def ensure_descriptors(ranks: int, groups: int) -> None:
    """Raise this process's limit of open files for so many more gloo groups. ClusterError where the hard limit is too low.

    A group keeps a connection to every other rank, and four more descriptors of its own: 7 for four ranks, 11 for eight.
    """
    listed = Path("/proc/self/fd")
    opened = sum(1 for _ in listed.iterdir()) if listed.is_dir() else 0
    needed = opened + groups * (ranks + 3) + SPARE_DESCRIPTORS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise problems.OPEN_FILES(limit=hard, workers=ranks, wanted=needed)
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def store_of_kernels(store: Any, rank: int, size: int) -> Any:
    """A store for NCCL, at the machine of the one at which all `size` members have met: the one asks for no secret, and the other tells where it is."""
    timeout = COLLECTIVE_TIMEOUT
    if rank == 0:
        own = serve_store(store.host, Secret(), size, timeout, gpus=True)
        store.set("lockstep-kernels", str(own.port))
        return own
    port = int(store.get("lockstep-kernels"))
    return connect_store(store.host, port, Secret(), timeout, gpus=True)


def form_default_group(backend: str, store: Any, rank: int, size: int) -> None:
    """Make the default process group of `size` processes that meet at `store`. ClusterError as in `between_members`."""
    ensure_descriptors(size, groups=2)
    sockets_before, listeners = connected(), listening()
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=COLLECTIVE_TIMEOUT)
    if backend == "gloo":
        refuse_connections(listening() - listeners)
        try:
            between_members(opened_since(sockets_before), store, "default", rank, size)
        except BaseException:
            dist.destroy_process_group()
            raise


def between_members(local: Sockets, store: Any, name: str, rank: int, size: int) -> Sockets:
    """Those of this rank's `local` connections whose other end is another rank's, by what all ranks of the group `name` say at `store`.

    gloo itself takes whoever connects first for the rank that it expects. ClusterError where that was another process: on a cluster on the loopback
    interface, where nothing lies between the two ends that could change an address.
    """
    store.set(f"lockstep-ends/{name}/{rank}", json.dumps([*local.values()]))
    others = [
        [
            Ends(tuple(own_end), tuple(peer_end))
            for own_end, peer_end in json.loads(store.get(f"lockstep-ends/{name}/{other_rank}"))
        ]
        for other_rank in range(size)
        if other_rank != rank
    ]
    connections = shared(local, others)
    if local and len(connections) < size - 1 and os.environ.get("GLOO_SOCKET_IFNAME") == "lo":
        raise problems.FOREIGN_CONNECTION(rank=rank, got=len(connections), wanted=size - 1)
    return connections


@contextmanager
def distributed(backend: str) -> Iterator[None]:
    """The default process group as `torchrun` describes it in the environment, ended on the way out."""
    ensure_descriptors(int(os.environ.get("WORLD_SIZE", "1")), groups=2)
    dist.init_process_group(backend, timeout=COLLECTIVE_TIMEOUT)
    try:
        yield
    finally:
        dist.destroy_process_group()
