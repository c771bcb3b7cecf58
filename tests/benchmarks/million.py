"""A run of a million steps, its record alone: what rank 0 holds, what a save costs at its end, and what its past adds to a restart.

One process tells the rows of a run to a recorder in a process of its own, and saves a small state each thousand steps, as
`fit` does. Then the recorder is killed, and another process takes the run up: until training would begin, and until the record
is compared with the checkpoint. Last, the run ends: ledger and figures are written. Meanwhile the run's heartbeat is watched.
A run of two segments is taken up likewise: by how much the restart of the long one is longer is what the steps before it add.

What counts is processor time, which a busy machine does not change: of rank 0's thread that saves, of its recorder for each
thousand steps, of both for a restart.

    python -m tests.benchmarks.million [--steps N] [--every N] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any

import psutil
import torch

from lockstep.checkpoint.manifest import SharedFile
from lockstep.checkpoint.reader import Checkpoint, load_newest, shared_files
from lockstep.checkpoint.retention import Keep
from lockstep.checkpoint.runs.run_checkpoints import read_shared
from lockstep.checkpoint.runs.run_folder import RunFolder
from lockstep.checkpoint.saver import AsyncSaver, Saved, Share
from lockstep.checkpoint.storage.opening import open_storage
from lockstep.record.events.union import Finished, Segment, Started
from lockstep.record.ledger.history import History, Saving
from lockstep.record.ledger.rows import StepRow
from lockstep.record.ledger.segments import SEGMENT_STEPS
from lockstep.record.recorder import Recorder
from lockstep.spec.fields import Spec
from lockstep.spec.loading import load_spec
from lockstep.training.checkpoints import _sharing

AHEAD = 5_000
"""Rows that may wait for the recorder: a real step takes longer than a row does to record."""


def row(step: int) -> StepRow:
    """A step whose values need all of their bits."""
    noise = math.sin(step)
    return StepRow(
        step, step // 1000, 64 * step, 2.0 + noise / 7, 64.0, {"entropy": noise / 3}, 1e-3 / step,
        1.0 + noise / 9, 1.0, 1.0, False, 1e-4, 1e-3 + abs(noise) / 1e4, 1.7e9 + step / 100, 1,
    )  # fmt: skip


class Timed:
    """The rows of a save, and the processor's time from their first byte until the segments before them are written, in its thread."""

    def __init__(self, rows: Saving) -> None:
        self._steps, self._others = rows.blocks()["steps"], rows.blocks()["evaluations"]
        self._sharing = _sharing(rows)
        self._began = self.cpu_s = 0.0

    def blocks(self) -> dict[str, Callable[[], bytes]]:
        def steps() -> bytes:
            self._began = time.thread_time()
            return self._steps()

        return {"steps": steps, "evaluations": self._others}

    def sharing(self, share: Share) -> Sequence[SharedFile]:
        found = self._sharing(share)
        self.cpu_s = time.thread_time() - self._began
        return found


class Watch:
    """The longest that a run's heartbeat stood still, in seconds."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "run.json"
        self.longest_s, self._beat, self._since = 0.0, "", time.monotonic()
        self.over = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()

    def _look(self) -> None:
        while not self.over.wait(0.2):
            beat = str(json.loads(self._file.read_text())["tags"].get("lockstep.heartbeat"))
            now = time.monotonic()
            self.longest_s = max(self.longest_s, now - self._since)
            if beat != self._beat:
                self._beat, self._since = beat, now

    def close(self) -> float:
        self.over.set()
        self._thread.join()
        return round(self.longest_s, 1)


def spec_in(storage: Path) -> Spec:
    return load_spec(
        {
            "name": "million",
            "job": {"use": "jobs.digits.job:Digits"},
            "record": {"uri": "off"},
            "checkpoint": {"storage": str(storage)},
        }
    )


def recorder_of(spec: Spec, run_id: str | None) -> Recorder:
    fetch = partial(read_shared, spec.checkpoint.storage)
    return Recorder(spec, run_id=run_id, apart=True, fetch=fetch)


def trained(storage: Path, steps: int, every: int) -> dict[str, Any]:
    """Tell and save the whole run, and kill its recorder."""
    spec = spec_in(storage)
    recorder = recorder_of(spec, None)
    recorder.start()
    run_id = recorder.run_id()
    recorder.tell(Started({"identity": "million"}))
    watch = Watch(spec.folder / run_id)
    run = RunFolder.create(open_storage(spec.checkpoint.storage), run_id)
    saves: list[Saved] = []
    saver = AsyncSaver(run.claim(), keep=Keep(last=2), on_saved=saves.append)
    history, nbytes, pauses, cpu = History(), [], list[float](), list[float]()
    recorded = [cpu_of(recorder)]
    state = {"weight": torch.zeros(1000)}
    process, before = psutil.Process(), 0
    most, known = 0, set[str]()
    began = time.monotonic()
    for step in range(1, steps + 1):
        one = row(step)
        history.add(one)
        recorder.tell(one)
        if step % every:
            continue
        while recorder.state.journaled < step - AHEAD:
            time.sleep(0.01)
        rows = Timed(history.saving())
        pauses.append(sum(saver.save(step, {"model": state, **rows.blocks()}, None, rows.sharing)))
        saver.wait()
        cpu.append(rows.cpu_s)
        recorded.append(cpu_of(recorder))
        assert saver.failure is None, saver.failure
        checkpoint = Checkpoint.of(run, step)
        manifest = checkpoint.manifest()
        new = [entry for entry in manifest.shared if entry.name not in known]
        known |= {entry.name for entry in new}
        nbytes.append(manifest.size + sum(entry.size for entry in new) + len(manifest.encode()))
        before = before or process.memory_info().rss  # with all that the first save imports
        most = max(most, process.memory_info().rss)
    while recorder.state.journaled < steps:
        time.sleep(0.05)
    seconds = time.monotonic() - began
    late_s = watch.close()
    os.kill(recorder._writer._process.pid, 9)  # type: ignore[union-attr]
    ten = 10_000 // every or 1  # a segment's worth: what is behind the last segment comes round
    written = [save.written_s for save in saves]
    each = [after - before for before, after in pairwise(recorded)]
    return {
        "run_id": run_id,
        "steps": steps,
        "seconds": round(seconds),
        "rank_0_mb": round((most - before) / 1e6, 1),
        "save_bytes": [round(mean(part)) for part in (nbytes[:ten], nbytes[-ten:])],
        "save_bytes_ratio": round(mean(nbytes[-ten:]) / mean(nbytes[:ten]), 3),
        "save_ms": [
            round(1e3 * mean(part), 1) for part in ((written[1 : ten + 1] or written), written[-ten:])
        ],
        "save_ms_ratio": round(mean(written[-ten:]) / mean(written[1 : ten + 1] or written), 3),
        **first_and_last("save_cpu", cpu, ten),
        **first_and_last("recorder_cpu", each, ten),
        "pause_ms_most": round(1e3 * max(pauses[1:] or pauses), 2),
        "heartbeat_silent_s": late_s,
        "journal_mb": round((spec.folder / run_id / "journal.jsonl").stat().st_size / 1e6, 1),
    }


def cpu_of(recorder: Recorder) -> float:
    """What the recorder's process has computed so far, in seconds."""
    user_s, system_s = psutil.Process(recorder._writer._process.pid).cpu_times()[:2]  # type: ignore[union-attr]
    return float(user_s + system_s)


def first_and_last(name: str, seconds: Sequence[float], count: int) -> dict[str, Any]:
    """The mean of the first `count` and of the last, in milliseconds, and their ratio. The very first imports what all need."""
    first, last = mean(seconds[1 : count + 1] or seconds), mean(seconds[-count:])
    return {
        f"{name}_ms": [round(1e3 * first, 1), round(1e3 * last, 1)],
        f"{name}_ratio": round(last / first, 3),
    }


def taken_up(storage: Path, run_id: str, steps: int) -> dict[str, Any]:
    """In a fresh process: take the run up and end it."""
    spec = spec_in(storage)
    began, cpu = time.monotonic(), time.process_time()
    recorder = recorder_of(spec, run_id)
    recorder.start()
    found = load_newest(RunFolder.open(open_storage(spec.checkpoint.storage), run_id), print)
    assert found is not None
    named = [Segment.of(one.name, one.size, one.sha256) for one in found.manifest.shared]
    history = History.restored(found.sections, named, shared_files(found, print))
    restored_cpu_s = time.process_time() - cpu
    recorder.run_id()
    ready_s = time.monotonic() - began
    recorder_cpu_s = cpu_of(recorder)
    recorder.tell(Started({"identity": "million"}), history.past())
    while recorder.state.journaled < 2:
        time.sleep(0.01)
    compared_s = time.monotonic() - began
    watch = Watch(spec.folder / run_id)
    recorder.tell(Finished({"step": steps}))
    ending = time.monotonic()
    recorder.close(600.0)
    status = json.loads((spec.folder / run_id / "run.json").read_text())["status"]
    return {
        "restart_s": round(ready_s, 2),
        "restart_cpu_s": [round(restored_cpu_s, 2), round(recorder_cpu_s, 2)],
        "compared_s": round(compared_s, 2),
        "ended_s": round(time.monotonic() - ending, 1),
        "heartbeat_silent_at_end_s": watch.close(),
        "status": status,
        "violation": recorder.state.violation,
    }


def again(folder: str, told: dict[str, Any]) -> dict[str, Any]:
    """`taken_up` in a process of its own."""
    command = [sys.executable, "-m", "tests.benchmarks.million", "--steps", str(told["steps"])]
    done = subprocess.run(
        [*command, "--take-up", folder, told["run_id"]], check=True, stdout=subprocess.PIPE, text=True
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--every", type=int, default=1_000)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--take-up", nargs=2, metavar=("STORAGE", "RUN"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.take_up:
        print(json.dumps(taken_up(Path(arguments.take_up[0]), arguments.take_up[1], arguments.steps)))
        return
    with tempfile.TemporaryDirectory() as folder:
        few = min(arguments.steps, 2 * SEGMENT_STEPS)
        short = again(folder, trained(Path(folder), few, arguments.every))
        told = trained(Path(folder), arguments.steps, arguments.every)
        told |= again(folder, told)
        added = [
            after - before
            for before, after in zip(short["restart_cpu_s"], told["restart_cpu_s"], strict=True)
        ]
        told |= {
            f"restart_after_{few}_s": short["restart_s"],
            f"restart_after_{few}_cpu_s": short["restart_cpu_s"],
            "restart_adds_cpu_s": [round(seconds, 2) for seconds in added],
        }
    text = json.dumps(told, indent=1)
    print(text)
    if arguments.json:
        arguments.json.write_text(text)


if __name__ == "__main__":
    main()
