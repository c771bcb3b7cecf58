"""Two states of the code compared by the bits that they train: each in its own working tree, by processes of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from lockstep.checks.processes import Process, first_failure, run_together
from lockstep.proof import guard_worker, problems
from lockstep.proof.identity_changes import Cause, causes
from lockstep.proof.operator_trace import Look
from lockstep.proof.run_diff import Compared, Parted, add_parting, first_parting
from lockstep.record.ledger.rows import EvaluationRow, StepRow
from lockstep.record.ledger.tables import read_evaluations, read_parquet
from lockstep.training.worker_environment import sent_environment

Start = Callable[[str, Path, Mapping[str, str]], Process]
"""Starts `guard_worker.main` of a request, in a folder and with an environment."""


def start_python(request: str, folder: Path, environment: Mapping[str, str]) -> Process:
    """A new interpreter, which imports what its own state of the code has."""
    return subprocess.Popen(
        [sys.executable, "-P", str(Path(guard_worker.__file__)), request],
        cwd=folder,
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


class Trained(NamedTuple):
    """What one state of the code came to; rows by step. `look` where it was asked for."""

    steps: Mapping[int, StepRow]
    evaluations: Mapping[int, EvaluationRow]
    fields: Mapping[str, Any]
    look: Look | None


@dataclass(frozen=True, slots=True)
class Trainer:
    """Trains a spec in a state of the code. `folder` and `paths` are relative to the tree: where commands are given, and what Python searches."""

    root: Path
    """The working tree around the working directory, of which no other state may see anything."""
    spec: str
    """The spec file: relative to `folder`, or an absolute path outside the repository."""
    overrides: Sequence[str]
    steps: int
    ranks: int
    folder: Path
    paths: Sequence[Path]
    start: Start = start_python

    def __call__(self, tree: Path, label: str, look: tuple[int, int] | None = None) -> Trained:
        """Train in the working tree `tree`, which is `label` to a person. UnfitError where it cannot be."""
        job_folder = tree / self.folder
        if not (job_folder / self.spec).is_file():
            raise problems.UNFIT_FILE(what=label, file=self.spec)
        with tempfile.TemporaryDirectory(prefix="lockstep-guard-") as out:
            request = {
                "spec": self.spec,
                "overrides": list(self.overrides),
                "steps": self.steps if look is None else look[0],
                "out": out,
                "look": look,
                "ranks": self.ranks if look is None else 1,
                "tree": str(tree),
                "root": str(self.root),
            }
            self._run(request, job_folder, self._environment(tree), label)
            return _read(Path(out))

    def _environment(self, tree: Path) -> dict[str, str]:
        paths = [str(tree / path) for path in self.paths if (tree / path).is_dir()]
        inherited = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
        paths += [path for path in inherited if not Path(path).resolve().is_relative_to(self.root)]
        return {
            **os.environ,
            **sent_environment(),
            "PYTHONPATH": os.pathsep.join(paths),
            "PYTHONDONTWRITEBYTECODE": "1",
        }

    def _run(self, request: dict[str, Any], folder: Path, environment: Mapping[str, str], label: str) -> None:
        starts = [
            partial(self.start, json.dumps({**request, "rank": rank}), folder, environment)
            for rank in range(request["ranks"])
        ]
        failed = first_failure(run_together(starts))
        if failed is not None:
            reason = failed.said or f"its process ended with exit code {failed.code}"
            raise problems.UNFIT(what=label, got=reason)


def _read(out: Path) -> Trained:
    look = json.loads((out / guard_worker.LOOK).read_text(encoding="utf-8"))
    return Trained(
        {row.step: row for row in read_parquet(out / guard_worker.ROWS)},
        {row.step: row for row in read_evaluations(out / guard_worker.EVALUATIONS)},
        json.loads((out / guard_worker.FIELDS).read_text(encoding="utf-8")),
        None if look is None else Look.of(look),
    )


@dataclass(slots=True, kw_only=True)
class Guarded(Compared):
    """What a guard found. `commit` is the first that changes bits, where it was looked for; None where no commit has the change yet."""

    base: str
    commit: str | None = None
    title: str | None = None


def compare(base: Trained, changed: Trained) -> tuple[list[Cause], Parted | None]:
    """In which fields two states differ, and the first step and quantity in which what they trained does."""
    last = min(max(base.steps), max(changed.steps))
    first, _ = first_parting(base, changed, last)
    parted = None
    if first is not None:
        parted = Parted.of(*first)
    if parted is None and max(base.steps) != max(changed.steps):
        counts = [f"{max(trained.steps)} steps" for trained in (base, changed)]
        parted = Parted(last + 1, None, "row", counts[0], counts[1])
    return causes(base.fields, changed.fields), parted


def look_into(parted: Parted, look: Callable[[str, tuple[int, int]], Look | None]) -> None:
    """Have a difference within a micro-batch say which module or parameter and operator parts; `look` looks at it on a side, `base` or `found`."""
    if parted.micro_batch is None:
        return
    at = parted.step, parted.micro_batch
    base_look, found_look = look("base", at), look("found", at)
    if base_look is not None and found_look is not None:
        add_parting(parted, base_look, found_look)
