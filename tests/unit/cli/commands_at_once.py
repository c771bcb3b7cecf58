"""A process that has imported what a command needs, and forks commands: many can begin at the same moment, for little.

    python -m tests.unit.cli.commands_at_once

Reads one JSON object a line: {"start": [[word, …], …], "into": FOLDER, "delays": [s, …]} begins a command for each list of words, all
at one moment but for their delays, with what they print in FOLDER/<pid>.out and .err; it answers with their pids. {"wait": pid} answers with the
exit code, the seconds that the command was there, and those that it computed.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

from lockstep.cli.main import app
from tests.without_figures import without_figures

for needed in (
    "torch._dynamo",  # an optimizer imports it
    "torch._inductor.config",  # `use_deterministic_algorithms` does
    "jobs.digits.job",
    "lockstep.calls.continuation",
    "lockstep.calls.named_runs",
    "lockstep.driver.local",
    "lockstep.record.mirror.mlflow",
    "lockstep.sweeps.driver",
    "lockstep.training.loop",
    "pyarrow.fs",
    "pyarrow.parquet",
    "sklearn.datasets",
):  # all that a command imports on its way; no thread runs here when it forks, and no connection is open
    importlib.import_module(needed)


def begin(words: Sequence[str], folder: Path, gate: int, delay_s: float) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 70
    try:
        os.setsid()
        own = os.getpid()
        for number, ending in ((1, "out"), (2, "err")):
            # Truncated, for a process before it may have had its number.
            os.dup2(os.open(folder / f"{own}.{ending}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        (folder / f"{own}.seconds").unlink(missing_ok=True)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        sys.argv = ["lockstep", *words]
        os.read(gate, 1)  # ends for all at once
        time.sleep(delay_s)
        began = time.monotonic()
        try:
            with without_figures():
                app(list(words))
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else int(bool(ended.code))
        (folder / f"{own}.seconds").write_text(str(time.monotonic() - began))
    except BaseException:  # noqa: BLE001  told, and the code says so
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def start(commands: Sequence[Sequence[str]], folder: Path, delays: Sequence[float]) -> list[int]:
    folder.mkdir(parents=True, exist_ok=True)
    gate, opened = os.pipe()
    os.set_inheritable(gate, True)
    pids = []
    for words, delay_s in zip(commands, delays, strict=True):
        pids.append(begin(words, folder, gate, delay_s))
    os.write(opened, b"." * len(pids))
    os.close(gate)
    os.close(opened)
    return pids


def wait(pid: int) -> list[float]:
    _, status, used = os.wait4(pid, 0)
    return [os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime]


if __name__ == "__main__":
    print("ready", flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        if "start" in asked:
            print(json.dumps(start(asked["start"], Path(asked["into"]), asked["delays"])), flush=True)
        else:
            print(json.dumps(wait(asked["wait"])), flush=True)
