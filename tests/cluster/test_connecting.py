"""The command and a cluster that is not there, is someone else's, or goes away: an answer within seconds."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from lockstep.clusters import problems
from lockstep.clusters.connection import connected
from tests.ports import refusing_port
from tests.raised import raises

ROOT = Path(__file__).parents[2]

ANSWER_S = 10.0
"""From the moment at which the command asks; what it imports before, it imports on an idle machine in two seconds."""


class Listener:
    """A server on loopback that accepts; it passes the first `answered` connections on to a real cluster, and is silent on all others."""

    def __init__(self, real: str | None = None, answered: int = 0) -> None:
        self._real, self._left = real, answered
        self._server = socket.create_server(("127.0.0.1", 0))
        self._held: list[socket.socket] = []
        self.silent_since: float | None = None
        self.address = f"127.0.0.1:{self._server.getsockname()[1]}"
        self.asked = threading.Event()
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with suppress(OSError):  # closed
            while True:
                connection, _ = self._server.accept()
                self._held.append(connection)
                self._left -= 1
                if self._left >= 0 and self._real is not None:
                    host, _, port = self._real.rpartition(":")
                    there = socket.create_connection((host, int(port)))
                    self._held.append(there)
                    for pair in ((connection, there), (there, connection)):
                        threading.Thread(target=self._pass, args=pair, daemon=True).start()
                else:
                    self.silent_since = self.silent_since or time.monotonic()
                    self.asked.set()

    def _pass(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while content := source.recv(65536):
                target.sendall(content)

    def close(self) -> None:
        for connection in (self._server, *self._held):
            connection.close()


@pytest.fixture
def silent() -> Iterator[Listener]:
    listener = Listener()
    yield listener
    listener.close()


def command(folder: Path, *words: str, **environment: str) -> subprocess.Popen[str]:
    kept = {
        name: value for name, value in os.environ.items() if name not in {"PYTHONHASHSEED", "RAY_ADDRESS"}
    }
    spec = [
        "jobs/digits/train.yaml",
        "length.epochs=1",
        "record.uri=off",
        f"checkpoint.storage={folder}/runs",
    ]
    return subprocess.Popen(
        [sys.executable, "-m", "lockstep", "train", *spec, "--json", *words],
        cwd=ROOT,
        env={**kept, "PYTHONPATH": str(ROOT / "platform"), "XDG_STATE_HOME": str(folder), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def failed(process: subprocess.Popen[str]) -> str:
    """The one line of a command that has failed."""
    out, err = process.communicate(timeout=60)
    assert process.returncode == 1, err
    told = json.loads(out)
    assert told["status"] == "FAILED"
    error: str = told["error"]
    assert "\n" not in error
    return error


@pytest.mark.parametrize("by", ["RAY_ADDRESS", pytest.param("--address", marks=pytest.mark.exact)])
def test_a_dead_address_is_told_at_once(tmp_path: Path, by: str) -> None:
    with refusing_port() as port:
        address = f"127.0.0.1:{port}"
        words, environment = ([by, address], {}) if by == "--address" else ([], {by: address})
        error = failed(command(tmp_path, *words, **environment))
        assert error.startswith(f"address: no Ray cluster answers at {address} (Connection refused)")


@pytest.mark.scenario
def test_a_server_that_accepts_and_never_answers_is_told_in_seconds(tmp_path: Path, silent: Listener) -> None:
    process = command(tmp_path, "--address", silent.address)
    assert silent.asked.wait(60)
    asked = time.monotonic()
    error = failed(process)
    assert time.monotonic() - asked < ANSWER_S
    assert "does not answer as a Ray cluster within 4 s" in error
    assert not list(tmp_path.glob("runs/*"))  # nothing is left behind


@pytest.mark.scenario
@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_is_heard_while_the_command_waits_for_an_answer(
    tmp_path: Path, silent: Listener, sent: signal.Signals, code: int
) -> None:
    process = command(tmp_path, "--address", silent.address)
    assert silent.asked.wait(60)
    process.send_signal(sent)
    asked = time.monotonic()
    process.communicate(timeout=30)
    assert time.monotonic() - asked < 3.0
    assert process.returncode == code


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("interrupted", [False, pytest.param(True, marks=pytest.mark.exact)])
@pytest.mark.scenario
def test_a_cluster_that_falls_silent_while_it_is_joined_is_told_and_ctrl_c_is_heard(
    tmp_path: Path, interrupted: bool
) -> None:
    """The first question is answered by a real cluster; what Ray itself asks then is not."""
    import ray

    listener = Listener(ray.get_runtime_context().gcs_address, answered=2)  # one to look, one for its health
    process = command(tmp_path, "--address", listener.address)
    assert listener.asked.wait(60), process.communicate(timeout=30)
    asked = time.monotonic()
    try:
        if interrupted:
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=30)
            assert process.returncode == 130
        else:
            assert f"{listener.address} accepts connections but does not answer" in failed(process)
        assert time.monotonic() - asked < ANSWER_S
    finally:
        listener.close()


@pytest.mark.scenario
def test_a_process_that_is_connected_elsewhere_is_not_sent_there(cluster: None) -> None:
    """As in a notebook: the run had trained on the cluster of the connection, and not on the one that is named."""
    import ray

    here = ray.get_runtime_context().gcs_address
    for address in (None, "auto", here, f"localhost:{here.rpartition(':')[2]}"):
        with connected(address, verbose=False) as own:
            assert not own
    for other in ("127.0.0.1:1", f"192.0.2.7:{here.rpartition(':')[2]}"):
        with (
            raises(problems.OTHER_CLUSTER, got=other, joined=here),
            connected(other, verbose=False),
        ):
            pass
