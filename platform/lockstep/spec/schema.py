"""The JSON schema of a spec file and of a sweep file, for editors: draft 2020-12, with the keys that a user writes.

It is made of the pydantic models. What only their validators know, and a schema can say, is added here: which fields
exclude each other, and what may be written in a shorter way. What one field demands of another, such as a divisor of
`batch.global`, is left to `load_spec`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pydantic
import yaml

from lockstep.spec.descriptions import SPEC, SWEEP
from lockstep.spec.fields import RECHECK, Cadence, Every, Length, Spec
from lockstep.spec.messages import sections_of
from lockstep.spec.sweep import KINDS, Domain, SweepSpec

DIALECT = "https://json-schema.org/draft/2020-12/schema"

_Model = type[pydantic.BaseModel]
_Schema = dict[str, Any]

_EXACTLY_ONE: Mapping[_Model, tuple[str, ...]] = {
    Length: ("epochs", "steps"),
    Every: ("epochs", "steps"),
    Cadence: ("epochs", "steps", "seconds"),
    Domain: KINDS,
}
"""Of these fields of a section one has a value; the others are left out, or null."""

_NAME_MAY_BE_LEFT_OUT = ("AdamW", "Constant")
"""The kinds that are meant where a section gives no name."""


def spec_schema() -> _Schema:
    """The schema of a spec file."""
    return {"$schema": DIALECT, "title": "Lockstep spec", **_spec()}


def sweep_schema() -> _Schema:
    """The schema of a sweep file. A spec that it holds itself has to be one."""
    spec, schema = _spec(), _described(SweepSpec, SWEEP)
    schema["$defs"] |= {**spec.pop("$defs"), "Spec": spec}
    fields = schema["properties"]
    file_or_spec = [{"type": "string"}, {"$ref": "#/$defs/Spec"}]
    fields["spec"] = {"anyOf": file_or_spec, **_kept(fields["spec"], "description", "examples")}
    scheduler = fields["scheduler"]
    words = [
        kind.model_fields["name"].default
        for kind in sections_of(SweepSpec.model_fields["scheduler"].annotation)
        if not any(field.is_required() for field in kind.model_fields.values())
    ]
    scheduler["anyOf"] = [{"enum": words}, {"oneOf": scheduler.pop("oneOf")}]
    return {"$schema": DIALECT, "title": "Lockstep sweep", **schema}


def _spec() -> _Schema:
    schema = _described(Spec, SPEC)
    fields, defined = schema["properties"], schema["$defs"]
    determinism, recheck = fields["determinism"], fields.pop(RECHECK)
    mode = {"enum": determinism["enum"]}
    parts = {"mode": {**mode, "default": determinism["default"]}, "recheck": recheck}
    mapping = {"type": "object", "properties": parts, "additionalProperties": False}
    fields["determinism"] = {"anyOf": [mode, mapping], **_kept(determinism, "default", "description")}
    sharding = fields["sharding"]
    modes = {"enum": defined["Sharding"]["properties"]["mode"]["enum"]}
    fields["sharding"] = {
        "anyOf": [modes, {"$ref": "#/$defs/Sharding"}],
        "default": sharding["default"]["mode"],
        **_kept(sharding, "description"),
    }
    fields["compile"]["oneOf"].append({"const": "units"})
    defined["Batch"]["properties"]["micro"]["type"] = ["integer", "null"]
    defined["Data"]["properties"]["without"]["anyOf"].append({"type": "integer", "minimum": 0})
    return schema


def _described(model: _Model, descriptions: Mapping[str, str]) -> _Schema:
    """Pydantic's schema of `model` with a line for each field, its own or that of the table, and without what repeats the fields' names."""
    schema = model.model_json_schema()
    schema.pop("title")
    for section, prefix in sections(model):
        definition = schema if section is model else schema["$defs"][section.__name__]
        for name, field in definition["properties"].items():
            _tidy(field, field.get("description") or descriptions[prefix + name])
        if (
            "const" in definition["properties"].get("name", {})
            and section.__name__ not in _NAME_MAY_BE_LEFT_OUT
        ):
            definition["required"] = ["name", *definition.get("required", ())]
        if section in _EXACTLY_ONE:
            not_null = {"not": {"type": "null"}}
            definition["oneOf"] = [
                {"required": [key], "properties": {key: not_null}} for key in _EXACTLY_ONE[section]
            ]
    return schema


def sections(model: _Model, prefix: str = "") -> Iterator[tuple[_Model, str]]:
    """Each section below `model` and the dotted prefix of its fields; several kinds of a section have the same."""
    yield model, prefix
    for name, field in model.model_fields.items():
        for section in sections_of(field.annotation):
            yield from sections(section, f"{prefix}{field.alias or name}.")


def _tidy(field: _Schema, description: str) -> None:
    field["description"] = description
    field.pop("title", None)
    field.pop("discriminator", None)  # of OpenAPI; each kind has its name as a constant
    if "examples" in field:  # they stand in the models as a user would write them
        field["examples"] = [yaml.safe_load(str(example)) for example in field["examples"]]
    if isinstance(field.get("default"), dict):
        field["default"] = _without_nulls(field["default"])


def _without_nulls(section: _Schema) -> _Schema:
    return {
        name: _without_nulls(value) if isinstance(value, dict) else value
        for name, value in section.items()
        if value is not None
    }


def _kept(field: _Schema, *names: str) -> _Schema:
    return {name: field[name] for name in names if name in field}
