"""Which runs a Ray cluster has: each driver puts a notice into the cluster's own key-value store, where anyone can read it.

A notice is a few hundred bytes. A killed driver leaves its notice as it was: readers show a run whose driver is gone
as lost.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, replace
from typing import Any

from lockstep.clusters.ray_internals import key_values, unavailable
from lockstep.record.redaction import without_uri_secrets

NAMESPACE, PREFIX = b"lockstep", "run:"

EVERY_S = 5.0
"""Seconds between two reports of a run's step."""


@dataclass(frozen=True, slots=True)
class Notice:
    """A run as its driver last reported it. Times are Unix seconds."""

    run_id: str
    name: str
    status: str
    step: int
    workers: int
    began: float
    told: float
    store: str
    driver: str
    """Ray's id of the driver's job."""


class RunRegistry:
    """The notice of one run, kept by its driver while it is connected to the cluster."""

    def __init__(self, name: str, store: str, began: float) -> None:
        self._name, self._store, self._began = name, without_uri_secrets(store), began
        self._notice: Notice | None = None

    def begins(self, run_id: str, workers: int) -> None:
        """Put up the notice of a run that now exists."""
        import ray

        driver = ray.get_runtime_context().get_job_id()
        self._put(
            Notice(run_id, self._name, "RUNNING", 0, workers, self._began, time.time(), self._store, driver)
        )

    def reached(self, step: int, workers: int) -> None:
        """Update the notice with the run's step, at most every `EVERY_S`."""
        if self._notice is not None and time.time() - self._notice.told >= EVERY_S:
            self._put(replace(self._notice, step=step, workers=workers, told=time.time()))

    def ends(self, status: str, step: int) -> None:
        """Update the notice with the run's end, if it ever began."""
        if self._notice is not None:
            self._put(
                replace(self._notice, status=status, step=max(step, self._notice.step), told=time.time())
            )

    def _put(self, notice: Notice) -> None:
        self._notice = notice
        if not unavailable("key-values"):
            key_values.put(f"{PREFIX}{notice.run_id}", json.dumps(asdict(notice)).encode(), NAMESPACE)


def notices(address: str, drivers: set[str]) -> list[dict[str, Any]]:
    """The runs of the cluster whose GCS is at `address`, newest first; `drivers` are Ray's ids of the live drivers."""
    if unavailable("key-values"):
        return []
    posted = [Notice(**json.loads(value)) for value in key_values.values(address, PREFIX, NAMESPACE)]
    current = [
        replace(notice, status="LOST")
        if notice.status == "RUNNING" and notice.driver not in drivers
        else notice
        for notice in posted
    ]
    return [asdict(notice) for notice in sorted(current, key=lambda notice: -notice.began)]
