"""The identity of a run: a digest of everything that can change its bits.

Two runs with one identity give the same weights. What is only placement (workers, loader processes, where
files and records go) never enters it.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from lockstep.errors import SpecError
from lockstep.job.imports import FIELD
from lockstep.job.source import changed_file, job_source_digest
from lockstep.spec.fields import PLACEMENT, PLACEMENT_FIELDS, Spec
from lockstep.spec.sample_ids import described

LATER = frozenset({"numerics_probe.numpy"})
"""Fields by these very names that records of earlier versions lack, which is no difference."""


def identity_fields(spec: Spec, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Every field of the identity by its dotted name, in plain data.

    `facts` are what only a worker can know: data sizes, device kind, numerics probe, initial weights' digest, what a fork starts from.
    With `reduction: native` the sum depends on the workers and on the buckets, so these enter as well. SpecError where a file of the
    job was changed after it was imported.
    """
    document = deciding(spec)
    document["job"] = {**document["job"], "params": _params(spec)}
    for name in ("initial_weights", "fork"):  # what they lead to is told by the facts
        document.pop(name)
    fields = dict(_flat(document))
    if (without := fields.pop("data.without")) is not None:
        fields["data.without"] = described(without)
    fields |= {f"version.{name}": found for name, found in _versions().items()}
    fields["job.source"] = _source_digest(spec.job.use)
    if spec.reduction == "exact":
        facts = {key: value for key, value in facts.items() if key != "workers"}
    else:
        fields["workers.bucket_mb"] = spec.workers.bucket_mb
    return {**fields, **facts}


def _source_digest(use: str) -> str:
    """The digest of the job's source. SpecError where this process has imported another one than lies there now."""
    if (changed := changed_file(use)) is not None:
        raise SpecError(
            f"job.source: {str(changed)!r} was changed after it was imported, so the run would train other code than its identity and its "
            "record have; put it back, or start again"
        )
    return job_source_digest(use)


def forked_step(fields: Mapping[str, Any]) -> int:
    """The step of another run that one with these identity fields goes on from; 0 for a run with a beginning of its own."""
    found = re.search(r"@(\d+)", str(fields.get("fork")))  # `<identity>@<step>`, see `training.start`
    return int(found[1]) if found else 0


def changed_fields(before: Spec, after: Spec) -> list[tuple[str, Any, Any]]:
    """The fields of the identity in which two specs differ: dotted name, value before, value after."""
    documents = [deciding(spec) for spec in (before, after)]
    if not same_value(before.job.params, after.job.params):  # else there is no need to import the job
        for spec, document in zip((before, after), documents, strict=True):
            document["job"] = {**document["job"], "params": _params(spec)}
    old, new = (dict(_flat(document)) for document in documents)
    names = {**old, **new}
    changed = [
        (name, old.get(name), new.get(name)) for name in names if not same_value(old.get(name), new.get(name))
    ]
    # A mapping that is empty on one side alone is told by what the other one has in it.
    return [one for one in changed if not any(name.startswith(f"{one[0]}.") for name in names)]


def same_value(one: Any, other: Any) -> bool:
    """Whether two values are one in a recorded identity, where 1, 1.0 and true are three."""
    return _as_json(one) == _as_json(other)


def differing_fields(before: Mapping[str, Any], now: Mapping[str, Any], *, either: bool = False) -> list[str]:
    """The names of the fields in which two recorded identities differ.

    `before` may lack what older versions did not record: LATER, defaults of params, files of the job; with `either` so may `now`.
    """

    def lacks(name: str) -> bool:
        later = name in LATER or name.startswith(("job.params", FIELD))
        return later and (name not in before or (either and name not in now))

    names = sorted({*before, *now})
    return [name for name in names if not same_value(before.get(name), now.get(name)) and not lacks(name)]


def written_params(spec: Spec) -> dict[str, Any]:
    """The params as the spec has them, which older versions recorded: fields `job.params.…`."""
    from lockstep.job.loading import placement_params

    placed = placement_params(spec.job.use)
    return dict(_flat({k: v for k, v in spec.job.params.items() if k not in placed}, "job.params."))


def deciding(spec: Spec) -> dict[str, Any]:
    """The part of a spec that decides about bits."""
    document = {key: value for key, value in spec.document().items() if key not in PLACEMENT}
    for section, placed in PLACEMENT_FIELDS.items():
        if section != "determinism":
            document[section] = {key: value for key, value in document[section].items() if key != placed}
    document["determinism"] = spec.determinism  # its mode, however it was written
    return document


def _params(spec: Spec) -> dict[str, Any]:
    from lockstep.job.loading import deciding_params

    return deciding_params(spec.job.use, spec.job.params)


def identity_digest(fields: Mapping[str, Any]) -> str:
    """sha256 over the fields as JSON with sorted names."""
    return hashlib.sha256(_as_json(fields).encode()).hexdigest()


def _as_json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)


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
