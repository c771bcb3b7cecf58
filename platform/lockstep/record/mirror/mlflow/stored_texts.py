"""How MLflow has the parameters and tags of a run: under its own names for some, and a text that it would cut as the name of the artifact that has it whole."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Literal, NamedTuple

from lockstep.record.events.metrics import store_key

Kind = Literal["params", "tags"]

_LONGEST: Mapping[Kind, int] = {"params": 6000, "tags": 8000}
_NAMES = {
    "lockstep.note": "mlflow.note.content",
    "lockstep.job": "mlflow.source.name",
    "lockstep.git_commit": "mlflow.source.git.commit",
    "lockstep.parent": "mlflow.parentRunId",
}
"""Tags that MLflow's pages know under another name."""


class StoredText(NamedTuple):
    """What MLflow has in the place of a `text`, and the artifact that has it whole, or nothing."""

    text: str
    value: str
    artifact: str


def stored_texts(kind: Kind, texts: Mapping[str, str]) -> dict[str, StoredText]:
    """The parameters or tags of a run as MLflow has them, by its names for them."""
    named = {store_key(_NAMES.get(name, name)): text for name, text in texts.items()}
    return {name: _stored(kind, name, text) for name, text in named.items()}


def stored_values(kind: Kind, texts: Mapping[str, str]) -> dict[str, str]:
    """As `stored_texts`, without the artifacts."""
    return {name: stored.value for name, stored in stored_texts(kind, texts).items()}


def _stored(kind: Kind, name: str, text: str) -> StoredText:
    if len(text) <= _LONGEST[kind]:
        return StoredText(text, text, "")
    digest = hashlib.sha256(text.encode()).hexdigest()
    artifact = f"{kind}/{name.replace('/', '.')}-{digest[:12]}.txt"
    return StoredText(
        text, f"{len(text)} characters, whole in the artifact {artifact}, sha256 {digest}", artifact
    )
