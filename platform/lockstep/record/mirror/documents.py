"""The texts and flat values that describe a run: parameters, documents, the note on its page."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import yaml

from lockstep.files import encoded
from lockstep.parsing import conforms, json_value
from lockstep.printing import markdown


def as_yaml(document: Mapping[str, Any]) -> str:
    """A document as YAML, in the order of its keys."""
    return yaml.safe_dump(dict(document), sort_keys=False, allow_unicode=True)


def without_nan(value: Any) -> Any:
    """Plain data with None in place of each number that is not finite."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: without_nan(inner) for name, inner in value.items()}
    return [without_nan(inner) for inner in value] if isinstance(value, list | tuple) else value


def as_json(document: Any) -> str:
    """Indented JSON, with NaN and Infinity as Python writes them and unknown objects as text: reading it back keeps each value."""
    return json.dumps(document, indent=2, ensure_ascii=False, default=str) + "\n"


def flat(document: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested mappings as dotted names: `{"optimizer": {"lr": 0.1}}` is `{"optimizer.lr": "0.1"}`. Lists are JSON."""
    values: dict[str, str] = {}
    for name, value in document.items():
        if isinstance(value, Mapping):
            values.update(flat(value, f"{prefix}{name}."))
        else:
            values[f"{prefix}{name}"] = as_value(value)
    return values


def as_value(value: Any) -> str:
    """A value as a spec file would write it. No store gets a text that UTF-8 cannot hold."""
    return encoded(value).decode() if isinstance(value, str) else json.dumps(value, default=str)


def single_values(facts: Mapping[str, Any]) -> dict[str, Any]:
    """The facts that are one value: not None, no mapping and no list."""
    return {n: v for n, v in facts.items() if v is not None and not isinstance(v, Mapping | list | tuple)}


def reading(metric: tuple[str, Any]) -> str:
    """A metric in a few characters: `eval/loss 0.0312`."""
    name, value = metric
    return f"{name} {value:.6g}" if isinstance(value, float) else f"{name} {value}"


class Verdict(NamedTuple):
    """How a run stands, in plain text: `FAILED`, ` after step 3: …`, and what is wrong with its record or its bits."""

    status: str
    text: str = ""
    troubles: Sequence[str] = ()

    def __str__(self) -> str:
        return f"{self.status}{self.text}"


def note(verdict: Verdict, details: Mapping[str, Any], figures: Sequence[str] = (), run_id: str = "") -> str:
    """Markdown for the run's page: first the verdict, because the page folds after four lines, then a table and figures."""
    troubles = "".join(f" · **{markdown(trouble)}**" for trouble in verdict.troubles)
    headline = f"**{markdown(verdict.status)}**{markdown(verdict.text)}{troubles}"
    images = [
        f"![{Path(path).stem}](get-artifact?path={quote(path, safe='')}&run_uuid={run_id})"
        for path in figures
    ]
    rows = [f"| {markdown(name)} | {markdown(value)} |" for name, value in flat(details).items()]
    table = ["", "| | |", "|---|---|", *rows] if rows else []
    return "\n".join([headline, *table, *([""] if images else []), *images, ""])


def attempts_in(text: bytes) -> list[dict[str, Any]]:
    """The attempts of an attempts.json, each a mapping with its number; none if the file is not as it was written, and another is made."""
    with suppress(ValueError):
        attempts = json_value(text)
        if conforms(attempts, Sequence[Mapping[str, Any]]):
            return [attempt for attempt in attempts if isinstance(attempt.get("attempt"), int)]
    return []
