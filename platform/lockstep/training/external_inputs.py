"""What a job takes from its process and machine, as fields of the identity, or as facts that a resume compares and tells.

A file below the job's folder that it reads before the run computes anything is a field of its own, `file.<path>`: such as a configuration, a vocabulary or
weights. What else it reads, lists and asks for is a fact: a data set may lie anywhere, and a process is another one each time.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

from lockstep.communication.group import Group
from lockstep.job.inputs.external_facts import COPIED, MOST_TOLD, UNKNOWN, UNREPEATABLE, Files
from lockstep.job.inputs.external_reads import ABSENT, content_of, merged
from lockstep.job.inputs.host_queries import ENVIRONMENT, answers, asked, unrepeatable
from lockstep.job.inputs.imports import Imported
from lockstep.job.inputs.replaced_functions import process_facts
from lockstep.job.inputs.variables import copied_by, is_placement, reads_by, reads_of
from lockstep.job.interface import Job, overrides
from lockstep.record.redaction import redacted_variables
from lockstep.spec.fields import Spec


class ExternalInputs(NamedTuple):
    """What a run takes: fields of the identity, facts to compare, and what cannot be compared."""

    fields: dict[str, Any]
    facts: dict[str, Any]
    environment: dict[str, Any]
    """Facts that are not compared: `UNKNOWN` and `UNREPEATABLE`."""


def external_inputs_of(spec: Spec, job: Job, group: Group, imported: Imported) -> ExternalInputs:
    """What the job has taken on any rank so far. All ranks call it."""
    files = Files(spec, imported.paths)
    found = merged(reads.outside for reads in reads_by(job, imported.paths))
    steady = {
        name: content
        for path, content in found.steady.items()
        # What is missing may be a cache that the job makes later on.
        if content is not ABSENT and (name := files.own_name(path)) is not None
    }
    others = {
        path: content
        for path, content in {**found.steady, **found.others}.items()
        if files.own_name(path) not in steady
    }
    every = group.gather((sorted(steady), sorted(files.name(path) for path in others)))
    unsteady = set[str]().union(*(names for _, names in every))
    fields = {
        name: steady[name] if name in steady else content_of(files.path(name))[0]
        for name in sorted(set[str]().union(*(names for names, _ in every)) - unsteady)
    }
    fields |= {files.name(path, always=True): content_of(path)[0] for path in imported.archives}
    facts = {files.name(path): content for path, content in others.items() if not files.is_source(path)}
    facts |= {name: content for name, content in steady.items() if name in unsteady}
    facts |= {files.name(path): content_of(path)[0] for path in imported.libraries}
    facts |= files.listings(found.folders)
    names = asked(imported.paths)
    copied = copied_by(job, imported.paths) or next(
        (names[name] for name in names if name in ENVIRONMENT), ""
    )
    facts |= {**answers(names), **process_facts(), **(_copied_variables() if copied else {})}
    rest = {
        UNKNOWN: _unknown(job, copied, found.programs),
        UNREPEATABLE: [f"{name} ({names[name]})" for name in unrepeatable(names)],
    }
    return ExternalInputs(
        fields, dict(sorted(facts.items())), {name: lines for name, lines in rest.items() if lines}
    )


class LaterFacts:
    """The facts of files and folders that are first taken after the run has begun. It is asked after each step, and costs nothing where there is none."""

    def __init__(self, spec: Spec, job: Job, paths: frozenset[str]) -> None:
        self._files, self._outside = Files(spec, paths), reads_of(job).outside
        self._count = self._outside.count
        self._seen = len(self._outside.files), len(self._outside.folders)

    def new(self) -> dict[str, Any]:
        """Those since it was asked last."""
        if self._outside.count == self._count:
            return {}
        self._count = self._outside.count
        files, folders = list(self._outside.files), list(self._outside.folders)
        new_files, new_folders = files[self._seen[0] :], folders[self._seen[1] :]
        self._seen = len(files), len(folders)
        read = {
            self._files.name(path): self._outside.files[path].content
            for path in new_files
            if path not in self._outside.written and not self._files.is_source(path)
        }
        return {**read, **self._files.listings(new_folders)}


_OF_SHELLS = frozenset(
    {
        "_",
        "SHLVL",
        "OLDPWD",
        "COLUMNS",
        "LINES",
        "LS_COLORS",
        "PS1",
        "LESSOPEN",
        "LESSCLOSE",
        "WINDOWID",
        "PYTEST_CURRENT_TEST",
    }
)
"""Variables that a shell or a test runner sets for itself."""


def _copied_variables() -> dict[str, str]:
    """The variables of the environment, by the sha256 of their values: but for secrets, and those that say where something is."""
    values = dict(os.environ)
    plain = {
        name: value
        for name, value in values.items()
        if not is_placement(name, value) and name not in _OF_SHELLS
    }
    kept = redacted_variables(plain)
    return {
        f"{COPIED}{name}": hashlib.sha256(os.fsencode(value)).hexdigest()[:16]
        for name, value in plain.items()
        if kept[name] == value
    }


def _unknown(job: Job, copied: str, programs: Mapping[str, str]) -> list[str]:
    """What the job takes of which nothing tells what it was. A job with an `identity` has said what counts of it."""
    if overrides(job, "identity"):
        return []
    lines = [
        f"starts another program ({program}, {place})"
        for program, place in list(programs.items())[:MOST_TOLD]
    ]
    if len(programs) > MOST_TOLD:
        lines.append(f"starts {len(programs) - MOST_TOLD} more programs")
    if copied:
        lines.append(f"copies the whole environment ({copied})")
    return lines
