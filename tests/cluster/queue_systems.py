"""What Kueue, Volcano and Slurm do to the processes of a run, on this machine, with the files in `cluster/`.

Of their interfaces there is what reaches a run: it is started as the file says, gets signals, is killed when its grace is over, is stopped
and continued, and is started again. What a file says of an exit code is read as the controller reads it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from lockstep.training.worker_environment import WORKER_ENVIRONMENT
from tests.unit.clusters.schemas import CLUSTER, ROOT, documents

MARK = "OF_THIS_CONTAINER"


class Processes:
    """A container or a step of Slurm: a first process and all that it has started, in whatever session."""

    def __init__(self, words: Sequence[str], folder: Path, environment: Mapping[str, str] = {}) -> None:
        kept = {
            name: value
            for name, value in os.environ.items()
            if name not in WORKER_ENVIRONMENT and not name.startswith(("RAY_", "LOCKSTEP_", "SLURM_"))
        }
        self.mark = uuid.uuid4().hex
        self._sockets = tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True)  # short paths
        self.output = folder / "output.txt"
        with self.output.open("a") as output:
            self.first = subprocess.Popen(
                words, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
                env={
                    **kept, "PYTHONPATH": f"{ROOT / 'platform'}:{ROOT}", "RAY_TMPDIR": self._sockets.name, MARK: self.mark, **environment,
                },
            )  # fmt: skip

    def all(self) -> list[psutil.Process]:
        """Those that run, the first one too."""
        members = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.environ().get(MARK) == self.mark and process.status() != psutil.STATUS_ZOMBIE:
                    members.append(process)
        return members

    def send(self, number: signal.Signals, processes: Sequence[psutil.Process] | None = None) -> None:
        for process in self.all() if processes is None else processes:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def wait_for(self, happened: Callable[[], object], limit_s: float = 300.0) -> None:
        """Wait until something has happened while the first process runs."""
        until = time.monotonic() + limit_s
        while not happened():
            assert self.first.poll() is None, self.output.read_text()
            assert time.monotonic() < until, self.output.read_text()
            time.sleep(0.05)

    def end(self, grace_s: float) -> int:
        """SIGTERM to the first process, and SIGKILL to all when the grace is over. The exit code, as Kubernetes has it."""
        self.first.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            self.first.wait(grace_s)
        return self.kill()

    def kill(self) -> int:
        while left := self.all():
            self.send(signal.SIGKILL, left)
            time.sleep(0.05)
        code = self.first.wait()
        return code if code >= 0 else 128 - code

    def stop_and_continue(self, seconds: float, processes: Sequence[psutil.Process] | None = None) -> None:
        """As `scontrol suspend` and `resume`: SIGTSTP, which a process may handle, then SIGSTOP; later SIGCONT."""
        processes = self.all() if processes is None else processes
        self.send(signal.SIGTSTP, processes)
        time.sleep(0.5)
        self.send(signal.SIGSTOP, processes)
        time.sleep(seconds)
        self.send(signal.SIGCONT, processes)


class Pod:
    """The pod of a Job in `cluster/`, as often as it is created; `changes` come after the arguments that the file has."""

    def __init__(self, manifest: str, folder: Path, changes: Sequence[str]) -> None:
        (self.job,) = documents(CLUSTER / manifest)
        spec = self.job["spec"]
        self.template: dict[str, Any] = (spec.get("tasks") or [spec])[0]["template"]
        (container,) = self.template["spec"]["containers"]
        program, *words = [*container["command"], *container.get("args", [])]
        assert program == "lockstep"
        here = {"/shared": str(folder), "http://mlflow:5000": f"sqlite:///{folder}/mlflow.db"}
        for there, instead in here.items():
            words = [word.replace(there, instead) for word in words]
        self._words, self._folder = [sys.executable, "-m", "lockstep", *words, *changes], folder
        self.processes: Processes

    @property
    def grace_s(self) -> float:
        return float(self.template["spec"]["terminationGracePeriodSeconds"])

    def create(self) -> Processes:
        """What the controller of Jobs does where Kueue admits the Job, and Volcano where there is room."""
        self.processes = Processes(self._words, self._folder)
        return self.processes


def after_failure(job: Mapping[str, Any], code: int, *, evicted: bool = False) -> str:
    """What follows in a `batch/v1` Job whose pod has ended with a code: Ignore, FailJob, or Count, as one of `backoffLimit`."""
    for rule in job["spec"]["podFailurePolicy"]["rules"]:
        if evicted and any(each["type"] == "DisruptionTarget" for each in rule.get("onPodConditions", [])):
            return str(rule["action"])
        codes = rule.get("onExitCodes")
        if codes is not None and (code in codes["values"]) == (codes["operator"] == "In"):
            return str(rule["action"])
    return "Count"


def action(job: Mapping[str, Any], event: str, code: int = 0) -> str:
    """What follows an event in a Job of Volcano: its first rule for the event or the code."""
    rules = job["spec"]["policies"]
    return next(
        str(rule["action"])
        for rule in rules
        if rule.get("event") == event or rule.get("exitCode") == code != 0
    )


class SlurmJob:
    """A batch script under `slurmctld`: `srun` and `scontrol` are programs beside it."""

    def __init__(self, script: Path, folder: Path, words: Sequence[str]) -> None:
        self._script, self._folder, self._words = script, folder, words
        self.starts = 0
        self.asked = folder / "scontrol.txt"
        programs = {
            "srun": 'while [[ "$1" == --* ]]; do shift; done; exec "$@"',
            "lockstep": f'exec "{sys.executable}" -m lockstep "$@"',
            "scontrol": f'echo "$@" >> "{self.asked}"',
        }
        (folder / "bin").mkdir()
        for name, text in programs.items():
            path = folder / "bin" / name
            path.write_text(f"#!/bin/bash\n{text}\n")
            path.chmod(0o755)

    def start(self) -> Processes:
        """As often as the job is queued: Slurm counts that."""
        environment = {
            "PATH": f"{self._folder / 'bin'}:{os.environ['PATH']}",
            "LOCKSTEP_RUNS": str(self._folder / "runs"),
            "SLURM_JOB_ID": "17",
            "SLURM_JOB_NAME": "digits-1",
            "SLURM_CPUS_PER_TASK": "2",
        }
        if self.starts:
            environment["SLURM_RESTART_COUNT"] = str(self.starts)
        self.starts += 1
        self.processes = Processes(["bash", str(self._script), *self._words], self._folder, environment)
        return self.processes

    def _step(self) -> list[psutil.Process]:
        return [process for process in self.processes.all() if process.pid != self.processes.first.pid]

    def near_the_end_of_its_time(self) -> None:
        """`--signal=TERM@…`: to all processes of the steps, and, as under srun, twice. The script goes on."""
        step = self._step()
        for _ in range(2):
            self.processes.send(signal.SIGTERM, step)
            time.sleep(0.01)

    def requeue(self) -> None:
        """What follows `scontrol requeue`: the script is ended, and queued."""
        self.processes.kill()

    def cancel(self, wait_s: float) -> int:
        """`scancel`: SIGTERM to the script too, and SIGKILL to all after KillWait. The script's exit code."""
        self.processes.send(signal.SIGTERM)
        until = time.monotonic() + wait_s
        while self.processes.all() and time.monotonic() < until:
            time.sleep(0.05)
        return self.processes.kill()
