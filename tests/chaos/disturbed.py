"""A run that is disturbed again and again, and held against the same run left alone.

    python -m tests.chaos.disturbed --runs digits=10,stdlib_gpt=10 --seed 1

Each run is `lockstep train` on several Ray nodes. At random moments, which follow from the seed, something happens to it; some
of the moments lie within the recovery from what happened before:

* SIGKILL to a worker, to the raylet of a node with workers (another node joins later), to the recorder, or to the driver, in
  which Ray Train's controller lives (then `lockstep resume`);
* a worker or the recorder is stopped for a while, and goes on (`pause`, `recorder-pause`);
* the connections between two workers are cut (`link`);
* the file system of checkpoints and record is full for some seconds (`full`);
* a second command is given on the run, which has to end with exit code 2 (`second`);
* a worker's call fails, or a bit of its weights flips: what `exposed.PLANTED` names.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from lockstep.checkpoint.runs.run_checkpoints import steps_of
from lockstep.record.ledger.live_rows import RowsSoFar
from lockstep.record.ledger.tables import DETERMINISTIC, read_evaluations, read_parquet
from tests.chaos.cluster import ENVIRONMENT, Nodes, started
from tests.chaos.exposed import PLANTED
from tests.chaos.ways import PATIENCE_S, cut_link, fill, one_of, plant, refused_second, shared_out, small_disk

ROOT = Path(__file__).parents[2]

WEIGHTS = {
    "worker": 8, "node": 4, "recorder": 2, "driver": 3, "pause": 3, "recorder-pause": 2, "link": 4, "full": 3, "second": 3,
    **dict.fromkeys(PLANTED, 2),
}  # fmt: skip
"""How often each happens, beside the others."""

ONCE = {"ecc", "nccl"}
"""What leaves a node out where it happens twice: of these, one each in a run, for the nodes are few."""

RUNS = {
    "digits": ["jobs/digits/train.yaml", "job.use=tests.chaos.exposed:ExposedDigits", "job.params={width: 8, pause_s: 0.04}", "checkpoint.every.steps=7"],
    "stdlib_gpt": ["jobs/stdlib_gpt/train.yaml", "job.use=tests.chaos.exposed:ExposedGPT", "job.params={depth: 2, heads: 2, head_width: 16, context: 64, corpus_bytes: 200000}", "evaluate.every.steps=40", "checkpoint.every.steps=10"],
    "forgetful": ["jobs/digits/train.yaml", "job.use=tests.cluster.broken_jobs:Forgetful", "job.params={width: 8, pause_s: 0.04}", "checkpoint.every.steps=25", "rehearsal=off"],
}  # fmt: skip
RUNS["mirrored"] = [*RUNS["digits"], "sharding=optimizer", "faults.mirror=true"]
RUNS["sharded"] = [*RUNS["digits"], "sharding=full", "faults.mirror=true"]
"""Its bits would flip in `after_step`, in the whole weights, of which each worker takes its rows: it gets other faults."""
RUNS["brief"] = [*RUNS["digits"], "length.epochs=9"]
"""Long enough for two kills."""

CONTROL = "forgetful"
"""Loses something with each worker: what does not show here would show nowhere."""

PAST_CHECKPOINT = range(2, 15)
"""So many steps are recorded past its newest checkpoint when something happens to the control: well before the next one, every 25 steps."""

PLACED = [
    "workers.min=1",
    "workers.max=3",
    "faults.max_worker_failures=100",
    "faults.longest_silence_s=60",
]


class Disturbance(NamedTuple):
    """What happens, so many seconds after the run trains again, or after what happened before where it is `soon`."""

    kind: str
    soon: bool
    after_s: float


def plan(seed: int, wanted: str) -> list[Disturbance]:
    """What happens in one run: so much, of any kind, or that of `worker+node`; nothing where the run kills by itself."""
    draw = random.Random(seed)
    if ":" in wanted:
        return []
    if not wanted.isdigit():
        return [Disturbance(kind, False, draw.uniform(0.0, 2.0)) for kind in wanted.split("+")]
    left, kinds = dict(WEIGHTS), list[str]()
    for _ in range(int(wanted)):
        kinds += draw.choices(list(left), list(left.values()))
        if kinds[-1] in ONCE:
            del left[kinds[-1]]
    return [
        Disturbance(kind, n > 0 and draw.random() < 0.25, draw.uniform(0.0, 4.0))
        for n, kind in enumerate(kinds)
    ]


class Disturbed:
    """One run on `nodes`, in `folder`."""

    def __init__(
        self,
        nodes: Nodes,
        folder: Path,
        words: list[str],
        seed: int,
        rates: str | None = None,
        *,
        control: bool = False,
    ) -> None:
        self.nodes, self.folder, self.draw = nodes, folder, random.Random(seed)
        self.control = control
        self.happened: list[str] = []
        self.account: list[dict[str, Any]] = []
        """Its attempts, once it has ended."""
        self.seconds = 0.0
        self.rates = ["--chaos", rates] if rates else []
        self.drivers = 0
        self.faults = folder / "faults"
        self.faults.mkdir()
        if "tests.chaos.exposed" in " ".join(words):
            words = [*words, f"job.params.faults={self.faults}"]
        self.driver = self._start("train", *words, *PLACED, f"checkpoint.storage={folder}/runs")

    def _start(self, *words: str) -> subprocess.Popen[str]:
        self.drivers += 1
        return self._command(self.folder / f"driver-{self.drivers}.log", *words)

    def _command(self, path: Path, *words: str) -> subprocess.Popen[str]:
        log = path.open("w")
        return subprocess.Popen(
            [sys.executable, "-m", "lockstep", *words, *self.rates, "--address", self.nodes.address, "--uri", self.uri, "-v"],
            cwd=ROOT,
            env={**os.environ, **ENVIRONMENT, "PYTHONPATH": os.pathsep.join([str(ROOT / "platform"), str(ROOT)])},
            stdout=log,
            stderr=log,
            text=True,
        )  # fmt: skip

    @property
    def uri(self) -> str:
        return f"sqlite:///{self.folder}/mlflow.db"

    @property
    def run(self) -> Path | None:
        """The run's folder, once it can be resumed."""
        found = list(self.folder.glob("runs/*/spec.yaml"))
        return found[0].parent if found else None

    def attempts(self) -> list[dict[str, Any]]:
        """Those that have begun to train."""
        if self.run is None or not (self.run / "attempts.json").exists():
            return []
        found: list[dict[str, Any]] = json.loads((self.run / "attempts.json").read_text())
        return [attempt for attempt in found if attempt["last_step"]]

    def over(self) -> bool:
        """Whether the driver has ended by itself, and well. One that was killed is resumed, and one that was started on a full disk and said so."""
        code = self.driver.poll()
        if code is None:
            return False
        full = code == 1 and os.strerror(errno.ENOSPC) in self.log().rstrip().rpartition("\n")[2]
        assert code in {0, -9} or full, self.log()
        if code:
            self.resume()
        return code == 0

    def resume(self) -> None:
        assert self.run is not None, "the driver was killed before there was a run"
        self.driver = self._start(*self._resumption())

    def _resumption(self) -> tuple[str, ...]:
        assert self.run is not None
        return "resume", self.run.name, f"checkpoint.storage={self.folder}/runs"

    def disturb(self, wanted: Disturbance) -> bool:
        """Have it happen when its time has come. Whether it could: a run may end before."""
        until = time.monotonic() + PATIENCE_S
        while not wanted.soon and (not self.attempts() or not self.trains()):
            assert time.monotonic() < until, f"it does not train again\n{self.log()}"
            if self.over():
                return False
            time.sleep(0.1)
        time.sleep(wanted.after_s)
        while not self.over():
            what = self._carry_out(wanted.kind) if not self.control or self._would_forget() else None
            if what is not None:
                self.happened.append(f"{wanted.kind}{' soon' if wanted.soon else ''} ({what})")
                return True
            assert time.monotonic() < until, f"{wanted.kind} cannot happen\n{self.log()}"
            time.sleep(0.1)
        return False

    def _would_forget(self) -> bool:
        """Whether a restart now goes on from a checkpoint, and takes steps again that are recorded: else nothing is forgotten, or it does not show."""
        saved = steps_of(f"{self.folder}/runs", self.run.name) if self.run else []
        if self.run is None or not saved:
            return False
        return (
            max((row.step for row in RowsSoFar(self.run).steps()), default=0) - max(saved) in PAST_CHECKPOINT
        )

    def trains(self) -> bool:
        """Whether the newest attempt is one that nothing ended yet."""
        return self.attempts()[-1]["ended"] is None and bool(self.nodes.busy())

    def _carry_out(self, kind: str) -> str | None:
        """Have it happen to one of what there is now: which, or None where there is none."""
        workers = [process for node in self.nodes.nodes for process in self.nodes.workers(node)]
        match kind:
            case "worker":
                return one_of(workers, self.draw, psutil.Process.kill)
            case "recorder":
                return one_of(self.nodes.recorders(), self.draw, psutil.Process.kill)
            case "pause":
                return one_of(workers, self.draw, self._pause)
            case "recorder-pause":
                return one_of(self.nodes.recorders(), self.draw, self._pause)
            case "link":
                return cut_link(workers, self.draw)
            case "node":
                return self._lose_node()
            case "driver":
                return self._lose_driver()
            case "second":
                return self._second()
            case "full":
                return self._fill()
            case _ if kind in PLANTED:
                return self._plant(kind)
        raise ValueError(f"{kind!r} is nothing that can happen; wanted one of {', '.join(WEIGHTS)}")

    def _pause(self, process: psutil.Process) -> None:
        process.suspend()
        try:
            time.sleep(self.draw.uniform(1.0, 8.0))
        finally:
            with suppress(psutil.NoSuchProcess):  # it was replaced meanwhile
                process.resume()

    def _lose_driver(self) -> str | None:
        if self.run is None:
            return None
        self.driver.kill()
        self.driver.wait()
        self.resume()
        return str(self.driver.pid)

    def _lose_node(self) -> str | None:
        busy = self.nodes.busy()
        if not busy:
            return None
        node = self.draw.choice(busy)
        self.nodes.kill(node)
        self.nodes.add()
        return str(node.node_ip_address)

    def _second(self) -> str | None:
        """Give the command that would take the run up: it has to leave a run alone that is alive."""
        if self.run is None:
            return None
        began, log = time.monotonic(), self.folder / "second.log"
        return refused_second(self._command(log, *self._resumption()), self.driver, log, began)

    def _fill(self) -> str:
        fill(self.folder / "runs", self.draw.uniform(1.0, 4.0))
        return "ENOSPC"

    def _plant(self, kind: str) -> str | None:
        return plant(self.faults / kind, self.over, self.log)

    def __enter__(self) -> Disturbed:
        return self

    def __exit__(self, *_: object) -> None:
        self.driver.kill()
        self.driver.wait()

    def finish(self) -> dict[str, Any]:
        """Until it ends: what it came to."""
        until = time.monotonic() + 2 * PATIENCE_S
        while not self.over():
            assert time.monotonic() < until, f"it does not end\n{self.log()}"
            time.sleep(0.2)
        assert self.run is not None
        self.account = self.attempts()
        return outcome(self.run, self.uri)

    def own_kills(self) -> list[str]:
        """What `--chaos` said that it killed."""
        logs = [path.read_text() for path in sorted(self.folder.glob("driver-*.log"))] if self.rates else []
        return re.findall(r"^chaos: (.*) is killed$", "\n".join(logs), re.MULTILINE)

    def told(self, other: list[str]) -> str:
        """The run in a line."""
        attempts = self.account
        return (
            f"{len(self.happened)} disturbances, {attempts[-1]['attempt']} attempts, {self.drivers} drivers, "
            f"{sum(attempt['repeated'] for attempt in attempts)} steps repeated, {self.seconds:.0f} s: "
            f"{'OTHER ' + ', '.join(other) if other else 'the same'}"
        )

    def log(self) -> str:
        return (self.folder / f"driver-{self.drivers}.log").read_text()[-3000:]


def alone(folder: Path, words: list[str]) -> dict[str, Any]:
    """The same run in one process, left alone."""
    uri = f"sqlite:///{folder}/mlflow.db"
    folder.mkdir(parents=True)
    subprocess.run(
        [sys.executable, "-m", "lockstep", "train", *words, f"checkpoint.storage={folder}/runs", "--local", "--uri", uri],
        cwd=ROOT, env={**os.environ, **ENVIRONMENT, "PYTHONPATH": os.pathsep.join([str(ROOT / "platform"), str(ROOT)])},
        check=True, capture_output=True,
    )  # fmt: skip
    (spec,) = folder.glob("runs/*/spec.yaml")
    return outcome(spec.parent, uri)


def outcome(run: Path, uri: str) -> dict[str, Any]:
    """All that has to be the same: digest, deterministic columns, evaluations, and MLflow's history of each metric.

    Each step is once in a history, unless a bit flipped: MLflow deletes no point, and of the steps that were taken again the newest counts.
    """
    from mlflow import MlflowClient

    client = MlflowClient(uri)
    found = client.get_run(run.name)
    keys = [key for key in found.data.metrics if not key.startswith(("perf/", "system/", "layers/"))]
    histories: dict[str, list[tuple[int, str]]] = {}
    for key in sorted(keys):
        points = sorted(client.get_metric_history(run.name, key), key=lambda one: one.timestamp)
        newest = {one.step: repr(one.value) for one in points}
        assert len(points) == len(newest) or found.data.tags.get("lockstep.corrupted"), (
            f"{key} has a step twice"
        )
        histories[key] = sorted(newest.items())
    return {
        "status": found.info.status,
        "weights_digest": found.data.tags["lockstep.weights_digest"],
        "violation": found.data.tags.get("lockstep.violation", ""),
        "columns": [
            [repr(getattr(row, name)) for name in DETERMINISTIC]
            for row in read_parquet(run / "ledger.parquet")
        ],
        "evaluations": [
            (row.step, repr(row.metrics)) for row in read_evaluations(run / "evaluations.parquet")
        ],
        "histories": histories,
    }


def wrong_end(account: list[dict[str, Any]], other: list[str], *, control: bool) -> str:
    """Why a run did not end as it must, or nothing. Its `account` are its attempts, `other` is what differs from the run left alone."""
    if not control:
        return f"OTHER {', '.join(other)}" if other else ""
    if not any(attempt["from_step"] and not attempt["in_memory"] for attempt in account):
        return "a control that can show nothing: no attempt began from a checkpoint"
    return "" if other else "a control that shows nothing: it should differ"


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """What is not the same."""
    return [name for name in one if one[name] != other[name]]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--runs",
        default="digits=9,digits=8,mirrored=8,sharded=worker+node,stdlib_gpt=9,stdlib_gpt=8,stdlib_gpt=8,forgetful=driver",
        help="jobs, each with how much happens, or with what: digits=worker+node, or with the rates of --chaos: digits=worker:0.02+driver:0.01",
    )
    parser.add_argument(
        "--faults",
        type=int,
        help="so much in all, in runs of these jobs, and the control; in place of --runs",
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--nodes", type=int, default=3)
    given = parser.parse_args()
    runs = (
        given.runs if given.faults is None else shared_out(given.faults, ("digits", "stdlib_gpt", "mirrored"))
    )
    if given.faults is not None:
        runs += f",{CONTROL}=driver"
    count, wrong = 0, []
    with tempfile.TemporaryDirectory(prefix="lockstep-chaos-") as name, started(given.nodes) as nodes:
        references: dict[str, dict[str, Any]] = {}
        for number, entry in enumerate(runs.split(",")):
            job, wanted = entry.split("=")
            if job not in references:
                references[job] = alone(Path(name, f"{job}-alone"), RUNS[job])
            run, found = disturbed(
                nodes, Path(name, f"{number}-{job}"), job, wanted, given.seed * 1000 + number
            )
            count += len(run.happened)
            other = differences(found, references[job])
            told = run.told(other)
            why = wrong_end(run.account, other, control=job == CONTROL)
            if why:
                wrong.append(number)
            print(f"run {number} {job}: {told}", flush=True)
            if why and job == CONTROL:
                print(f"  {why}", flush=True)
    print(f"{count} disturbances; runs that did not end as they must: {wrong or 'none'}")
    raise SystemExit(bool(wrong))


def disturbed(
    nodes: Nodes, folder: Path, job: str, wanted: str, seed: int
) -> tuple[Disturbed, dict[str, Any]]:
    """A run to which happened what is `wanted`, and which has ended, and what it came to."""
    folder.mkdir()
    began, coming = time.monotonic(), plan(seed, wanted)
    rates = wanted.replace("+", ",") if ":" in wanted else None
    with ExitStack() as stack:
        if any(one.kind == "full" for one in coming):
            stack.enter_context(small_disk(folder / "runs"))
        run = stack.enter_context(Disturbed(nodes, folder, RUNS[job], seed, rates, control=job == CONTROL))
        for one in coming:
            if run.disturb(one):
                print(f"  {time.monotonic() - began:6.1f} s {run.happened[-1]}", flush=True)
        found = run.finish()
        run.happened += run.own_kills()
    run.seconds = time.monotonic() - began
    return run, found


if __name__ == "__main__":
    main()
