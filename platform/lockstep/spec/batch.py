"""The samples of a step: one size of the global batch, or several in turn, and the size of a micro-batch."""

from __future__ import annotations

from itertools import pairwise
from math import gcd
from typing import Annotated, Any, Self

from pydantic import Discriminator, Field, PositiveInt, Tag, ValidationInfo, field_validator, model_validator

from lockstep.plan import BatchSize
from lockstep.spec.section import Section

MOST_SIZES = 10_000
"""Of a ramp: it is kept as a list of them."""


class BatchStage(Section):
    """A size of the global batch, and until when it holds: so many steps or trained samples of the whole run, or its end."""

    size: PositiveInt
    until_steps: PositiveInt | None = None
    until_samples: PositiveInt | None = None

    @model_validator(mode="after")
    def _one_end(self) -> Self:
        if self.until_steps is not None and self.until_samples is not None:
            raise ValueError("wanted one of until_steps and until_samples")
        return self


class RampUp(Section):
    """A global batch that rises from `start` by `increment` to `size` over `samples` trained samples, as Megatron's rampup-batch-size."""

    start: PositiveInt
    increment: PositiveInt
    samples: PositiveInt
    size: PositiveInt

    @model_validator(mode="after")
    def _arrives(self) -> Self:
        if self.size <= self.start or (self.size - self.start) % self.increment:
            raise ValueError(
                f"wanted a size above start = {self.start} by a multiple of increment = {self.increment}"
            )
        if (sizes := self.increments + 1) > MOST_SIZES:
            raise ValueError(f"wanted an increment that makes at most {MOST_SIZES} sizes, not {sizes}")
        return self

    @property
    def increments(self) -> int:
        return (self.size - self.start) // self.increment

    def stages(self) -> list[BatchStage]:
        """The sizes in turn, each for an equal share of the samples."""
        count = self.increments
        rising = [
            BatchStage(
                size=self.start + i * self.increment, until_samples=-(-(i + 1) * self.samples // count)
            )
            for i in range(count)
        ]
        return [*rising, BatchStage(size=self.size)]


def _written_as(value: Any) -> str:
    """How a global batch is written: a number, a list of sizes, or a ramp, which is kept as the sizes that it stands for."""
    if isinstance(value, dict | RampUp):
        return "ramp"
    return "sizes" if isinstance(value, list | tuple) else "number"


class Batch(Section):
    """Samples of a step and of one forward/backward; their ratio is the number of micro-batches M."""

    global_: Annotated[
        Annotated[PositiveInt, Tag("number")]
        | Annotated[list[BatchStage], Tag("sizes")]
        | Annotated[RampUp, Tag("ramp")],
        Discriminator(_written_as),
    ] = Field(default=64, alias="global")
    micro: PositiveInt = Field(default_factory=lambda batch: _spread(_common(batch["global_"])))
    tokens: PositiveInt | None = None

    @model_validator(mode="before")
    @classmethod
    def _null_is_default(cls, data: Any) -> Any:
        """`batch.micro=null` takes back the micro that a file gives."""
        if isinstance(data, dict) and data.get("micro", 0) is None:
            return {key: value for key, value in data.items() if key != "micro"}
        return data

    @field_validator("global_")
    @classmethod
    def _ends_open(cls, value: int | list[BatchStage] | RampUp) -> int | list[BatchStage]:
        sizes = _stages(value)
        if not sizes:
            raise ValueError("wanted at least one size")
        for i, each in enumerate(sizes):
            is_open = each.until_steps is None and each.until_samples is None
            if is_open != (i == len(sizes) - 1):
                raise ValueError(
                    f"wanted until_steps or until_samples for each size but the last one, which holds to the end; size {i + 1} of {len(sizes)} "
                    f"has {'neither' if is_open else 'one'}"
                )
        for unit in ("until_steps", "until_samples"):
            ends = [end for each in sizes if (end := getattr(each, unit)) is not None]
            if any(later <= earlier for earlier, later in pairwise(ends)):
                raise ValueError(f"wanted {unit} that rise: they count from the beginning of the run")
        return sizes if len(sizes) > 1 else sizes[0].size

    @field_validator("micro")
    @classmethod
    def _divides(cls, micro: int, info: ValidationInfo) -> int:
        global_batch = info.data.get("global_", micro)  # absent where it is wrong itself
        sizes = [each.size for each in _stages(global_batch)]
        for size in sizes:
            if size % micro:
                near = _nearest_divisor(_common(global_batch), micro)
                advice = "" if near is None else f"; the nearest is {near}"
                every = "" if len(sizes) == 1 else " and of its other sizes"
                raise ValueError(f"wanted a divisor of batch.global = {size}{every}{advice}")
        return micro

    @property
    def sizes(self) -> tuple[BatchSize, ...]:
        """The sizes of the global batch in turn, one where it stays the same."""
        return tuple(
            BatchSize(each.size, each.until_steps, each.until_samples) for each in _stages(self.global_)
        )

    @property
    def micro_batches(self) -> int:
        """M, the number of micro-batches of a full step; of the largest where the global batch changes."""
        return max(each.size for each in self.sizes) // self.micro


def _common(sizes: int | list[BatchStage] | RampUp) -> int:
    """The largest number that divides every size of the global batch."""
    return gcd(*(each.size for each in _stages(sizes)))


def _stages(sizes: int | list[BatchStage] | RampUp) -> list[BatchStage]:
    """A global batch as sizes in turn, however it is written."""
    if isinstance(sizes, int):
        return [BatchStage(size=sizes)]
    return sizes.stages() if isinstance(sizes, RampUp) else sizes


def _nearest_divisor(number: int, target: int) -> int | None:
    """The divisor of a number that is nearest to `target`, the smaller of two equally near ones; None if none is near."""
    if target >= number:
        return number
    near = (divisor for distance in range(1, 100_000) for divisor in (target - distance, target + distance))
    return next((divisor for divisor in near if divisor > 0 and number % divisor == 0), None)


def _spread(size: int) -> int:
    """An eighth of the global batch, or the nearest larger part that divides it: a run can spread over that many."""
    return next(size // parts for parts in range(8, 0, -1) if size % parts == 0)
