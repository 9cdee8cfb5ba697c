"""A batch that decodes as one: sequences begin, and the steps in which all get a token count.

Neighbours: `solo` is the engine, `step_log` its steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from moe_worker.bench.solo import SoloEngine, random_answer, wait_for
from moe_worker.bench.step_log import Step, decode_seconds

SPARE_STEPS = 24
"""In which the last sequence begins while the first ones decode already."""


@dataclass(frozen=True)
class Steady:
    batch: int
    prompt_tokens: int
    steps: int
    """In which all sequences decode; there may be some more."""
    seed: int = 0
    """Of prompts and answers: the same one again would find its prompts in the prefix cache."""

    @property
    def longest(self) -> int:
        return self.prompt_tokens + SPARE_STEPS + self.steps

    def is_full(self, step: Step) -> bool:
        return step.num_tokens == self.batch and not step.num_prompts


def decode(
    solo: SoloEngine, of: Steady, on_step: Callable[[Step], None] = lambda step: None
) -> list[float]:
    """Seconds of the full steps, in order; `on_step` is told every step by the engine's thread."""
    seeds = range(1000 * of.seed, 1000 * of.seed + of.batch)
    prompts = [solo.random_ids(seed, of.prompt_tokens) for seed in seeds]
    solo.log.clear()
    solo.log.on_step = on_step
    answers = [
        solo.ask(prompt, random_answer(SPARE_STEPS + of.steps, seed))
        for prompt, seed in zip(prompts, seeds, strict=True)
    ]
    wait_for(answers)
    solo.log.on_step = None
    return decode_seconds(solo.log.steps, of.batch)
