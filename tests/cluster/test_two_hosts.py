"""Two simulated hosts: network namespaces with addresses of their own, joined by one link that can be cut."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from lockstep import train
from lockstep.clusters.authentication import write_token
from lockstep.training.worker_environment import MEMORY
from tests.cluster.machines import wait_for_nodes
from tests.network import can_simulate, ip
from tests.processes import named, started_for_exact_runs

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
PORT = 6399
CUT_S = 6.0
SPEC = [
    "jobs/digits/train.yaml", "length.steps=4000", "job.params.width=8", "record.uri=off",
    "workers.min=2", "workers.max=2", "evaluate.every.steps=2000", "checkpoint.every.steps=500",
]  # fmt: skip


class Hosts:
    """Host 1 has the head, host 2 another node; each has one CPU, so two workers are one on each."""

    def __init__(self, state: Path) -> None:
        self.names = [f"lockstep-{os.getpid()}-{number}" for number in (1, 2)]
        self.addresses = ["10.77.7.1", "10.77.7.2"]
        self.folder = Path(tempfile.mkdtemp(prefix="ls2-"))
        self.token = state / "token"
        self.nodes: list[subprocess.Popen[bytes]] = []
        theirs = ("RAY_", "LOCKSTEP_", *MEMORY)  # nodes as others start them
        kept = {name: value for name, value in os.environ.items() if not name.startswith(theirs)}
        self.environment = {
            **kept,
            "PYTHONPATH": str(ROOT / "platform"),
            "PYTHONHASHSEED": "0",
            "MKL_CBWR": "AUTO",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(self.token),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_TMPDIR": str(self.folder),
            "GLOO_SOCKET_IFNAME": "wire",
        }

    def build(self) -> None:
        for name in self.names:
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        ip(
            "-n",
            self.names[0],
            "link",
            "add",
            "wire",
            "type",
            "veth",
            "peer",
            "name",
            "wire",
            "netns",
            self.names[1],
        )
        for name, address in zip(self.names, self.addresses, strict=True):
            ip("-n", name, "address", "add", f"{address}/24", "dev", "wire")
            ip("-n", name, "link", "set", "wire", "up")

    def start(self) -> None:
        common = ["--num-cpus=1", "--object-store-memory=134217728", "--block"]
        self._node(
            0, "--head", f"--port={PORT}", f"--temp-dir={self.folder}/1", "--include-dashboard=false", *common
        )
        self._wait(1)
        self._node(1, f"--address={self.addresses[0]}:{PORT}", *common)
        self._wait(2)

    def _node(self, host: int, *words: str) -> None:
        with Path(self.folder, f"node-{host}.log").open("wb") as log:
            self.nodes.append(
                subprocess.Popen(
                    self.on(
                        host, str(BIN / "ray"), "start", f"--node-ip-address={self.addresses[host]}", *words
                    ),
                    env=self.environment,
                    cwd=ROOT,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            )

    def _wait(self, count: int) -> None:
        wait_for_nodes(self.on(0), f"{self.addresses[0]}:{PORT}", count, self.environment)

    def on(self, host: int, *words: str) -> list[str]:
        return ["ip", "netns", "exec", self.names[host], *words]

    def link(self, state: str) -> None:
        ip("-n", self.names[0], "link", "set", "wire", state)

    def train(self, storage: Path) -> subprocess.Popen[str]:
        words = ["train", *SPEC, f"checkpoint.storage={storage}", "--address", f"{self.addresses[0]}:{PORT}"]
        return subprocess.Popen(
            self.on(0, sys.executable, "-m", "lockstep", *words, "--json"),
            env=self.environment, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def end(self) -> None:
        """End what was started here: the nodes and all below them, then the namespaces."""
        left = [
            process
            for node in self.nodes
            for process in [psutil.Process(node.pid), *psutil.Process(node.pid).children(recursive=True)]
        ]
        for node in self.nodes:
            node.send_signal(signal.SIGTERM)
        psutil.wait_procs(left, timeout=10)
        for process in left:
            if process.is_running():
                process.kill()
        for node in self.nodes:
            node.wait()
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
        shutil.rmtree(self.folder, ignore_errors=True)


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    reason = can_simulate()
    if reason is not None:
        pytest.skip(reason)
    found = Hosts(tmp_path_factory.mktemp("hosts"))
    write_token(found.token)
    try:
        found.build()
        found.start()
        yield found
    finally:
        found.end()


@pytest.mark.exact  # minutes
def test_a_link_that_is_cut_and_restored_in_mid_run_changes_no_bit(hosts: Hosts, tmp_path: Path) -> None:
    """G1 across two hosts, one worker on each: the link is down for six seconds, and the run ends as if alone."""
    run = hosts.train(tmp_path / "there")
    until = time.monotonic() + 180
    while not list(tmp_path.glob("there/*/environment.json")):
        assert time.monotonic() < until, "the run did not start"
        assert run.poll() is None, run.communicate()
        time.sleep(0.3)
    workers = named("ray::RayTrainWorker")
    assert len(workers) >= 2
    assert all(started_for_exact_runs(worker) for worker in workers)
    time.sleep(2)
    assert run.poll() is None, "it ended before the link could be cut"
    hosts.link("down")
    time.sleep(CUT_S)
    hosts.link("up")
    assert run.poll() is None, "it ended while the link was down"
    out, err = run.communicate(timeout=240)
    assert run.returncode == 0, err[-3000:]
    there = json.loads(out)
    assert there["workers"] == 2
    here = train(ROOT / SPEC[0], [*SPEC[1:], f"checkpoint.storage={tmp_path}/here"], local=True)
    assert there["weights_digest"] == here.weights_digest
    other = train(ROOT / SPEC[0], [*SPEC[1:], "seed=18", f"checkpoint.storage={tmp_path}/other"], local=True)
    assert there["weights_digest"] != other.weights_digest
