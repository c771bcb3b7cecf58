"""The identity of a run: a digest of everything that can change its bits.

Two runs with one identity give the same weights. What is only placement (workers, loader processes, where
files and records go) never enters it.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import json
import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from lockstep.spec import Spec

PLACEMENT = frozenset({"name", "workers", "checkpoint", "record"})
"""Sections of the spec that are no part of the identity; `data.loader_processes` is another."""


def identity_fields(spec: Spec, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Every field of the identity by its dotted name, in plain data.

    `facts` are what only a worker can know: data sizes, device kind, numerics probe, initial weights' digest.
    With `reduction: native` the sum depends on the workers and on the buckets, so these enter as well.
    """
    document = {key: value for key, value in spec.document().items() if key not in PLACEMENT}
    document["data"] = {key: value for key, value in document["data"].items() if key != "loader_processes"}
    document.pop("initial_weights")
    fields = dict(_flat(document))
    fields |= {f"version.{name}": found for name, found in _versions().items()}
    fields["job.source"] = job_source_digest(spec.job.use)
    if spec.reduction == "exact":
        facts = {key: value for key, value in facts.items() if key != "workers"}
    else:
        fields["workers.bucket_mb"] = spec.workers.bucket_mb
    return {**fields, **facts}


def identity_digest(fields: Mapping[str, Any]) -> str:
    """sha256 over the fields as JSON with sorted names."""
    return hashlib.sha256(json.dumps(fields, sort_keys=True, default=str).encode()).hexdigest()


def job_source_digest(use: str) -> str:
    """sha256 over the job's module and all that it imports from the same source root, found without running it."""
    digest = hashlib.sha256()
    for name, path in sorted(_sources(use.partition(":")[0]).items()):
        digest.update(f"{name}\n".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _sources(module: str) -> dict[str, Path]:
    """File by module name: `module`, its packages, and what they import from below the same root."""
    found: dict[str, Path] = {}
    waiting = [module]
    top = module.partition(".")[0]
    root = _root(top)
    while waiting:
        name = waiting.pop()
        path = _file(name, root)
        if path is None or name in found:
            continue
        found[name] = path
        waiting += _imports(path, name)
        if "." in name:
            waiting.append(name.rpartition(".")[0])
    return found


def _root(top: str) -> Path | None:
    """The folder that holds the job's top-level module."""
    loaded = sys.modules.get(top)
    spec = getattr(loaded, "__spec__", None) or importlib.util.find_spec(top)
    if spec is None:
        return None
    if spec.submodule_search_locations:
        return Path(next(iter(spec.submodule_search_locations))).parent
    return Path(spec.origin).parent if spec.origin else None


def _file(name: str, root: Path | None) -> Path | None:
    if root is None:
        return None
    base = root.joinpath(*name.split("."))
    return next((path for path in (base.with_suffix(".py"), base / "__init__.py") if path.is_file()), None)


def _imports(path: Path, name: str) -> Iterator[str]:
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")
            base = ".".join(parts[: len(parts) - node.level + 1]) if node.level else ""
            origin = ".".join(part for part in (base, node.module or "") if part)
            yield origin
            yield from (f"{origin}.{alias.name}" for alias in node.names)


def _flat(document: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in document.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _versions() -> dict[str, str]:
    found = {"python": ".".join(map(str, sys.version_info[:3]))}
    for package in ("lockstep-train", "torch", "numpy"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:  # run from its source folder, without being installed
            found[package] = "unknown"
    return found
