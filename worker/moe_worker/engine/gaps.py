"""How long this rank stood between two steps, and what a switch added to it.

A gap is the time from the end of one busy step to the beginning of the next when the group had
work without a pause; waiting for requests is no gap. Pure: the engine tells what time it is.
"""

from __future__ import annotations

import statistics
from collections import deque

MAX_GAPS = 1024
"""The median is over the newest gaps only."""


class StepGaps:
    def __init__(self) -> None:
        self._gaps: deque[float] = deque(maxlen=MAX_GAPS)
        self._longest = 0.0
        self._ended_at: float | None = None
        self._switch_median: float | None = None

    @property
    def longest_seconds(self) -> float:
        """Since the placement in force began, the gap of its switch included."""
        return self._longest

    @property
    def median_seconds(self) -> float:
        gaps = list(self._gaps)  # read from other threads while the engine adds
        return statistics.median(gaps) if gaps else 0.0

    def begin_step(self, now_seconds: float) -> float | None:
        """A busy step begins; returns the stall of a switch that the gap before it contained: that
        gap less the median of the gaps before the switch."""
        median, self._switch_median = self._switch_median, None
        if self._ended_at is None:
            return None
        gap = now_seconds - self._ended_at
        self._gaps.append(gap)
        self._longest = max(self._longest, gap)
        return None if median is None else max(0.0, gap - median)

    def end_step(self, now_seconds: float) -> None:
        self._ended_at = now_seconds

    def idle(self) -> bool:
        """The group has no work: the next step follows a pause, not a gap. True when `begin_step`
        was to tell a switch's stall: nobody waited for that switch."""
        unstalled = self._switch_median is not None
        self._ended_at = self._switch_median = None
        return unstalled

    def switch(self) -> bool:
        """Another placement comes into force now. True when a step follows without a pause, so
        that `begin_step` will tell the stall."""
        if self._ended_at is not None:
            self._switch_median = self.median_seconds
        self._gaps.clear()
        self._longest = 0.0
        return self._ended_at is not None
