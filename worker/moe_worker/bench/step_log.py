"""What an engine reports of its steps, kept: when each ended, and what came of it.

Neighbours: `solo` gives it to an engine, whose thread writes it; read it while the engine rests.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from moe_worker.engine.observer import StepPhase, Unobserved


@dataclass(frozen=True)
class Step:
    ended_seconds: float
    """On the log's clock."""
    num_tokens: int
    """Generated."""
    num_prompts: int
    """Whose last token was computed."""
    phases: dict[StepPhase, float]
    """Seconds of each, by the engine's own clock; what lies between two steps is in none."""


class StepLog(Unobserved):
    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.steps: list[Step] = []
        self.clock = clock
        self._phases: dict[StepPhase, float] = {}
        self._num_tokens = self._num_prompts = 0
        self.on_step: Callable[[Step], None] | None = None
        """Called by the engine's thread after each, within the time of the next."""

    def clear(self) -> None:
        self.steps.clear()

    def step(self, phase: StepPhase, seconds: float) -> None:
        self._phases[phase] = self._phases.get(phase, 0.0) + seconds
        if phase != "publish":
            return
        step = Step(self.clock(), self._num_tokens, self._num_prompts, self._phases)
        self._phases, self._num_tokens, self._num_prompts = {}, 0, 0
        self.steps.append(step)
        if self.on_step is not None:
            self.on_step(step)

    def prompt_computed(self, num_tokens: int, num_cached_tokens: int) -> None:
        self._num_prompts += 1

    def generated(self, num_tokens: int) -> None:
        self._num_tokens += num_tokens


def decode_seconds(steps: Sequence[Step], batch: int) -> list[float]:
    """From the end of one step to the end of the next, where both gave each of `batch` sequences a
    token and computed no prompt."""
    return [
        step.ended_seconds - before.ended_seconds
        for before, step in pairwise(steps)
        if _is_full(before, batch) and _is_full(step, batch)
    ]


def _is_full(step: Step, batch: int) -> bool:
    return step.num_tokens == batch and not step.num_prompts
