"""A measurement stored as a run: it keeps no trained state, but curves, documents, a figure and a note. It cannot be resumed."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from lockstep.files import write_text
from lockstep.record.events.metrics import Point
from lockstep.record.mirror import documents
from lockstep.record.mirror.run_store import POINTS_PER_CALL, RunStore
from lockstep.record.mirror.stores import store_for
from lockstep.record.plots.run_plots import FOLDER
from lockstep.record.redaction import redacted_document
from lockstep.spec.fields import Spec


class Kept(NamedTuple):
    """Where a measurement is: its run in the store, the folder of its files, and the link to its page (may be empty)."""

    run_id: str
    folder: Path
    url: str


def keep_measurement(
    spec: Spec,
    kind: str,
    verdict: str,
    *,
    curves: Mapping[str, Sequence[float]],
    texts: Mapping[str, str],
    draw: Callable[[Path], Path],
) -> Kept:
    """Store the results of a measurement of a `kind` such as `lr-find`, in the store that the spec names.

    `curves` have one value per step, `texts` are files by name, and `draw` draws the figure into a file. RecordError where the
    store refuses it.
    """
    store = store_for(spec, time.time())
    run_id = store.open(None)
    run = Kept(run_id, spec.folder / run_id, store.url())
    try:
        store.log_params(documents.flat(redacted_document(spec.document())))
        store.set_tags(
            {"lockstep.kind": kind, "lockstep.job": spec.job.use, "lockstep.folder": str(run.folder)}
        )
        _log_curves(store, curves)
        for name, text in texts.items():
            write_text(run.folder / name, text)
            store.log_file(run.folder / name, "")
        figure = draw(run.folder / FOLDER / f"{kind}.png")
        store.log_file(figure, FOLDER)
        note = documents.note(
            documents.Verdict(kind, f" · {verdict}"), {}, [f"{FOLDER}/{figure.name}"], run_id
        )
        store.set_tags({"lockstep.note": note})
    except BaseException:
        store.set_status("FAILED")
        raise
    store.set_status("FINISHED")
    return run


def _log_curves(store: RunStore, curves: Mapping[str, Sequence[float]]) -> None:
    at = int(1000 * time.time())
    points = [
        Point(name, value, at, step)
        for name, values in curves.items()
        for step, value in enumerate(values, 1)
    ]
    for start in range(0, len(points), POINTS_PER_CALL):
        store.log_metrics(points[start : start + POINTS_PER_CALL])
