"""Why two executions of a run may differ: the fields of their identities, compared before any of their bits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from lockstep.job.identity import VARIABLE, differences, shown

UNTOLD = "no field of the identity differs: look for a change to the record, an operator that is not deterministic, or a machine that computes wrong results"
"""What is said of a difference that nothing in the identity explains."""


class Cause(NamedTuple):
    """One value of the identity that is not what it was: its field, with the place inside it, and both trees."""

    field: str
    recorded: Any
    found: Any

    @property
    def elsewhere(self) -> bool:
        """Whether bits may rightly differ for it: another version, kind of device or processor."""
        return self.field.startswith(("version.", "numerics_probe")) or self.field == "device"

    @property
    def change(self) -> str:
        """The field with both values, for a list of them."""
        return f"{self.field}: {shown(self.recorded)} → {shown(self.found)}"

    def __str__(self) -> str:
        return f"{self.field} was {shown(self.recorded)} and is {shown(self.found)}"


_ORDER = ("version.", "device", "numerics_probe", "threads", "job.", "data.")
"""Which fields come first in a list of causes: versions, device, threads, source, data."""


def causes(recorded: Mapping[str, Any], current: Mapping[str, Any]) -> list[Cause]:
    """The fields that differ, the likelier cause first. None where the run's own fields are not recorded."""
    if not recorded:
        return []
    shared = recorded.keys() & current
    # One alone has read the others so far: of those nothing is known to differ.
    comparable = [
        {name: tree for name, tree in fields.items() if name in shared or not name.startswith(VARIABLE)}
        for fields in (recorded, current)
    ]
    differing = [Cause(*difference) for difference in differences(*comparable)]
    return sorted(differing, key=lambda cause: (_rank(cause.field), cause.field))


def _rank(field: str) -> int:
    return next((i for i, prefix in enumerate(_ORDER) if field.startswith(prefix)), len(_ORDER))
