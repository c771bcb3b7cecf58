"""The keys by which ranks meet: given to those that know the secret, and to nobody else, whatever they send."""

from __future__ import annotations

import pickle
import socket
import threading
import time
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch.distributed as dist

from lockstep.communication import store
from lockstep.communication.credentials import ANSWER_BYTES, CHALLENGE_BYTES, Secret
from lockstep.communication.gloo_sockets import connected, listening, opened_since, refuse_connections
from lockstep.communication.group import between_members
from lockstep.communication.store import AuthenticatedStore, StoreServer
from lockstep.errors import ClusterError

HERE = "127.0.0.1"
SOON = timedelta(seconds=5)


@pytest.fixture
def secret() -> Secret:
    return Secret()


@pytest.fixture
def served(secret: Secret) -> Iterator[StoreServer]:
    service = StoreServer(HERE, secret, 2)
    yield service
    service.close()


def closed(connection: socket.socket) -> bool:
    """Whether the other end has hung up, without another byte."""
    connection.settimeout(5)
    try:
        return connection.recv(64) == b""
    except ConnectionError:
        return True


def test_ranks_read_what_another_has_set(served: StoreServer, secret: Secret) -> None:
    first, second = (AuthenticatedStore(HERE, served.port, secret, SOON) for _ in range(2))
    threading.Timer(0.1, lambda: first.set("late", "value")).start()
    assert second.get("late") == b"value"
    assert [first.add("count", 2), second.add("count", 3)] == [2, 5]
    assert first.check(["late", "count"])
    assert not first.check(["late", "none"])
    assert second.compare_set("late", "value", "other") == b"other"
    assert second.compare_set("late", "value", "third") == b"other"
    prefixed = dist.PrefixStore("group", second)
    prefixed.set("large", "x" * 1_000_000)
    assert first.get("group/large") == b"x" * 1_000_000
    assert first.delete_key("late")
    assert not first.delete_key("late")
    with pytest.raises(dist.DistStoreError, match="no late within"):
        first.wait(["late"], timedelta(seconds=0.1))


def test_nothing_listens_once_all_ranks_have_come(served: StoreServer, secret: Secret) -> None:
    first, second = (AuthenticatedStore(HERE, served.port, secret, SOON) for _ in range(2))
    first.set("a", "b")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((HERE, served.port), 1)
    assert second.get("a") == b"b"


def test_who_does_not_know_the_secret_gets_no_key(served: StoreServer, secret: Secret) -> None:
    """Neither with another secret, nor past the challenge, nor with an answer that was overheard: the ranks still meet."""
    first = AuthenticatedStore(HERE, served.port, secret, SOON)
    first.set("key", "value")
    with pytest.raises(dist.DistNetworkError, match="the store at"):
        AuthenticatedStore(HERE, served.port, Secret(), SOON)
    with socket.create_connection((HERE, served.port)) as stranger:
        asked = stranger.recv(CHALLENGE_BYTES)
        stranger.sendall(store._message([b"get", b"key"]) + bytes(ANSWER_BYTES))
        assert closed(stranger)
    overheard = secret.answer(asked)
    with socket.create_connection((HERE, served.port)) as stranger:
        stranger.recv(CHALLENGE_BYTES)
        stranger.sendall(overheard)
        assert closed(stranger)
    assert AuthenticatedStore(HERE, served.port, secret, SOON).get("key") == b"value"


def test_a_service_that_does_not_know_the_secret_is_told_nothing(secret: Secret) -> None:
    with socket.create_server((HERE, 0)) as server:
        told: list[bytes] = []

        def pretend() -> None:
            taken, _ = server.accept()
            with taken:
                taken.sendall(bytes(CHALLENGE_BYTES))
                taken.recv(ANSWER_BYTES, socket.MSG_WAITALL)
                taken.sendall(bytes(32))
                told.append(taken.recv(64))

        thread = threading.Thread(target=pretend)
        thread.start()
        with pytest.raises(dist.DistNetworkError, match="does not know the run's secret"):
            AuthenticatedStore(HERE, server.getsockname()[1], secret, SOON)
        thread.join()
    assert told == [b""]


def test_silent_strangers_keep_no_rank_away(served: StoreServer, secret: Secret) -> None:
    strangers = [socket.create_connection((HERE, served.port)) for _ in range(store.MOST_UNPROVEN + 20)]
    began = time.monotonic()
    AuthenticatedStore(HERE, served.port, secret, SOON).set("key", "value")
    assert time.monotonic() - began < 2
    for stranger in strangers:
        stranger.close()


def test_a_secret_is_in_no_text_and_travels_between_processes(secret: Secret) -> None:
    copy = pickle.loads(pickle.dumps(secret))
    assert copy.confirmed(bytes(32), secret.answer(bytes(32))) is not None
    assert repr(secret) == "Secret()"
    with pytest.raises(ValueError, match="at least 16 bytes"):
        Secret(b"short")


def test_a_listener_is_shut_and_what_is_connected_goes_on() -> None:
    known = listening()
    with socket.create_server((HERE, 0)) as server, socket.create_server((HERE, 0)) as other:
        opened = socket.create_connection(server.getsockname())
        taken, _ = server.accept()
        refuse_connections({each for each in listening() - known if each[0] != other.fileno()})
        with pytest.raises(TimeoutError):
            socket.create_connection(server.getsockname(), 0.3)
        socket.create_connection(other.getsockname(), 5).close()
        opened.sendall(b"x" * 100_000)
        assert len(taken.recv(100_000, socket.MSG_WAITALL)) == 100_000
        for each in (opened, taken):
            each.close()


@pytest.mark.parametrize("on_loopback", [True, False])
def test_a_connection_to_no_member_is_refused_on_loopback(
    monkeypatch: pytest.MonkeyPatch, *, on_loopback: bool
) -> None:
    """A stranger that came first to gloo's listener, in the place of rank 1. Elsewhere a proxy may change addresses: the group goes on as one that cannot be broken off."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo" if on_loopback else "eth0")
    store = dist.HashStore()
    store.set("lockstep-ends/group/1", '[[["127.0.0.1", 1], ["127.0.0.1", 2]]]')
    before = connected()
    with socket.create_server((HERE, 0)) as server, socket.create_connection(server.getsockname()):
        own = opened_since(before)
        if on_loopback:
            with pytest.raises(ClusterError, match="another process has connected in the place of one"):
                between_members(own, store, "group", 0, 2)
        else:
            assert between_members(own, store, "group", 0, 2) == {}
