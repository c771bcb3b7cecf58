"""Replaces secrets in recorded texts by a mark that says what was there: `<redacted: GitHub Token>`, `***` in a URI.

* URIs are parsed: passwords, and parameters with names of secrets (`without_uri_secrets`).
* Keys and tokens with a recognisable form are found by the detectors of detect-secrets, and by a few for services of this field.
* For names such as `password` and `api_key` the quoted value is replaced, for environment variables
(`WANDB_API_KEY=…`) any value.
* A private key is replaced from its first line to its last.

Detectors of high entropy are not used: digests, of which diffs, logs and identities are full, look like keys to them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from typing import Any

from lockstep.record.mirror.documents import flat
from lockstep.redaction_marks import HIDDEN, is_mark, is_redacted, marked

_URI = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]{0,31}://[^\s'\"<>`]+")
"""A scheme has at most 32 characters: without a limit, each letter of a long word would start a scan of all of it."""
_SECRET = re.compile(
    r"pass(word|wd|phrase)?|pwd|.*(token|secret|signature|credential|api_?key)|sig|auth|key", re.I
)
"""Names of parameters whose values are secrets, matched as a whole; `-` counts as `_`."""
_PORT = re.compile(r"\d{1,5}(/|$)")

_BETWEEN = "(?: *)(?:=|:|:=|=>| +|::)(?: *)", " *+(?:(?:=>|:=|::|=|:) *+|(?<= ))"
"""What some detectors have between a name and its value, and the same in linear time: theirs tries every way to share blanks among three."""

_DETECTORS = (
    "artifactory.ArtifactoryDetector", "aws.AWSKeyDetector", "azure_storage_key.AzureStorageKeyDetector",
    "cloudant.CloudantDetector", "discord.DiscordBotTokenDetector", "github_token.GitHubTokenDetector",
    "gitlab_token.GitLabTokenDetector", "ibm_cloud_iam.IbmCloudIamDetector", "ibm_cos_hmac.IbmCosHmacDetector",
    "mailchimp.MailchimpDetector",
    "pypi_token.PypiTokenDetector", "sendgrid.SendGridDetector", "slack.SlackDetector",
    "softlayer.SoftlayerDetector", "square_oauth.SquareOAuthDetector", "stripe.StripeDetector",
    "telegram_token.TelegramBotTokenDetector", "twilio.TwilioKeyDetector",
)  # fmt: skip

# A group is repeated in an atomic group, not by a possessive quantifier: with one, Python before 3.11.5 finds nothing where the group looks ahead.
_OPENAI = "[A-Za-z0-9]{20}T3BlbkFJ[A-Za-z0-9]{20}"
_FURTHER = (
    ("Hugging Face Token", re.compile(r"\bhf_[A-Za-z0-9]{30,}\b")),
    ("GitHub Token", re.compile(r"\bgithub_pat_[A-Za-z0-9_]{50,}\b")),
    # The package's own of these three look at a long word again from each of its letters, or at a line from each `//`.
    (
        "JSON Web Token",
        re.compile(
            r"(?<![A-Za-z0-9_=-])(?>(?:(?!eyJ)[A-Za-z0-9_=-])*)(eyJ[A-Za-z0-9_=-]++\.[A-Za-z0-9_=-]++\.?+[A-Za-z0-9_.+/=-]*+)"
        ),
    ),
    ("NPM tokens", re.compile(r"/:_authToken=\s*+(npm_[^\n]++|[A-Fa-f0-9-]{36})")),
    (
        "OpenAI Token",
        re.compile(
            rf"(?<![A-Za-z0-9_-])(?>(?:(?!sk-)[A-Za-z0-9_-])*)(sk-(?>(?:(?!{_OPENAI})[A-Za-z0-9_-])*){_OPENAI})"
        ),
    ),
    ("Google API Key", re.compile(r"\bAIza[A-Za-z0-9_-]{35}\b")),
    ("Anthropic API Key", re.compile(r"\bsk-ant-[A-Za-z0-9_-]{20,}")),
    ("OpenAI Token", re.compile(r"\bsk-proj-[A-Za-z0-9_-]{20,}")),
)
_VARIABLE_NAMES = "PASSWORD|PASSWD|SECRET|TOKEN|API_?KEY|ACCESS_?KEY|CREDENTIALS?"
_ENVIRONMENT = re.compile(
    rf"\b(?>(?:(?!{_VARIABLE_NAMES})[A-Z0-9_])*)(?:{_VARIABLE_NAMES})[A-Z0-9_]*+=(?![\s'\"<$({{…]|$)(\S++)"
)
_NAMED_VALUE = "Secret Keyword"
_NAMED = re.compile(r"key|pass|pwd|secret|contrase", re.IGNORECASE)
"""A line without any of these has no name that the keyword detector looks for; this check costs a hundredth of the detector."""
_PRIVATE_KEY = re.compile(
    r"-----BEGIN [A-Z0-9 ]*PRIVATE KEY(?: BLOCK)?-----.*?(?:-----END [A-Z0-9 ]*-----|\Z)", re.DOTALL
)

_PIECE = 1 << 16
"""Characters that are scanned at once, up to the end of a line: some milliseconds during which no other thread runs."""
_SHORTEST_TOKEN = 16
"""A shorter group of a detector's pattern is part of its form, not a token."""


def without_uri_secrets(text: str) -> str:
    """`text` with the secrets of every URI in it hidden: `postgresql://me:***@host/db`, `http://host/?token=***`.

    Hidden are passwords, even with an unescaped `/`, `?`, `#` or `@`; the user of an http URI without a password, which is
    a token; and the values of parameters with names of secrets.
    """
    return _URI.sub(lambda match: _without_secrets(match[0]), text)


def document_without_uri_secrets(value: Any) -> Any:
    """Plain data with the secrets of every URI in its texts hidden. A text that is one URI may contain spaces and quotes."""
    if isinstance(value, Mapping):
        return {name: document_without_uri_secrets(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [document_without_uri_secrets(inner) for inner in value]
    if not isinstance(value, str):
        return value
    return (
        _without_secrets(value)
        if re.match(r"[a-zA-Z][a-zA-Z0-9+.-]*://\S", value)
        else without_uri_secrets(value)
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


def redacted(text: str) -> str:
    """`text` with the secrets that are found in it replaced."""
    if not text:
        return text
    text = _PRIVATE_KEY.sub(marked("Private Key"), without_uri_secrets(text))
    return "".join(_without_tokens(piece) for piece in _pieces(text))


def redacted_document(value: Any) -> Any:
    """Plain data with the secrets in its texts replaced; a text under the name of a secret counts as one."""
    return _redacted(document_without_uri_secrets(value))


def _redacted(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _redacted_entry(str(name), inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_redacted(inner) for inner in value]
    return redacted(value) if isinstance(value, str) else value


def _redacted_entry(name: str, value: Any) -> Any:
    if not isinstance(value, str) or not value or not _NAMED.search(name):
        return _redacted(value)
    line = f'{name} = "{value}"'
    secrets = (match["value"] for pattern in _named_values() for match in pattern.finditer(line))
    return marked(_NAMED_VALUE) if value in secrets else redacted(value)


def redacted_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Environment variables with secrets replaced; of a variable with the name of a secret, the whole value."""
    return {
        name: marked("Secret Keyword")
        if value and re.search(_VARIABLE_NAMES, name.upper())
        else redacted(value)
        for name, value in environment.items()
    }


def redacted_fields(document: Mapping[str, Any]) -> list[str]:
    """The dotted names of the values that were redacted."""
    return [name for name, value in flat(document).items() if is_redacted(value)]


def _pieces(text: str) -> list[str]:
    pieces, start = [], 0
    while start < len(text):
        end = text.find("\n", start + _PIECE) + 1 or len(text)
        pieces.append(text[start:end])
        start = end
    return pieces


def _without_tokens(text: str) -> str:
    for kind, pattern in _patterns():
        text = pattern.sub(lambda match, kind=kind: _replaced(match, kind), text)  # type: ignore[misc]
    text = _ENVIRONMENT.sub(lambda match: _replaced(match, "Secret Keyword"), text)
    if not _NAMED.search(text):
        return text
    return "\n".join(_without_named(line) if _NAMED.search(line) else line for line in text.split("\n"))


def _replaced(match: re.Match[str], kind: str) -> str:
    """A match with its token replaced: a group that is long enough, or else the whole match."""
    start, end = match.span(0)
    for group in range(1, (match.re.groups or 0) + 1):
        if match[group] and (len(match[group]) >= _SHORTEST_TOKEN or match.re is _ENVIRONMENT):
            start, end = match.span(group)
            break
    if is_mark(match.string[start:end]):
        return match[0]
    return f"{match.string[match.start() : start]}{marked(kind)}{match.string[end : match.end()]}"


def _without_named(line: str) -> str:
    """A line with the quoted values of names such as `password` replaced."""
    for pattern in _named_values():
        line = pattern.sub(_value_replaced, line)
    return line


def _value_replaced(match: re.Match[str]) -> str:
    if is_mark(match["value"]):
        return match[0]
    start, end = (at - match.start() for at in match.span("value"))
    return f"{match[0][:start]}{marked(_NAMED_VALUE)}{match[0][end:]}"


@cache
def _patterns() -> tuple[tuple[str, re.Pattern[str]], ...]:
    # Imported here: it takes a fifth of a second, which only a recording process should pay.
    patterns = list(_FURTHER)
    for name in _DETECTORS:
        module, _, detector = name.partition(".")
        plugin = getattr(import_module(f"detect_secrets.plugins.{module}"), detector)()
        patterns += [
            (plugin.secret_type, re.compile(pattern.pattern.replace(*_BETWEEN), pattern.flags))
            for pattern in plugin.denylist
        ]
    return tuple(patterns)


@cache
def _named_values() -> tuple[re.Pattern[str], ...]:
    """The package's names of secrets, with a quoted value: assigned to the name, after it and before a semicolon, or compared with it.

    Its own expressions look again at the rest of the line from every name in it. These begin where a word or a quote does, and give nothing back.
    """
    from detect_secrets.plugins.keyword import DENYLIST

    names = "|".join(DENYLIST)
    name = rf"(?>(?:(?!{names})\w)*)(?:{names})"
    value = r"""(?P<quote>["'`])(?P<value>(?=\w)(?>(?:(?!(?P=quote))[^\x0b'"])+))(?<![,`])(?P=quote)"""
    return tuple(
        re.compile(pattern, re.IGNORECASE)
        for pattern in (
            rf"""(?<!\w){name}\w*+[\]'"]{{0,2}}+\s*+(?::=?+|!==?+|=>|={{1,3}}+)\s*+{value}""",
            rf"(?<!\w){name}\w*+\S{{0,50}}?\s*+{value};",
            rf"{value}\s*+[!=]{{2,3}}+\s*+{name}",
        )
    )
