"""What is compiled: the loss as a whole, or the blocks that the model repeats, each by itself."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Discriminator, Tag

from lockstep.spec.section import Section
from lockstep.spec.sharding import ModuleNames

_UNITS = "units"


class CompiledUnits(Section):
    """The modules that are compiled one by one; null: the blocks that the model repeats."""

    units: ModuleNames | None = None

    def document(self) -> Any:
        """Itself as a spec file would write it: one word for the default."""
        return _UNITS if self.units is None else {_UNITS: list(self.units)}


def _in_full(value: Any) -> Any:
    if value == _UNITS:
        return {_UNITS: None}
    if not isinstance(value, bool | dict | CompiledUnits):
        raise ValueError("wanted true, false, units, or {units: [names of modules]}")
    return value


Compile = Annotated[
    Annotated[bool, Tag("whole")] | Annotated[CompiledUnits, Tag(_UNITS)],
    Discriminator(lambda value: "whole" if isinstance(value, bool) else _UNITS),
    BeforeValidator(_in_full),
]
"""`compile: units` is `compile: {units: null}`."""
