"""Weights & Biases: the curves of a run as an offline run, which `wandb sync` sends to a server.

The file is what wandb's offline mode leaves, written by wandb's own writer. wandb itself would have each row begin now: the times of a run
that is logged later are its writer's. Here they are the ledger's. The bytes follow from the record alone, under the id of the run, so a
second call leaves the same file, or one with more rows in its place.
"""

from __future__ import annotations

import filecmp
import json
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from lockstep.files import make_folder, private, replaced
from lockstep.record.events.codec import LATEST
from lockstep.views import problems
from lockstep.views.curves import Curves, Moment

_REFUSED_IN_PROJECTS = re.compile(r"[/\\#?%:]")
LONGEST_PROJECT = 128
"""Characters of a project's name."""


class Written(NamedTuple):
    """What became of one run: the folder of its offline run, how many steps that has, and whether it has changed."""

    run_id: str
    folder: str
    steps: int
    changed: bool


def check_installed() -> None:
    """SpecError where the package is missing."""
    try:
        import wandb  # noqa: F401
    except ModuleNotFoundError as error:
        raise problems.PACKAGE(package="wandb") from error


def write_offline_run(curves: Curves, directory: Path) -> Written:
    """Bring the offline run of a run, a folder in `directory`, up to its record. StorageError where the disk refuses."""
    folder = _folder(directory, curves)
    path = folder / f"run-{curves.run_id}.wandb"
    try:
        with private(bool(curves.document.get("record", {}).get("private"))):
            make_folder(folder)
            with replaced(path) as aside:
                steps = _write(aside, curves)
                changed = not (path.exists() and filecmp.cmp(path, aside, shallow=False))
            if changed:  # what `wandb sync` leaves beside a run that a server has
                path.with_name(f"{path.name}.synced").unlink(missing_ok=True)
    except OSError as error:
        raise problems.UNWRITABLE(option="dir", file=path, got=error.strerror or error) from error
    return Written(curves.run_id, str(folder), steps, changed)


def _folder(directory: Path, curves: Curves) -> Path:
    """The folder of a run, named as wandb names them: by when the run began, in UTC, and its id."""
    began = time.strftime(
        "%Y%m%d_%H%M%S", time.gmtime(min(max(next(curves.moments()).wall_clock, 0.0), LATEST))
    )
    existing = directory.glob(f"offline-run-*-{curves.run_id}")
    return next(existing, directory / f"offline-run-{began}-{curves.run_id}")


def _write(path: Path, curves: Curves) -> int:
    """Write all records of a run into a new file. How many steps it has."""
    from wandb.sdk.internal.datastore import DataStore

    path.unlink(missing_ok=True)  # the writer refuses a file that exists
    store = DataStore()
    store.open_for_write(str(path))
    steps = 0
    try:
        for number, record in enumerate(_records(curves), start=1):
            record.num = number
            store.write(record)
            steps += record.HasField("history")
    finally:
        store.close()
    return steps


def _records(curves: Curves) -> Iterator[Any]:
    """What the file is to hold: the run with its spec, a row for each step, the last value of each key, and how the run ended."""
    import wandb
    from wandb.proto import wandb_internal_pb2 as wire

    began = next(curves.moments()).wall_clock
    yield wire.Record(header=wire.HeaderRecord(version_info=wire.VersionInfo(producer=wandb.__version__)))
    experiment = str(curves.document.get("record", {}).get("experiment") or curves.name)
    project = _REFUSED_IN_PROJECTS.sub("-", experiment)[:LONGEST_PROJECT]
    run = wire.RunRecord(run_id=curves.run_id, project=project, display_name=curves.name)
    run.start_time.FromMilliseconds(round(began * 1000))
    for name, value in curves.fields.items():
        run.config.update.add(key=name, value_json=json.dumps(value, default=str))  # YAML knows dates
    yield wire.Record(run=run)
    last: dict[str, float] = {}
    for step, values in _rows(curves, began):
        history = wire.HistoryRecord(step=wire.HistoryStep(num=step))
        for name, number in values.items():
            history.item.add(nested_key=[name], value_json=json.dumps(number))
        last |= values
        yield wire.Record(history=history)
    summary = wire.SummaryRecord()
    for name, number in last.items():
        summary.update.add(nested_key=[name], value_json=json.dumps(number))
    yield wire.Record(summary=summary)
    if curves.failed is not None:  # a run without an end is one that goes on
        yield wire.Record(
            exit=wire.RunExitRecord(exit_code=int(curves.failed), runtime=round(last["_runtime"]))
        )


def _rows(curves: Curves, began: float) -> Iterator[tuple[int, Mapping[str, float]]]:
    """The steps, in order, each once: the values of an evaluation join those of its step, whose time they take."""
    pending: Moment | None = None
    for moment in curves.moments():
        if pending is None or moment.step != pending.step:
            if pending is not None:
                yield pending.step, _row(pending, began)
            pending = moment
        else:
            pending = pending._replace(values=pending.values | moment.values)
    if pending is not None:
        yield pending.step, _row(pending, began)


def _row(moment: Moment, began: float) -> Mapping[str, float]:
    times = {"_step": moment.step, "_timestamp": moment.wall_clock, "_runtime": moment.wall_clock - began}
    return moment.values | times
