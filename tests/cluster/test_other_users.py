"""Another user of the machine, and another machine, beside a run: they read, write, reach and stop nothing of it."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from tests.network import can_simulate, ip

pytestmark = [
    pytest.mark.scenario,
    pytest.mark.skipif(
        os.geteuid() != 0 or shutil.which("setpriv") is None, reason="wants root and setpriv, to be nobody"
    ),
]

SAID = "patient-record-4711"

JOB = f"""
import time
import torch
from torch import nn
from torch.utils.data import TensorDataset
import lockstep

print("{SAID}, as it is imported", flush=True)

class Slow(lockstep.Job):
    def model(self):
        return nn.Linear(4, 2)
    def train_data(self):
        print("{SAID}, as it trains", flush=True)
        return TensorDataset(torch.ones(64, 4), torch.ones(64, dtype=torch.long))
    def loss(self, model, batch):
        time.sleep(0.05)
        return lockstep.Loss(nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="sum"), len(batch[1]))
"""

SPEC = """
name: seen
job: {use: "slow:Slow"}
seed: 1
length: {steps: 2000}
batch: {global: 8, micro: 4}
checkpoint: {every: {steps: 100}}
workers: {min: 2, max: 2}
record: {experiment: seen, private: true}
"""

NOBODY = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")


class Command(NamedTuple):
    """A run in progress."""

    process: subprocess.Popen[str]
    folder: Path
    temporary: Path
    """Its TMPDIR, which all users share."""

    def processes(self) -> list[psutil.Process]:
        own = psutil.Process(self.process.pid)
        return [own, *own.children(recursive=True)]

    def listeners(self) -> dict[tuple[str, int], str]:
        """Where its processes listen, and which does."""
        found = {}
        for process in self.processes():
            for each in process.net_connections("tcp"):
                if each.status == psutil.CONN_LISTEN:
                    found[each.laddr.ip.removeprefix("::ffff:"), each.laddr.port] = process.name()
        return found

    def steps(self) -> int:
        """How many rows its journal has."""
        return sum(path.read_text().count('"step":[') for path in self.folder.glob("runs/*/journal.jsonl"))


@pytest.fixture(scope="module")
def command() -> Iterator[Command]:
    """A run on two workers, on a cluster of its own."""
    # Not in pytest's folder, which other users may not enter; short, for the paths of sockets.
    with tempfile.TemporaryDirectory(prefix="s-", ignore_cleanup_errors=True) as name:
        folder, temporary = Path(name), Path(name, "t")
        folder.chmod(0o755)
        temporary.mkdir()
        temporary.chmod(0o1777)
        squatted = temporary / f"lockstep-{os.getuid()}"
        squatted.mkdir()
        os.chown(squatted, 65534, 65534)
        (folder / "slow.py").write_text(JOB)
        (folder / "seen.yaml").write_text(SPEC)
        variables = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        with (folder / "log").open("w") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "lockstep", "train", "seen.yaml", "--uri", "off"],
                cwd=folder,
                env={**variables, "TMPDIR": str(temporary)},
                stdout=log,
                stderr=log,
                text=True,
                umask=0o022,
            )
        started = Command(process, folder, temporary)
        try:
            until = time.monotonic() + 120
            while started.steps() < 3:
                assert process.poll() is None, (folder / "log").read_text()
                assert time.monotonic() < until, (folder / "log").read_text()
                time.sleep(0.1)
            yield started
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


def as_nobody(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*NOBODY, *words], capture_output=True, text=True, check=False, timeout=60, cwd="/")


def session_folders(run: Command) -> list[Path]:
    return [path for path in run.temporary.rglob("session_2*") if path.is_dir()]


def test_a_squatted_name_in_the_temporary_folder_costs_nothing(command: Command) -> None:
    """Another user had made `lockstep-<uid>` before: the run trains, in another folder."""
    assert command.steps() > 0
    assert not any(Path(command.temporary, f"lockstep-{os.getuid()}").iterdir())


def test_another_user_reads_and_writes_no_file_of_a_run(command: Command) -> None:
    (session,) = session_folders(command)
    assert any(SAID in path.read_text(errors="replace") for path in (session / "logs").glob("worker-*.out"))
    assert session.parents[1].stat().st_mode & 0o777 == 0o700, (
        "Ray opens its own folders: this one is the gate"
    )
    for path in (session, session / "logs", session / "sockets"):
        assert as_nobody("ls", str(path)).returncode != 0
        assert as_nobody("touch", f"{path}/x").returncode != 0
    assert as_nobody("mv", f"{session}/sockets/raylet", f"{session}/sockets/raylet.real").returncode != 0
    for root in (command.temporary, command.folder / "runs", Path("/dev/shm")):
        assert as_nobody("grep", "-rls", SAID, str(root)).stdout == "", root


def test_what_workers_print_is_readable_to_their_user_alone(command: Command) -> None:
    """In a cluster that somebody else started their logs would lie in a folder that all users may enter."""
    (session,) = session_folders(command)
    printed = [path for path in (session / "logs").glob("worker-*.out") if SAID in path.read_text()]
    assert [path.stat().st_mode & 0o777 for path in printed] == [0o600] * len(printed)


CONNECT = """
import socket, sys
for name in sys.argv[1:]:
    path = name.replace("@", chr(0), 1)
    with socket.socket(socket.AF_UNIX) as it:
        it.settimeout(5)
        try:
            it.connect(path)
            it.sendall(b"x" * 64)
            print(name, "answers" if it.recv(64) else "hangs up")
        except PermissionError:
            print(name, "denies")
        except OSError:
            print(name, "hangs up")
"""


def test_no_socket_of_the_machine_answers_another_user(command: Command) -> None:
    """Neither Ray's, which lie in its session's folder, nor those by which workers are forked."""
    (session,) = session_folders(command)
    names = {
        each.laddr
        for process in command.processes()
        for each in process.net_connections("unix")
        if "lockstep" in str(each.laddr)
    }
    abstract = {f"@{str(name)[1:]}" if str(name)[0] in "\0@" else str(name) for name in names}
    assert any(name.startswith("@lockstep-ahead") for name in abstract)
    wanted = [
        *sorted(abstract),
        str(session / "sockets" / "raylet"),
        str(session / "sockets" / "plasma_store"),
    ]
    said = as_nobody("/usr/bin/python3", "-c", CONNECT, *wanted).stdout
    assert said.count("\n") == len(wanted)
    assert "answers" not in said
    assert "denies" in said


UNAUTHENTICATED = """
import sys
from ray._raylet import GcsClient
try:
    print(GcsClient(address=sys.argv[1]).internal_kv_keys(b"", namespace=None))
except Exception as error:
    print("refused:", error)
"""


def test_no_port_of_a_run_answers_without_its_secret(command: Command, tmp_path: Path) -> None:
    """gloo's, which know none, take no connection once the group is formed; Ray's want its token."""
    workers = {where for where, name in command.listeners().items() if "RayTrainWo" in name}
    reached = [where for where in workers if connects(where)]
    assert len(reached) == 2, "the port of Ray's own calls in each worker"
    assert len(workers) > 2, "gloo's listeners were seen"
    (gcs,) = [where for where, name in command.listeners().items() if "gcs_server" in name]
    said = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", UNAUTHENTICATED, f"{gcs[0]}:{gcs[1]}"],
        env={"HOME": str(tmp_path), "PATH": os.environ["PATH"], "RAY_AUTH_MODE": "disabled"},
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert "refused:" in said.stdout, said.stdout + said.stderr


def connects(where: tuple[str, int]) -> bool:
    try:
        socket.create_connection(where, 0.5).close()
    except OSError:
        return False
    return True


@pytest.fixture
def other_machine() -> Iterator[Sequence[str]]:
    """A network namespace that reaches this machine at 10.99.78.1: the words that run a command there."""
    why_not = can_simulate()
    if why_not is not None:
        pytest.skip(why_not)
    name = f"ls{os.getpid()}"
    ip("netns", "add", name)
    try:
        ip("link", "add", f"{name}a", "type", "veth", "peer", "name", f"{name}b", "netns", name)
        ip("addr", "add", "10.99.78.1/24", "dev", f"{name}a")
        ip("link", "set", f"{name}a", "up")
        for words in (("addr", "add", "10.99.78.2/24", "dev", f"{name}b"), ("link", "set", f"{name}b", "up")):
            ip("-n", name, *words)
        yield ("ip", "netns", "exec", name)
    finally:
        ip("netns", "del", name)


REACH = """
import socket, sys
for port in map(int, sys.argv[1:]):
    try:
        socket.create_connection(("10.99.78.1", port), 1).close()
        print(port)
    except OSError:
        pass
"""


def test_another_machine_reaches_no_listener_of_a_run(command: Command, other_machine: Sequence[str]) -> None:
    """One that listens on every interface is reached: the way there is open."""
    with socket.create_server(("", 0)) as control:
        ports = [control.getsockname()[1], *(port for _, port in command.listeners())]
        assert len(ports) > 5
        said = subprocess.run(
            [*other_machine, "/usr/bin/python3", "-c", REACH, *map(str, ports)],
            capture_output=True, text=True, check=True, timeout=120,
        )  # fmt: skip
    assert said.stdout.split() == [str(ports[0])]


def test_the_run_goes_on(command: Command) -> None:
    """After all of that."""
    before = command.steps()
    time.sleep(2)
    assert command.process.poll() is None
    assert command.steps() > before
