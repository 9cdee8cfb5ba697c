"""Rows that only an engine with a scheduler has: requests that come and go, newcomers under load.

Neighbours: `ours` asks for them, `moe_worker.bench.solo` is the engine.
"""

from __future__ import annotations

import itertools
import threading
from queue import SimpleQueue

import numpy as np

from bench.engines import workload
from bench.engines.workload import Figure
from moe_worker.bench.bench_error import BenchError
from moe_worker.bench.solo import ANSWER_SECONDS, Answer, SoloEngine, random_answer, wait_for

USERS, REQUESTS = 16, 96
"""Of the row `arrivals`: each user sends the next request when the last one is answered."""
PROMPT_TOKENS, ANSWER_TOKENS = (8, 96), (16, 96)
LOADED_BATCH, LOADED_TOKENS = 16, 900
NEWCOMERS, NEWCOMER_TOKENS, PAUSE_SECONDS = 20, 128, 0.05
"""Of the row `ttft`: newcomers one after another, with pauses of that length on average."""


def arrivals(solo: SoloEngine, seed: int) -> Figure:
    """Tokens generated a second while all users wait for an answer; prompts are computed within."""
    rng = np.random.default_rng(seed)
    numbers = itertools.count(20_000 + 1000 * seed)
    ended: SimpleQueue[Answer] = SimpleQueue()

    def ask() -> Answer:
        number = next(numbers)
        prompt = solo.random_ids(number, int(rng.integers(*PROMPT_TOKENS)))
        params = random_answer(int(rng.integers(*ANSWER_TOKENS)), number)
        return solo.ask(prompt, params, ended.put)

    solo.log.clear()
    began = solo.log.clock()
    for _ in range(USERS):
        ask()
    for _ in range(REQUESTS - USERS):
        ended.get(timeout=ANSWER_SECONDS).wait()
        ask()
    finished = solo.log.clock()
    for _ in range(USERS):
        ended.get(timeout=ANSWER_SECONDS).wait()
    steps = [step for step in solo.log.steps if step.ended_seconds <= finished]
    tokens = sum(step.num_tokens for step in steps)
    return Figure(
        "arrivals", "nvfp4", tokens / (finished - began), "tok/s", None,
        {"steps": len(steps), "requests": REQUESTS, "users": USERS},
    )  # fmt: skip


def time_to_first_token(solo: SoloEngine, seed: int) -> Figure:
    """Of newcomers, at random moments, while a batch decodes; by the wall's clock, always."""
    rng = np.random.default_rng(seed)
    seeds = range(30_000 + 1000 * seed, 30_000 + 1000 * seed + LOADED_BATCH)
    batch = [
        solo.ask(solo.random_ids(of, workload.PROMPT_TOKENS), random_answer(LOADED_TOKENS, of))
        for of in seeds
    ]
    seconds, pause = [], threading.Event()
    for number in range(NEWCOMERS):
        pause.wait(rng.exponential(PAUSE_SECONDS))
        of = 40_000 + 1000 * seed + number
        newcomer = solo.ask(solo.random_ids(of, NEWCOMER_TOKENS), random_answer(2, of))
        newcomer.wait()
        if any(answer.end is not None for answer in batch):
            break  # the engine is so fast that the load is over
        seconds.append(newcomer.ttft_seconds)
    for answer in batch:
        solo.engine.cancel(answer.request_id)
    wait_for(batch)
    if not seconds:
        raise BenchError("ttft: the load ended before the first newcomer was answered")
    return workload.duration(
        "ttft", "nvfp4", seconds, worst_ms=max(seconds) * 1e3, running=LOADED_BATCH
    )
