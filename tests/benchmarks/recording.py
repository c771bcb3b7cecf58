"""What recording costs a step: `fit` with its rows going to a real recorder, and not, in turns within one run.

The recorder is the actor that `lockstep train` starts, on a Ray cluster of this benchmark's own; its store is SQLite, a
tracking server, or a server that was killed when training began (`away`). Rounds of three blocks are timed: recording
on, off, off again. Before an on-block as many steps are recorded as it takes for the recorder to be in full swing;
after it training rests until the recorder is idle. On over off is the ratio, off over off the noise (A/A); of both,
the median over the rounds and a 95 % interval of it.

    python -m tests.benchmarks.recording [--quick] [--json FILE] [--only PREFIX]
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import ray
import torch

from lockstep.attempts.event_sender import Sender
from lockstep.attempts.mailbox import start_mailbox, wait_for_run_id
from lockstep.attempts.recorder_actor import start_recorder
from lockstep.checkpoint.runs.run_folder import AttemptOrigin
from lockstep.clusters.ray_settings import RAY_SETTINGS
from lockstep.communication.group import Group
from lockstep.job.loading import load_job
from lockstep.record.events.union import Event, tell_nobody
from lockstep.record.ledger.rows import StepRow
from lockstep.spec.loading import load_spec
from lockstep.training.determinism import WORKER_ENVIRONMENT
from lockstep.training.driver_requests import NoRequests
from lockstep.training.loop import fit
from tests.benchmarks.step_time import Estimate, estimate
from tests.distributed.pool import Pool
from tests.unit.record.server import Server

WARM_UP = 20
LEAD_S, REST_S = 1.5, 3.0
"""A recorder flushes each second, and needs a part of one to write what it has."""


@dataclass(frozen=True)
class Case:
    """One job, one store. `limit` is the ratio wanted."""

    name: str
    store: str
    workers: int
    limit: float
    job: str
    batch: tuple[int, int]


CASES = [
    Case(name, store, workers, limit, job, batch)
    for name, limit, job, batch in (
        ("mlp", 1.05, "tests.benchmarks.mlp:MLP", (256, 128)),
        ("gpt", 1.01, "jobs.stdlib_gpt.job:StdlibGPT", (32, 16)),
    )
    for workers in (1, 2)
    for store in ("sqlite", "server", "away")
]


class Turns(NoRequests):
    """Rank 0's events: rows are sent in the on-blocks alone, and every block is timed."""

    def __init__(self, mailbox: Any, recorder: Any, block_s: float, rounds: int) -> None:
        self.times: list[list[float]] = []
        self.recorder_cpu_s = self.recording_s = 0.0
        self._mailbox, self._recorder = mailbox, recorder
        self._sender = Sender(lambda events: mailbox.tell.remote(1, events))
        self._block_s, self._rounds = block_s, rounds
        self._count = 0
        self._plan: list[tuple[str, int]] = [("warm", WARM_UP)]
        self._began = time.perf_counter()
        self._process: psutil.Process | None = None

    def tell(self, event: Event) -> None:
        if not isinstance(event, StepRow):
            self._sender.tell(event)
            return
        if not self._plan:
            return  # the step in which the run stops
        kind, length = self._plan[0]
        if kind in {"on", "lead"}:
            self._sender.tell(event)
            self._sender.stop()  # the loop asks in every step
        if self._process is None and self._count == 0:
            self._began = time.perf_counter()  # before the first step the run was prepared
        self._count += 1
        if self._count == length:
            self._end(kind, time.perf_counter() - self._began)
            self._begin()

    def _end(self, kind: str, seconds: float) -> None:
        self._plan.pop(0)
        if kind == "warm":
            self._process = psutil.Process(ray.get(self._recorder.__ray_call__.remote(lambda _: os.getpid())))
            wait_for_run_id(self._mailbox)
            self._lay_out(seconds / WARM_UP)
        elif kind in {"on", "off"}:
            self.times[-1].append(seconds / self._count)
        if kind == "on":
            self._sender.close()
            self.recording_s += seconds
            self.recorder_cpu_s += self._cpu_s() - self._cpu_before
            time.sleep(REST_S)

    def _begin(self) -> None:
        self._count = 0
        if self._plan and self._plan[0][0] == "lead":
            self.times.append([])
        if self._plan and self._plan[0][0] == "on":
            self._cpu_before = self._cpu_s()
        self._began = time.perf_counter()

    def _lay_out(self, step_s: float) -> None:
        block, lead = max(3, round(self._block_s / step_s)), max(1, round(LEAD_S / step_s))
        for _ in range(self._rounds):
            self._plan += [("lead", lead), ("on", block), ("off", block), ("off", block)]

    def _cpu_s(self) -> float:
        assert self._process is not None
        times = self._process.cpu_times()
        return float(times.user + times.system)

    def stop(self) -> bool:
        return not self._plan

    def run_id(self) -> str:
        return wait_for_run_id(self._mailbox)

    def memory(self) -> int:
        """Bytes that the recorder's process holds."""
        assert self._process is not None
        return int(self._process.memory_info().rss)


def contest(case: Case, uri: str, folder: str, address: str, block_s: float, rounds: int) -> dict[str, Any]:
    """One worker's part: what rank 0 measured."""
    torch.set_num_threads(1)
    spec = load_spec(
        {
            "job": {"use": case.job},
            "seed": 17,
            "length": {"steps": 1_000_000},
            "batch": {"global": case.batch[0], "micro": case.batch[1]},
            "clip_norm": 1.0,
            "evaluate": {"every": {"steps": 10_000_000}},
            "checkpoint": {"storage": folder, "every": None},
            "record": {"uri": uri, "experiment": "bench"},
        }
    )
    job, group = load_job(spec.job.use, spec.job.params), Group.join(torch.device("cpu"))
    if group.rank > 0:
        fit(spec, job, group, tell_nobody, NoRequests(), AttemptOrigin())
        return {}
    ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    try:
        mailbox = start_mailbox({})
        mailbox.begin.remote(1)
        recorder = start_recorder(spec, {}, None, mailbox)
        recorder.record.remote()
        record = Turns(mailbox, recorder, block_s, rounds)
        fit(spec, job, group, record.tell, record, AttemptOrigin())
        return {
            "times": record.times,
            "memory_mb": record.memory() / 1e6,
            "recorder_cpu": record.recorder_cpu_s / record.recording_s,
        }
    finally:
        ray.shutdown()


def measure(pool: Pool, case: Case, address: str, block_s: float, rounds: int) -> dict[str, Any]:
    """Hold one contest and sum it up."""
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        uri = f"sqlite:///{folder}/mlflow.db"
        if case.store != "sqlite":
            server = stack.enter_context(Server(Path(folder)))
            uri = server.uri
            if case.store == "away":
                kill_when_opened(server, Path(folder))
        told = pool.run(case.workers, contest, case, uri, f"{folder}/runs", address, block_s, rounds)[0]
    times = told.pop("times")
    return {
        **asdict(case),
        **told,
        "rounds": rounds,
        "off_ms": 1e3 * median(off for _, off, _ in times),
        "ratio": asdict(estimate([on / median([off, again]) for on, off, again in times])),
        "a_a": asdict(estimate([again / off for _, off, again in times])),
    }


def kill_when_opened(server: Server, folder: Path) -> None:
    """Kill the server as soon as the run exists."""

    def watch() -> None:
        while not list(folder.glob("runs/*/environment.json")):
            time.sleep(0.05)
        server.kill()

    threading.Thread(target=watch, daemon=True).start()


HEADER = f"{'case':5} {'store':7} {'W':>1} {'step off':>9}   {'on / off [95 %]':21}   {'A/A [95 %]':21}   wanted    recorder"


def line(result: Mapping[str, Any]) -> str:
    ratio = Estimate(**result["ratio"])
    verdict = "ok" if ratio.median <= result["limit"] else "OVER"
    return (
        f"{result['name']:5} {result['store']:7} {result['workers']} {result['off_ms']:6.2f} ms   {ratio}   "
        f"{Estimate(**result['a_a'])}   {verdict:4} {result['limit']:.2f}   {result['recorder_cpu']:.0%} of a core, {result['memory_mb']:.0f} MB"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="short blocks, few rounds")
    parser.add_argument("--json", type=Path, help="write the results here as well")
    parser.add_argument(
        "--only", default="", help="only the cases whose row begins with this, as in 'mlp sqlite 2'"
    )
    options = parser.parse_args(arguments)
    block_s, rounds = (1.5, 6) if options.quick else (2.5, 12)
    chosen = [case for case in CASES if f"{case.name} {case.store} {case.workers}".startswith(options.only)]
    os.environ.update(WORKER_ENVIRONMENT, **RAY_SETTINGS, OMP_NUM_THREADS="1")  # before a worker starts
    print(HEADER)
    results = []
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        ray.init(
            address="local", num_cpus=2, include_dashboard=False, log_to_driver=False,
            logging_level=logging.ERROR, _temp_dir=folder,
        )  # fmt: skip
        address = ray.get_runtime_context().gcs_address
        pool = Pool(max(case.workers for case in chosen))
        try:
            for case in chosen:
                results.append(measure(pool, case, address, block_s, rounds))
                print(line(results[-1]), flush=True)
        finally:
            pool.close()
            ray.shutdown()
    if options.json is not None:
        options.json.write_text(json.dumps({"torch": torch.__version__, "cases": results}, indent=1))


if __name__ == "__main__":
    main()
