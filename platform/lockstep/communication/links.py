"""Connections of a group on CPUs for its small messages, which the training thread sends and reads by itself.

gloo hands a collective from thread to thread, four on each rank, and on busy processors each of them waits until another's time slice is
over. Measured with two ranks on two processors that compute 3.2 ms a step and swap 100 KB: the swap takes 1.4 ms through gloo's
all-to-all (4.0 at the 90th percentile), and 0.2 ms (0.4) if the thread that waits for a message reads it. Large messages stay with gloo,
whose threads move them while a backward computes.

Invariants: messages between two ranks are read in the order in which they were sent; both know how long each is.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import select
import socket
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from typing import Any

from torch import Tensor

from lockstep.communication.credentials import Secret, is_client, is_server
from lockstep.communication.gloo_sockets import Ends, Sockets, inodes
from lockstep.communication.waits import LOOK_S
from lockstep.running_time import running_s

DIRECT_BYTES = 1 << 19
"""The largest message for a link: about what a connection takes at once, so that nobody has to push the rest."""

MOST_RANKS = 16
"""In larger groups each rank would poll so many connections that gloo's threads cost less."""

CONNECT_S = 10.0
"""How long the ranks, which have just met, may take to connect; if they do not, everything goes through gloo."""


Messages = Sequence[tuple[int, Tensor]]
"""Tensors, each with the rank that it goes to or comes from."""


class Links:
    """A connection to every other rank. Only the training thread passes messages; any other thread may shut the connections by their descriptors."""

    def __init__(self, sockets: Mapping[int, socket.socket], timeout_s: float) -> None:
        """`sockets` by rank. A wait in which nothing moves for `timeout_s` raises RuntimeError. OSError where one is no longer connected."""
        self.ends: Sockets = {
            connection.fileno(): Ends(connection.getsockname()[:2], connection.getpeername()[:2])
            for connection in sockets.values()
        }
        """Their addresses, by their descriptors."""
        self.inodes = inodes(self.ends)
        self._links = {rank: _Link(rank, opened) for rank, opened in sockets.items()}
        self._timeout_s = timeout_s
        self.look: Callable[[], None] = _nothing
        """Called now and then while waiting; raises where the group is broken off."""
        self.close = weakref.finalize(self, _close, list(sockets.values()), os.getpid())
        """Close the connections, in the process that has opened them."""

    def pass_on(self, outgoing: Messages, incoming: Messages) -> Callable[[], None]:
        """Send messages to single ranks and receive theirs into the tensors given. Returns at once, with a function that waits for all of it.

        The tensors are contiguous, on the CPU and of any dtype, and must not change before that. An empty one is no message. Raises
        RuntimeError where a rank is lost or the group is broken off.
        """
        for rank, message in outgoing:
            self._links[rank].send(_memory(message))
        for rank, into in incoming:
            self._links[rank].receive(_memory(into))
        links = {rank: self._links[rank] for rank, _ in (*outgoing, *incoming)}.values()
        ends = [(link, link.wanted_out, link.wanted_in) for link in links]
        messages = (outgoing, incoming)  # keeps the tensors alive: a link knows only their addresses
        return lambda: self._wait(ends, messages)

    def _wait(self, ends: Sequence[tuple[_Link, int, int]], _keep_alive: object) -> None:
        """Wait until each link has sent and received so many messages."""
        moved_at = running_s()
        while True:
            for link, _, _ in ends:
                link.push()
                link.pull()
            ends = [
                (link, out, came) for link, out, came in ends if link.gone_out < out or link.come_in < came
            ]
            if not ends:
                return
            if _ready([link for link, _, _ in ends]):
                moved_at = running_s()
                continue
            self.look()
            if running_s() - moved_at > self._timeout_s:
                ranks = ", ".join(str(link.rank) for link, _, _ in ends)
                raise RuntimeError(
                    f"timed out waiting {1e3 * self._timeout_s:.0f} ms for recv operation with ranks {ranks}"
                )


class _Link:
    """The connection to one rank: what is to be sent and to be filled, in order."""

    def __init__(self, rank: int, opened: socket.socket) -> None:
        self.rank, self.socket = rank, opened
        self._out: deque[memoryview] = deque()
        self._in: deque[memoryview] = deque()
        self.wanted_out = self.wanted_in = self.gone_out = self.come_in = 0
        """How many messages were queued, and how many of them are done."""

    @property
    def events(self) -> int:
        """The events that it waits for, as flags of `select.poll`."""
        return (select.POLLOUT if self._out else 0) | (select.POLLIN if self._in else 0)

    def send(self, message: memoryview) -> None:
        """Queue a message, and send what the connection takes now."""
        if message:
            self._out.append(message)
            self.wanted_out += 1
            self.push()

    def receive(self, into: memoryview) -> None:
        """Queue a buffer for the next message."""
        if into:
            self._in.append(into)
            self.wanted_in += 1

    def push(self) -> None:
        """Send what the connection takes now."""
        while self._out:
            try:
                sent = self.socket.send(self._out[0])
            except BlockingIOError:
                return
            except OSError as error:
                raise self._lost() from error
            if sent < len(self._out[0]):
                self._out[0] = self._out[0][sent:]
            else:
                self._out.popleft()
                self.gone_out += 1

    def pull(self) -> None:
        """Read what has arrived into the queued buffers."""
        while self._in:
            try:
                read = self.socket.recv_into(self._in[0])
            except BlockingIOError:
                return
            except OSError as error:
                raise self._lost() from error
            if read == 0:
                raise self._lost()
            if read < len(self._in[0]):
                self._in[0] = self._in[0][read:]
            else:
                self._in.popleft()
                self.come_in += 1

    def _lost(self) -> RuntimeError:
        return RuntimeError(f"connection closed by peer: rank {self.rank}")


def _ready(links: Iterable[_Link]) -> bool:
    """Wait until one of the links can make progress. False where none can for a while."""
    poll = select.poll()
    for link in links:
        poll.register(link.socket, link.events)
    return bool(poll.poll(1e3 * LOOK_S))


def _memory(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor, by its address: torch refuses to resize what NumPy has seen. It keeps nothing alive."""
    return memoryview((ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def _close(sockets: Sequence[socket.socket], owner: int) -> None:
    if os.getpid() == owner:  # a forked process has closed them already: they may be other files by now
        for opened in sockets:
            opened.close()


def _nothing() -> None: ...


def linked(
    rank: int, size: int, host: str, gather: Callable[[Any], list[Any]], timeout_s: float
) -> Links | None:
    """Connect all ranks of a group, each of which calls it; None on all ranks where the group is too large or any of them cannot connect.

    `host` is this rank's address for the others, `gather` gives every rank's value by rank. `timeout_s` is that of `Links`.
    """
    if size > MOST_RANKS:
        return None
    sockets: dict[int, socket.socket] = {}
    links = None
    with _server(host, size) or nullcontext() as server:
        key = secrets.token_bytes(_KEY)
        addresses: list[_Address | None] = gather(server and (host, server.getsockname()[1], key))
        if server is not None and None not in addresses:
            with suppress(OSError):
                _connect(
                    rank, [address for address in addresses if address is not None], server, key, sockets
                )
                for opened in sockets.values():
                    opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    opened.setblocking(False)
                links = Links(sockets, timeout_s)
    if all(gather(links is not None)):  # who hears it may go on, and leave, while others still read it
        return links
    _close([*sockets.values()], os.getpid())
    return None


SAID_S = 1.0
"""How long a connecting rank may take to say which one it is; it says so at once."""

_KEY = 32
"""The bytes of the secret that a server gives to the ranks alone, by which they and it recognise each other."""

_Address = tuple[str, int, bytes]


def _server(host: str, size: int) -> socket.socket | None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, 0), family=family, backlog=size)
    except OSError:
        return None


def _connect(
    rank: int,
    addresses: Sequence[_Address],
    server: socket.socket,
    key: bytes,
    sockets: dict[int, socket.socket],
) -> None:
    """Connect to the ranks below, and accept those above. OSError where one of them is late; `sockets` has those that came."""
    until = time.monotonic() + CONNECT_S
    for peer, (host, port, theirs) in enumerate(addresses[:rank]):
        opened = socket.create_connection((host, port), max(0.001, until - time.monotonic()))
        sockets[peer] = opened
        if not is_server(opened, Secret(theirs)):
            raise ConnectionRefusedError("another process listens in a rank's place")
        opened.sendall(rank.to_bytes(2))
    secret = Secret(key)
    while len(sockets) < len(addresses) - 1:
        server.settimeout(max(0.001, until - time.monotonic()))
        opened, _ = server.accept()
        opened.settimeout(SAID_S)
        peer = -1
        with suppress(OSError):
            if is_client(opened, secret):
                peer = int.from_bytes(opened.recv(2, socket.MSG_WAITALL))
        if rank < peer < len(addresses) and peer not in sockets:
            sockets[peer] = opened
        else:  # not a member of the group
            opened.close()
