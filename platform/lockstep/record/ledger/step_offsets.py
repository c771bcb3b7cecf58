"""Where the steps of a journal begin in its file."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from heapq import merge


class StepOffsets:
    """Offsets by step number, 16 bytes a step. Steps are mostly in order; one that comes after later ones is `late`, and its newest line counts."""

    def __init__(self) -> None:
        self._numbers, self._starts = array("q"), array("q")
        self._late: dict[int, int] = {}

    def add(self, number: int, start: int) -> None:
        """Note where the line of a step begins."""
        if number <= self.last:
            self._late[number] = start
        else:
            self._starts.append(start)  # first: other threads look for the number
            self._numbers.append(number)

    @property
    def count(self) -> int:
        """How many steps there are."""
        return len(self._numbers) + sum(not self._is_in_order(number) for number in self._late)

    @property
    def first(self) -> int | None:
        """The lowest step."""
        return min([*self._numbers[:1], *self._late], default=None)

    @property
    def last(self) -> int:
        """The highest step, or 0."""
        return self._numbers[-1] if self._numbers else 0

    def start_of(self, number: int) -> int | None:
        """The offset of a step's line; None where there is none."""
        start = self._late.get(number)
        if start is None and self._is_in_order(number):
            return self._starts[bisect_left(self._numbers, number)]
        return start

    def start_up_to(self, number: int) -> int:
        """The offset of the last step in order up to `number`; 0 where there is none."""
        at = bisect_right(self._numbers, number)
        return self._starts[at - 1] if at else 0

    def numbers(self, after: int = -1) -> Iterator[int]:
        """The steps after number `after`, sorted."""
        first = bisect_right(self._numbers, after)
        in_order = (self._numbers[i] for i in range(first, len(self._numbers)))
        late = sorted(number for number in self._late if number > after and not self._is_in_order(number))
        return merge(in_order, late)

    def _is_in_order(self, number: int) -> bool:
        """Whether a step came before all later ones, if only in an older line."""
        at = bisect_left(self._numbers, number)
        return at < len(self._numbers) and self._numbers[at] == number
