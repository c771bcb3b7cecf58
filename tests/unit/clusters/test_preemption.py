"""The agent of a node against servers that speak the protocols of the clouds' metadata services."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from lockstep.clusters import node_departure, preemption, problems
from lockstep.clusters.preemption import Agent, Notice, sources
from tests.raised import raises

ROOT = Path(__file__).parents[3]


class Server(ThreadingHTTPServer):
    """A metadata service on loopback: what is at each path, what was asked, and for GCP an event for every change."""

    daemon_threads = True

    def __init__(self, handler: type[BaseHTTPRequestHandler]) -> None:
        super().__init__(("127.0.0.1", 0), handler)
        self.values: dict[str, str] = {}
        self.asked: list[str] = []
        self.tokens: set[str] = set()
        self.changed = threading.Condition()
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()

    def set(self, path: str, text: str) -> None:
        with self.changed:
            self.values[path] = text
            self.changed.notify_all()


class Quiet(BaseHTTPRequestHandler):
    server: Server

    def log_message(self, *words: Any) -> None: ...

    def answer(self, code: int, text: str = "", **headers: str) -> None:
        self.send_response(code)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())


class Imds(Quiet):
    """IMDSv2: a token by PUT with the header of its lifetime, and no answer without one."""

    def do_PUT(self) -> None:
        if self.path != "/latest/api/token" or "X-aws-ec2-metadata-token-ttl-seconds" not in self.headers:
            return self.answer(400)
        token = f"token-{len(self.server.tokens)}"
        self.server.tokens = {token}  # the one before has run out
        return self.answer(200, token)

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        if self.headers.get("X-aws-ec2-metadata-token") not in self.server.tokens:
            return self.answer(401)
        text = self.server.values.get(self.path)
        return self.answer(404) if text is None else self.answer(200, text)


class Compute(Quiet):
    """Compute Engine's: asked with its header, and kept waiting until a value changes from the one whose tag is given."""

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        if self.headers.get("Metadata-Flavor") != "Google":
            return self.answer(403)
        parts = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(parts.query).items()}
        server = self.server
        if query.get("wait_for_change") == "true":
            with server.changed:
                server.changed.wait_for(
                    lambda: self.tag(parts.path) != query["last_etag"], float(query["timeout_sec"])
                )
        return self.answer(
            200, server.values[parts.path], ETag=self.tag(parts.path), Metadata_Flavor="Google"
        )

    def tag(self, path: str) -> str:
        return f"{hash(self.server.values[path]) & 0xFFFF:x}f"


ACTION, REBALANCE = (
    "/latest/meta-data/spot/instance-action",
    "/latest/meta-data/events/recommendations/rebalance",
)
PREEMPTED, MAINTENANCE = (
    f"/computeMetadata/v1/instance/{name}" for name in ("preempted", "maintenance-event")
)


@pytest.fixture
def imds(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(preemption, "EVERY_S", 0.05)
    with Server(Imds) as server:
        yield server
        server.shutdown()


@pytest.fixture
def compute() -> Iterator[Server]:
    with Server(Compute) as server:
        server.values = {PREEMPTED: "FALSE", MAINTENANCE: "NONE"}
        yield server
        server.shutdown()


def heard_from(cloud: str, server: Server) -> Callable[[], Notice]:
    """Asks all sources of a cloud in threads; the next notice of any."""
    import queue

    found: queue.SimpleQueue[Notice] = queue.SimpleQueue()
    for source in sources(cloud, server.url):
        source.begin()

        def ask(source: preemption.Source = source) -> None:
            try:
                for notice in source.notices():
                    if notice is not None:
                        found.put(notice)
            except OSError:
                pass  # the server is gone with its test

        threading.Thread(target=ask, daemon=True).start()
    return lambda: found.get(timeout=30)


def test_the_notice_of_a_spot_instance_is_heard_once_with_its_time(imds: Server) -> None:
    heard = heard_from("aws", imds)
    while len(imds.asked) < 4:  # 404 so far
        time.sleep(0.01)
    imds.set(ACTION, json.dumps({"action": "terminate", "time": "2026-11-22T08:22:00Z"}))
    assert heard() == Notice("AWS will terminate this spot instance", 1795335720.0)
    imds.set(REBALANCE, json.dumps({"noticeTime": "2026-11-22T08:20:00Z"}))
    assert heard() == Notice("AWS recommends to leave this spot instance", None)
    imds.set(ACTION, json.dumps({"action": "terminate", "time": "2026-11-22T08:24:00Z"}))
    assert heard() == Notice("AWS will terminate this spot instance", 1795335840.0)  # another time: news


def test_a_token_that_has_run_out_is_renewed(imds: Server) -> None:
    heard = heard_from("aws", imds)
    imds.tokens = set()
    imds.set(ACTION, json.dumps({"action": "stop", "time": "2026-11-22T08:22:00Z"}))
    assert heard().why == "AWS will stop this spot instance"
    assert imds.tokens == {"token-0"}


def test_a_preemption_is_heard_as_it_comes_and_a_machine_that_is_moved_runs_on(compute: Server) -> None:
    heard = heard_from("gcp", compute)
    compute.set(MAINTENANCE, "MIGRATE_ON_HOST_MAINTENANCE")
    compute.set(MAINTENANCE, "TERMINATE_ON_HOST_MAINTENANCE")
    first = heard()
    assert first.why == "GCP stops this machine for maintenance"
    compute.set(PREEMPTED, "TRUE")
    second = heard()
    assert second.why == "GCP preempts this machine"
    for notice, left_s in ((first, preemption.MAINTENANCE_S), (second, preemption.PREEMPTED_S)):
        assert notice.deadline is not None
        assert 0 < notice.deadline - time.time() <= left_s
    assert sum("wait_for_change=true" not in path for path in compute.asked) == 2  # at the start


def test_a_notice_that_is_there_at_the_start_is_heard(compute: Server) -> None:
    compute.values[PREEMPTED] = "TRUE"
    assert heard_from("gcp", compute)().why == "GCP preempts this machine"


@pytest.mark.parametrize("cloud", ["aws", "gcp"])
def test_where_no_service_answers_nothing_is_asked_again(cloud: str) -> None:
    """Also where another server does: it asks for no token, and its answers are not Google's."""

    class Other(Quiet):
        def do_GET(self) -> None:
            self.server.asked.append(self.path)
            self.answer(200, "hello")

    with Server(Other) as other:
        said: list[str] = []
        agent = Agent(sources(cloud, other.url), lambda notice, wait: None, 1.0, said.append)
        assert not any(agent._answers(source) for source in agent._sources)
        assert all("no metadata service answers" in text for text in said)
        asked = len(other.asked)
        assert asked <= preemption.TRIES * len(agent._sources)
        other.shutdown()


def test_the_address_is_configured_and_nothing_else() -> None:
    with raises(problems.CLOUD, got="azure"):
        sources("azure", "http://127.0.0.1:1")
    with raises(problems.METADATA, got="169.254.169.254"):
        sources("aws", "169.254.169.254")


def test_drivers_of_another_machine_are_not_told_to_end() -> None:
    with raises(problems.DRIVERS_ELSEWHERE, got="0123"):
        node_departure.leave(None, "0123", "its pod ends", None, print, wait=False, stop_runs=True)


def test_a_machine_that_is_in_no_cluster_leaves_none(tmp_path: Path) -> None:
    """And starts none of its own for it."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    places = {"XDG_STATE_HOME": str(tmp_path), "RAY_TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-m", "lockstep", "cluster", "leave"],
        env={**kept, **places, "PYTHONPATH": str(ROOT / "platform")}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "no cluster was started on this machine" in done.stderr


AGENT = """
import sys
from lockstep.clusters.preemption import Agent, sources
def leave(notice, wait):
    print(notice.why, round(notice.deadline), wait, flush=True)
agent = Agent(sources("gcp", sys.argv[1]) if len(sys.argv) > 1 else [], leave, 55.0, lambda text: None)
print("ready", "ray" in sys.modules, "torch" in sys.modules, flush=True)
agent.run()
"""


def test_a_notice_and_then_the_end_of_a_pod_are_handed_on_and_nothing_heavy_is_imported(
    compute: Server,
) -> None:
    """SIGTERM is the last notice, and waits until the node is empty."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "platform")}
    agent = subprocess.Popen(
        [sys.executable, "-c", AGENT, compute.url], env=environment, stdout=subprocess.PIPE, text=True
    )
    assert agent.stdout is not None
    try:
        assert agent.stdout.readline() == "ready False False\n"
        compute.set(PREEMPTED, "TRUE")
        why, deadline, wait = agent.stdout.readline().rsplit(" ", 2)
        assert (why, wait) == ("GCP preempts this machine", "False\n")
        assert int(deadline) > time.time()
        agent.send_signal(signal.SIGTERM)
        why, deadline, wait = agent.stdout.readline().rsplit(" ", 2)
        assert (why, wait) == ("this node is told to end", "True\n")
        assert 40 < int(deadline) - time.time() <= 56
        assert agent.wait(30) == 0
    finally:
        agent.kill()
        agent.wait()
        agent.stdout.close()
