"""What a journal has, read beside the process that may be writing it."""

from __future__ import annotations

from pathlib import Path

from lockstep.record.events.codec import from_line
from lockstep.record.ledger.journal_file import NAME
from lockstep.record.ledger.rows import StepRow


def read_steps(folder: Path) -> list[StepRow]:
    """The steps in the journal of a run that another process may be recording; none where there is no journal."""
    path = folder / NAME
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")[:-1]
    rows = (from_line(line, folder) for line in lines if line.startswith(b'{"step"'))
    steps: dict[int, StepRow] = {}
    for row in rows:
        if isinstance(row, StepRow):
            steps.setdefault(row.step, row)
    return [steps[number] for number in sorted(steps)]
