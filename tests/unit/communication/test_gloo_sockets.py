"""The connections of a group are those that two members have between them, and no others are touched."""

from __future__ import annotations

import os
import socket

from lockstep.communication.gloo_sockets import Ends, close, connected, inodes, opened_since, shared, shut


def pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        here = socket.create_connection(server.getsockname())
        there, _ = server.accept()
    return here, there


def test_what_was_opened_is_known_by_both_ends() -> None:
    before = connected()
    (here, there), (stranger, other) = pair(), pair()
    with here, there, stranger, other:
        new = opened_since(before)
        assert set(new) == {one.fileno() for one in (here, there, stranger, other)}
        told = [Ends(there.getsockname(), there.getpeername())]
        found = shared(new, [told])
        assert set(found) == {here.fileno()}
        shut(found)
        assert there.recv(1) == b""
        stranger.sendall(b"x")
        assert other.recv(1) == b"x"


def test_a_descriptor_that_is_another_files_by_now_is_left_alone() -> None:
    before = connected()
    here, there = pair()
    with there:
        found = {here.fileno(): opened_since(before)[here.fileno()]}
        here.close()
        new, peer = pair()
        with new, peer:
            shut(dict.fromkeys((new.fileno(), peer.fileno()), next(iter(found.values()))) | found)
            new.sendall(b"x")
            assert peer.recv(1) == b"x"


def test_a_look_does_not_change_how_a_socket_waits() -> None:
    """Python would make it non-blocking where there is a default timeout."""
    here, there = pair()
    with here, there:
        socket.setdefaulttimeout(5.0)
        try:
            assert connected()[here.fileno()].peer == there.getsockname()
            assert socket.getdefaulttimeout() == 5.0
        finally:
            socket.setdefaulttimeout(None)
        assert os.get_blocking(there.fileno())


def test_a_connection_that_its_owner_has_closed_has_no_inode() -> None:
    """Nor that of another file which has the descriptor by now."""
    before = connected()
    here, there = pair()
    with there:
        found = {here.fileno(): opened_since(before)[here.fileno()]}
        assert inodes(found) == {here.fileno(): os.fstat(here.fileno()).st_ino}
        here.close()
        assert inodes(found) == {}
        new, peer = pair()
        with new, peer:
            assert new.fileno() in found
            assert inodes(found) == {}


def test_a_process_that_lets_go_leaves_the_connection_to_others() -> None:
    before = connected()
    here, there = pair()
    found = {here.fileno(): opened_since(before)[here.fileno()]}
    with there:
        held = os.dup(here.detach())
        close(found)
        with socket.socket(fileno=held) as again:
            again.sendall(b"x")
            assert there.recv(1) == b"x"
            assert opened_since(before).keys() == {held, there.fileno()}
