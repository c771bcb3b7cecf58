"""TensorBoard: the curves of a run as an event file.

Its bytes follow from the record alone: the spec, then one event a row, in order. So what was written of a run before is the
beginning of what is to be written now, and only the rest is added, a record that was cut off included. Where it is not (another
spec, a row that was recorded again after wrong bits), a new file takes the place of the old one.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from lockstep.files import NoLocksError, lock, make_folder, private, replacing, unlock
from lockstep.record.mirror.documents import as_yaml, flat
from lockstep.views import problems
from lockstep.views.curves import Curves, Moment

FILE = "events.out.tfevents.lockstep"
"""One name for all times: TensorBoard reads every file in a folder that has `tfevents` in its name."""


class Written(NamedTuple):
    """What became of one run: its event file, how many rows that has, and how many of them are new."""

    run_id: str
    file: str
    rows: int
    added: int


def check_installed() -> None:
    """SpecError where the package is missing."""
    try:
        import tensorboard  # noqa: F401
    except ModuleNotFoundError as error:
        raise problems.PACKAGE(package="tensorboard") from error


def write_events(curves: Curves, logdir: Path) -> Written:
    """Bring the event file of a run, in a folder of its own below `logdir`, up to its record. StorageError where the disk refuses."""
    path = _folder(logdir, curves) / FILE
    hidden = bool(curves.document.get("record", {}).get("private"))
    try:
        with private(hidden):
            make_folder(path.parent)
            with _locked(path) as file:
                counts = _add(file, curves) or _write_anew(path, curves)
    except OSError as error:
        raise problems.UNWRITABLE(option="logdir", file=path, got=error.strerror or error) from error
    return Written(curves.run_id, str(path), *counts)


def _folder(logdir: Path, curves: Curves) -> Path:
    """The folder of a run. One that is there stays, whatever the run is called by now."""
    short = curves.run_id[:8]
    return next(logdir.glob(f"*-{short}"), logdir / f"{curves.name}-{short}")


@contextmanager
def _locked(path: Path) -> Iterator[BinaryIO]:
    """The file, to be read and written; made where there is none. Two commands at once would both add the same rows."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        with os.fdopen(descriptor, "r+b") as file:
            # Where no file can be locked, only two commands at once are the worse for it.
            with suppress(NoLocksError):
                lock(descriptor, wait=True)
            if os.path.samestat(os.fstat(descriptor), path.stat()):  # else it was replaced meanwhile
                try:
                    yield file
                finally:
                    file.flush()
                    unlock(descriptor)
                return


def _add(file: BinaryIO, curves: Curves) -> tuple[int, int] | None:
    """Add the rows that the file lacks. How many it has then, and how many are new; None where it does not begin as it should."""
    number, begun = 0, None
    for number, record in enumerate(_records(curves)):
        if begun is None:
            existing = file.read(len(record))
            if existing == record:
                continue
            if not record.startswith(existing):
                return None
            file.seek(-len(existing), os.SEEK_CUR)
            file.truncate()
            begun = number
        file.write(record)
    if begun is None:
        return None if file.read(1) else (number, 0)
    return number, number - max(begun, 1) + 1


def _write_anew(path: Path, curves: Curves) -> tuple[int, int]:
    rows = -1  # the first record is the spec's
    with replacing(path) as file:
        for record in _records(curves):
            file.write(record)
            rows += 1
    return rows, rows


def _records(curves: Curves) -> Iterator[bytes]:
    """What the file is to hold: the version and the spec first, then a record for each row."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary

    moments = curves.moments()
    first = next(moments)
    spec = Event(wall_time=first.wall_clock, summary=_spec_summary(curves, first))
    yield _encoded(Event(wall_time=first.wall_clock, file_version="brain.Event:2"), spec)
    for moment in chain([first], moments):
        values = [Summary.Value(tag=key, simple_value=value) for key, value in moment.values.items()]
        yield _encoded(Event(wall_time=moment.wall_clock, step=moment.step, summary=Summary(value=values)))


def _encoded(*events: Any) -> bytes:
    from tensorboard.summary.writer.record_writer import RecordWriter

    sink = io.BytesIO()
    for event in events:
        RecordWriter(sink).write(event.SerializeToString())
    return sink.getvalue()


def _spec_summary(curves: Curves, first: Moment) -> Any:
    """The spec as text, and the fields of it that make up the identity as hyperparameters."""
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
    from tensorboard.compat.proto.types_pb2 import DT_STRING
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData
    from tensorboard.plugins.hparams.summary_v2 import hparams_pb
    from tensorboard.plugins.text.metadata import create_summary_metadata

    hyperparameters = {name: _typed(text) for name, text in flat(curves.fields).items()}
    summary = hparams_pb(hyperparameters, trial_id=curves.run_id, start_time_secs=first.wall_clock)
    for value in summary.value:  # a mapping of protobuf's has no order of its own
        plugin = value.metadata.plugin_data
        plugin.content = HParamsPluginData.FromString(plugin.content).SerializeToString(deterministic=True)
    markdown = "".join(f"    {line}\n" for line in as_yaml(curves.document).splitlines())
    text = TensorProto(dtype=DT_STRING, string_val=[markdown.encode()], tensor_shape=TensorShapeProto())
    shown = Summary.Value(tag="spec", metadata=create_summary_metadata("spec", ""), tensor=text)
    return Summary(value=[*summary.value, shown])


def _typed(text: str) -> bool | float | str:
    """A field as a hyperparameter: a number or a truth value where it is one."""
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return value if isinstance(value, bool | int | float) else text
