"""How two runs differ: what `lockstep diff` does, for Python."""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from pathlib import Path

from lockstep.calls import problems
from lockstep.calls.executions import execution_of, named_in
from lockstep.checkpoint.runs.run_folder import Replay
from lockstep.checks.start_checks import find_initial_weights
from lockstep.driver.options import RunOptions
from lockstep.proof.execution import Execution, ProcessSettings, take_steps
from lockstep.proof.recorded_run import recorded_run
from lockstep.proof.run_diff import Difference, Side, Unwatched, difference
from lockstep.proof.sandbox import Sandbox
from lockstep.proof.step_spans import STEPS
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
    sandboxed: bool = False,
) -> Difference:
    """Compare two runs, each the id of a recorded one or a spec file that is trained here for `steps` steps.

    What is taken again is taken on one worker, by a process of its own for each of the two; nothing of a recorded run is written to.
    Where it is `sandboxed`, each is confined. SpecError where one is neither; raises LockstepError.
    """
    options = options or RunOptions(local=True)
    where = Path(storage).absolute()
    with tempfile.TemporaryDirectory(prefix="lockstep-diff-") as name, ExitStack() as stack:

        def side(which: str) -> Side:
            if which.endswith((".yaml", ".yml")):
                return _of_spec(which, steps or STEPS, uri, options, stack, sandboxed=sandboxed)
            run = recorded_run(which, tracking_uri(uri), where)
            execution = stack.enter_context(execution_of(run, options, sandboxed=sandboxed))
            return Side(which, run.spec, run.fields, run.steps, run.evaluations, run.source, execution, run)

        return difference(side(a), side(b), Path(name))


def _of_spec(
    name: str, steps: int, uri: str | None, options: RunOptions, stack: ExitStack, *, sandboxed: bool
) -> Side:
    if not Path(name).is_file():
        raise problems.DIFF_NO_FILE(got=name)
    spec = find_initial_weights(load_spec(name, uri=uri))
    options.progress.say(f"{name}: {steps} steps are trained")
    confined = Sandbox(needed=[*named_in(spec)]) if sandboxed else None
    execution = stack.enter_context(Execution(ProcessSettings(options.progress.say, confined)))
    replay = Replay("", spec.checkpoint.storage, 0, steps)
    trained = take_steps(execution, spec, replay, Unwatched(), files=True)
    return Side(name, spec, trained.fields, trained.steps, trained.evaluations, trained.source, execution)
