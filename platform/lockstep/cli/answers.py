"""What commands share: their options, and how they answer: one object or a text on standard output, an error as one line and an exit code."""

from __future__ import annotations

import json
import os
import re
import sys
import textwrap
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lockstep.errors import LockstepError

if TYPE_CHECKING:
    from lockstep.driver.options import RunOptions

Json = Annotated[bool, typer.Option("--json", help="print one JSON object on standard output")]
Uri = Annotated[
    str | None, typer.Option(help="MLflow tracking URI; overrides record.uri and MLFLOW_TRACKING_URI")
]
SpecFile = Annotated[Path, typer.Argument(metavar="SPEC", help="a YAML file; see docs/spec.md")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="dotted overrides, such as optimizer.lr=1e-3"),
]
Address = Annotated[str | None, typer.Option(help="Ray cluster: an address, auto or local")]
Retries = Annotated[
    int,
    typer.Option(
        min=0,
        help="for a job: how often the run is started again where its driver, or the driver's node, is lost",
    ),
]
Notify = Annotated[
    str | None,
    typer.Option(
        metavar="COMMAND",
        envvar="LOCKSTEP_NOTIFY",
        show_envvar=False,
        help="a command, run by the shell, that is told of start, failure and end; default: LOCKSTEP_NOTIFY",
    ),
]
RunId = Annotated[str, typer.Argument(metavar="RUN", help="the id of a run")]
Storage = Annotated[Path, typer.Option(help="folder that contains the run folders")]
RUNS = Path("runs")
"""Where run folders are looked for by default."""
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="show tracebacks, and what Ray prints")]


_SEVERAL = re.compile(r"((?:metrics|artifacts) {2,}|  )(?=\S)")
"""How a line begins that says several things, with two blanks between them: `metrics   train/loss 0.1  eval/loss 0.2`, or an item of a list."""


def folded(text: str, columns: int) -> str:
    """A text for a terminal of so many columns: a line that says several things is broken between two of them, and not in a word."""
    return "\n".join(_folded(line, columns) for line in text.split("\n"))


def _folded(line: str, columns: int) -> str:
    found = _SEVERAL.match(line)
    if found is None or len(line) <= columns:
        return line
    margin = " " * max(4, found.end())
    lines, begun = [found[0]], False
    for gap, thing in re.findall(r"( *)(\S+(?: \S+)*)", line[found.end() :]):
        if begun and len(lines[-1]) + len(gap) + len(thing) > columns:
            lines.append(margin)
            gap = ""
        words = textwrap.wrap(
            thing, max(20, columns - len(margin)), break_long_words=False, break_on_hyphens=False
        )
        lines[-1] += gap + words[0]
        lines += [margin + rest for rest in words[1:]]
        begun = True
    return "\n".join(lines)


def json_text(value: Any) -> str:
    """One line of JSON as every parser takes it: null for a number that is not finite, which JSON does not know."""
    from lockstep.record.documents import without_nan

    return json.dumps(without_nan(value), default=str, allow_nan=False)


@contextmanager
def answered(
    as_json: bool, verbose: bool, unanswered: int = 1
) -> Iterator[Callable[[dict[str, Any], Callable[[], str]], None]]:
    """Run a command: its answer goes to standard output, its errors become one line and an exit code.

    `unanswered` is the code of a failure: another one than 1 where that is an answer of the command's. Meanwhile
    standard output leads to standard error, for libraries and child processes as well.
    """
    sys.stdout.flush()
    out = os.dup(1)
    os.dup2(2, 1)

    def answer(value: dict[str, Any], text: Callable[[], str]) -> None:
        sys.stdout.flush()
        line = json_text(value) if as_json else text()
        if not as_json and os.isatty(out):
            line = folded(line, os.get_terminal_size(out).columns)
        with os.fdopen(os.dup(out), "w") as stream:
            print(line, file=stream)

    def failed(code: int, status: str, message: str) -> typer.Exit:
        print(f"lockstep: {message}", file=sys.stderr)
        if as_json:
            answer({"status": status, "error": message, "exit_code": code}, str)
        return typer.Exit(code)

    try:
        yield answer
    except LockstepError as error:
        if verbose:
            traceback.print_exc()
        raise failed(max(error.exit_code, unanswered), "FAILED", str(error)) from None
    except KeyboardInterrupt:
        failed(130, "KILLED", "ended at once by a signal")
        os._exit(130)  # whatever still runs here is not waited for
    finally:
        os.dup2(out, 1)
        os.close(out)


def began() -> float:
    """When the command was given, Unix time in seconds: before this process started over, where it did."""
    return float(os.environ.pop("LOCKSTEP_BEGAN_AT", time.time()))


@contextmanager
def running(
    as_json: bool,
    began_at: float,
    local: bool,
    address: str | None,
    verbose: bool,
    chaos: str | None,
    retries: int = 0,
    notify: str | None = None,
) -> Iterator[RunOptions]:
    """What a command was given, as one value. The live line is shown meanwhile; nothing with `--json`."""
    if retries:
        from lockstep.clusters.keeper import first_job

        first_job()  # before anything is begun
    from lockstep.driver.options import RunOptions
    from lockstep.driver.progress import Line, Silent

    line = None if as_json else Line()
    with nullcontext() if line is None else line.running():
        yield RunOptions(
            progress=line or Silent(),
            local=local,
            address=address,
            verbose=verbose,
            chaos=chaos,
            retries=retries,
            notify=notify,
            began_at=began_at,
        )


def uri_option(tracking_uri: str) -> str:
    """How a later command is told the store, where it would not find it by itself."""
    from lockstep.spec.locations import tracking_uri as default_uri

    return "" if tracking_uri == default_uri(None) else f" --uri {tracking_uri}"
