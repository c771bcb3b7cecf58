"""The sealed steps of a record: files of segments in the run's folder. The journal names them, and no longer has their steps itself.

A file is on the disk, whole and hashed, before a journal names it. If it is damaged or missing, the journal counts as lacking
its steps: they come from a checkpoint again.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.errors import RecordError, StorageError
from lockstep.files import replacing
from lockstep.paths import read_beneath
from lockstep.record.events import Segment, StepRow
from lockstep.record.ledger import Rows
from lockstep.record.segments import check, seal, steps_in, table_in

if TYPE_CHECKING:
    import pyarrow as pa

LARGEST = 1 << 30
"""Bytes of the largest segment that is read."""

FOLDER = "sealed"
"""The folder within the run's folder."""


class SealedSteps:
    """The segments of a run, in order. No two have a step in common."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / FOLDER
        self.segments: list[Segment] = []
        self.lost: list[Segment] = []
        """The segments whose files are damaged or missing."""
        self._held: tuple[Segment, list[StepRow]] | None = None

    def take_up(self, segments: Iterable[Segment]) -> None:
        """Set the segments, and verify each: its file is read, and its hash compared."""
        self.segments, self.lost, self._held = [], [], None
        for segment in sorted(segments):
            try:
                self._content(segment)
            except RecordError:
                self.lost.append(segment)
            else:
                self.segments.append(segment)

    def take_up_all(self) -> None:
        """Take every segment that has a file, for when nothing names them. A file whose hash does not match its name does not count."""
        found = []
        for path in self._folder.glob("*.rows"):
            with suppress(StorageError, OSError, ValueError):
                content = read_beneath(self._folder, path.name, LARGEST)
                segment = Segment.of(path.name, len(content), hashlib.sha256(content).hexdigest())
                if segment.name == path.name:
                    found.append(segment)
        apart = [one for one in found if not any(one != other and _meet(one, other) for other in found)]
        self.take_up(apart)

    def write(self, steps: Sequence[StepRow]) -> Segment:
        """Write the file of these steps. It counts for nothing before `add`. RecordError where the disk refuses."""
        segment, content = seal(Rows(steps, ()))
        try:
            with replacing(self._folder / segment.name) as file:
                file.write(content)
        except OSError as error:
            raise RecordError(
                f"record.folder: cannot write {str(self._folder)!r}: {error.strerror or error}"
            ) from error
        return segment

    def add(self, segment: Segment) -> None:
        """Add a written segment."""
        self.segments = sorted([*self.segments, segment])
        self.lost = [one for one in self.lost if not segment.first <= one.first <= segment.last]

    @property
    def count(self) -> int:
        """How many steps the segments have."""
        return sum(one.last - one.first + 1 for one in self.segments)

    @property
    def first(self) -> int | None:
        """The first step of the segments, damaged ones included."""
        return min((one.first for one in (*self.segments, *self.lost)), default=None)

    @property
    def last(self) -> int:
        """The last step of the segments, or 0."""
        return self.segments[-1].last if self.segments else 0

    def segment_of(self, step: int) -> Segment | None:
        """The segment with a step, or None."""
        at = bisect_right(self.segments, step, key=lambda one: one.first) - 1
        return self.segments[at] if at >= 0 and step <= self.segments[at].last else None

    def step(self, step: int) -> StepRow | None:
        """The row of a step, or None. RecordError where its file was damaged since."""
        segment = self.segment_of(step)
        return self.steps(segment)[step - segment.first] if segment is not None else None

    def steps(self, segment: Segment) -> list[StepRow]:
        """The steps of a segment. RecordError where its file was damaged since."""
        if self._held is None or self._held[0] != segment:
            self._held = segment, steps_in(self._content(segment))
        return self._held[1]

    def table(self, segment: Segment, columns: Sequence[str] | None) -> pa.Table:
        """The steps of a segment as a table, with all columns or the named ones. RecordError where its file was damaged since."""
        return table_in(self._content(segment), columns)

    def numbers(self) -> Iterator[range]:
        """The range of steps of each segment."""
        return (range(one.first, one.last + 1) for one in self.segments)

    def _content(self, segment: Segment) -> bytes:
        path = self._folder / segment.name
        try:
            return check(segment, read_beneath(self._folder, segment.name, LARGEST))
        except (OSError, ValueError, StorageError) as error:
            raise RecordError(
                f"record: {str(path)!r} cannot be read ({error}); resume the run: a checkpoint has its steps"
            ) from error


def _meet(one: Segment, other: Segment) -> bool:
    return one.first <= other.last and other.first <= one.last
