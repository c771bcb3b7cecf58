"""The identity of a run: a digest of everything that can change its bits.

Two runs with one identity give the same weights. What is only placement (workers, loader processes, where
files and records go) never enters it.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from lockstep.job.source import job_source_digest
from lockstep.spec.fields import PLACEMENT, PLACEMENT_FIELDS, Spec
from lockstep.spec.sample_ids import described


def identity_fields(spec: Spec, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Every field of the identity by its dotted name, in plain data.

    `facts` are what only a worker can know: data sizes, device kind, numerics probe, initial weights' digest, what a fork starts from.
    With `reduction: native` the sum depends on the workers and on the buckets, so these enter as well.
    """
    document = _deciding(spec)
    _take_placement(spec.job.use, document)
    for name in ("initial_weights", "fork"):  # what they lead to is told by the facts
        document.pop(name)
    fields = dict(_flat(document))
    if (without := fields.pop("data.without")) is not None:
        fields["data.without"] = described(without)
    fields |= {f"version.{name}": found for name, found in _versions().items()}
    fields["job.source"] = job_source_digest(spec.job.use)
    if spec.reduction == "exact":
        facts = {key: value for key, value in facts.items() if key != "workers"}
    else:
        fields["workers.bucket_mb"] = spec.workers.bucket_mb
    return {**fields, **facts}


def changed_fields(before: Spec, after: Spec) -> list[tuple[str, Any, Any]]:
    """The fields of the identity in which two specs differ: dotted name, value before, value after."""
    documents = [_deciding(spec) for spec in (before, after)]
    if before.job.params != after.job.params:  # else there is no need to import the job
        for document in documents:
            _take_placement(after.job.use, document)
    old, new = (dict(_flat(document)) for document in documents)
    names = {**old, **new}
    changed = [(name, old.get(name), new.get(name)) for name in names if old.get(name) != new.get(name)]
    # A mapping that is empty on one side alone is told by what the other one has in it.
    return [one for one in changed if not any(name.startswith(f"{one[0]}.") for name in names)]


def _deciding(spec: Spec) -> dict[str, Any]:
    """The part of a spec that decides about bits."""
    document = {key: value for key, value in spec.document().items() if key not in PLACEMENT}
    for section, placed in PLACEMENT_FIELDS.items():
        if section != "determinism":
            document[section] = {key: value for key, value in document[section].items() if key != placed}
    document["determinism"] = spec.determinism  # its mode, however it was written
    return document


def _take_placement(use: str, document: dict[str, Any]) -> None:
    """Take the params out that the job declares as placement."""
    from lockstep.job.loading import placement_params

    placed, job = placement_params(use), document["job"]
    document["job"] = {**job, "params": {k: v for k, v in job["params"].items() if k not in placed}}


def identity_digest(fields: Mapping[str, Any]) -> str:
    """sha256 over the fields as JSON with sorted names."""
    return hashlib.sha256(json.dumps(fields, sort_keys=True, default=str).encode()).hexdigest()


def _flat(document: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in document.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


@cache
def _versions() -> dict[str, str]:
    found = {"python": ".".join(map(str, sys.version_info[:3]))}
    for package in ("lockstep-train", "torch", "numpy"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:  # run from its source folder, without being installed
            found[package] = "unknown"
    return found
