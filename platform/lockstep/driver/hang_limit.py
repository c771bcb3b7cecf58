"""How long a run may be silent before it is considered hung. Pure."""

from __future__ import annotations

TIMES_THE_LONGEST = 20.0
"""A silence may last so many times the longest one so far."""


class Patience:
    """How long an attempt may be silent: `start_s` until its first step, then a multiple of its longest silence, at least `floor_s`. In seconds."""

    def __init__(self, floor_s: float, start_s: float) -> None:
        self.floor_s, self.start_s = floor_s, start_s
        self._longest_s = 0.0
        self._signs = 0
        self._since: float | None = None

    @property
    def begun(self) -> bool:
        """Whether the attempt has done its first step."""
        return self._signs > 0

    @property
    def bound_s(self) -> float:
        """The silence that is too long, in seconds."""
        return max(self.floor_s, TIMES_THE_LONGEST * self._longest_s) if self.begun else self.start_s

    def silent_s(self, alive: int, now: float) -> float:
        """Seconds since the last sign of life. The count `alive` grows with every sign, and is 0 before the first step."""
        if self._since is None:
            self._since = now
        if alive != self._signs:
            if self._signs and alive > self._signs:
                self._longest_s = max(self._longest_s, now - self._since)
            self._signs, self._since = alive, now
        return now - self._since

    def is_over(self, alive: int, now: float) -> bool:
        """Whether the attempt is considered hung."""
        return self.silent_s(alive, now) > self.bound_s
