"""Records of runs as their folders hold them, without a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lockstep.files import write_text
from lockstep.record.events.union import Recorded
from lockstep.record.ledger.journal import Journal
from lockstep.record.mirror.documents import as_yaml
from lockstep.spec.loading import load_spec
from lockstep.views.curves import Curves, curves_of

RUN = "0123456789abcdef" * 2


def record(storage: Path, events: Sequence[Recorded], **sections: Any) -> Path:
    """Have the journal of a run hold these events as well, and its folder the spec."""
    folder = storage / RUN
    document = {"name": "digits", "job": {"use": "jobs.digits.job:Digits"}, **sections}
    write_text(folder / "spec.yaml", as_yaml(load_spec(document).document()))
    journal = Journal(folder)
    journal.add(events)
    journal.close()
    return folder


def curves(storage: Path) -> Curves:
    return curves_of(RUN, "off", storage / RUN)
