"""How a spec is read: once, in the driver.

Unknown keys are refused with the nearest real one, relative paths and URIs become absolute, defaults are filled in. What
leaves this module is complete and immutable.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pydantic

from lockstep.spec import problems
from lockstep.spec.document import check_text, check_whole, override, read_document
from lockstep.spec.fields import Spec
from lockstep.spec.locations import absolute, absolute_weights, storage_location, tracking_uri
from lockstep.spec.messages import refusal, shown


def load_spec(
    source: str | Path | Mapping[str, Any], overrides: Iterable[str] = (), *, uri: str | None = None
) -> Spec:
    """Read a spec from a YAML file or from plain data, apply `key=value` overrides, resolve paths.

    An override replaces what is at its dotted key, whole sections included, and creates the sections above it.
    Raises SpecError: one line that names the field, what was got and what is wanted.
    """
    document = copy.deepcopy(dict(source)) if isinstance(source, Mapping) else read_document(Path(source))
    override(document, overrides)
    check_text(document)
    if not isinstance(source, Mapping):
        check_whole(document)
    spec = validate(document)
    resolved = _resolve(spec, default_name=spec.name or _default_name(source, spec), uri=uri)
    check_text(resolved.document())  # a file's name, the working directory and the environment may add some
    return resolved


def named_store(
    source: str | Path | Mapping[str, Any], overrides: Iterable[str] = (), uri: str | None = None
) -> str | None:
    """The store that is named for a spec, by `uri`, in the spec or by MLFLOW_TRACKING_URI; None if only the default is left."""
    document = copy.deepcopy(dict(source)) if isinstance(source, Mapping) else read_document(Path(source))
    override(document, overrides)
    record = document.get("record")
    in_spec = record.get("uri") if isinstance(record, Mapping) else None
    return uri or in_spec or os.environ.get("MLFLOW_TRACKING_URI") or None


def validate(document: Mapping[str, Any]) -> Spec:
    """The spec of a complete document; SpecError for the first thing that is wrong with it."""
    try:
        return Spec.model_validate(document, by_alias=True, by_name=False)
    except pydantic.ValidationError as error:
        raise refusal(error, Spec, document) from error


def _default_name(source: str | Path | Mapping[str, Any], spec: Spec) -> str:
    if not isinstance(source, Mapping) and Path(source).stem not in {"train", "spec"}:
        return Path(source).stem
    return spec.job.use.rpartition(":")[2].lower() or "run"


def _resolve(spec: Spec, *, default_name: str, uri: str | None) -> Spec:
    record, storage = spec.record, storage_location(spec.checkpoint.storage)
    if record.folder is not None and "://" in record.folder:
        raise problems.RECORD_FOLDER(got=shown(record.folder))
    folder = record.folder or ("runs" if "://" in storage else storage)
    return spec.model_copy(
        update={
            "name": default_name,
            "initial_weights": absolute_weights(spec.initial_weights) if spec.initial_weights else None,
            "checkpoint": spec.checkpoint.model_copy(update={"storage": storage}),
            "record": record.model_copy(
                update={
                    "uri": tracking_uri(uri or record.uri),
                    "experiment": record.experiment or default_name,
                    "folder": absolute(folder),
                }
            ),
        }
    )
