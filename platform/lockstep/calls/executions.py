"""Executing the code of a recorded run in a process of its own: how a command starts it, and what it is given."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lockstep.calls import problems
from lockstep.checkpoint.storage.local import LocalStorage
from lockstep.checkpoint.storage.opening import open_storage
from lockstep.data.table_pins import FIELD as TABLE_VERSION
from lockstep.driver.options import RunOptions
from lockstep.job.inputs.imports import FIELD
from lockstep.proof.execution import Execution, ProcessSettings
from lockstep.proof.recorded_run import RecordedRun
from lockstep.proof.sandbox import Sandbox
from lockstep.spec.fields import Spec


def execution_of(
    run: RecordedRun,
    options: RunOptions,
    *,
    sandboxed: bool,
    needed: Sequence[Path] = (),
    hidden: Sequence[Path] | None = (),
    terminal: bool = False,
    workers: int | None = None,
) -> Execution:
    """What executes the code of a run: in a process of its own, or where `options` are not local on a cluster that such a process joins.

    In a sandbox it sees the folders `needed`, and neither the record of the run nor `hidden`; with None the record as well.
    """
    cluster = None
    if not options.local:
        cluster = {"address": options.address, "workers": workers, "verbose": options.verbose}
    sandbox = None
    if sandboxed:
        if cluster is not None:
            raise problems.SANDBOX_ON_RAY()
        if run.spec.reduction == "native" and run.fields.get("workers", 1) != 1:
            raise problems.SANDBOX_NATIVE(run=run.run_id, got=run.fields["workers"])
        unseen = [] if hidden is None else [*_record_of(run), *hidden]
        sandbox = Sandbox(unseen, [*needed, *named_in(run.spec)])
    fields = {
        name: value
        for name, value in run.fields.items()
        if name == "job.source" or name.startswith((FIELD, TABLE_VERSION))
    }
    return Execution(ProcessSettings(options.progress.say, sandbox, terminal), run.source, fields, cluster)


def taken_again(run: RecordedRun, start: int, until: int) -> str:
    """What is said of steps before they are taken again; `start` as in a Span."""
    fork = run.spec.fork
    beginning = "the beginning" if fork is None else f"where run {fork.run} was forked"
    where = f"the checkpoint of step {start}" if start else beginning
    return f"steps {max(start, run.forked_at) + 1} to {until} are taken again, from {where}"


def _record_of(run: RecordedRun) -> Iterator[Path]:
    """Where the record of a run is on this machine, as far as it is in files."""
    yield run.spec.folder / run.run_id
    if run.folder is not None:
        yield run.folder
    storage = open_storage(run.spec.checkpoint.storage)
    if isinstance(storage, LocalStorage):
        yield storage.root / run.run_id
    uri = run.spec.record.uri or ""
    for scheme in ("sqlite:///", "file://"):
        if uri.startswith(scheme):
            yield Path(uri.removeprefix(scheme)).absolute()
    if uri and "://" not in uri and Path(uri).exists():
        yield Path(uri).absolute()


def named_in(spec: Spec) -> Iterator[Path]:
    """The files and folders that the job's params and the initial weights name."""
    for value in _texts([spec.job.params, spec.initial_weights]):
        if value.startswith("/") and len(value) < 4096 and "\0" not in value and Path(value).exists():
            yield Path(value)


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _texts(item)
