"""What a group of workers can be refused for is told as the problem that it is, before anything is sent."""

from __future__ import annotations

import json
import resource
import socket
from typing import Any

import pytest

from lockstep.communication import problems
from lockstep.communication.gloo_sockets import Ends, connected, opened_since
from lockstep.communication.group import between_members, ensure_descriptors
from tests.raised import raises


class Said(dict[str, bytes]):
    """What the members of a group say of their connections."""

    def set(self, name: str, value: str) -> None:
        self[name] = value.encode()


def ends(*sockets: socket.socket) -> str:
    return json.dumps([Ends(each.getsockname(), each.getpeername()) for each in sockets])


@pytest.mark.parametrize("whose", ["a member's", "a stranger's"])
def test_a_process_that_connects_in_the_place_of_a_member_is_noticed(
    monkeypatch: pytest.MonkeyPatch, whose: str
) -> None:
    """gloo takes whoever comes first. On loopback, where no address changes on the way, its other end must be one that a member names."""
    before: Any = connected()
    with socket.create_server(("127.0.0.1", 0)) as server:
        mine = socket.create_connection(server.getsockname())
        theirs, _ = server.accept()
    store: Any = Said()
    with mine, theirs:
        own = {fd: pair for fd, pair in opened_since(before).items() if fd == mine.fileno()}
        store.set("lockstep-ends/g/1", ends(theirs) if whose == "a member's" else "[]")
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
        if whose == "a member's":
            assert between_members(own, store, "g", 0, 2) == own
            return
        with raises(problems.FOREIGN_CONNECTION, rank=0, got=0, wanted=1):
            between_members(own, store, "g", 0, 2)
        monkeypatch.delenv("GLOO_SOCKET_IFNAME")
        assert between_members(own, store, "g", 0, 2) == {}


def test_more_workers_than_a_process_may_have_files_are_refused() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limits[1] == resource.RLIM_INFINITY:
        pytest.skip("there is no hard limit")
    with raises(problems.OPEN_FILES, limit=limits[1], workers=10**9):
        ensure_descriptors(10**9, groups=1)
