"""How two runs differ: what `lockstep diff` does, for Python."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from lockstep.calls.verification import job_source
from lockstep.checkpoint.run_folder import Replay
from lockstep.checks.preflight import find_initial_weights
from lockstep.driver.options import RunOptions
from lockstep.errors import SpecError
from lockstep.job.imports import files_here, recorded_beside
from lockstep.job.source import check_job_source, job_sources
from lockstep.proof.difference import Difference, Side, Unwatched, difference
from lockstep.proof.recorded_run import recorded_run
from lockstep.proof.replaying import replay_here
from lockstep.proof.stretches import STEPS
from lockstep.spec.loading import load_spec
from lockstep.spec.locations import tracking_uri


def diff(
    a: str,
    b: str,
    *,
    steps: int | None = None,
    uri: str | None = None,
    storage: str | Path = "runs",
    options: RunOptions | None = None,
) -> Difference:
    """Compare two runs, each the id of a recorded one or a spec file that is trained here for `steps` steps.

    All that is taken again is taken in this process, on one worker; nothing of a recorded run is written to. SpecError where
    one is neither; raises LockstepError.
    """
    options = options or RunOptions(local=True)
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    with tempfile.TemporaryDirectory(prefix="lockstep-diff-") as aside:
        one, other = (_side(name, steps or STEPS, uri, Path(storage).absolute(), options) for name in (a, b))
        return difference(one, other, Path(aside))


def _side(name: str, steps: int, uri: str | None, storage: Path, options: RunOptions) -> Side:
    if name.endswith((".yaml", ".yml")):
        return _of_spec(name, steps, uri, options)
    run = recorded_run(name, tracking_uri(uri), storage)
    return Side(
        name, run.spec, run.fields, run.steps, run.evaluations, run.source, job_source(run, options), run
    )


def _of_spec(name: str, steps: int, uri: str | None, options: RunOptions) -> Side:
    if not Path(name).is_file():
        raise SpecError(f"diff: there is no file {name!r}; give the id of a run or a spec file")
    spec = find_initial_weights(load_spec(name, uri=uri))
    check_job_source(spec.job.use)
    options.progress.say(f"{name}: {steps} steps are trained")
    found = replay_here(spec, Replay("", spec.checkpoint.storage, 0, steps), Unwatched())
    source = {
        module.replace(".", "/")
        + ("/__init__.py" if path.name == "__init__.py" else ".py"): path.read_bytes()
        for module, path in job_sources(spec.job.use).items()
    } | files_here(spec.job.use, recorded_beside(found.fields))
    return Side(name, spec, found.fields, found.steps, found.evaluations, source, None)
