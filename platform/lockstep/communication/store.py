"""Where the ranks of a group exchange the addresses of their connections: a store of keys behind the secret of the run.

torch's own TCPStore listens on every interface, and answers whoever connects. Here rank 0 serves the keys on one address, answers
those that know the secret, and stops listening when every rank has connected. Values are bytes and are never unpickled.

A request is a list of byte strings, the first of which names the operation; so is its answer. The server never waits: a client asks again
until a key is there.
"""

from __future__ import annotations

import selectors
import socket
import struct
import threading
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from lockstep.communication.credentials import ANSWER_BYTES, Secret, challenge, is_server
from lockstep.running_time import running_s

MOST_UNPROVEN = 256
"""How many connections may be open that have not shown the secret yet; beyond that the oldest is closed."""

MOST_BYTES = 1 << 26
"""The largest request that is accepted, 64 MiB: a rank's addresses are some kilobytes."""

PROVEN_S = 30.0
"""How long a connecting rank waits until the server has recognised it: rank 0 may be importing something."""

FIRST_LOOK_S, LONGEST_LOOK_S = 0.0005, 0.02
"""The pauses between two questions for a key that is not there yet: each is twice as long as the last."""


class StoreServer:
    """Serves the keys of one group, from a thread of this process."""

    def __init__(self, host: str, secret: Secret, size: int | None = None) -> None:
        """Listen at this machine's address `host`, for `size` ranks; with None until `expect`. OSError where nothing can listen."""
        self._secret = secret
        self._listener: socket.socket | None = _listener(host)
        self.host, self.port = host, int(self._listener.getsockname()[1])
        self._size = size
        self._ranks = 0
        """How many have connected and shown the secret."""
        self._keys: dict[bytes, bytes] = {}
        self._waker, woken = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(woken, selectors.EVENT_READ)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._unproven: list[_Connection] = []
        threading.Thread(target=self._serve, name="lockstep-store", daemon=True).start()

    def expect(self, size: int) -> None:
        """Stop listening as soon as `size` ranks have connected. To be called before this process connects."""
        self._size = size

    def close(self) -> None:
        """End the service and its connections."""
        with suppress(OSError):  # it is closed already
            self._waker.shutdown(socket.SHUT_RDWR)

    def _serve(self) -> None:
        try:
            while True:
                for key, _ in self._selector.select():
                    if key.fileobj is self._listener:
                        self._accept()
                    elif isinstance(key.data, _Connection):
                        self._read(key.data)
                    else:  # `close` was called
                        return
                if self._listener is not None and self._size is not None and self._ranks >= self._size:
                    self._stop_listening()
                if self._listener is None and len(self._selector.get_map()) == 1:  # all have left
                    return
        finally:
            for key in list(self._selector.get_map().values()):
                key.fileobj.close()  # type: ignore[union-attr]  # a socket
            self._selector.close()
            self._waker.close()

    def _stop_listening(self) -> None:
        assert self._listener is not None
        self._selector.unregister(self._listener)
        self._listener.close()
        self._listener = None
        for connection in list(self._unproven):
            self._drop(connection)

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            accepted, _ = self._listener.accept()
        except OSError:  # it has left again, or this process has too many files open
            return
        accepted.settimeout(PROVEN_S)  # for what is sent: it only reads when something is there
        connection = _Connection(accepted)
        self._selector.register(accepted, selectors.EVENT_READ, connection)
        self._unproven.append(connection)
        if len(self._unproven) > MOST_UNPROVEN:
            self._drop(self._unproven[0])
        try:
            accepted.sendall(connection.challenge)
        except OSError:
            self._drop(connection)

    def _read(self, connection: _Connection) -> None:
        """Take what has arrived, and answer each complete request."""
        try:
            data = connection.socket.recv(1 << 16)
            connection.data += data
            if not data:
                self._drop(connection)
            elif connection.proven or self._proven(connection):
                while (request := _first_message(connection.data)) is not None:
                    connection.socket.sendall(_message(self._answer(request)))
        except (OSError, ValueError, IndexError):  # it is gone, or speaks another language
            self._drop(connection)

    def _proven(self, connection: _Connection) -> bool:
        """Whether the other end has shown the secret by now."""
        if len(connection.data) < ANSWER_BYTES:
            return False
        answer = bytes(connection.data[:ANSWER_BYTES])
        confirmation = self._secret.confirmed(connection.challenge, answer)
        if confirmation is None:
            self._drop(connection)
            return False
        del connection.data[:ANSWER_BYTES]
        connection.proven = True
        self._unproven.remove(connection)
        self._ranks += 1
        connection.socket.sendall(confirmation)
        return True

    def _drop(self, connection: _Connection) -> None:
        if connection in self._unproven:
            self._unproven.remove(connection)
        with suppress(KeyError, ValueError):  # dropped before
            self._selector.unregister(connection.socket)
        connection.socket.close()

    def _answer(self, request: Sequence[bytes]) -> Sequence[bytes]:
        operation, *words = request
        match operation:
            case b"set":
                self._keys[words[0]] = words[1]
                return []
            case b"get":
                return [self._keys[words[0]]] if words[0] in self._keys else []
            case b"add":
                self._keys[words[0]] = str(int(self._keys.get(words[0], b"0")) + int(words[1])).encode()
                return [self._keys[words[0]]]
            case b"append":
                self._keys[words[0]] = self._keys.get(words[0], b"") + words[1]
                return []
            case b"compare_set":
                present = self._keys.get(words[0])
                if present == words[1] or (present is None and not words[1]):
                    present = self._keys[words[0]] = words[2]
                return [words[1] if present is None else present]
            case b"check":
                return [b"1"] if all(word in self._keys for word in words) else []
            case b"delete":
                return [b"1"] if self._keys.pop(words[0], None) is not None else []
            case b"count":
                return [str(len(self._keys)).encode()]
        raise ValueError(f"no operation {operation!r}")


class _Connection:
    """One connection of the server."""

    def __init__(self, opened: socket.socket) -> None:
        self.socket = opened
        self.challenge = challenge()
        self.proven = False
        self.data = bytearray()
        """What has arrived and is not answered."""


class AuthenticatedStore(Store):
    """A rank's view of the keys, as `torch.distributed` wants it. Keep it for as long as its group: torch keeps only its C++ half."""

    def __init__(
        self, host: str, port: int, secret: Secret, timeout: timedelta, served: StoreServer | None = None
    ) -> None:
        """Connect to the service there, which `served` is if this process is rank 0.

        DistNetworkError where nobody answers, or who answers does not know the secret.
        """
        super().__init__()
        self.host, self.port = host, port
        self._served = served
        self.set_timeout(timeout)
        self._lock = threading.Lock()
        self._data = bytearray()
        self._where = f"the store at {host}:{port}"
        try:
            self._socket = socket.create_connection((host, port), PROVEN_S)
            weakref.finalize(self, self._socket.close)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            recognised = is_server(self._socket, secret)
            self._socket.settimeout(timeout.total_seconds())
        except OSError as error:
            raise dist.DistNetworkError(f"{self._where}: no rank answers: {error}") from error
        if not recognised:
            self._socket.close()
            raise dist.DistNetworkError(
                f"{self._where}: the process that answers does not know the run's secret"
            )

    def close(self) -> None:
        """End the connection, and the service if it is this process's own."""
        self._socket.close()
        if self._served is not None:
            self._served.close()

    def set(self, key: str, value: Any) -> None:
        self._ask(b"set", key.encode(), _bytes(value))

    def get(self, key: str) -> bytes:
        """The value of a key, once it is there. DistStoreError where it is not within the store's timeout."""
        return self._until_there([key], self._patience(), b"get")[0]

    def add(self, key: str, number: int) -> int:
        return int(self._ask(b"add", key.encode(), str(number).encode())[0])

    def append(self, key: str, value: Any) -> None:
        self._ask(b"append", key.encode(), _bytes(value))

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        return self._ask(b"compare_set", key.encode(), _bytes(expected), _bytes(desired))[0]

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._ask(b"check", *(key.encode() for key in keys)))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Until all keys are there. DistStoreError where they are not within `timeout`."""
        self._until_there(keys, timeout or self._patience(), b"check")

    def delete_key(self, key: str) -> bool:
        return bool(self._ask(b"delete", key.encode()))

    def num_keys(self) -> int:
        return int(self._ask(b"count")[0])

    def clone(self) -> AuthenticatedStore:
        """The same store: its calls may come from several threads."""
        return self

    def _patience(self) -> timedelta:
        """What `set_timeout` has set, of which torch's stubs know nothing."""
        set_for: timedelta = self.timeout  # type: ignore[attr-defined]
        return set_for

    def _until_there(self, keys: Sequence[str], timeout: timedelta, operation: bytes) -> list[bytes]:
        until, pause_s = running_s() + timeout.total_seconds(), FIRST_LOOK_S
        while not (answer := self._ask(operation, *(key.encode() for key in keys))):
            if running_s() > until:
                raise dist.DistStoreError(
                    f"{self._where}: no {', '.join(keys)} within {timeout.total_seconds():g} s"
                )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_LOOK_S)
        return answer

    def _ask(self, *request: bytes) -> list[bytes]:
        with self._lock:
            try:
                self._socket.sendall(_message(request))
                while (answer := _first_message(self._data)) is None:
                    data = self._socket.recv(1 << 16)
                    if not data:
                        raise ConnectionResetError("connection closed by peer")
                    self._data += data
            except OSError as error:
                raise dist.DistNetworkError(f"{self._where}: rank 0 is gone: {error}") from error
            return answer


def serve_store(host: str, secret: Secret, size: int, timeout: timedelta, *, gpus: bool = False) -> Any:
    """The store of rank 0, which serves it at `host`, for `size` ranks. It has a `host` and a `port`.

    With `gpus` it is torch's own, which listens only there but asks for no secret: NCCL's threads in C++ look into the store for
    as long as the group lives, and must not wait for Python.
    """
    if gpus:
        listener = _listener(host)
        port = listener.getsockname()[1]
        return TCPStore(
            host, port, size, True, timeout, wait_for_workers=False, master_listen_fd=listener.detach()
        )
    served = StoreServer(host, secret, size)
    return AuthenticatedStore(host, served.port, secret, timeout, served)


def connect_store(host: str, port: int, secret: Secret, timeout: timedelta, *, gpus: bool = False) -> Any:
    """The store that rank 0 serves there, as `serve_store` returns it to rank 0. DistNetworkError where it cannot be reached."""
    if gpus:
        return TCPStore(host, port, is_master=False, timeout=timeout)
    return AuthenticatedStore(host, port, secret, timeout)


def _listener(host: str) -> socket.socket:
    """A listening socket at `host`, or at every interface where the address is not this machine's own, as behind a translation of addresses."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, 0), family=family, backlog=socket.SOMAXCONN)
    except OSError:
        return socket.create_server(("", 0), family=family, backlog=socket.SOMAXCONN)


def _bytes(value: Any) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


def _message(words: Sequence[bytes]) -> bytes:
    sized = b"".join(struct.pack("!I", len(word)) + word for word in words)
    return struct.pack("!I", len(sized)) + sized


def _first_message(data: bytearray) -> list[bytes] | None:
    """Take the first message out of `data`; None where it is not complete. ValueError where it is no message or too large."""
    if len(data) < 4:
        return None
    (size,) = struct.unpack_from("!I", data)
    if size > MOST_BYTES:
        raise ValueError(f"a message of {size} bytes")
    if len(data) < 4 + size:
        return None
    words, at = [], 4
    while at < 4 + size:
        (length,) = struct.unpack_from("!I", data, at)
        words.append(bytes(data[at + 4 : at + 4 + length]))
        at += 4 + length
    if at != 4 + size:
        raise ValueError("a message whose parts do not fit")
    del data[: 4 + size]
    return words
