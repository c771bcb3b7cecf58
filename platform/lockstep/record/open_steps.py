"""Where the open steps of a journal, those in no sealed segment, begin in its file."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from heapq import merge

from lockstep.record.events import Segment
from lockstep.record.segments import end_of


class OpenSteps:
    """Offsets by step number. Steps are mostly in order; one that comes after later ones is `late`."""

    def __init__(self) -> None:
        self._numbers, self._starts = array("q"), array("q")
        self._late: dict[int, int] = {}

    def add(self, number: int, start: int, *, late: bool) -> None:
        """Note where the line of a step begins."""
        if late:
            self._late[number] = start
        else:
            self._numbers.append(number)
            self._starts.append(start)

    @property
    def count(self) -> int:
        """How many steps there are."""
        return len(self._numbers) + sum(not self.on_time(number) for number in self._late)

    @property
    def first(self) -> int | None:
        """The lowest open step."""
        return min([*self._numbers[:1], *self._late], default=None)

    @property
    def last(self) -> int:
        """The last step that came in order, or 0."""
        return self._numbers[-1] if self._numbers else 0

    @property
    def late(self) -> list[int]:
        """The steps that came after later ones, sorted."""
        return sorted(self._late)

    def start_of(self, number: int) -> int | None:
        """The offset of a step's line; None for a step that is not open."""
        start = self._late.get(number)
        if start is None and self.on_time(number):
            return self._starts[bisect_left(self._numbers, number)]
        return start

    def on_time(self, number: int) -> bool:
        """Whether a step came in order."""
        at = bisect_left(self._numbers, number)
        return at < len(self._numbers) and self._numbers[at] == number

    def in_order(self) -> Iterator[int]:
        """The step numbers, sorted."""
        return merge(self._numbers, self.late)

    def full(self, behind: int, delivered: int, last_step: int, sealed: Sequence[Segment]) -> range | None:
        """The first range of steps after step `behind` that makes a segment beside the `sealed` ones; None if it is not full.

        It is full if there are later steps, and every line of it begins before the offset `delivered`.
        """
        at = bisect_right(self._numbers, behind)
        late = [number for number in self._late if number > behind]
        first = min([*self._numbers[at : at + 1], *late], default=None)
        if first is None or last_step <= (last := end_of(first)):
            return None
        last = min([last, *(one.first - 1 for one in sealed if one.first > first)])
        steps = range(first, last + 1)
        # A missing step may still come.
        delivered_all = all(start is not None and start < delivered for start in map(self.start_of, steps))
        return steps if delivered_all else None

    def places(self) -> Iterator[tuple[int, int]]:
        """Pairs of step number and offset."""
        yield from zip(self._numbers, self._starts, strict=True)
        yield from self._late.items()

    def keep(self, wanted: Callable[[int], bool]) -> None:
        """Keep only the wanted steps."""
        on_time = [place for place in zip(self._numbers, self._starts, strict=True) if wanted(place[0])]
        self._numbers, self._starts = (array("q", [place[i] for place in on_time]) for i in (0, 1))
        self._late = {number: start for number, start in self._late.items() if wanted(number)}
