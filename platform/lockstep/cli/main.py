"""The `lockstep` command.

With `--json` a command prints exactly one JSON object, on one line, on standard output; everything else goes
to standard error. Exit codes: 0 done, 1 the run failed, 2 the spec or the usage is wrong, 130 and 143 stopped
by a signal.
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer

from lockstep.cli import records
from lockstep.cli.answers import Json, Uri, Verbose, answered
from lockstep.spec import RECORD_OFF

app = typer.Typer(
    add_completion=False, no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False
)
records.register(app)

SpecFile = Annotated[Path, typer.Argument(metavar="SPEC", help="a YAML file; see docs/spec.md")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="dotted overrides: optimizer.lr=1e-3")
]
Local = Annotated[
    bool, typer.Option("--local", help="train in this one process, without Ray; works under torchrun")
]
Address = Annotated[str | None, typer.Option(help="the Ray cluster: an address, auto or local")]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="print the resolved spec and the plan, and train nothing")
]


def run() -> None:
    """Entry point of the command."""
    began_at = time.time()
    if "--local" in sys.argv and "PYTHONHASHSEED" not in os.environ:
        # Python reads it when it starts: a run in this very process has to start over with it.
        os.environ |= {"PYTHONHASHSEED": "0", "LOCKSTEP_BEGAN_AT": repr(began_at)}
        os.execv(sys.executable, [sys.executable, "-m", "lockstep", *sys.argv[1:]])
    app()


@app.callback()
def lockstep() -> None:
    """Distributed training for PyTorch in which a run is exact: the same spec gives the same bits."""


@app.command()
def train(
    spec: SpecFile,
    overrides: Overrides = None,
    json_: Json = False,
    local: Local = False,
    address: Address = None,
    uri: Uri = None,
    dry_run: DryRun = False,
    verbose: Verbose = False,
) -> None:
    """Train one run to its end."""
    began_at = float(os.environ.pop("LOCKSTEP_BEGAN_AT", time.time()))
    with answered(json_, verbose) as answer:
        from lockstep.spec import load_spec

        sys.path.insert(0, str(Path.cwd()))
        loaded = load_spec(spec, overrides or [], uri=uri)
        if dry_run:
            from lockstep.checks import dry_run as checks

            report = checks.dry_run(loaded)
            answer(report, lambda: _yaml(report["spec"]) + "\n" + checks.as_text(report))
            return
        from lockstep.orchestration.progress import Line, Silent
        from lockstep.orchestration.runs import train as train_run

        line = None if json_ else Line()
        with line.running() if line else nullcontext():
            result = train_run(
                loaded,
                local=local,
                address=address,
                progress=line or Silent(),
                verbose=verbose,
                began_at=began_at,
            )
        answer(result.as_dict(), lambda: _told(result.as_dict()))
    if result.signal_number is not None:
        raise typer.Exit(128 + result.signal_number)


@app.command()
def ui(
    uri: Uri = None,
    port: Annotated[int, typer.Option(help="the port on 127.0.0.1")] = 5000,
    verbose: Verbose = False,
) -> None:
    """Open the MLflow UI on the run store, on this machine only."""
    with answered(as_json=False, verbose=verbose):
        from lockstep.orchestration.ui import serve_ui
        from lockstep.spec import tracking_uri

        print(f"http://127.0.0.1:{port}/#/experiments?workflowType=machine_learning", file=sys.stderr)
        serve_ui(tracking_uri(uri), port)


def _yaml(document: dict[str, Any]) -> str:
    import yaml

    return yaml.safe_dump(document, sort_keys=False, default_flow_style=None)


def _told(result: dict[str, Any]) -> str:
    metrics = "  ".join(f"{name} {value:.4g}" for name, value in result["metrics"].items())
    lines = [
        f"{result['status'].lower()}: step {result['step']}, epoch {result['epoch']}, {result['workers']} worker{'s' if result['workers'] > 1 else ''}",
        f"metrics           {metrics}",
        f"weights_digest    {result['weights_digest']}",
        f"run               {result['run_id']}",
        f"folder            {result['folder']}",
    ]
    if result["tracking_uri"] != RECORD_OFF:
        lines.append(f"look at it        {result['url'] or 'lockstep ui --uri ' + result['tracking_uri']}")
    return "\n".join(lines)
