"""What a bug report needs, looked up in seconds whatever answers: what `lockstep doctor` does, for Python.

Nothing is changed, and nothing is started but a process that imports the job of a spec. Each look has a limit of its own
and runs beside the others.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import lockstep
from lockstep.checks import machine
from lockstep.checks.job_import import import_problem
from lockstep.checks.start_checks import advise
from lockstep.checks.tracking_store import store_answers
from lockstep.clusters.bounded_calls import within
from lockstep.clusters.reachability import LOCAL, check_answers, cluster_address
from lockstep.errors import LockstepError, first_line
from lockstep.record.git_state import git_state
from lockstep.record.redaction import redacted_document, without_uri_secrets
from lockstep.record.versions import versions
from lockstep.spec.fields import Spec
from lockstep.spec.loading import load_spec
from lockstep.spec.locations import unchecked_uri

LOOK_S = 15.0
"""How long a look may take. A cluster that does not answer is known after 7 s, on a machine that is not busy."""

IMPORT_S = 120.0
"""How long the job may take to be imported, with torch, which takes seconds."""

_Facts = dict[str, Any]


def diagnose(
    spec: str | Path | None = None,
    overrides: Iterable[str] = (),
    *,
    address: str | None = None,
    uri: str | None = None,
) -> _Facts:
    """Facts by their section, as plain data; `warnings` are lines of what is known to be wrong.

    What does not answer, cannot be read or is wrong with the spec is a fact and no error.
    """
    loaded, problem = _loaded(spec, overrides, uri)
    store = (loaded.record.uri if loaded else None) or unchecked_uri(uri)
    looks: dict[str, Callable[[], _Facts]] = {
        "machine": machine.described,
        "gpus": machine.gpus,
        "lockstep": lambda: _source(Path(lockstep.__file__).parent),
        "folder": lambda: _source(Path.cwd()),
        "cluster": lambda: _cluster(address),
        "store": lambda: _store(store),
        "runs": lambda: machine.folder(loaded.folder if loaded else Path("runs").absolute()),
    }
    if spec is not None:
        looks["spec"] = lambda: _spec(str(spec), loaded, problem)
    with ThreadPoolExecutor(len(looks)) as threads:
        sections = dict(zip(looks, threads.map(_looked, looks.items()), strict=True))
    facts: _Facts = {
        "versions": versions(),
        "python": sys.executable,
        "variables": machine.variables(os.environ),
        "spec": None,
        **sections,
    }
    report: _Facts = redacted_document({**facts, "warnings": [*_warnings(facts)]})
    return report


def _looked(look: tuple[str, Callable[[], _Facts]]) -> _Facts:
    """What a look found, or `error` with why it found nothing."""
    name, call = look
    try:
        return within(IMPORT_S + LOOK_S if name == "spec" else LOOK_S, name, call)
    except Exception as error:  # noqa: BLE001 - a library's, a driver's, a file system's: it is what the report is for
        return {"error": str(error) if isinstance(error, LockstepError) else first_line(error)}


def _loaded(
    spec: str | Path | None, overrides: Iterable[str], uri: str | None
) -> tuple[Spec | None, str | None]:
    if spec is None:
        return None, None
    try:
        return load_spec(spec, overrides, uri=uri), None
    except LockstepError as error:
        return None, str(error)


def _spec(file: str, loaded: Spec | None, problem: str | None) -> _Facts:
    if loaded is None:
        return {"file": file, "loads": False, "problem": problem, "imports": None, "import_problem": None}
    refused = import_problem(loaded.job.use, loaded.job.params, IMPORT_S)
    return {
        "file": file,
        "loads": True,
        "problem": None,
        "imports": refused is None,
        "import_problem": refused,
        "advice": advise(loaded),
    }


def _source(folder: Path) -> _Facts:
    state = git_state(folder)
    return {"path": str(folder), "commit": state.get("commit"), "dirty": state.get("dirty")}


def _cluster(address: str | None) -> _Facts:
    """Whether the cluster that a command would join answers; `answers` is None where none is named."""
    named = None
    try:
        named = cluster_address(address)
        if named == LOCAL:
            return {"address": None, "answers": None, "evidence": "none is named: a run starts its own"}
        check_answers(named)
    except LockstepError as error:
        return {"address": named or address, "answers": False, "evidence": str(error)}
    return {"address": named, "answers": True, "evidence": f"{named} answers"}


def _store(uri: str) -> _Facts:
    shown = without_uri_secrets(uri)
    try:
        return {"uri": shown, "answers": True, "evidence": store_answers(uri)}
    except LockstepError as error:
        return {"uri": shown, "answers": False, "evidence": str(error)}


def _warnings(facts: Mapping[str, Any]) -> Iterator[str]:
    yield from machine.wrong_versions()
    for section, content in facts.items():
        if isinstance(content, dict) and "error" in content:
            yield f"{section}: {content['error']}"
    if "error" not in facts["machine"]:
        yield from machine.wrong_limits(facts["machine"])
    yield from machine.wrong_variables(facts["variables"])
    yield from machine.wrong_build(facts["gpus"].get("devices", []))
    for section in ("cluster", "store"):
        if facts[section].get("answers") is False:
            yield facts[section]["evidence"]
    runs = facts["runs"]
    if runs.get("writable") is False:
        yield f"{runs['path']} cannot be written: {runs['evidence']}"
    if runs.get("free_bytes", machine.LITTLE_SPACE) < machine.LITTLE_SPACE:
        yield f"{runs['path']} has {runs['free_bytes'] >> 20} MiB left"
    spec = facts["spec"] or {}
    yield from filter(None, (spec.get("problem"), spec.get("import_problem"), *spec.get("advice", ())))
