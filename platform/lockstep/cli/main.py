"""The `lockstep` command.

With `--json` a command prints exactly one JSON object, on one line, on standard output; everything else goes
to standard error. Its exit codes are those of `lockstep.exit_codes`.
"""

from __future__ import annotations

import atexit
import gc
import os
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from lockstep.cli import checks, cluster, exports, getting_started, problems, proofs, records, sweeps
from lockstep.cli.command_output import (
    Json,
    Overrides,
    SpecFile,
    Uri,
    Verbose,
    answered,
    began,
    exit_code,
    open_standard_streams,
    running,
    say,
)
from lockstep.cli.commands import Groups, OptionValues, command
from lockstep.cli.entry import trains_here
from lockstep.cli.interruption import fail, take_signals
from lockstep.driver.signals import commands_end_by, end_on_second_signal
from lockstep.errors import NoSuchRunError
from lockstep.exit_codes import ExitCode
from lockstep.job.job_folder import search_job_folder
from lockstep.process import collect_seldom
from lockstep.spec.locations import RECORD_OFF

if TYPE_CHECKING:
    from lockstep.driver.options import RunOptions
    from lockstep.driver.result import Result
    from lockstep.sweeps.driver import SweepResult

app = typer.Typer(
    cls=Groups,
    invoke_without_command=True,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

_TOLD_VERSIONS = ("lockstep", "python", "torch", "ray", "mlflow")

RunName = Annotated[
    str | None,
    typer.Option("--run", help="name of the run; the same command starts this run, and later resumes it"),
]
Takeover = Annotated[
    bool,
    typer.Option(
        "--takeover",
        help="take the run over from the command that holds it; that command ends after its next step, or is cut off if it does not answer",
    ),
]
ProfileStart = Annotated[
    bool,
    typer.Option("--profile-start", help="show where the time until the first step went, by stage"),
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="print the resolved spec and the plan, and train nothing")
]


def run_command() -> None:
    """Run the command that `sys.argv` has, in this process."""
    open_standard_streams()
    take_signals(as_json="--json" in sys.argv)
    if not trains_here(sys.argv[1:]):
        collect_seldom()
    end_on_second_signal()
    commands_end_by(fail)
    # Spares the last garbage collections of the interpreter: with torch and Ray they take a second or more.
    atexit.register(gc.freeze)
    try:
        app()
    except OSError as error:  # of --help: a command tells its own
        _unwritten(error)
    except Exception:  # noqa: BLE001 - a defect of Lockstep's: its traceback has texts from data in it
        say(traceback.format_exc())
        sys.exit(ExitCode.FAILED)
    except SystemExit:
        try:
            sys.stdout.flush()
        except OSError as error:
            _unwritten(error)
        raise


def _unwritten(error: OSError) -> NoReturn:
    """End a process whose standard output takes nothing more. The interpreter would tell that in four lines."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # for the interpreter's own last flush
    if not isinstance(error, BrokenPipeError):
        say(f"lockstep: standard output: cannot be written: {error.strerror}")
    sys.exit(ExitCode.FAILED)


@app.callback()
def lockstep(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", help="print the versions of lockstep and of its main dependencies")
    ] = False,
    json_: Annotated[
        bool, typer.Option("--json", help="with --version: as one JSON object; a command has its own --json")
    ] = False,
) -> None:
    """Distributed training for PyTorch in which a run is exact: the same spec gives the same bits."""
    if version:
        with answered(json_, verbose=False) as answer:
            from lockstep.record.versions import versions

            installed = {name: versions().get(name) for name in _TOLD_VERSIONS}
            lines = [f"{name:<9} {number or 'not installed'}" for name, number in installed.items()]
            answer(dict(installed), lambda: "\n".join(lines))
        raise typer.Exit
    if context.invoked_subcommand is None:
        context.fail("Missing command.")
    if json_:
        context.fail("--json: wanted after the command, or with --version")


@command(
    app,
    "train",
    "lockstep train jobs/digits/train.yaml",
    "lockstep train jobs/digits/train.yaml --local length.epochs=1",
    "lockstep train jobs/digits/train.yaml --dry-run --json",
)
def train(
    spec: SpecFile,
    overrides: Overrides = None,
    *,
    option_values: OptionValues,
    run_name: RunName = None,
    takeover: Takeover = False,
    profile_start: ProfileStart = False,
    uri: Uri = None,
    dry_run: DryRun = False,
    json_: Json = False,
    verbose: Verbose = False,
) -> None:
    """Train one run to its end."""
    began_at = began()
    with answered(json_, verbose) as answer:
        from lockstep.spec.loading import load_spec

        search_job_folder(first=True)
        loaded = load_spec(spec, overrides or [], uri=uri)
        if dry_run:
            from lockstep.checks.dry_run import as_text
            from lockstep.checks.dry_run import dry_run as planned

            report = planned(loaded)
            answer(report, lambda: _yaml(report["spec"]) + "\n" + as_text(report))
            return
        from lockstep.calls.named_runs import train_named

        if option_values["retries"] and run_name is None:
            raise problems.RETRIES_NAME()
        with running(json_, began_at=began_at, verbose=verbose, **option_values) as options:
            result = train_named(options, loaded, run_name, takeover=takeover or kept_job())
        answer(result.as_dict(), lambda: _result_text(result, starts=profile_start), exit_code(result))
    raise typer.Exit(exit_code(result))


@command(
    app,
    "train",
    "lockstep resume RUN",
    "lockstep resume RUN workers.max=4",
    "lockstep resume RUN --fork optimizer.lr=1e-4",
)
def resume(
    run_id: Annotated[str, typer.Argument(metavar="RUN_ID", help="the run id that lockstep train printed")],
    overrides: Overrides = None,
    from_step: Annotated[
        int | None, typer.Option(min=1, help="resume from this step instead of the newest good checkpoint")
    ] = None,
    fork: Annotated[
        bool,
        typer.Option("--fork", help="start a new run from this state; overrides may change anything"),
    ] = False,
    without: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="train it again without the samples whose ids the file has, from before their first use: a new run",
        ),
    ] = None,
    *,
    option_values: OptionValues,
    takeover: Takeover = False,
    profile_start: ProfileStart = False,
    uri: Uri = None,
    json_: Json = False,
    verbose: Verbose = False,
) -> None:
    """Resume a run from its newest good checkpoint, bit for bit."""
    began_at = began()
    with answered(json_, verbose) as answer:
        search_job_folder(first=True)
        if option_values["retries"] and (fork or without is not None):
            raise problems.RETRIES_FORK()
        if without is not None and (from_step is not None or takeover):
            raise problems.WITHOUT_CHECKPOINT()
        with running(json_, began_at=began_at, verbose=verbose, **option_values) as options:
            result: Result | SweepResult
            if without is not None:
                from lockstep.calls.sample_removal import resume_without

                result = resume_without(options, run_id, without, overrides or [], uri=uri)
            else:
                result = _resume_run_or_sweep(
                    options,
                    run_id,
                    overrides or [],
                    step=from_step,
                    fork=fork,
                    uri=uri,
                    takeover=takeover or kept_job(),
                )
        answer(result.as_dict(), lambda: _as_text(result, starts=profile_start), exit_code(result))
    raise typer.Exit(exit_code(result))


def _resume_run_or_sweep(
    options: RunOptions,
    run_id: str,
    overrides: list[str],
    *,
    step: int | None,
    fork: bool,
    uri: str | None,
    takeover: bool,
) -> Result | SweepResult:
    from lockstep.calls.resume import resume_with

    try:
        return resume_with(options, run_id, overrides, step=step, fork=fork, uri=uri, takeover=takeover)
    except NoSuchRunError as error:
        from lockstep.sweeps.sweep_resume import resume_sweep

        result = resume_sweep(options, run_id, overrides, uri=uri, takeover=takeover, step=step, fork=fork)
        if result is None:
            raise error from None
        return result


def kept_job() -> bool:
    """Whether this is a job that a run's driver restarter has started: of the one before it, parts may still live."""
    from lockstep.clusters.driver_restarter import KEPT

    return KEPT in os.environ


@command(app, "look", "lockstep ui", "lockstep ui --uri sqlite:///runs.db --port 5001")
def ui(
    uri: Uri = None,
    port: Annotated[int, typer.Option(help="port to listen on")] = 5000,
    host: Annotated[
        str, typer.Option(help="address to listen on; beyond 127.0.0.1 only with a password")
    ] = "127.0.0.1",
    verbose: Verbose = False,
) -> None:
    """Open the MLflow UI on the run store. It is reachable from this machine only, unless --host says otherwise."""
    with answered(as_json=False, verbose=verbose):
        from lockstep.calls.ui import Ui
        from lockstep.spec.locations import tracking_uri

        server = Ui(tracking_uri(uri), port, host)
        say(server.link)
        server.serve()


def _yaml(document: dict[str, Any]) -> str:
    import yaml

    return yaml.safe_dump(document, sort_keys=False, default_flow_style=None)


def _as_text(run: Result | SweepResult, *, starts: bool) -> str:
    from lockstep.driver.result import Result

    return _result_text(run, starts=starts) if isinstance(run, Result) else sweeps.as_text(run)


def _result_text(run: Result, *, starts: bool = False) -> str:
    """What a command says of a run. With `starts`, also where the time until its first step went."""
    from lockstep.driver.resume_hint import look_at, resume_command
    from lockstep.driver.start_stages import picture

    result = run.as_dict()
    metrics = "  ".join(f"{name} {value:.4g}" for name, value in result["metrics"].items())
    lines = [
        f"{result['status'].lower()}: step {result['step']}, epoch {result['epoch']}, {result['workers']} worker{'s' if result['workers'] > 1 else ''}",
        f"metrics           {metrics}",
        f"weights_digest    {result['weights_digest']}",
        *([f"ema_digest        {result['ema_digest']}"] if result["ema_digest"] else []),
        f"run               {result['run_id']}",
        f"folder            {result['folder']}",
        f"checkpoint        {result['checkpoint'] or 'none'}",
    ]
    if result["status"] == "KILLED":
        command = resume_command(run.run_id, run.tracking_uri, run.folder)
        lines.append(f"resume it with    {command}")
    if result["tracking_uri"] != RECORD_OFF:
        lines.append(f"look at it        {look_at(run.url, run.tracking_uri)}")
    if starts:
        lines.append(picture(run.start))
    return "\n".join(lines)


for commands in (getting_started, sweeps, checks, records, proofs, exports, cluster):
    commands.register(app)
