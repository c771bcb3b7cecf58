"""What is known of each attempt of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from lockstep.attempts.restart_stages import breakdown


@dataclass(slots=True)
class AttemptSummary:
    """The history of one attempt. Times are Unix seconds; steps count from 1, and 0 means none."""

    attempt: int
    workers: int
    began: float
    from_step: int = 0
    """The step of the checkpoint that it started from, or from which workers of the previous attempt went on."""
    in_memory: bool = False
    """Whether workers of the previous attempt went on in their processes: none was restarted and no checkpoint read."""
    joined: int = 0
    """How many workers joined them and received the state from them."""
    last_step: int = 0
    """The last step that it is known to have done."""
    ended: float | None = None
    why: str | None = None
    planned: bool = False
    """Whether it ended as planned: with the run, by a signal, to move, or so that workers join or leave. Else the run was interrupted."""
    repeated: int = 0
    """Steps at its beginning that an earlier attempt had already done."""
    lost_s: float | None = None
    """Seconds from the last step of the previous attempt to its own first one."""
    seconds: dict[str, float] = field(default_factory=dict)
    """`lost_s` by stage, in the order of `stages.STAGES`."""
    stragglers: list[str] = field(default_factory=list)
    """Ranks that kept the others waiting, with how much slower they were and in which steps."""
    left_out: list[str] = field(default_factory=list)
    """Nodes that get no more workers from the end of this attempt on: their devices failed twice, or had wrong bits."""
    corrupted: list[str] = field(default_factory=list)
    """Differences between the bits of its workers, and who was wrong."""

    def follows(
        self,
        previous: AttemptSummary,
        last_step_at: float,
        previous_ends: Mapping[str, float],
        ends: Mapping[str, float],
    ) -> None:
        """Record what the end of the previous attempt has cost, once this one has done its first step.

        `last_step_at` is the time of the previous attempt's last step, 0 if it did none. `previous_ends` and `ends` are the times at which the stages of each ended.
        """
        # The previous attempt saved this checkpoint itself; the row of that step may still have been on its way here.
        if self.from_step > previous.from_step:
            previous.last_step = max(previous.last_step, self.from_step)
        self.repeated = max(0, previous.last_step - self.from_step)
        self.seconds = breakdown(last_step_at or previous.began, previous_ends, ends)
        self.lost_s = sum(self.seconds.values())

    def cost(self) -> str:
        """One line on what it took to go on, for a person."""
        longest = sorted(self.seconds, key=lambda stage: -self.seconds[stage])[:3]
        spent = ", ".join(f"{stage} {self.seconds[stage]:.1f}" for stage in longest)
        return f"with {self.workers} workers after {self.lost_s:.1f} s ({spent}); {self.repeated} steps are repeated"

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)
