"""All checks on a GPU: prints a table, and writes it as a page. Run by `make gpu`; needs no Ray and no network.

    python -m tests.gpu.report [--page FILE] [--only CHECK] [--device cpu]

Without CUDA it names what it leaves out. Exits with 1 where something does not hold. On a CPU the checks are small.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

import torch

from lockstep.training.worker_environment import WORKER_ENVIRONMENT
from tests.gpu.checks import CHECKS, Row, Setting
from tests.gpu.processes import Processes, backend_for


def rows(name: str, setting: Setting) -> Iterator[Row]:
    """Those of one check; its error is a row that does not hold."""
    try:
        yield from CHECKS[name](setting)
    except Exception as error:  # noqa: BLE001 - the other checks are still worth their time
        traceback.print_exc()
        yield Row(f"{name}: {type(error).__name__}", " ".join(str(error).split())[:200], False)


def as_page(found: dict[str, list[Row]], head: str) -> str:
    lines = [f"# On {head}", "", "| check | | value | |", "|---|---|---|---|"]
    words = {True: "holds", False: "**does not hold**", None: ""}
    for name, every in found.items():
        lines += [f"| {name} | {row.what} | {row.value} | {words[row.holds]} |" for row in every]
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--page", type=Path, default=Path("gpu.md"))
    parser.add_argument("--only", choices=list(CHECKS), action="append")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    options = parser.parse_args()
    names = options.only or list(CHECKS)
    if options.device == "cuda" and not torch.cuda.is_available():
        print("\n".join(f"skipped: {name}: no CUDA device" for name in names))
        return
    os.environ.update(WORKER_ENVIRONMENT)  # before a process starts
    processes = Processes(backend_for(options.device))
    device = torch.cuda.get_device_name() if options.device == "cuda" else "a CPU"
    head = (
        f"{device}, torch {torch.__version__}, Python {sys.version.split()[0]}, ranks by {processes.backend}"
    )
    print(head, flush=True)
    setting, found = Setting.on(options.device, processes), {}
    for name in names:
        began, found[name] = time.time(), []
        for row in rows(name, setting):
            found[name].append(row)
            print(
                f"{row.what:52} {row.value:52} {'' if row.holds is None else 'ok' if row.holds else 'WRONG'}",
                flush=True,
            )
        print(f"  ({name}: {time.time() - began:.0f} s)", flush=True)
        options.page.write_text(as_page(found, head))
    if any(row.holds is False for every in found.values() for row in every):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
