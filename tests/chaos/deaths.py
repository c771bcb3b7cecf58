"""Each part of a run is killed at each stage of it, once, and what the command, the record and MLflow then say is checked.

    python -m tests.chaos.deaths --rounds 100 --seed 1

The parts and the stages come in turn; the moment within a stage follows from the seed. A run that can go on must finish. Any
other must end its command with one line and exit code 1, and be FAILED in MLflow, with an error.txt, within a minute of the kill.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from itertools import product
from pathlib import Path
from typing import NamedTuple

import psutil

from lockstep.training.worker_environment import WORKER_ENVIRONMENT
from tests.ports import free_port
from tests.processes import named

ROOT = Path(__file__).parents[2]

LIMIT_S = 60.0
"""How long after the kill the store may still have another status than the right one."""

STEPS = 60

STAGES = ("starting", "created", "training", "saved", "last step")
"""The command was given; the run exists; steps are recorded; a checkpoint is whole; the last step is recorded, and the end is not."""


class Part(NamedTuple):
    """A part of a run: words in its command line, and whether the run goes on without it."""

    words: tuple[str, ...]
    goes_on: bool
    local: bool = False
    sweep: bool = False
    joined: bool = False
    """On a cluster that another command has started."""


PARTS: Mapping[str, Part] = {
    "raylet": Part(("raylet/raylet",), False),
    "gcs_server": Part(("gcs/gcs_server",), False),
    "driver": Part(("lockstep", "train"), False),
    "recorder": Part(("ray::RecorderActor",), True),
    "mailbox": Part(("ray::Mailbox",), True),
    "worker": Part(("RayTrainWorker",), True),
    "fork server": Part(("warm_server", "serve_ahead"), True),
    "guardian": Part(("driver.guardian",), True),
    "local trainer": Part(("lockstep", "train"), False, local=True),
    "local recorder": Part(("writer_process",), False, local=True),
    "local guardian": Part(("driver.guardian",), True, local=True),
    "sweep's raylet": Part(("raylet/raylet",), False, sweep=True),
    "sweep's gcs_server": Part(("gcs/gcs_server",), False, sweep=True),
    "sweep's driver": Part(("lockstep", "sweep"), False, sweep=True),
    "sweep's recorders": Part(("ray::RecordersActor",), False, sweep=True),
    "sweep's trial": Part(("ray::ResourceTrainable",), True, sweep=True),
    "sweep's guardian": Part(("driver.guardian",), True, sweep=True),
    "joined raylet": Part(("raylet/raylet",), False, joined=True),
    "joined gcs_server": Part(("gcs/gcs_server",), False, joined=True),
    "joined driver": Part(("lockstep", "train"), False, joined=True),
    "sweep's joined raylet": Part(("raylet/raylet",), False, sweep=True, joined=True),
    "sweep's joined gcs_server": Part(("gcs/gcs_server",), False, sweep=True, joined=True),
}


@contextmanager
def cluster(environment: Mapping[str, str]) -> Iterator[tuple[str, list[psutil.Process]]]:
    """A cluster as `ray start` makes one, on loopback and in a folder of its own: its address and its processes."""
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        address = f"127.0.0.1:{free_port()}"
        words = [
            "--head",
            "--node-ip-address=127.0.0.1",
            f"--port={address.partition(':')[2]}",
            "--num-cpus=2",
        ]
        words += ["--include-dashboard=false", "--dashboard-agent-listen-port=0", f"--temp-dir={folder}"]
        subprocess.run(
            [str(Path(sys.executable).parent / "ray"), "start", *words],
            env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True,
        )  # fmt: skip
        try:
            yield address, named(folder, among=psutil.process_iter())
        finally:
            for process in named(folder, among=psutil.process_iter()):
                with suppress(psutil.NoSuchProcess):
                    process.kill()


class Death(NamedTuple):
    """What one kill came to."""

    part: str
    stage: str
    problem: str
    """What is wrong; empty if nothing is."""
    told: str


def command(folder: Path, *, local: bool = False, sweep: bool = False, address: str = "local") -> list[str]:
    settings = {
        "job.use": "tests.cluster.broken_jobs:SlowDigits",
        "job.params": "{width: 8, pause_s: 0.02}",
        "length": f"{{steps: {STEPS}}}",
        "checkpoint.every.steps": "10",
        "checkpoint.storage": f"{folder}/runs",
    }
    if sweep:
        words = ["sweep", "jobs/digits/sweep.yaml", "trials=2", "concurrency=1"]
        words += [f"spec.{name}={value}" for name, value in settings.items()]
    else:
        words = ["train", "jobs/digits/train.yaml", *(f"{name}={value}" for name, value in settings.items())]
        words += ["workers.max=2", "workers.min=1"]
    where = ["--local"] if local else ["--address", address]
    words += ["--notify", f"cat >> '{folder}/notified'; echo >> '{folder}/notified'"]
    return [sys.executable, "-m", "lockstep", *words, *where, "--uri", f"sqlite:///{folder}/mlflow.db"]


def notified(folder: Path) -> list[str]:
    """The events of which the user's command was told, in order."""
    path = folder / "notified"
    return [json.loads(line)["event"] for line in path.read_text().splitlines()] if path.exists() else []


def reached(folder: Path, stage: str) -> bool:
    """Whether a run, or a trial of a sweep, has come to a stage."""
    texts = [path.read_text(errors="replace") for path in folder.glob("runs/*/journal.jsonl")]
    match stage:
        case "starting":
            return True
        case "created":
            words = '{"started"'
            if list(folder.glob("runs/*/sweep.yaml")):
                return True
        case "training":
            words = '{"step":[5,'
        case "saved":
            return bool(list(folder.glob("runs/*/step-*/manifest.json")))
        case _:
            words = f'{{"step":[{STEPS},'
    return any(words in text for text in texts)


def targets(
    driver: psutil.Process, words: tuple[str, ...], elsewhere: list[psutil.Process]
) -> list[psutil.Process]:
    with suppress(psutil.NoSuchProcess):
        if words[0] == "lockstep":
            return [driver]
        return named(*words, among=[*driver.children(recursive=True), *elsewhere])
    return []


def statuses(folder: Path) -> list[str]:
    """Those that the store has; none where it is not made yet. Opened to write: who was killed within a transaction left it to the next reader to undo."""
    import sqlite3

    database = folder / "mlflow.db"
    if not database.exists():
        return []
    with closing(sqlite3.connect(f"file:{database}?mode=rw", uri=True, timeout=60)) as connection:
        try:
            return [row[0] for row in connection.execute("select status from runs")]
        except sqlite3.OperationalError as error:
            if "no such table" not in str(error):
                raise
            return []


def kill(folder: Path, part: str, stage: str, draw: random.Random) -> Death:
    """Kill a part at a stage of a run of its own."""
    folder.mkdir()
    environment = {
        **os.environ,
        **WORKER_ENVIRONMENT,
        "PYTHONPATH": os.pathsep.join([str(ROOT / "platform"), str(ROOT)]),
    }
    if not PARTS[part].joined:
        return _kill(folder, part, stage, draw, environment, "local", [])
    environment |= {"RAY_AUTH_MODE": "disabled", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
    with cluster(environment) as (address, processes):
        return _kill(folder, part, stage, draw, environment, address, processes)


def _kill(
    folder: Path,
    part: str,
    stage: str,
    draw: random.Random,
    environment: Mapping[str, str],
    address: str,
    elsewhere: list[psutil.Process],
) -> Death:
    target = PARTS[part]
    words = command(folder, local=target.local, sweep=target.sweep, address=address)
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(words, cwd=ROOT, env=environment, stdout=log, stderr=log)
    driver = psutil.Process(process.pid)
    until = time.monotonic() + 240
    while not reached(folder, stage) and process.poll() is None:
        assert time.monotonic() < until, (folder / "log").read_text()[-2000:]
        time.sleep(0.02)
    time.sleep(draw.uniform(0.5, 6.0) if stage == "starting" else draw.uniform(0.0, 0.4))
    while not (victims := targets(driver, target.words, elsewhere)) and process.poll() is None:
        time.sleep(0.02)
    if process.poll() is not None:
        return Death(part, stage, "", "the run had ended before the kill")
    with suppress(psutil.NoSuchProcess):
        draw.choice(victims).send_signal(signal.SIGKILL)
    killed_at, run_there = time.monotonic(), bool(statuses(folder))
    try:
        code = process.wait(240)
    except subprocess.TimeoutExpired:
        process.kill()
        return Death(part, stage, "the command does not end", "")
    ended_s = time.monotonic() - killed_at
    until = max(killed_at + LIMIT_S, time.monotonic() + 5.0)
    while wrong := list(problems(folder, part, stage, code, run_there=run_there)):
        if time.monotonic() > until:
            break
        time.sleep(0.2)
    seconds, found = time.monotonic() - killed_at, ",".join(statuses(folder)) or "no run"
    told = f"exit code {code} after {ended_s:.0f} s, {found} after {seconds:.0f} s"
    return Death(part, stage, "; ".join(wrong), told)


def problems(folder: Path, part: str, stage: str, code: int, *, run_there: bool) -> Iterator[str]:
    """What is wrong with how a run ended."""
    found, log = statuses(folder), (folder / "log").read_text(errors="replace")
    if "RUNNING" in found:
        yield "MLflow has RUNNING"
    finished = set(found) == {"FINISHED"}
    of_the_driver = part in ("driver", "local trainer", "sweep's driver", "joined driver")
    if finished:
        # The end was recorded before the kill; what is lost is the command's own answer, or the rest of the record. Where Ray's own process died as the last
        # step was taken, the recorder may write so after the command, which ends with its cluster and says what died.
        told = (
            "had ended before, as its record says" in log
            or "record: the process that writes it has ended" in log
            or (part.endswith(("raylet", "gcs_server")) and re.search(r"^lockstep: .+", log, re.MULTILINE))
        )
        if code != 0 and not of_the_driver and not told:
            yield f"FINISHED, and exit code {code}"
        return
    if "Traceback (most recent call last)" in log:
        yield "a traceback"
    if PARTS[part].goes_on and run_there:
        yield "the run did not go on"
    wanted = [-signal.SIGKILL] if of_the_driver else [1]
    if part.split()[-1] in ("raylet", "gcs_server") and stage == "starting":
        wanted.append(
            -signal.SIGKILL
        )  # while the driver connects, Ray may hold Python's lock: its guardian ends it
    if code not in wanted:
        yield f"exit code {code}, wanted {wanted}"
    if not of_the_driver and not re.search(r"^lockstep: .+", log, re.MULTILINE):
        yield "no line"
    ended = [path.parent for path in folder.glob("runs/*/error.txt")]
    if found and not ended:
        yield "no error.txt"
    if ended and notified(folder).count("failure") != 1:
        yield f"the user's command was told {notified(folder)}"
    if PARTS[part].sweep and found and not any((path / "sweep.yaml").exists() for path in ended):
        yield "no error.txt of the sweep"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--parts", default=",".join(PARTS), help="the parts, with commas between them")
    parser.add_argument("--stages", default=",".join(STAGES), help="the stages, with commas between them")
    given = parser.parse_args()
    pairs = list(product(given.parts.split(","), given.stages.split(",")))
    random.Random(given.seed).shuffle(pairs)
    wrong = 0
    with tempfile.TemporaryDirectory(prefix="lockstep-deaths-", ignore_cleanup_errors=True) as name:
        for number in range(given.rounds):
            part, stage = pairs[number % len(pairs)]
            death = kill(Path(name, str(number)), part, stage, random.Random(f"{given.seed} {number}"))
            wrong += bool(death.problem)
            print(
                f"{number} {death.part} killed, {death.stage}: {death.told}: {death.problem or 'as it must be'}",
                flush=True,
            )
            if death.problem:
                print(Path(name, str(number), "log").read_text(errors="replace")[-1500:], flush=True)
    print(f"{given.rounds} kills; wrong ends: {wrong or 'none'}")
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()
