"""The texts and flat values that describe a run: parameters, documents, the note on its page. No password leaves here."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import yaml

from lockstep.spec.fields import Spec

_PASSWORD = re.compile(r"(://[^/@:\s]*):[^/@\s]+@")


def without_password(text: str) -> str:
    """`text` with the password of every URI in it hidden: `postgresql://me:***@host/db`."""
    return _PASSWORD.sub(r"\1:***@", text)


def spec_document(spec: Spec) -> dict[str, Any]:
    """The spec as plain data that may be shown."""
    shown: dict[str, Any] = json.loads(without_password(json.dumps(spec.document())))
    return shown


def as_yaml(document: Mapping[str, Any]) -> str:
    """A document in the order that it was written in."""
    return yaml.safe_dump(dict(document), sort_keys=False, allow_unicode=True)


def as_json(document: Any) -> str:
    """Indented JSON, with NaN and Infinity as Python writes them and anything unknown as its text."""
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
    """A value as a spec file would write it."""
    return value if isinstance(value, str) else json.dumps(value, default=str)


def single_values(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the facts that are one value, and not empty, a mapping or a list."""
    return {n: v for n, v in facts.items() if v is not None and not isinstance(v, Mapping | list | tuple)}


def reading(metric: tuple[str, Any]) -> str:
    """A metric in a few characters: `eval/loss 0.0312`."""
    name, value = metric
    return f"{name} {value:.6g}" if isinstance(value, float) else f"{name} {value}"


def note(verdict: str, details: Mapping[str, Any], figures: Sequence[str] = (), run_id: str = "") -> str:
    """Markdown for the run's page: the verdict first, for the page folds after four lines, then a table and figures."""
    images = [
        f"![{Path(path).stem}](get-artifact?path={quote(path, safe='')}&run_uuid={run_id})"
        for path in figures
    ]
    rows = [f"| {name} | {_cell(value)} |" for name, value in flat(details).items()]
    table = ["", "| | |", "|---|---|", *rows] if rows else []
    return "\n".join([verdict, *table, *([""] if images else []), *images, ""])


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
