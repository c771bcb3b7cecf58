"""Several simulated machines, each with a Ray node of its own, on a switch whose links can be cut one by one. The head's GCS may keep its state in a real Redis."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from lockstep.clusters.authentication import write_token
from tests.network import WIRE, ip, switched
from tests.processes import named

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
PORT = 6399
REDIS_PORT = 6401


def wait_for_nodes(on: list[str], address: str, count: int, environment: Mapping[str, str]) -> None:
    """Wait until so many nodes have joined the cluster at `address`; `on` is the command that runs another on a machine of it."""
    program = (
        f"import ray, time; ray.init('{address}', log_to_driver=False)\n"
        f"while sum(n['Alive'] for n in ray.nodes()) < {count}: time.sleep(0.3)"
    )
    until = time.monotonic() + 120
    while True:
        done = subprocess.run(
            [*on, sys.executable, "-c", program],
            env=environment, capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        if done.returncode == 0:
            return
        assert time.monotonic() < until, done.stderr[-2000:]


class Machines:
    """Machine 0 has the head, which has no worker; each of the others has one CPU."""

    def __init__(
        self,
        names: Sequence[tuple[str, str]],
        folder: Path,
        settings: Mapping[str, str],
        *,
        redis: bool,
    ) -> None:
        self.names = [name for name, _ in names]
        self.addresses = [address for _, address in names]
        self.folder, self.redis = folder, redis
        self.nodes: dict[int, subprocess.Popen[bytes]] = {}
        self.others: list[subprocess.Popen[bytes]] = []
        self.booted: list[subprocess.Popen[bytes]] = []
        self._inside: list[int] = []
        """The first process of each machine."""
        token = folder / "token"
        write_token(token)
        kept = {
            name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "LOCKSTEP_"))
        }
        self.environment = {
            **kept,
            "PYTHONPATH": os.pathsep.join([str(ROOT / "platform"), str(ROOT)]),
            "PYTHONHASHSEED": "0",
            "MKL_CBWR": "AUTO",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(token),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_raylet_start_wait_time_s": "120",  # of 30 s: three nodes that start on two busy cores take longer
            "RAY_TMPDIR": str(folder / "ray"),
            "GLOO_SOCKET_IFNAME": WIRE,
            **settings,
        }
        if redis:
            self.environment |= {
                "RAY_REDIS_ADDRESS": f"127.0.0.1:{REDIS_PORT}",
                "RAY_external_storage_namespace": "lockstep",
            }

    @property
    def address(self) -> str:
        return f"{self.addresses[0]}:{PORT}"

    def on(self, machine: int, *words: str) -> list[str]:
        """A command on a machine, which has processes and files of Ray of its own: by them a driver finds the node that it belongs to."""
        inside = str(self._inside[machine])
        return ["nsenter", "--target", inside, "--mount", "--pid", "--net", f"--wdns={ROOT}", *words]

    def _boot(self, machine: int) -> int:
        """The first process of a machine, with which all of its others end."""
        mounted = 'mount --bind "$0" "$1" && echo up && exec sleep infinity'
        places = [str(self.folder / f"ray-{machine}"), str(self.folder / "ray")]
        words = [
            "ip",
            "netns",
            "exec",
            self.names[machine],
            "unshare",
            "--pid",
            "--fork",
            "--mount-proc",
            "--kill-child",
        ]
        booted = subprocess.Popen(
            [*words, "sh", "-c", mounted, *places], stdout=subprocess.PIPE, start_new_session=True
        )
        self.booted.append(booted)
        assert booted.stdout is not None
        assert booted.stdout.readline() == b"up\n"
        (first,) = psutil.Process(booted.pid).children()
        return first.pid

    def start(self) -> None:
        for name in ("ray", *(f"ray-{machine}" for machine in range(len(self.names)))):
            (self.folder / name).mkdir()
        self._inside += [self._boot(machine) for machine in range(len(self.names))]
        for (
            name
        ) in self.names:  # Ray finds out which of the nodes is a driver's own by the way to the outside
            ip("-n", name, "route", "add", "default", "dev", WIRE)
        if self.redis:
            words = [
                "redis-server",
                "--bind",
                "127.0.0.1",
                "--port",
                str(REDIS_PORT),
                "--save",
                "",
                "--dir",
                str(self.folder),
            ]
            with Path(self.folder, "redis.log").open("wb") as log:
                self.others.append(
                    subprocess.Popen(self.on(0, *words), stdout=log, stderr=log, start_new_session=True)
                )
        self.start_head()
        self._wait_until_started(0)
        for machine in range(1, len(self.names)):
            self._node(machine, f"--address={self.address}", "--num-cpus=1")
            self._wait_until_started(machine)
        self.wait_for(len(self.names))

    def start_head(self) -> None:
        self._node(
            0,
            "--head",
            f"--port={PORT}",
            f"--temp-dir={self.folder}/ray",
            "--include-dashboard=false",
            "--num-cpus=0",
        )

    def _node(self, machine: int, *words: str) -> None:
        common = [
            "--object-store-memory=100000000",
            "--block",
            f"--node-ip-address={self.addresses[machine]}",
        ]
        with Path(self.folder, f"node-{machine}.log").open("ab") as log:
            self.nodes[machine] = subprocess.Popen(
                self.on(machine, str(BIN / "ray"), "start", *words, *common),
                env=self.environment, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip

    def _wait_until_started(self, machine: int) -> None:
        log = Path(self.folder, f"node-{machine}.log")
        while "Ray runtime started" not in (text := log.read_text()):
            assert self.nodes[machine].poll() is None, text[-2000:]
            time.sleep(0.1)

    def wait_for(self, count: int) -> None:
        wait_for_nodes(self.on(0), self.address, count, self.environment)

    def kill_node(self, machine: int) -> None:
        """SIGKILL to all that runs on a machine's node."""
        node = self.nodes.pop(machine)
        for process in [*psutil.Process(node.pid).children(recursive=True), psutil.Process(node.pid)]:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        node.wait()

    def power_off(self, machine: int) -> None:
        """All that runs on a machine is gone at once: node, drivers, guardians."""
        psutil.Process(self._inside[machine]).kill()

    def link(self, machine: int, state: str) -> None:
        ip("-n", self.names[machine], "link", "set", WIRE, state)

    def workers(self, machine: int) -> list[psutil.Process]:
        return [*self.named(machine, "ray::RayTrainWorker"), *self.named(machine, "ray::JoiningWorker")]

    def named(self, machine: int, name: str) -> list[psutil.Process]:
        """The processes of a machine's node whose title has this name."""
        return named(name, among=psutil.Process(self.nodes[machine].pid).children(recursive=True))

    def lockstep(self, machine: int, log: Path, *words: str) -> subprocess.Popen[str]:
        """A command on a machine and this cluster; its answer is the file `<log>.json`."""
        words += ("--address", self.address, "--json")
        with log.open("w") as err, log.with_suffix(".json").open("w") as out:
            return subprocess.Popen(
                self.on(machine, sys.executable, "-m", "lockstep", *words),
                env=self.environment, cwd=ROOT, stdout=out, stderr=err, text=True,
            )  # fmt: skip

    def end(self) -> None:
        """A machine ends with its first process."""
        for pid in self._inside:
            with suppress(psutil.NoSuchProcess):
                psutil.Process(pid).kill()
        for each in [*self.booted, *self.nodes.values(), *self.others]:
            each.wait(60)
            if each.stdout is not None:
                each.stdout.close()


@contextmanager
def running(machines: int, *, redis: bool = False, **settings: str) -> Iterator[Machines]:
    """So many machines with their nodes, for the length of a block; `settings` are variables of their environment."""
    folder = Path(tempfile.mkdtemp(prefix="lsm-"))
    with switched(machines, 1000) as names:
        found = Machines(names, folder, settings, redis=redis)
        try:
            found.start()
            yield found
        finally:
            found.end()
            shutil.rmtree(folder, ignore_errors=True)
