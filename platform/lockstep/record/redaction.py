"""Secrets in what is recorded are replaced by a mark that says what was there: `<redacted: GitHub Token>`, `***` in a URI.

* URIs are taken apart (`documents.without_password`).
* Keys and tokens that have a form of their own are found by the detectors of detect-secrets, and by a few for services of this field.
* Of names such as `password` and `api_key` the value in quotes is replaced, of variables of the environment
  (`WANDB_API_KEY=…`) any value.
* A private key is replaced from its first line to its last.

Detectors of high entropy are left out: digests, of which diffs, logs and identities are full, look like keys to them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

from lockstep.record.documents import HIDDEN, flat, shown_document, without_password

if TYPE_CHECKING:
    from detect_secrets.plugins.keyword import KeywordDetector

_DETECTORS = (
    "artifactory.ArtifactoryDetector", "aws.AWSKeyDetector", "azure_storage_key.AzureStorageKeyDetector",
    "cloudant.CloudantDetector", "discord.DiscordBotTokenDetector", "github_token.GitHubTokenDetector",
    "gitlab_token.GitLabTokenDetector", "ibm_cloud_iam.IbmCloudIamDetector", "ibm_cos_hmac.IbmCosHmacDetector",
    "jwt.JwtTokenDetector", "mailchimp.MailchimpDetector", "npm.NpmDetector", "openai.OpenAIDetector",
    "pypi_token.PypiTokenDetector", "sendgrid.SendGridDetector", "slack.SlackDetector",
    "softlayer.SoftlayerDetector", "square_oauth.SquareOAuthDetector", "stripe.StripeDetector",
    "telegram_token.TelegramBotTokenDetector", "twilio.TwilioKeyDetector",
)  # fmt: skip

_FURTHER = {
    "Hugging Face Token": re.compile(r"\bhf_[A-Za-z0-9]{30,}\b"),
    "GitHub Token": re.compile(r"\bgithub_pat_[A-Za-z0-9_]{50,}\b"),
    "JSON Web Token": re.compile(r"\beyJ[A-Za-z0-9_=-]+\.[A-Za-z0-9_=-]+\.?[A-Za-z0-9_.+/=-]*"),
    "Google API Key": re.compile(r"\bAIza[A-Za-z0-9_-]{35}\b"),
    "Anthropic API Key": re.compile(r"\bsk-ant-[A-Za-z0-9_-]{20,}"),
    "OpenAI Token": re.compile(r"\bsk-proj-[A-Za-z0-9_-]{20,}"),
}
_VARIABLE_NAMES = "PASSWORD|PASSWD|SECRET|TOKEN|API_?KEY|ACCESS_?KEY|CREDENTIALS?"
_ENVIRONMENT = re.compile(rf"\b[A-Z0-9_]*(?:{_VARIABLE_NAMES})[A-Z0-9_]*=(?![\s'\"<$({{…]|$)(\S+)")
_NAMED = re.compile(r"key|pass|pwd|secret|contrase", re.IGNORECASE)
"""A line without any of these has none of the names that the detector of names looks for, at a hundredth of the cost."""
_PRIVATE_KEY = re.compile(
    r"-----BEGIN [A-Z0-9 ]*PRIVATE KEY(?: BLOCK)?-----.*?(?:-----END [A-Z0-9 ]*-----|\Z)", re.DOTALL
)

_PIECE = 1 << 16
"""Characters that are scanned at once, up to the end of a line: some milliseconds in which no other thread runs."""
_SHORTEST_TOKEN = 16
"""A group of a detector's pattern that is shorter is a part of its form, and no token."""


def redacted(text: str) -> str:
    """`text` without the secrets that are found in it."""
    if not text:
        return text
    text = _PRIVATE_KEY.sub(_mark("Private Key"), without_password(text))
    return "".join(_without_tokens(piece) for piece in _pieces(text))


def redacted_document(value: Any) -> Any:
    """Plain data without the secrets in its texts; of an entry whose name is that of a secret the text is one."""
    return _redacted(shown_document(value))


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
    return _mark(_keyword().secret_type) if value in _keyword().analyze_string(line) else redacted(value)


def redacted_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables of an environment without secrets; of one whose name is that of a secret the whole value is one."""
    return {
        name: _mark("Secret Keyword")
        if value and re.search(_VARIABLE_NAMES, name.upper())
        else redacted(value)
        for name, value in environment.items()
    }


def redacted_fields(document: Mapping[str, Any]) -> list[str]:
    """The dotted names of what is not as it was given, but redacted."""
    return [name for name, value in flat(document).items() if HIDDEN in value or _MARK.search(value)]


_MARK = re.compile(r"<redacted: [^<>]+>")


def _mark(kind: str) -> str:
    return f"<redacted: {kind}>"


def _pieces(text: str) -> list[str]:
    found, start = [], 0
    while start < len(text):
        end = text.find("\n", start + _PIECE) + 1 or len(text)
        found.append(text[start:end])
        start = end
    return found


def _without_tokens(text: str) -> str:
    for kind, pattern in _patterns():
        text = pattern.sub(lambda found, kind=kind: _replaced(found, kind), text)  # type: ignore[misc]
    text = _ENVIRONMENT.sub(lambda found: _replaced(found, "Secret Keyword"), text)
    if not _NAMED.search(text):
        return text
    return "\n".join(_without_named(line) if _NAMED.search(line) else line for line in text.split("\n"))


def _replaced(found: re.Match[str], kind: str) -> str:
    """A match with its token replaced: a group that is as long as one, or else the whole."""
    whole = found[0]
    if _MARK.search(whole) or HIDDEN in whole:
        return whole
    start, end = found.span(0)
    for group in range(1, (found.re.groups or 0) + 1):
        if found[group] and (len(found[group]) >= _SHORTEST_TOKEN or found.re is _ENVIRONMENT):
            start, end = found.span(group)
            break
    return f"{found.string[found.start() : start]}{_mark(kind)}{found.string[end : found.end()]}"


def _without_named(line: str) -> str:
    """A line without the values in quotes of names such as `password`."""
    for secret in set(_keyword().analyze_string(line)):
        if HIDDEN not in secret and not _MARK.search(secret):
            for quote in "\"'`":
                line = line.replace(
                    f"{quote}{secret}{quote}", f"{quote}{_mark(_keyword().secret_type)}{quote}"
                )
    return line


@cache
def _patterns() -> tuple[tuple[str, re.Pattern[str]], ...]:
    # Imported here: it takes a fifth of a second, of a process that records alone.
    found = [*_FURTHER.items()]
    for name in _DETECTORS:
        module, _, detector = name.partition(".")
        plugin = getattr(import_module(f"detect_secrets.plugins.{module}"), detector)()
        found += [(plugin.secret_type, pattern) for pattern in plugin.denylist]
    return tuple(found)


@cache
def _keyword() -> KeywordDetector:
    from detect_secrets.plugins.keyword import KeywordDetector

    return KeywordDetector()
