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
from lockstep.spec.id_ranges import described

PARAM = "job.params."
"""How the field of a param begins; its name follows."""

VARIABLE = "variable."
"""How the field of an environment variable begins that the job reads; its name follows."""

_ORIGIN = ("initial_weights", "fork")
"""Where a run's first state comes from: no part of its identity, which has the digest of what lies there."""


DELAY = "evaluate.delay"
"""The field with the steps after which an evaluation decides. A run in which none decides about bits, or each does at once, has no such field."""

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
    old: Any
    new: Any


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Difference]:
    """The values in which two identities differ, by the names of their fields, and inside them by key: `job.params.scale['a']['b']`.

    Last comes what the first micro-batch gave, which follows from the others.
    """
    names = sorted({*old, *new}, key=lambda name: (name == FIRST_MICRO_BATCH, name))
    return [difference for name in names for difference in _within(name, old, new, name)]


def _within(key: str, old: Mapping[str, Any], new: Mapping[str, Any], name: str) -> Iterator[Difference]:
    """The differences of the values that two mappings have for `key`. The place of these values is called `name`."""
    old_value, new_value = old.get(key), new.get(key)
    if (key in old) == (key in new) and text(old_value) == text(new_value):
        return
    if _is_plain_mapping(old_value) and _is_plain_mapping(new_value):
        for inner in sorted({*old_value, *new_value}):
            yield from _within(inner, old_value, new_value, f"{name}[{inner!r}]")
        return
    yield Difference(name, old_value, new_value)


def _is_plain_mapping(tree: Any) -> TypeGuard[Mapping[str, Any]]:
    return isinstance(tree, Mapping) and not any(key.startswith("$") for key in tree)


def shown(tree: Any) -> str:
    """The value of a tree as Python writes it."""
    return repr(decoded(tree))


def changed_fields(old: Spec, new: Spec) -> list[Difference]:
    """The fields with a say in the bits in which two specs differ. The job is imported only if its params differ as written."""
    same = text(encoded(old.job.params)) == text(encoded(new.job.params))
    old_fields, new_fields = (
        {**deciding_sections(spec), **({} if same else _params(spec))} for spec in (old, new)
    )
    return differences(old_fields, new_fields)


def deciding(spec: Spec) -> dict[str, Any]:
    """The fields of a spec that decide about bits, its job's params among them as the job gets them."""
    return {**deciding_sections(spec), **_params(spec)}


def deciding_sections(spec: Spec) -> dict[str, Any]:
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
    delay = document["evaluate"].pop("delay")
    if delay and spec.early_stop is not None:
        document["evaluate"][DELAY.partition(".")[2]] = delay
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
