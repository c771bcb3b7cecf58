"""What a journal has, read beside the process that may be writing it."""

from __future__ import annotations

from pathlib import Path

from lockstep.record.events import Sealed, StepRow
from lockstep.record.journal_file import NAME
from lockstep.record.journal_lines import from_line
from lockstep.record.sealed import SealedSteps


def sealed_in(folder: Path) -> SealedSteps:
    """The sealed steps of a run that another process may be recording."""
    sealed = SealedSteps(folder)
    with (folder / NAME).open("rb") as file:
        event = from_line(file.readline().rstrip(b"\n"), folder)
    if isinstance(event, Sealed):
        sealed.take_up(event.segments)
    return sealed


def read_steps(folder: Path) -> list[StepRow]:
    """The steps in the journal of a run that another process may be recording; none where there is no journal."""
    path = folder / NAME
    if not path.exists():
        return []
    sealed = sealed_in(folder)
    lines = path.read_bytes().split(b"\n")[:-1]
    rows = (from_line(line, folder) for line in lines if line.startswith(b'{"step"'))
    steps = {row.step: row for segment in sealed.segments for row in sealed.steps(segment)}
    for row in rows:
        if isinstance(row, StepRow):
            steps.setdefault(row.step, row)
    return [steps[number] for number in sorted(steps)]
