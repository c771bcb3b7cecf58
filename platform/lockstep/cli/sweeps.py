"""The commands that search: `sweep` and `lr-find`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lockstep.cli.command_output import (
    Json,
    Overrides,
    SpecFile,
    Uri,
    Verbose,
    answered,
    exit_code,
    running,
)
from lockstep.cli.commands import OptionValues, command
from lockstep.durations import duration_text
from lockstep.job.job_folder import search_job_folder
from lockstep.spec.locations import RECORD_OFF
from lockstep.sweeps.trial_standings import sort_key

if TYPE_CHECKING:
    from lockstep.sweeps.driver import SweepResult

SweepFile = Annotated[Path, typer.Argument(metavar="SWEEP", help="a YAML file; see docs/sweeps.md")]


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    command(
        app,
        "train",
        "lockstep sweep jobs/digits/sweep.yaml",
        "lockstep sweep jobs/digits/sweep.yaml trials=4 spec.length.epochs=5",
    )(sweep)
    command(app, "train", "lockstep lr-find jobs/digits/train.yaml --plot lr-find.svg", name="lr-find")(
        lr_find
    )


def sweep(
    sweep_file: SweepFile,
    overrides: Overrides = None,
    *,
    option_values: OptionValues,
    uri: Uri = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="print the sweep and its trials, and train nothing")
    ] = False,
    json_: Json = False,
    verbose: Verbose = False,
) -> None:
    """Search learning rate, precision or any other field with Ray Tune."""
    began_at = time.time()
    with answered(json_, verbose) as answer:
        search_job_folder(first=True)
        from lockstep.spec.sweep import load_sweep

        loaded = load_sweep(sweep_file, overrides or [], uri=uri)
        if dry_run:
            report = planned(loaded)
            answer(report, lambda: plan_as_text(report))
            return
        from lockstep.sweeps.driver import run_sweep

        with running(json_, began_at=began_at, verbose=verbose, **option_values) as options:
            result = run_sweep(options, loaded)
        answer(result.as_dict(), lambda: as_text(result), exit_code(result))
    raise typer.Exit(exit_code(result))


def planned(sweep: Any) -> dict[str, Any]:
    """What a dry run tells: the sweep, and the trials that are known beforehand."""
    indices = range(sweep.total) if sweep.search != "optuna" else ()
    return {"sweep": sweep.document(), "trials": [sweep.sample(index) for index in indices]}


def plan_as_text(report: dict[str, Any]) -> str:
    """The same for a person."""
    import yaml

    lines = [
        f"trial {i:<4} " + "  ".join(f"{k}={v}" for k, v in fields.items())
        for i, fields in enumerate(report["trials"])
    ]
    return yaml.safe_dump(report["sweep"], sort_keys=False, default_flow_style=None) + "\n" + "\n".join(lines)


def as_text(result: SweepResult) -> str:
    """How a sweep ended, for a person: the best trials first."""
    from lockstep.driver.resume_hint import look_at, resume_command

    ranked = sorted(
        (t for t in result.trials if t["metric"] is not None), key=lambda t: sort_key(t, result.mode)
    )
    counts = ", ".join(f"{count} {status}" for status, count in result.counts.items())
    lines = [
        f"{result.status.lower()}: {len(result.trials)} trials in {duration_text(result.seconds)} ({counts})"
    ]
    for trial in ranked[:10]:
        sets = "  ".join(f"{name}={value}" for name, value in trial["fields"].items())
        lines.append(
            f"  {result.metric} {trial['metric']:<10.6g} trial {trial['trial']:<3} {trial['status']:<9} step {trial['step']:<7} {sets}"
        )
    lines += [
        f"  trial {t['trial']:<3} {t['status']}: {t['reason']}"
        for t in result.trials
        if t["status"] == "failed" or (t["reason"] and result.metric not in t["metrics"])
    ]
    if result.best is not None:
        lines.append(f"best spec         {result.folder}/best.yaml")
    lines += [f"sweep             {result.sweep_id}", f"folder            {result.folder}"]
    if result.status != "FINISHED":
        command = resume_command(result.sweep_id, result.tracking_uri, result.folder)
        lines.append(f"resume it with    {command}")
    if result.tracking_uri != RECORD_OFF:
        lines.append(f"look at it        {look_at(result.url, result.tracking_uri)}")
    return "\n".join(lines)


def lr_find(
    spec: SpecFile,
    overrides: Overrides = None,
    lowest: Annotated[float, typer.Option(help="learning rate of the first step")] = 1e-7,
    highest: Annotated[float, typer.Option(help="learning rate of the last step")] = 10.0,
    steps: Annotated[int, typer.Option(help="number of steps")] = 100,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="draw the curve: a file .svg or .png, or a folder")
    ] = None,
    uri: Uri = None,
    json_: Json = False,
    verbose: Verbose = False,
) -> None:
    """Find a learning rate. One short run raises the rate until the loss explodes."""
    with answered(json_, verbose) as answer:
        from lockstep.calls.checking import find_rate
        from lockstep.checks.lr_finder import as_text

        search_job_folder(first=True)
        rate_range, measurement = find_rate(
            spec, overrides or [], lowest=lowest, highest=highest, steps=steps, uri=uri, plot=plot
        )
        lines = [] if measurement is None else [f"run {measurement.run_id}", *filter(None, [measurement.url])]
        answer(
            {**rate_range.as_dict(), "run_id": measurement and measurement.run_id},
            lambda: "\n".join([as_text(rate_range), *lines]),
        )
