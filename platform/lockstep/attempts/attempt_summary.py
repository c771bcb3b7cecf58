"""What is known of each attempt of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from lockstep.attempts.stages import breakdown


@dataclass(slots=True)
class AttemptSummary:
    """What became of one attempt. Times are Unix seconds; steps are numbers of steps, 0 where there is none."""

    attempt: int
    workers: int
    began: float
    from_step: int = 0
    """The checkpoint that it started from, or the step from which workers of the attempt before went on."""
    in_memory: bool = False
    """Whether workers of the attempt before went on in their processes: none was restarted and no checkpoint read."""
    joined: int = 0
    """How many of its workers joined those, and were handed the state."""
    last_step: int = 0
    """The last step that it was seen to do."""
    ended: float | None = None
    why: str | None = None
    repeated: int = 0
    """Steps at its beginning that an earlier attempt had done already."""
    lost_s: float | None = None
    """From the last step of the attempt before to its own first one."""
    seconds: dict[str, float] = field(default_factory=dict)
    """`lost_s` by stage, in the order of `stages.STAGES`."""
    stragglers: list[str] = field(default_factory=list)
    """Ranks that kept the others waiting, with how much slower they were and in which steps."""
    left_out: list[str] = field(default_factory=list)
    """Nodes that get no worker from the end of this attempt on: their devices failed twice, or had wrong bits."""
    corrupted: list[str] = field(default_factory=list)
    """Differences between the bits of its workers, with who was wrong."""
    standbys: int = 0
    """How many of its workers were processes that stood by."""

    def follows(
        self,
        before: AttemptSummary,
        last_step_at: float,
        ends_before: Mapping[str, float],
        ends: Mapping[str, float],
    ) -> None:
        """Take down what the end of the attempt before has cost, now that this one has done its first step.

        `last_step_at` is when that one did its last step, 0 where it did none; `ends` are those of the stages of each.
        """
        # A checkpoint that it saved itself: the row of that step may still have been on its way here.
        if self.from_step > before.from_step:
            before.last_step = max(before.last_step, self.from_step)
        self.repeated = max(0, before.last_step - self.from_step)
        self.seconds = breakdown(last_step_at or before.began, ends_before, ends)
        self.lost_s = sum(self.seconds.values())

    def cost(self) -> str:
        """What it took to go on, for a person."""
        longest = sorted(self.seconds, key=lambda stage: -self.seconds[stage])[:3]
        spent = ", ".join(f"{stage} {self.seconds[stage]:.1f}" for stage in longest)
        return f"with {self.workers} workers after {self.lost_s:.1f} s ({spent}); {self.repeated} steps are repeated"

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)
