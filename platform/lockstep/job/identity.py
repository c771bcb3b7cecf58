"""The identity of a run: a digest of everything that can change its bits.

Two runs with one identity give the same weights. What is only placement (workers, loader processes, where
files and records go) never enters it.

It is the digest of one mapping, of a field's name to its tree (`typed_tree`). A section of the spec gives a field for each of its own; a
param of the job is one field, however deep its value is, so what a user writes never becomes part of a name.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple, TypeGuard

from lockstep.job import problems
from lockstep.job.source import changed_file, job_source_digest
from lockstep.job.typed_tree import decoded, digest, encoded, text
from lockstep.spec.fields import PLACEMENT, PLACEMENT_FIELDS, Spec
from lockstep.spec.sample_ids import described

PARAM = "job.params."
"""How the field of a param begins; its name follows."""

_ORIGIN = ("initial_weights", "fork")
"""Where a run's first state comes from: no part of its identity, which has the digest of what lies there."""


FIRST_MICRO_BATCH = "first_micro_batch"
"""The field with the digest of what the run's first micro-batch gives at the initial weights: loss, parts, gradients and buffers."""


def identity_fields(spec: Spec, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Every field of the identity, by name: trees, which are plain JSON.

    `facts` are trees that only a worker can know: data sizes, device kind, numerics probe, initial weights' digest, what a fork starts from.
    With `reduction: native` the sum depends on the workers and on the buckets, so these enter as well. SpecError where a file of the
    job was changed after it was imported.
    """
    fields = {name: tree for name, tree in deciding(spec).items() if name not in _ORIGIN}
    fields |= {f"version.{name}": installed for name, installed in _versions().items()}
    fields["job.source"] = _source_digest(spec.job.use)
    if spec.reduction == "exact":
        facts = {key: value for key, value in facts.items() if key != "workers"}
    else:
        fields["workers.bucket_mb"] = spec.workers.bucket_mb
    return {**fields, **facts}


def _source_digest(use: str) -> str:
    """The digest of the job's source. SpecError where this process has imported another one than lies there now."""
    if (changed := changed_file(use)) is not None:
        raise problems.SOURCE_CHANGED(got=changed)
    return job_source_digest(use)


def forked_step(fields: Mapping[str, Any]) -> int:
    """The step of another run that one with these identity fields goes on from; 0 for a run with a beginning of its own."""
    match = re.search(r"@(\d+)", str(fields.get("fork")))  # `<identity>@<step>`, see `training.start`
    return int(match[1]) if match else 0


class Difference(NamedTuple):
    """A value in which two identities differ: where it is, and its trees on both sides, None where there is none."""

    name: str
    before: Any
    now: Any


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[Difference]:
    """The values in which two identities differ, by the names of their fields, and inside them by key: `job.params.scale['a']['b']`.

    Last comes what the first micro-batch gave, which follows from the others.
    """
    names = sorted({*before, *now}, key=lambda name: (name == FIRST_MICRO_BATCH, name))
    return [difference for name in names for difference in _within(name, before, now, name)]


def _within(key: str, before: Mapping[str, Any], now: Mapping[str, Any], name: str) -> Iterator[Difference]:
    """The differences at a key of two mappings, which is called `name`."""
    old, new = before.get(key), now.get(key)
    if (key in before) == (key in now) and text(old) == text(new):
        return
    if _is_plain_mapping(old) and _is_plain_mapping(new):
        for inner in sorted({*old, *new}):
            yield from _within(inner, old, new, f"{name}[{inner!r}]")
        return
    yield Difference(name, old, new)


def _is_plain_mapping(tree: Any) -> TypeGuard[Mapping[str, Any]]:
    return isinstance(tree, Mapping) and not any(key.startswith("$") for key in tree)


def shown(tree: Any) -> str:
    """The value of a tree as Python writes it."""
    return repr(decoded(tree))


def changed_fields(before: Spec, after: Spec) -> list[Difference]:
    """The values that decide in which two specs differ. The job is imported only where its params as they are written differ."""
    same = text(encoded(before.job.params)) == text(encoded(after.job.params))
    params = [{} if same else _params(spec) for spec in (before, after)]
    old, new = (
        {**_sections(spec), **spec_params} for spec, spec_params in zip((before, after), params, strict=True)
    )
    return differences(old, new)


def deciding(spec: Spec) -> dict[str, Any]:
    """The fields of a spec that decide about bits, its job's params among them as the job gets them."""
    return {**_sections(spec), **_params(spec)}


def _sections(spec: Spec) -> dict[str, Any]:
    """The fields of a spec that decide, but for the job's params. An `early_stop` that is left out gives none."""
    document = {key: value for key, value in spec.document().items() if key not in PLACEMENT}
    origin = {name: encoded(document.pop(name)) for name in _ORIGIN}
    for section, placed in PLACEMENT_FIELDS.items():
        if section != "determinism":
            document[section] = {key: value for key, value in document[section].items() if key != placed}
    document["determinism"] = spec.determinism  # its mode, however it was written
    document["job"] = {"use": spec.job.use}
    document["batch"] = _stated(document["batch"], ("tokens",))
    document["early_stop"] = _stated(document["early_stop"] or {}, ("threshold",))
    document["evaluate"] = _stated(document["evaluate"], ("limit",))
    fields = {name: encoded(value) for name, value in _flat(document)}
    if (without := fields.pop("data.without")) is not None:
        fields["data.without"] = described(without)
    return {**fields, **origin}


def _stated(section: Mapping[str, Any], optional: tuple[str, ...]) -> dict[str, Any]:
    """A section without those of its `optional` fields that say nothing."""
    return {key: value for key, value in section.items() if key not in optional or value is not None}


def _params(spec: Spec) -> dict[str, Any]:
    from lockstep.job.loading import deciding_params

    return {f"{PARAM}{name}": tree for name, tree in deciding_params(spec.job.use, spec.job.params).items()}


def identity_digest(fields: Mapping[str, Any]) -> str:
    """sha256 over the fields."""
    return digest(dict(fields))


def _flat(document: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The fields of the spec's sections, whose names have no dot."""
    for key, value in document.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


@cache
def _versions() -> dict[str, str]:
    by_name = {"python": ".".join(map(str, sys.version_info[:3]))}
    for package in ("lockstep-train", "torch", "numpy"):
        try:
            by_name[package] = version(package)
        except PackageNotFoundError:  # run from its source folder, without being installed
            by_name[package] = "unknown"
    return by_name
