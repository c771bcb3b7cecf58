"""The commands that look ahead: `check`, `estimate` and `bench`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lockstep.cli import problems
from lockstep.cli.command_output import Address, Json, Overrides, SpecFile, Uri, Verbose, answered, say
from lockstep.cli.commands import command
from lockstep.exit_codes import ExitCode
from lockstep.job.job_folder import search_job_folder

if TYPE_CHECKING:
    from lockstep.checks.findings import Finding


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    command(app, "train", "lockstep check jobs/digits/train.yaml --local")(check)
    command(app, "train", "lockstep estimate jobs/digits/train.yaml batch.micro=64")(estimate)
    command(app, "train", "lockstep bench jobs/digits/train.yaml --workers 1,2,4 --plot bench.svg")(bench)


def check(
    spec: SpecFile,
    overrides: Overrides = None,
    json_: Json = False,
    local: Annotated[
        bool, typer.Option("--local", help="check from this machine alone, without Ray")
    ] = False,
    address: Address = None,
    uri: Uri = None,
    health: Annotated[
        bool,
        typer.Option("--health", help="also measure the machines: speed, bits, memory, disk, links, clocks"),
    ] = False,
    verbose: Verbose = False,
) -> None:
    """Find out before a long run what would go wrong in it. Keeps nothing that it trains."""
    with answered(json_, verbose) as answer:
        search_job_folder(first=True)
        from lockstep.calls.checking import check_spec
        from lockstep.checks.findings import as_text

        hear = _heard if verbose else None
        report = check_spec(
            spec, overrides or [], local=local, address=address, uri=uri, health=health, say=hear
        )
        answer(report.as_dict(), lambda: as_text(report))
    if not report.passed:
        raise typer.Exit(ExitCode.FAILED)


def _heard(finding: Finding) -> None:
    say(f"{finding.result}: {finding.name}")


def estimate(
    spec: SpecFile,
    overrides: Overrides = None,
    json_: Json = False,
    verbose: Verbose = False,
) -> None:
    """Estimate how much memory a run will need, part by part. Keeps nothing that it trains."""
    with answered(json_, verbose) as answer:
        search_job_folder(first=True)
        from lockstep.calls.checking import estimate_spec
        from lockstep.checks.estimate import as_text

        result = estimate_spec(spec, overrides or [])
        answer(result.as_dict(), lambda: as_text(result))


def bench(
    spec: SpecFile,
    overrides: Overrides = None,
    workers: Annotated[
        str,
        typer.Option(metavar="W,W,…", help="numbers of workers, such as 1,2,4; the first is the baseline"),
    ] = "1,2",
    steps: Annotated[int, typer.Option(metavar="N", help="how many steps count, after 3 to warm up")] = 20,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="draw the result: a .svg or .png file, or a folder")
    ] = None,
    local: Annotated[
        bool, typer.Option("--local", help="measure this machine even if a run would join a cluster")
    ] = False,
    json_: Json = False,
    verbose: Verbose = False,
) -> None:
    """Measure how fast the same steps are on several numbers of workers. Their bits are compared; no run is kept."""
    with answered(json_, verbose) as answer:
        search_job_folder(first=True)
        from lockstep.calls.checking import bench_spec
        from lockstep.checks.bench import as_text

        counts = _numbers(workers)
        hear = None if json_ else say
        result = bench_spec(spec, counts, overrides or [], steps=steps, local=local, plot=plot, say=hear)
        answer(result.as_dict(), lambda: as_text(result))
    if result.same_bits is False:
        raise typer.Exit(ExitCode.FAILED)


def _numbers(text: str) -> list[int]:
    """Whole numbers between commas."""
    try:
        return [int(word) for word in text.split(",")]
    except ValueError:
        raise problems.WORKER_COUNTS(got=text) from None
