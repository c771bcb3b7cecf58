"""The data sets of a run as its store shows them: those trained on, and those evaluated."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple

from lockstep.spec.fields import Spec

DIGEST_LENGTH = 32
"""Hex digits of a data set's short digest; MLflow takes 36."""


class DataSet(NamedTuple):
    """One data set of a job. `digest` is the beginning of `sha256`, which covers the whole `fingerprint`."""

    name: str
    context: Literal["train", "eval", "test"]
    job: str
    samples: int
    fingerprint: dict[str, str]
    sha256: str

    @property
    def digest(self) -> str:
        """The short digest."""
        return self.sha256[:DIGEST_LENGTH]


def data_sets(spec: Spec, fields: Mapping[str, Any]) -> list[DataSet]:
    """The data sets described by the fields of a run's identity; evaluation data only if there are any."""
    labels = [match[1] for name in fields if (match := _SAMPLES.fullmatch(name))]
    candidates = (_data_set(spec.job.use, label, fields) for label in sorted(labels, key=_in_order))
    return [data for data in candidates if data.samples]


_SAMPLES = re.compile(r"data\.(train|(?:eval|test)(?:/[\w-]+)?)_samples")


def measured_by(key: str, data: Iterable[DataSet]) -> DataSet | None:
    """The data set on which a metric was measured: `eval/loss`, or `eval/clean/loss` where there are several sets; None if it is not known."""
    context, _, name = key.partition("/")
    by_set = {
        data_set.name.partition("_data.")[2]: data_set for data_set in data if data_set.context == context
    }
    return by_set.get(name.partition("/")[0]) or by_set.get("")


def _in_order(label: str) -> tuple[int, str]:
    return ("train", "eval", "test").index(label.partition("/")[0]), label


def _data_set(job: str, label: str, fields: Mapping[str, Any]) -> DataSet:
    prefix = f"data.{label}."
    context, _, name = label.partition("/")
    fingerprint = {
        name.removeprefix(prefix): str(value) for name, value in fields.items() if name.startswith(prefix)
    }
    text = json.dumps(fingerprint, sort_keys=True, separators=(",", ":"))
    return DataSet(
        name=f"{job.rpartition(':')[2]}.{context}_data{name and '.' + name}",
        context=context,  # type: ignore[arg-type]
        job=job,
        samples=int(fields.get(f"data.{label}_samples", 0)),
        fingerprint=fingerprint,
        sha256=hashlib.sha256(text.encode()).hexdigest(),
    )
