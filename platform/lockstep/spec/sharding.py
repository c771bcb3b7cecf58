"""What the workers of a run share out, and how the units of a fully sharded model come and go, and from where. No bit depends on it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, NonNegativeInt

from lockstep.spec.section import Section


def _named(units: tuple[str, ...]) -> tuple[str, ...]:
    if not units or not all(units):
        raise ValueError(
            "wanted names of modules, such as ['layers.*'], or null for those that the model names"
        )
    return units


ModuleNames = Annotated[tuple[str, ...], Field(strict=False), AfterValidator(_named)]
"""Names or classes of modules, with `*` for any part."""


class Sharding(Section):
    """What is shared out, and the units of a fully sharded model: which modules they are, when their parameters are gathered and let go of, and where they lie meanwhile."""

    mode: Literal["none", "optimizer", "full"] = "none"
    units: ModuleNames | None = None
    prefetch: NonNegativeInt = 1
    reshard_after_forward: bool = True
    offload: bool = False

    def of_units(self) -> dict[str, Any]:
        """What it says of units, by field, where that is not the default; plain data."""
        return self.model_dump(mode="json", exclude_defaults=True, exclude={"mode"})

    def document(self) -> Any:
        """Itself as a spec file would write it: the mode alone where the rest are the defaults."""
        return {"mode": self.mode, **self.of_units()} if self.of_units() else self.mode


ShardingOrMode = Annotated[
    Sharding, BeforeValidator(lambda value: {"mode": value} if isinstance(value, str) else value)
]
"""`sharding: full` is `sharding: {mode: full}`."""
