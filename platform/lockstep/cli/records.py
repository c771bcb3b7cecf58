"""Commands on what is recorded: `runs`, `show`, `status`, `compare`, `pin`, `record sync`, `record check`, `record tensorboard`, `record wandb`."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lockstep.cli import problems
from lockstep.cli.command_output import RUNS, Json, RunId, Storage, Uri, Verbose, answered, say
from lockstep.cli.commands import Groups, command
from lockstep.durations import duration_text
from lockstep.errors import NoSuchRunError, SpecError
from lockstep.exit_codes import ExitCode
from lockstep.printing import on_one_line, table

if TYPE_CHECKING:
    from lockstep.record.mirror.run_store import RunInfo, RunReader
    from lockstep.views.curves import Curves
    from lockstep.views.status import RunStatus
    from lockstep.views.terminal_curves import Screen


record = typer.Typer(cls=Groups, help="Maintain recorded runs.", no_args_is_help=True)


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    command(
        app,
        "look",
        "lockstep runs",
        'lockstep runs --where "eval/accuracy > 0.9 and status = FINISHED"',
        "lockstep runs --uri off --storage runs",
    )(runs)
    command(app, "look", "lockstep show RUN", "lockstep show RUN --plot train/loss 'eval/*'")(show)
    command(
        app, "look", "lockstep status RUN", "lockstep status RUN --json", "lockstep status RUN --serve 9105"
    )(status)
    command(
        app,
        "look",
        "lockstep compare RUN OTHER",
        "lockstep compare RUN OTHER --key train/loss --key 'eval/*' --html curves.html",
    )(compare)
    command(app, "maintain", "lockstep pin RUN 1000", "lockstep pin RUN 1000 --remove")(pin)
    app.add_typer(record, name="record", rich_help_panel="maintain")


def runs(
    uri: Uri = None,
    experiment: Annotated[str | None, typer.Option(help="only runs of this experiment")] = None,
    where: Annotated[
        str | None,
        typer.Option(
            metavar="CONDITION",
            help="only runs whose metrics, params and facts meet this, such as 'eval/accuracy > 0.9 and status = FINISHED'",
        ),
    ] = None,
    limit: Annotated[int, typer.Option(help="maximum number of runs, from 1 to 1000")] = 20,
    storage: Storage = RUNS,
    json_: Json = False,
    verbose: Verbose = False,
) -> None:
    """List the newest runs of a store."""
    with answered(json_, verbose) as answer:
        from lockstep.record.mirror.stores import reader
        from lockstep.spec.locations import RECORD_OFF, tracking_uri

        if not 1 <= limit <= 1000:
            raise problems.LIMIT(got=limit)
        store = tracking_uri(uri)
        if store == RECORD_OFF and storage != RUNS and not storage.is_dir():
            raise problems.NO_STORAGE(folder=str(storage))
        store_reader = reader(store, storage)
        stored_runs = (
            store_reader.runs(experiment, limit)
            if where is None
            else _where(store_reader, where, experiment)[:limit]
        )
        for line in store_reader.passed_over:
            say(f"lockstep: {line}")
        answer({"runs": [_row(run) for run in stored_runs]}, lambda: _table(stored_runs))


_MOST_LISTED = 1000
"""The newest runs among which those that meet a condition are looked for."""


def _where(store: RunReader, text: str, experiment: str | None) -> list[RunInfo]:
    from lockstep.views.curves import last_metrics
    from lockstep.views.run_filter import conditions, matching

    required = conditions(text)
    return matching(store.runs(experiment, _MOST_LISTED), required, last_metrics)


def show(
    run: RunId,
    keys: Annotated[
        list[str] | None, typer.Argument(metavar="KEY", help="with --plot: the curves to draw")
    ] = None,
    plot: Annotated[
        bool,
        typer.Option("--plot", help="draw curves instead: loss, evaluation and rate, or those of each KEY"),
    ] = False,
    uri: Uri = None,
    storage: Storage = RUNS,
    json_: Json = False,
    verbose: Verbose = False,
) -> None:
    """Show what is recorded of one run."""
    screen = _screen() if plot else None  # before standard output leads to standard error
    with answered(json_, verbose) as answer:
        if screen is not None:
            from lockstep.views.terminal_curves import drawn, series_of

            series = series_of(_curves(run, uri, storage), keys or [])
            curves = {curve.key: {"steps": curve.steps, "values": curve.values} for curve in series}
            answer({"run_id": run, "curves": curves}, lambda: drawn(series, screen))
            return
        if keys:
            raise problems.SHOW_KEYS(got=" ".join(keys))
        from lockstep.record.events.union import Document
        from lockstep.record.mirror.documents import attempts_in
        from lockstep.record.mirror.stores import reader
        from lockstep.spec.locations import tracking_uri

        store = reader(tracking_uri(uri), storage)
        stored_run, artifacts = store.run(run), store.artifacts(run)
        listed = "attempts.json" in artifacts
        attempts = attempts_in(store.text(run, "attempts.json").encode()) if listed else []
        memory = {name: store.text(run, name) for name in artifacts if Document(name, "").tells_memory}
        answer(
            {**stored_run._asdict(), "artifacts": artifacts, "attempts": attempts, "memory": memory},
            lambda: _page(stored_run, artifacts, memory) + _attempts(attempts),
        )


def status(
    run: RunId,
    serve: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=65535,
            metavar="PORT",
            help="serve it on loopback until interrupted: JSON at /, metrics of Prometheus at /metrics; 0 takes a free port",
        ),
    ] = None,
    uri: Uri = None,
    storage: Storage = RUNS,
    json_: Json = False,
    verbose: Verbose = False,
) -> None:
    """Show how far a run is, and how long it still takes."""
    with answered(json_, verbose) as answer:
        from lockstep.driver.resume_hint import resume_command
        from lockstep.record.mirror.stores import reader
        from lockstep.spec.locations import tracking_uri
        from lockstep.views.status import as_text, status_of

        store = tracking_uri(uri)
        folder = _folder(run, uri, storage)

        def read() -> RunStatus:
            return status_of(reader(store, storage).run(run), store, folder, time.time())

        progress = read()
        if serve is not None:
            _serve(read, serve)
            return
        answer(
            progress.as_dict(), lambda: as_text(progress, resume_command(run, store, str(folder.absolute())))
        )


def _serve(read: Callable[[], RunStatus], port: int) -> None:
    """Serve a status until the command is interrupted. SpecError where the port is taken."""
    from lockstep.views.status_server import StatusServer

    try:
        server = StatusServer(read, port)
    except OSError as error:
        raise problems.PORT_TAKEN(got=port, reason=error.strerror) from error
    with server:
        say(f"the status is at {server.url}, its metrics at {server.url}/metrics; Ctrl-C ends it")
        server.serve_forever()


def compare(
    runs: Annotated[list[str], typer.Argument(metavar="RUN", help="the ids of runs")],
    keys: Annotated[
        list[str] | None,
        typer.Option(
            "--key",
            metavar="KEY",
            help="a curve, or several with *; give it once for each; default: as for show",
        ),
    ] = None,
    page: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="write a page that needs no other file")
    ] = None,
    uri: Uri = None,
    storage: Storage = RUNS,
    json_: Json = False,
    verbose: Verbose = False,
) -> None:
    """Compare the specs and curves of several runs."""
    screen = _screen()  # before standard output leads to standard error
    with answered(json_, verbose) as answer:
        from lockstep.files import write_text
        from lockstep.views.run_comparison import MOST, as_page, as_text, compared

        ids = list(dict.fromkeys(runs))
        if not 2 <= len(ids) <= MOST:
            raise problems.COMPARED_RUNS(got=len(ids), plural="s" * (len(ids) != 1), most=MOST)
        comparison = compared([_curves(run, uri, storage) for run in ids], keys or [])
        if page is not None:
            write_text(page, as_page(comparison))
        lines = [] if page is None else [f"written           {page}"]
        answer(
            {**comparison.as_dict(), "html": page and str(page)},
            lambda: "\n\n".join([as_text(comparison, screen), *lines]),
        )


def pin(
    run: RunId,
    step: Annotated[int, typer.Argument(min=1, metavar="STEP", help="a step that has a checkpoint")],
    remove: Annotated[bool, typer.Option("--remove", help="remove the pin")] = False,
    uri: Uri = None,
    storage: Storage = RUNS,
    json_: Json = False,
    verbose: Verbose = False,
) -> None:
    """Keep the checkpoint of a step for good. checkpoint.keep_last does not apply to it."""
    with answered(json_, verbose) as answer:
        from lockstep.calls.pinning import change_pin

        steps = change_pin(run, step, uri=uri, folder=storage, remove=remove)
        text = f"run {run}: pinned steps: {', '.join(map(str, steps)) or 'none'}"
        answer({"run_id": run, "pinned": steps}, lambda: text)


@command(record, None, "lockstep record sync RUN")
def sync(
    run: RunId,
    uri: Uri = None,
    storage: Storage = RUNS,
    json_: Json = False,
    verbose: Verbose = False,
) -> None:
    """Send a store what a run could not send before its process ended."""
    with answered(json_, verbose) as answer:
        from lockstep.calls.lost_files import sync_whole

        done = sync_whole(_folder(run, uri, storage), uri)
        text = f"run {done.run_id}: " + (
            f"everything is recorded, up to step {done.step}" if done.sent else "nothing was left to send"
        )
        answer(done._asdict(), lambda: text)


@command(record, None, "lockstep record check RUN", "lockstep record check RUN --repair")
def check(
    run: RunId,
    repair: Annotated[bool, typer.Option("--repair", help="repair what can be repaired")] = False,
    uri: Uri = None,
    storage: Storage = RUNS,
    json_: Json = False,
    verbose: Verbose = False,
) -> None:
    """Compare a run's journal, ledger, newest checkpoint and store."""
    with answered(json_, verbose) as answer:
        from lockstep.calls.record_check import check_record

        differences = check_record(_folder(run, uri, storage), uri, repair=repair)
        remaining = [difference for difference in differences if not difference.mended]
        lines = [
            f"{difference.where}: {difference.what}{' (mended)' if difference.mended else ''}"
            for difference in differences
        ]
        verdict = "the record is whole" if not remaining else f"{len(remaining)} differences are left"
        answer(
            {
                "run_id": run,
                "whole": not remaining,
                "differences": [difference._asdict() for difference in differences],
            },
            lambda: "\n".join([*lines, f"run {run}: {verdict}"]),
        )
        if remaining:
            raise typer.Exit(ExitCode.FAILED)


@command(record, None, "lockstep record tensorboard RUN OTHER --logdir curves")
def tensorboard(
    runs: Annotated[list[str], typer.Argument(metavar="RUN", help="the ids of runs")],
    logdir: Annotated[
        Path, typer.Option(help="folder for the event files; each run gets a folder in it")
    ] = Path("tensorboard"),
    uri: Uri = None,
    storage: Storage = RUNS,
    json_: Json = False,
    verbose: Verbose = False,
) -> None:
    """Write curves of runs for TensorBoard. Run it again to add new rows."""
    with answered(json_, verbose) as answer:
        from lockstep.views.tensorboard import check_installed, write_events

        check_installed()
        recorded = [_curves(run, uri, storage) for run in dict.fromkeys(runs)]
        written = [write_events(curves, logdir) for curves in recorded]
        lines = [
            f"run {entry.run_id}: {entry.rows} rows, {entry.added} new, in {entry.file}" for entry in written
        ]
        answer(
            {"logdir": str(logdir), "runs": [entry._asdict() for entry in written]},
            lambda: "\n".join([*lines, f"look at it        tensorboard --logdir {logdir}"]),
        )


@command(record, None, "lockstep record wandb RUN --dir curves")
def wandb(
    runs: Annotated[list[str], typer.Argument(metavar="RUN", help="the ids of runs")],
    directory: Annotated[
        Path, typer.Option("--dir", help="folder for the offline runs; each run gets a folder in it")
    ] = Path("wandb"),
    uri: Uri = None,
    storage: Storage = RUNS,
    json_: Json = False,
    verbose: Verbose = False,
) -> None:
    """Write curves of runs as offline runs of Weights & Biases. Run it again to rewrite the file."""
    with answered(json_, verbose) as answer:
        from lockstep.views.wandb import check_installed, write_offline_run

        check_installed()
        recorded = [_curves(run, uri, storage) for run in dict.fromkeys(runs)]
        written = [write_offline_run(curves, directory) for curves in recorded]
        lines = [
            f"run {entry.run_id}: {entry.steps} steps in {entry.folder}{'' if entry.changed else ', as before'}"
            for entry in written
        ]
        folders = " ".join(entry.folder for entry in written)
        answer(
            {"dir": str(directory), "runs": [entry._asdict() for entry in written]},
            lambda: "\n".join([*lines, f"send it        wandb sync {folders}"]),
        )


def _screen() -> Screen:
    from lockstep.views.terminal_curves import Screen

    return Screen.of(sys.stdout)


def _curves(run: str, uri: str | None, storage: Path) -> Curves:
    """The curves of a run. SpecError where there is no such run, or no step of it."""
    from lockstep.spec.locations import tracking_uri
    from lockstep.views.curves import curves_of

    try:
        return curves_of(run, tracking_uri(uri), _folder(run, uri, storage))
    except NoSuchRunError as error:
        raise error.as_kind(SpecError) from error


def _folder(run: str, uri: str | None, storage: Path) -> Path:
    """The run's folder: below `storage`, or where the store says that it is."""
    from lockstep.files import is_there

    if run and is_there(storage / run):
        return storage / run
    from lockstep.record.mirror.stores import reader
    from lockstep.spec.locations import tracking_uri

    recorded = reader(tracking_uri(uri), storage).run(run).tags.get("lockstep.folder")
    return Path(recorded) if recorded else storage / run


def _row(run: RunInfo) -> dict[str, Any]:
    """A run without its parameters and tags."""
    values = run._asdict()
    return {name: values[name] for name in values if name not in {"params", "tags"}} | {
        "job": run.tags.get("mlflow.source.name") or run.tags.get("lockstep.job", ""),
        "error": run.tags.get("lockstep.error", ""),
    }


def _table(runs: list[RunInfo]) -> str:
    rows = [["RUN", "NAME", "STATUS", "STARTED", "TOOK", "STEP", "LOSS", "EXPERIMENT"]]
    rows += [
        [
            run.run_id,
            run.name,
            run.status,
            _when(run.started),
            _took(run),
            str(run.step),
            _loss(run),
            run.experiment,
        ]
        for run in runs
    ]
    return table(rows)


def _page(run: RunInfo, artifacts: list[str], memory: Mapping[str, str]) -> str:
    from lockstep.record.events.union import Document
    from lockstep.record.ledger.goodput import text_of_tags

    shown = {
        "run": run.run_id,
        "name": run.name,
        "experiment": run.experiment,
        "status": run.status,
        "error": run.tags.get("lockstep.error", ""),
        "memory": "; ".join(Document(name, memory[name]).memory_line for name in sorted(memory)),
        "not exact": run.tags.get("lockstep.violation", ""),
        "started": f"{_when(run.started)}, took {_took(run)}",
        "recorded": f"up to step {run.step}",
        "metrics": "  ".join(
            f"{name} {value:.6g}"
            for name, value in sorted(run.metrics.items())
            if name.startswith(("train/", "eval/"))
        ),
        "effective": text_of_tags(run.tags),
        "resume proven": _proven(run.tags.get("lockstep.resumed_step", "")),
        "identity": run.tags.get("lockstep.identity", ""),
        "weights_digest": run.tags.get("lockstep.weights_digest", ""),
        "commit": run.tags.get("mlflow.source.git.commit") or run.tags.get("lockstep.git_commit", ""),
        "folder": run.tags.get("lockstep.folder", ""),
        "artifacts": "  ".join(artifacts),
        "look at it": run.url,
    }
    width = max(map(len, shown)) + 2
    return "\n".join(f"{name.ljust(width)}{on_one_line(text)}" for name, text in shown.items() if text)


def _proven(step: str) -> str:
    return step and f"at step {step}: a spare process took up that checkpoint and computed the same next step"


def _attempts(attempts: list[dict[str, Any]]) -> str:
    """Of a run that had more than one, or a straggler: what became of each, and what it cost to go on."""
    lines = []
    for attempt in attempts:
        lines.append(
            f"attempt {attempt['attempt']}: {attempt['workers']} workers, steps {attempt['from_step'] + 1} to "
            f"{attempt['last_step']}; {attempt['why'] or 'its driver was lost, or it is still running'}"
        )
        if attempt["lost_s"] is not None:
            spent = "  ".join(f"{stage} {seconds:.1f}" for stage, seconds in attempt["seconds"].items())
            how = "from a checkpoint"
            if attempt["in_memory"]:
                how = f"in memory, {attempt['joined']} joined" if attempt["joined"] else "in memory"
            lines.append(
                f"  began {attempt['lost_s']:.1f} s after the last step, {attempt['repeated']} steps repeated, {how}: {spent}"
            )
        lines += [f"  {straggler}" for straggler in attempt["stragglers"]]
    return "\n\n" + "\n".join(lines) if len(lines) > 1 else ""


def _loss(run: RunInfo) -> str:
    loss = run.metrics.get("eval/loss", run.metrics.get("train/loss"))
    return "" if loss is None else f"{loss:.4g}"


def _when(unix_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(unix_s))


def _took(run: RunInfo) -> str:
    took_s = (run.ended or time.time()) - run.started
    return duration_text(took_s) if took_s >= 0 else "unknown, for the clock was set back"
