"""What commands share: their options, and how they answer: one object or a text on standard output, an error as one line and an exit code."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import typer

from lockstep import printing
from lockstep.cli.interruption import answering, end, failure
from lockstep.driver.options import RunOptions, declared
from lockstep.driver.signals import Interrupted
from lockstep.errors import LockstepError
from lockstep.exit_codes import ExitCode, code_of_signal

if TYPE_CHECKING:
    from lockstep.driver.result import Result
    from lockstep.sweeps.driver import SweepResult

Json = Annotated[bool, typer.Option("--json", help="print one JSON object on standard output")]
Uri = Annotated[
    str | None, typer.Option(help="MLflow tracking URI; overrides record.uri and MLFLOW_TRACKING_URI")
]
SpecFile = Annotated[Path, typer.Argument(metavar="SPEC", help="a YAML file; see docs/spec.md")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="dotted overrides, such as optimizer.lr=1e-3"),
]
Address = Annotated[str | None, typer.Option(help=declared("address").help)]
RunId = Annotated[str, typer.Argument(metavar="RUN", help="the id of a run")]
Storage = Annotated[Path, typer.Option(help="folder that contains the run folders")]
RUNS = Path("runs")
"""Where run folders are looked for by default."""
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="show tracebacks, and what Ray prints")]


def json_text(value: Any) -> str:
    """One line of JSON as every parser takes it: null for a number that is not finite, which JSON does not know."""
    from lockstep.record.mirror.documents import without_nan

    text = json.dumps(without_nan(value), default=str, allow_nan=False)
    return text.replace("\x7f", "\\u007f")  # the one control character that JSON lets stand


def open_standard_streams() -> None:
    """Open the null device for each standard stream that the caller has closed, before another file gets its number."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)  # the lowest free number, which is this one
            os.set_inheritable(opened, True)
            setattr(sys, name, os.fdopen(opened, "w" if number else "r", closefd=False))


class Answer(Protocol):
    """How a command answers: with `value` as JSON, or with the text.

    `code` is the command's exit code. If the answer cannot be written, DONE becomes the code of a failure: whoever asked has not heard.
    """

    def __call__(self, value: dict[str, Any], text: Callable[[], str], code: int | None = None) -> None: ...


@contextmanager
def answered(as_json: bool, verbose: bool, unanswered: int = ExitCode.FAILED) -> Iterator[Answer]:
    """Run a command: its answer goes to standard output, its errors become one line and an exit code.

    `unanswered` is the code of a failure: another one than FAILED where that is an answer of the command's. Meanwhile
    standard output leads to standard error, for libraries and child processes as well.
    """
    sys.stdout.flush()
    out = os.dup(1)
    os.dup2(2, 1)

    def answer(value: dict[str, Any], text: Callable[[], str], code: int | None = None) -> None:
        sys.stdout.flush()
        line = json_text(value) if as_json else text()
        if not as_json and os.isatty(out):
            line = printing.folded(line, os.get_terminal_size(out).columns)
        if not _written(line, out):
            raise typer.Exit(code or unanswered)

    try:
        with answering(out if as_json else None):
            try:
                yield answer
            except KeyboardInterrupt as error:
                end(error.number if isinstance(error, Interrupted) else signal.SIGINT)
    except (LockstepError, OSError) as error:
        message, code, problem = f"{error}; --verbose shows where", int(ExitCode.FAILED), ""
        if isinstance(error, LockstepError):
            message, code, problem = str(error), error.exit_code, error.code
        code = max(code, unanswered)
        say((traceback.format_exc() if verbose else "") + f"lockstep: {message}")
        if as_json:
            _written(json_text(failure("FAILED", message, code, problem)), out)
        raise typer.Exit(code) from None
    finally:
        os.dup2(out, 1)
        os.close(out)


def _written(line: str, out: int) -> bool:
    """Write an answer. Where that fails it is said, unless its reader has left, as `head` does."""
    try:
        with os.fdopen(os.dup(out), "w") as stream:
            printing.write(f"{line}\n", stream)
    except BrokenPipeError:
        return False
    except OSError as error:
        say(f"lockstep: standard output: the answer cannot be written: {error.strerror}")
        return False
    return True


def say(line: str) -> None:
    """Write a line to standard error. Where it cannot be written, nothing else fails."""
    from lockstep.driver.progress import display

    with display():
        printing.complain(line)


def began() -> float:
    """When the command was given, Unix time in seconds: before this process started over, where it did."""
    return float(os.environ.pop("LOCKSTEP_BEGAN_AT", time.time()))


@contextmanager
def running(as_json: bool, *, began_at: float, verbose: bool, **option_values: Any) -> Iterator[RunOptions]:
    """The options of a command that trains, as one value; `option_values` are fields of RunOptions. The live line is shown meanwhile; nothing with `--json`."""
    if option_values.get("retries"):
        from lockstep.clusters.driver_restarter import refuse_without_a_job

        refuse_without_a_job(
            "local" if option_values.get("local") else option_values.get("address")
        )  # before anything is begun
    from lockstep.driver.progress import Line, Silent

    line = None if as_json else Line()
    with nullcontext() if line is None else line.running():
        yield RunOptions(progress=line or Silent(), verbose=verbose, began_at=began_at, **option_values)


def exit_code(result: Result | SweepResult) -> int:
    """That of a run or a sweep which has ended."""
    return ExitCode.DONE if result.signal_number is None else code_of_signal(result.signal_number)
