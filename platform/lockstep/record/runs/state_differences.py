"""Compares the parameters and tags that a store has of a run with those that its journal projects to. Others, such as a user's own tags, are none of its business."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from lockstep.job.identity import PARAM
from lockstep.parsing import MOST_YAML_BYTES, json_document, yaml_value
from lockstep.paths import read_beneath
from lockstep.record.ledger.journal import Journal
from lockstep.record.ledger.journal_end import end_of, status_of
from lockstep.record.mirror.documents import flat
from lockstep.record.mirror.projection import Projection
from lockstep.record.mirror.run_files import as_written
from lockstep.spec.fields import PLACEMENT, PLACEMENT_FIELDS, Spec

_NOTE, _ERROR = "lockstep.note", "lockstep.error"


class State(NamedTuple):
    """The parameters and the tags of a run."""

    params: Mapping[str, str]
    tags: Mapping[str, str]


def is_placement(name: str, fields: Mapping[str, Any]) -> bool:
    """Whether a parameter is a field of the spec, or a param of the job, on which no bits depend; `fields` are those of the identity."""
    section, _, field = name.partition(".")
    if name.startswith(PARAM):
        return f"{PARAM}{name.removeprefix(PARAM).partition('.')[0]}" not in fields
    return section in PLACEMENT or PLACEMENT_FIELDS.get(section) == field


def projected_state(spec: Spec, folder: Path, journal: Journal) -> State:
    """What a store should have of a run that has ended, but for the note, which a user may edit on its page. Raises OSError or ValueError for an unreadable spec.yaml.

    Parameters that a resume may change are left out: a store keeps their first values.
    """
    projection = Projection(spec, folder, journal)
    projection.fold(journal.events)
    projection.describe({})
    fields = json_document(as_written(projection.documents.get("fields.json", "{}")))
    params = flat(yaml_value(read_beneath(folder, "spec.yaml", MOST_YAML_BYTES).decode())) | projection.params
    untold = {_NOTE}
    if projection.end is None:
        projection.take(end_of(journal.events))
        untold.add(_ERROR)  # whoever found the run dead says why
    # An end that is no whole one for damage of the journal is reported as that.
    tags = {} if projection.lack else projection.tags(trouble="", figures=[], ended=True)
    return State(
        {name: value for name, value in params.items() if not is_placement(name, fields)},
        {name: value for name, value in tags.items() if name not in untold},
    )


def state_differences(stored: State, expected: State, journal: Journal) -> Iterator[str]:
    """In what a store does not have what it should of a run; nothing while a newer attempt decides how the run goes on."""
    if status_of(journal.events) == "RUNNING":
        return
    for kind, found, wanted in zip(("parameter", "tag"), stored, expected, strict=True):
        for name, value in wanted.items():
            if found.get(name, "") != value:
                yield f"{'has another' if name in found else 'lacks the'} {kind} {name}"
