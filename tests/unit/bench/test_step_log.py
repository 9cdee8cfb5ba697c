"""Steps are kept as the engine reports them; times of decode steps lie between two full ones."""

from __future__ import annotations

import itertools

from moe_worker.bench.step_log import Step, StepLog, decode_seconds


def log_with_steps(*tokens_and_prompts: tuple[int, int]) -> StepLog:
    """A step a second."""
    seconds = itertools.count(1)
    log = StepLog(lambda: float(next(seconds)))
    for num_tokens, num_prompts in tokens_and_prompts:
        log.step("schedule", 0.25)
        log.step("run", 0.5)
        for _ in range(num_prompts):
            log.prompt_computed(32, 0)
        for _ in range(num_tokens):
            log.generated(1)
        log.step("publish", 0.125)
    return log


def test_a_step_ends_when_it_is_published() -> None:
    log = log_with_steps((1, 1), (2, 0))
    assert [(step.ended_seconds, step.num_tokens, step.num_prompts) for step in log.steps] == [
        (1.0, 1, 1),
        (2.0, 2, 0),
    ]
    assert log.steps[0].phases == {"schedule": 0.25, "run": 0.5, "publish": 0.125}


def test_only_steps_between_full_ones_count() -> None:
    steps = log_with_steps((1, 1), (2, 1), (2, 0), (2, 0), (2, 0), (1, 0), (2, 0)).steps
    assert decode_seconds(steps, batch=2) == [1.0, 1.0]


def test_each_step_is_told() -> None:
    told: list[Step] = []
    log = StepLog()
    log.on_step = told.append
    log.step("publish", 0.0)
    assert told == log.steps
    log.clear()
    assert not log.steps
