"""What a trainer and its spare process hand each other, through files that have no name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lockstep.training.integrity.resume_check.evidence import Evidence
from lockstep.training.spare_process import ProcessContext


@dataclass(frozen=True, slots=True)
class Request:
    """What a spare process is to do: take up the checkpoint of `step` of a run, and take the next step."""

    spec: Mapping[str, Any]
    """The document of the spec."""
    run_id: str
    step: int
    device: str
    context: ProcessContext


@dataclass(frozen=True, slots=True)
class Taken:
    """The step was taken. `values` are what the job held before it, by place."""

    evidence: Evidence
    values: Mapping[str, str]
    cpu_s: float = 0.0
    """The process's time on processors, in seconds; on a GPU, all of its time. Of every answer."""


@dataclass(frozen=True, slots=True)
class Refused:
    """The state could not be restored, or the step could not be taken from it: a resume would end so too."""

    message: str
    cpu_s: float = 0.0


@dataclass(frozen=True, slots=True)
class NotTried:
    """The checkpoint could not be tried, for a reason that says nothing about a resume. It may be deleted by now."""

    message: str
    cpu_s: float = 0.0


Answer = Taken | Refused | NotTried
