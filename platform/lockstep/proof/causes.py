"""Why two executions of a run may differ: the fields of their identities, compared before any of their bits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from lockstep.job.identity import differing_fields

UNTOLD = "no field of the identity differs: look for a change to the record, an operator that is not deterministic, or a machine that computes wrong results"
"""What is said of a difference that nothing in the identity explains."""


class Cause(NamedTuple):
    """One field of the identity that is not what it was."""

    field: str
    recorded: Any
    found: Any

    @property
    def elsewhere(self) -> bool:
        """Whether bits may rightly differ for it: another version, kind of device or processor."""
        return self.field.startswith(("version.", "numerics_probe")) or self.field == "device"

    def __str__(self) -> str:
        return f"{self.field} was {self.recorded!r} and is {self.found!r}"


_ORDER = ("version.", "device", "numerics_probe", "threads", "job.", "data.")
"""Which fields are told first: versions, device, threads, source, data."""


def causes(recorded: Mapping[str, Any], found: Mapping[str, Any]) -> list[Cause]:
    """The fields that differ, the likelier cause first. None where the run's own fields are not recorded."""
    if not recorded:
        return []
    names = differing_fields(recorded, found, either=True)
    differing = [Cause(name, recorded.get(name), found.get(name)) for name in names]
    return sorted(differing, key=lambda cause: (_rank(cause.field), cause.field))


def _rank(field: str) -> int:
    return next((i for i, prefix in enumerate(_ORDER) if field.startswith(prefix)), len(_ORDER))
