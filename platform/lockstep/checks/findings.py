"""What checks come to: findings, each a pass, a warning or a failure with its evidence and what to do about it."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from lockstep.errors import LockstepError, evidence_and_remedy

Kind = Literal["pass", "warning", "failure"]


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check has found. A pass has no remedy."""

    name: str
    result: Kind
    evidence: str
    remedy: str = ""


def passed(name: str, evidence: str) -> Finding:
    return Finding(name, "pass", evidence)


def warned(name: str, evidence: str, remedy: str) -> Finding:
    return Finding(name, "warning", evidence, remedy)


def failed(name: str, evidence: str, remedy: str) -> Finding:
    return Finding(name, "failure", evidence, remedy)


def failure_of(name: str, error: LockstepError) -> Finding:
    """An error as a failure, of the check that it belongs to, or of the one called `name`."""
    evidence, remedy = (error.evidence, error.remedy) if error.evidence else evidence_and_remedy(str(error))
    return failed(error.check or name, evidence, remedy or "mend what the line names")


def advised(name: str, text: str) -> Finding:
    """A warning of another part as a finding."""
    evidence, remedy = evidence_and_remedy(text)
    return warned(name, evidence, remedy or "look at what the line names")


@dataclass(frozen=True, slots=True)
class Report:
    """What `lockstep check` found. `not_reached` are checks that need what a failed one could not give."""

    checks: Sequence[Finding]
    not_reached: Sequence[str]

    @property
    def passed(self) -> bool:
        """Whether nothing failed; warnings do not count."""
        return all(finding.result != "failure" for finding in self.checks)

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {
            "passed": self.passed,
            "checks": [asdict(finding) for finding in self.checks],
            "not_reached": list(self.not_reached),
        }


_WIDTH = 110


def as_text(report: Report) -> str:
    """The table for a person: result, name, evidence, and under it the remedy."""
    lines = [line for finding in report.checks for line in _rows(finding)]
    if report.not_reached:
        lines.append(f"not reached       {', '.join(report.not_reached)}")
    counts = {kind: sum(f.result == kind for f in report.checks) for kind in ("pass", "warning", "failure")}
    summary = f"{counts['pass']} passed, {counts['warning']} warned, {counts['failure']} failed"
    return "\n".join([*lines, summary])


def _rows(finding: Finding) -> list[str]:
    head = f"{finding.result:<8} {finding.name:<11} "
    texts = [finding.evidence] + ([f"→ {finding.remedy}"] if finding.remedy else [])
    lines = [line for text in texts for line in textwrap.wrap(text, _WIDTH - len(head)) or [""]]
    return [head + lines[0], *(" " * len(head) + line for line in lines[1:])]
