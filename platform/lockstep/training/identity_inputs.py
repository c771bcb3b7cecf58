"""What decides about a run and no spec names: the variables that its job reads, and the modules and distributions that it is made of.

`job/inputs` notes what the job reads; here it becomes fields of the identity. Files and what the job asks of its machine: `external_inputs.py`.

What is known before the first step is in the identity from the start. What shows itself later, such as a variable that is first read in step 500, joins
the identity then: the record and every checkpoint from there on have it.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from lockstep.checkpoint.manifest import Facts
from lockstep.communication.group import Group
from lockstep.files import as_text
from lockstep.job.identity import VARIABLE, Difference, differences, identity_digest, shown
from lockstep.job.inputs.external_facts import (
    FILE,
    MOVED,
    contents_here,
    continued_files,
)
from lockstep.job.inputs.imports import (
    Asked,
    files_here,
    imported,
    imported_by,
    new_modules,
    recorded_beside,
    source_fields,
)
from lockstep.job.inputs.variables import arrived, held_now, is_placement, read_by, reads_of
from lockstep.job.interface import Job
from lockstep.job.typed_tree import Opaque, encoded
from lockstep.record.events.union import SOURCE, InputsFound, Tell
from lockstep.record.redaction import redacted_variables
from lockstep.spec.fields import Spec
from lockstep.training import problems
from lockstep.training.external_inputs import LaterFacts

_LONGEST = 200
"""Characters. A longer value is told by its digest."""


def variable_tree(name: str, value: str | None) -> Any:
    """The value of a variable for the identity: None for one that is not set; a secret, and what is long, by its sha256."""
    if value is None:
        return None
    secret = redacted_variables({name: value})[name] != value
    if secret or len(value) > _LONGEST or not value.isprintable():
        return encoded(Opaque("sha256", hashlib.sha256(os.fsencode(value)).hexdigest()))
    return encoded(value)


def variable_fields(job: Job, values: Mapping[str, str | None]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What variables hold, by the names of their fields: those that decide, and those that only say where something is.

    A secret is how a job gets at something, and decides nothing.
    """
    deciding, places = dict[str, Any](), dict[str, Any]()
    for name, value in sorted(values.items()):
        tree = variable_tree(name, value)
        secret = redacted_variables({name: "x"})[name] != "x"
        placed = secret or is_placement(name, value, job.placement_variables)
        (places if placed else deciding)[f"{VARIABLE}{name}"] = tree
    return deciding, places


def variables_read(job: Job, group: Group, files: Iterable[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """As `variable_fields`, of all that the job has read on any rank so far. All ranks call it."""
    values = read_by(job, files)
    every: list[list[str]] = group.gather(sorted(values))
    return variable_fields(job, held_now(set().union(*every)) | values)


def places_here() -> dict[str, Any]:
    """What the C library and Python take from a machine without a read that is seen: the time zone, and the order and form of texts."""
    names = ("LC_ALL", "LC_COLLATE", "LC_CTYPE", "LC_NUMERIC", "LC_TIME", "LANG")
    values = {name: value for name, value in held_now(names).items() if value}
    return {"time zone": [*time.tzname, time.timezone], **values}


def completed(fields: Mapping[str, Any], saved: Mapping[str, Any], spec: Spec) -> dict[str, Any]:
    """The fields of an identity, with those that another process of the run has found and this one has not met yet: what they are here."""
    late = [name.removeprefix(VARIABLE) for name in saved if name.startswith(VARIABLE) and name not in fields]
    current = {f"{VARIABLE}{name}": variable_tree(name, value) for name, value in held_now(late).items()}
    files = [path for path in recorded_beside(saved) if path not in recorded_beside(fields)]
    read = contents_here([name for name in saved if name.startswith(FILE) and name not in fields], spec)
    return {**current, **read, **source_fields(files_here(spec.job.use, files)), **fields}


def differing(saved: Mapping[str, Any], fields: Mapping[str, Any]) -> list[Difference]:
    """What differs between an identity and `fields` that are completed by it. What was read here alone has nothing to differ from."""
    new = {name: tree for name, tree in fields.items() if name.startswith((VARIABLE, FILE))}
    return differences({**new, **saved}, fields)


def continued(facts: dict[str, Any], saved: Facts, spec: Spec, tell: Callable[[str], None]) -> dict[str, Any]:
    """The facts of an attempt that goes on from a checkpoint with these `saved` facts: with what the run had found by then. Tells of moves."""
    environment = facts["environment"]
    own, outside = continued_files(
        facts["fields"],
        environment[MOVED],
        saved.identity_fields,
        saved.environment.get(MOVED) or {},
        spec,
        tell,
    )
    fields = completed(own, saved.identity_fields, spec)
    return {
        **facts,
        "fields": fields,
        "identity": identity_digest(fields),
        "environment": {**environment, MOVED: outside},
    }


class Inputs:
    """Looks after each step for inputs that were not there before."""

    def __init__(self, spec: Spec, job: Job, facts: Mapping[str, Any]) -> None:
        self._spec, self._job = spec, job
        self._reads = reads_of(job)
        self._noted = len(self._reads.values)
        self._later = LaterFacts(spec, job, imported_by(spec.job.use, job).paths)
        self._modules = set(sys.modules)
        self._count = len(sys.modules)
        self._told = {SOURCE: dict(facts.get(SOURCE) or {})}

    def look(self, facts: dict[str, Any], step: int, tell: Tell) -> None:
        """Add to the facts what was found since the last look, and tell it. Where there is nothing, it costs a tenth of a microsecond."""
        arrived()
        if later := self._later.new():
            environment = facts["environment"]
            facts["environment"] = {**environment, MOVED: {**later, **environment[MOVED]}}
        if len(self._reads.values) == self._noted and len(sys.modules) == self._count:
            return
        self._noted = len(self._reads.values)
        deciding, places = variable_fields(self._job, dict(self._reads.values))
        environment = facts["environment"]
        facts["environment"] = {**environment, MOVED: {**places, **environment[MOVED]}}
        files = self._new_files()
        new_fields = {
            name: tree
            for name, tree in {**deciding, **source_fields(files)}.items()
            if name not in facts["fields"]
        }
        self._add(facts, new_fields, step, tell, files)

    def agree(self, group: Group, facts: dict[str, Any], step: int, tell: Tell) -> None:
        """Add what any rank has found. All ranks call it, before what they have is saved. DriftError where two of them differ in it."""
        if group.size == 1:
            return
        own_fields = {name: tree for name, tree in facts["fields"].items() if name.startswith(VARIABLE)}
        every: list[dict[str, Any]] = group.gather(own_fields)
        together: dict[str, Any] = {}
        for rank, fields in enumerate(every):
            for name, tree in fields.items():
                if together.setdefault(name, tree) != tree:
                    raise problems.INPUTS_DIFFER(
                        name=name, rank=rank, got=shown(tree), wanted=shown(together[name])
                    )
        self._add(
            facts, {name: tree for name, tree in together.items() if name not in own_fields}, step, tell, {}
        )

    def _new_files(self) -> dict[str, bytes]:
        """The files of modules that were imported since the last look, and that no distribution has installed."""
        if len(sys.modules) == self._count:
            return {}
        names = new_modules(self._modules)
        self._modules, self._count = set(sys.modules), len(sys.modules)
        return imported(self._spec.job.use, Asked(set(names))).files if names else {}

    def _add(
        self,
        facts: dict[str, Any],
        found: Mapping[str, Any],
        step: int,
        tell: Tell,
        files: Mapping[str, bytes],
    ) -> None:
        if not found:
            return
        facts["fields"] = {**facts["fields"], **found}
        facts["identity"] = identity_digest(facts["fields"])
        source = {path: as_text(content) for path, content in files.items()}
        tell(InputsFound(step, facts["fields"], facts["identity"], source))
