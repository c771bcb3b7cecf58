"""The texts and flat values that describe a run: parameters, documents, the note on its page. None contains a password."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import yaml

from lockstep.files import encoded
from lockstep.parsing import conforms, json_value
from lockstep.printing import markdown

HIDDEN = "***"
"""What replaces a secret."""

_URI = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]{0,31}://[^\s'\"<>`]+")
"""A scheme has at most 32 characters: without a limit, each letter of a long word would start a scan of all of it."""
_SECRET = re.compile(
    r"pass(word|wd|phrase)?|pwd|.*(token|secret|signature|credential|api_?key)|sig|auth|key", re.I
)
"""Names of parameters whose values are secrets, matched as a whole; `-` counts as `_`."""
_PORT = re.compile(r"\d{1,5}(/|$)")


def without_password(text: str) -> str:
    """`text` with the secrets of every URI in it hidden: `postgresql://me:***@host/db`, `http://host/?token=***`.

    Hidden are passwords, even with an unescaped `/`, `?`, `#` or `@`; the user of an http URI without a password, which is
    a token; and the values of parameters with names of secrets.
    """
    return _URI.sub(lambda match: _without_secrets(match[0]), text)


def shown_document(value: Any) -> Any:
    """Plain data with the secrets of every URI in its texts hidden. A text that is one URI may contain spaces and quotes."""
    if isinstance(value, Mapping):
        return {name: shown_document(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [shown_document(inner) for inner in value]
    if not isinstance(value, str):
        return value
    return (
        _without_secrets(value)
        if re.match(r"[a-zA-Z][a-zA-Z0-9+.-]*://\S", value)
        else without_password(value)
    )


def _without_secrets(uri: str) -> str:
    scheme, mark, address = uri.partition("://")
    address = _without_user(scheme.lower(), address)
    # Not urlsplit: it raises ValueError for text that is not a URI after all, such as `http://[{host}]` in a program's text.
    base, hash_, fragment = address.partition("#")
    base, question, query = base.partition("?")
    return f"{scheme}{mark}{base}{question}{_without_values(query)}{hash_}{_without_values(fragment)}"


def _without_user(scheme: str, address: str) -> str:
    """The part after `://` without its secret. An `@` after a path belongs to the path, unless only a password can stand before it."""
    authority = re.split(r"[/?#]", address, maxsplit=1)[0]
    user, at, host = authority.rpartition("@")
    if not at:
        user, at, host = address.rpartition("@")
        name, colon, password = user.partition(":")
        if not (at and colon) or _PORT.match(password) or re.search(r"[/?#]", name) or name.startswith("["):
            return address
        return f"{name}:{HIDDEN}@{host}"
    host += address[len(authority) :]
    name, colon, password = user.partition(":")
    if colon:
        return f"{name}:{HIDDEN}@{host.rpartition('@')[2] if _is_no_host(host) else host}"
    return f"{HIDDEN}@{host}" if scheme in {"http", "https"} else address


def _is_no_host(text: str) -> bool:
    """Whether a password continues here: `b/c@host/db` of `me:a@b/c@host/db`."""
    return "@" in re.split(r"[?#]", text, maxsplit=1)[0]


def _without_values(query: str) -> str:
    pairs = (pair.partition("=") for pair in query.split("&"))
    return "&".join(
        f"{name}={HIDDEN}" if value and _SECRET.fullmatch(name.replace("-", "_")) else f"{name}{mark}{value}"
        for name, mark, value in pairs
    )


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
