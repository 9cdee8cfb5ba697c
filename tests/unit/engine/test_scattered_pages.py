"""Case D09: right alone, wrong in a batch. Sixteen prompts of different lengths in a pool whose
free blocks lie in disorder, one after another and all at once, with every four-bit cache."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from moe_worker.engine.runner import Runner
from moe_worker.engine.sampling_params import SamplingParams
from moe_worker.engine.scheduler import Scheduler
from moe_worker.engine.sequence import Sequence
from tests.support.models import save_random_mixtral
from tests.support.one_rank import OneRank, Trace, run_all

pytestmark = pytest.mark.usefixtures("implementation")
LENGTHS = (1, 3, 7, 12, 15, 16, 17, 23, 31, 32, 33, 40, 47, 55, 64, 71)
MAX_TOKENS = 12
NUM_BLOCKS = 128


@pytest.fixture(scope="module")
def rank(tmp_path_factory: pytest.TempPathFactory) -> OneRank:
    path: Path = tmp_path_factory.mktemp("model")
    return OneRank.load(save_random_mixtral(path, seed=6, top_k=4, num_kv_heads=2))


def prompts(seed: int) -> list[tuple[int, ...]]:
    generator = torch.Generator().manual_seed(seed)
    return [tuple(torch.randint(0, 256, (n,), generator=generator).tolist()) for n in LENGTHS]


def churn(scheduler: Scheduler, runner: Runner, rank: OneRank) -> None:
    """Other requests begin together and leave in disorder, some of them before their end."""
    rng = np.random.default_rng(0)
    others = prompts(seed=77)
    for index, prompt in enumerate(others):
        params = SamplingParams(max_tokens=int(rng.integers(1, 30)))
        scheduler.add(Sequence(f"other-{index}", prompt, params))
    leaving = rng.permutation(len(others))[:8].tolist()
    while scheduler.has_work:
        schedule = scheduler.schedule()
        scheduler.commit(schedule, runner.run(schedule, rank.moe))
        if leaving and scheduler.num_waiting == 0:
            scheduler.abort(f"other-{leaving.pop()}")


def assert_scattered(scheduler: Scheduler) -> None:
    taken = scheduler.blocks.take(scheduler.blocks.num_available)
    assert sum(abs(b - a) != 1 for a, b in itertools.pairwise(taken)) > 16
    scheduler.blocks.release(reversed(taken))


@pytest.mark.parametrize("kv_dtype", ["nvfp4", "mxfp4"])
def test_d09_sixteen_prompts_at_once_are_as_one_after_another(rank: OneRank, kv_dtype: Any) -> None:
    scheduler, runner = rank.engine(
        kv_dtype=kv_dtype, num_blocks=NUM_BLOCKS, max_running=16, prefix_caching=False
    )
    params = SamplingParams(max_tokens=MAX_TOKENS)

    def generate(*names_and_prompts: tuple[str, tuple[int, ...]]) -> list[Trace]:
        traces = {name: Trace() for name, _ in names_and_prompts}
        for name, prompt in names_and_prompts:
            scheduler.add(Sequence(name, prompt, params))
        run_all(scheduler, runner, rank.moe, traces)
        return list(traces.values())

    named = [(f"r{index}", prompt) for index, prompt in enumerate(prompts(seed=1))]
    one_by_one = [generate(each)[0] for each in named]
    churn(scheduler, runner, rank)
    assert_scattered(scheduler)
    at_once = generate(*named)
    assert len({token for trace in one_by_one for token in trace.tokens}) > 16
    for trace, alone in zip(at_once, one_by_one, strict=True):
        assert len(trace.tokens) == MAX_TOKENS
        assert trace.tokens == alone.tokens
        assert torch.equal(torch.stack(trace.logits), torch.stack(alone.logits))
