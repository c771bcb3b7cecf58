"""The commands that look ahead: `check` and `estimate`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lockstep.cli.answers import Address, Json, Overrides, SpecFile, Uri, Verbose, answered

if TYPE_CHECKING:
    from lockstep.checks.findings import Finding


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    app.command()(check)
    app.command()(estimate)


def check(
    spec: SpecFile,
    overrides: Overrides = None,
    json_: Json = False,
    local: Annotated[
        bool, typer.Option("--local", help="check from this machine alone, without Ray")
    ] = False,
    address: Address = None,
    uri: Uri = None,
    verbose: Verbose = False,
) -> None:
    """Find out before a long run what would go wrong in it. Trains nothing that is kept."""
    with answered(json_, verbose) as answer:
        sys.path.insert(0, str(Path.cwd()))
        from lockstep.calls.checking import check_spec
        from lockstep.checks.findings import as_text

        say = _heard if verbose else None
        report = check_spec(spec, overrides or [], local=local, address=address, uri=uri, say=say)
        answer(report.as_dict(), lambda: as_text(report))
    if not report.passed:
        raise typer.Exit(1)


def _heard(finding: Finding) -> None:
    print(f"{finding.result}: {finding.name}", file=sys.stderr)


def estimate(
    spec: SpecFile,
    overrides: Overrides = None,
    json_: Json = False,
    verbose: Verbose = False,
) -> None:
    """Find out how much memory a run will need, part by part. Trains nothing that is kept."""
    with answered(json_, verbose) as answer:
        sys.path.insert(0, str(Path.cwd()))
        from lockstep.calls.checking import estimate_spec
        from lockstep.checks.estimate import as_text

        found = estimate_spec(spec, overrides or [])
        answer(found.as_dict(), lambda: as_text(found))
