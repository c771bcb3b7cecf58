"""What pydantic found wrong with a spec or with a job's params, as one line for a person.

The field comes first, dotted as in an override, then what was got, what is wanted and what to do. Of several
findings the unknown keys are told first: a misspelt key explains the one that is missing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, get_args

import pydantic
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from lockstep.errors import SpecError, nearest

_Model = type[pydantic.BaseModel]
_Path = tuple[int | str, ...]
_UNKNOWN = {"extra_forbidden", "invalid_key"}


class FieldError(ValueError):
    """What a validator of a whole section finds wrong with one `field` of it, dotted."""

    def __init__(self, field: str, text: str) -> None:
        super().__init__(f"{field}: {text}")
        self.field = field


def refusal(
    error: pydantic.ValidationError, model: _Model, document: Mapping[str, Any], within: str = ""
) -> SpecError:
    """The first finding about `document`, which was read as a `model`, with its field; `within` is the field that holds it all."""
    field, line = _first(error, model, document, within)
    refused = SpecError(line)
    refused.field = field
    return refused


def _first(
    error: pydantic.ValidationError, model: _Model, document: Mapping[str, Any], within: str
) -> tuple[str, str]:
    """The field of the first finding, and the line about it."""
    findings = error.errors(include_url=False)
    known = [finding for finding in findings if finding["type"] not in _UNKNOWN]
    # a key that one alternative of a type lacks and another has is not unknown
    places = {_path(finding, document) for finding in known}
    unknown = [f for f in findings if f["type"] in _UNKNOWN and _path(f, document) not in places]
    first = (unknown or known)[0]
    path = _path(first, document)
    field = ".".join([*filter(None, [within]), *map(key_shown, path)])
    match first["type"]:
        case "extra_forbidden":
            return field, f"{field}: unknown key{_known_keys(model, path, first['loc'], field)}"
        case "missing" if isinstance(first["loc"][-1], str):
            return field, f"{field}: missing{_example(model, path, first['loc'])}"
        case "union_tag_invalid":
            key = first["ctx"]["discriminator"].strip("'")
            tag = first["input"][key] if _holds(first["input"], key) else first["ctx"]["tag"]
            named = f"{field}.{key}"
            return named, f"{named}: got {shown(tag)}, wanted {_any_of(first['ctx']['expected_tags'])}"
        case "value_error" if not field:
            cause = first["ctx"]["error"]
            return getattr(cause, "field", ""), str(cause)
        case "dict_type" | "model_type" | "model_attributes_type":
            return (
                field,
                f"{field}: got {shown(first['input'])}, wanted a mapping{_keys_below(model, path, first['loc'])}",
            )
    same_place = [finding for finding in known + unknown if _path(finding, document) == path]
    return field, f"{field}: got {shown(first['input'])}, {_verdict(same_place)}{_advice(first)}"


def shown(value: object) -> str:
    """A value as a person wrote it in YAML, cut short where it is long."""
    words = {None: "null", True: "true", False: "false"}
    text = words[value] if value is None or isinstance(value, bool) else " ".join(repr(value).split())
    return text if len(text) <= 80 else f"{text[:76]} ..."


def key_shown(part: int | str) -> str:
    """A key as it is written, or quoted and cut short if it is no word of a line."""
    text = str(part)
    return text if text.isprintable() and len(text) <= 80 else shown(text)


# --- where ------------------------------------------------------------------------------------------------


def _path(finding: ErrorDetails, document: Mapping[str, Any]) -> _Path:
    """The part of pydantic's location that leads through the document; the rest names alternatives of a type."""
    path: list[int | str] = []
    data: Any = document
    for part in finding["loc"]:
        if _holds(data, part):
            data = data[part]
            path.append(part)
    if finding["type"] == "missing" and isinstance(finding["loc"][-1], str):
        path.append(finding["loc"][-1])
    return tuple(path)


def _holds(data: object, part: int | str) -> bool:
    if isinstance(data, Mapping):
        return part in data
    return isinstance(data, list | tuple) and isinstance(part, int) and part < len(data)


def sections_of(annotation: Any) -> list[_Model]:
    """Every section that a field may hold, such as AdamW, Adam and SGD for `optimizer`."""
    if isinstance(annotation, type) and issubclass(annotation, pydantic.BaseModel):
        return [annotation]
    return [kind for argument in get_args(annotation) for kind in sections_of(argument)]


def _label(kind: _Model) -> str:
    """How pydantic's location names one of several kinds: by the field that tells them apart, or by its class."""
    name = kind.model_fields.get("name")
    return name.default if name and isinstance(name.default, str) else kind.__name__


def _fields(kinds: Iterable[_Model]) -> dict[str, FieldInfo]:
    return {field.alias or name: field for kind in kinds for name, field in kind.model_fields.items()}


def _sections(model: _Model, path: _Path, location: _Path) -> tuple[list[_Model], list[_Model]]:
    """The section that holds the last part of `path`, and the kinds that the section could have been instead."""
    chosen, others = [model], list[_Model]()
    for part in path[:-1]:
        field = _fields(chosen).get(str(part))
        if field is not None:
            kinds = sections_of(field.annotation)
            chosen = [kind for kind in kinds if len(kinds) == 1 or _label(kind) in location] or kinds
            others = [kind for kind in kinds if kind not in chosen]
    return chosen, others


# --- what -------------------------------------------------------------------------------------------------

_WANTED = {
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float"), "a whole number"),
    **dict.fromkeys(("float_type", "float_parsing"), "a number"),
    **dict.fromkeys(("bool_type", "bool_parsing"), "true or false"),
    **dict.fromkeys(("list_type", "tuple_type"), "a list"),
    "string_type": "text",
    "invalid_key": "text for a key",
}
_BOUNDS = {
    "greater_than": ("greater than", "more than"),
    "greater_than_equal": ("greater than or equal to", "at least"),
    "less_than_equal": ("less than or equal to", "at most"),
}


def _verdict(findings: Sequence[ErrorDetails]) -> str:
    """What would have been right; where a type has alternatives, any of them."""
    alternatives = dict.fromkeys(filter(None, map(_expected, findings)))
    if alternatives:
        return f"wanted {' or '.join(alternatives)}"
    message = findings[0]["msg"]
    reason = findings[0].get("ctx", {}).get("error")
    return str(reason) if reason else message[:1].lower() + message[1:]


def _expected(finding: ErrorDetails) -> str | None:
    kind, message = finding["type"], finding["msg"]
    if kind in _WANTED:
        return _WANTED[kind]
    if kind == "too_long":
        return f"at most {finding['ctx']['max_length']} values"
    if kind == "missing":  # a tuple that ends too early
        return f"at least {int(finding['loc'][-1]) + 1} values"
    if message.startswith("Input should be "):
        return message.removeprefix("Input should be ").replace(*_BOUNDS.get(kind, ("", "")))
    return None


def _advice(finding: ErrorDetails) -> str:
    """What to do where the value has the right look and the wrong type."""
    kind, value = finding["type"], finding["input"]
    if kind == "string_type" and isinstance(value, int | float):
        return "; put it in quotes"
    if kind in {"int_type", "float_type"} and isinstance(value, str) and _is_number(value):
        return "; remove the quotes"
    if kind in {"int_type", "int_from_float"} and isinstance(value, float) and value.is_integer():
        return f"; write {int(value)}"
    return ""


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _known_keys(model: _Model, path: _Path, location: _Path, field: str) -> str:
    """The nearest real key, the section below that has this one, or the kinds of this section that have it."""
    chosen, others = _sections(model, path, location)
    key, section = str(path[-1]), field.rpartition(".")[0]
    if "name" not in _fields(chosen):  # kinds that nothing tells apart: any of them may be meant
        chosen, others = chosen + others, []
    owners = [_label(kind) for kind in others if key in _fields([kind])]
    if owners:
        kind, have = _label(chosen[0]), "has" if len(owners) == 1 else "have"
        return (
            f" where {section}.name is {kind!r}; {_any_of(owners, 'and')} {have} it: "
            f"change {section}.name, or leave the key out ({section}={{name: {kind}}} replaces the section)"
        )
    fields = _fields(chosen)
    below = [f"{name}.{key}" for name, info in fields.items() if key in _fields(sections_of(info.annotation))]
    below += [name for name in fields if name.endswith(f".{key}")]
    if below:
        return f"; did you mean {below[0]!r}?"
    return nearest(
        key, [name for name in fields if "." not in name]
    )  # the others are written below one of these


def _keys_below(model: _Model, path: _Path, location: _Path) -> str:
    field = _fields(_sections(model, path, location)[0]).get(str(path[-1])) if path else None
    keys = _fields(sections_of(field.annotation)) if field else {}
    return f" of fields: {', '.join(keys)}" if keys else " of fields"


def _example(model: _Model, path: _Path, location: _Path) -> str:
    """A value to start from, where the field gives one."""
    field = _fields(_sections(model, path, location)[0]).get(str(path[-1]))
    examples = field.examples if field else None
    return f"; give one, such as {path[-1]}: {examples[0]}" if examples else ", and it has no default"


def _any_of(names: str | Sequence[str], word: str = "or") -> str:
    """`'a', 'b' or 'c'`, out of names or of pydantic's own list of them."""
    quoted = names.split(", ") if isinstance(names, str) else [repr(name) for name in names]
    return f" {word} ".join(filter(None, [", ".join(quoted[:-1]), quoted[-1]]))
