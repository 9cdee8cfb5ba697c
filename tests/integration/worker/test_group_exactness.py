"""Logits and tokens do not depend, bit for bit, on how many ranks there are or where experts live."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from moe_api.plan import GroupPlan, SlotsLRS
from moe_placement.initial import contiguous
from tests.support import engine_ranks, worker_processes
from tests.support.engine_ranks import Operator, Result
from tests.support.random_checkpoint import write_random_checkpoint
from tests.support.worker_processes import wait_until

pytestmark = pytest.mark.processes
EXPERTS, LAYERS = 8, 2


@pytest.fixture(scope="module")
def pool() -> Iterator[worker_processes.Pool]:
    with worker_processes.pool(3) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    root = tmp_path_factory.mktemp("models")
    return {
        2: write_random_checkpoint(root / "top2", top_k=2, seed=2, dtype=torch.bfloat16),
        4: write_random_checkpoint(root / "top4", top_k=4, seed=4),
    }


def prompts(count: int, seed: int = 0) -> dict[str, list[int]]:
    rng = np.random.default_rng(seed)
    return {
        f"r{i}": rng.integers(0, 96, size=int(rng.integers(3, 40))).tolist() for i in range(count)
    }


class Serving:
    """A group of the first N ranks of the pool, serving."""

    def __init__(
        self, pool: worker_processes.Pool, model: Path, size: int, slots_LRS: SlotsLRS,
        **config: Any,
    ) -> None:  # fmt: skip
        self.ranks = pool.ranks[:size]
        self.operator = Operator([pool.address(i) for i in range(size)])
        for i, rank in enumerate(self.ranks):
            rank.post(engine_ranks.start, model, i, pool.address(i), f"inc-{i}", config)
        for rank in self.ranks:
            rank.result()
        self.plan = self.operator.form(range(size), slots_LRS)
        self.put(self.plan)
        self.wait_for(lambda s: s.phase == "Serving", "serving")

    def put(self, plan: GroupPlan) -> None:
        self.plan = plan
        for rank in self.ranks:
            assert not rank.call(engine_ranks.put_plan, plan).refused

    def wait_for(self, condition: Any, what: str) -> None:
        wait_until(
            lambda: all(condition(rank.call(engine_ranks.state)) for rank in self.ranks), what
        )

    def switch(self, slots_LRS: SlotsLRS) -> None:
        plan = self.operator.rebalance(self.plan, slots_LRS)
        self.put(plan)
        self.wait_for(lambda s: s.applied_epoch == plan.epoch, f"epoch {plan.epoch}")

    def submit(self, requests: dict[str, Sequence[int]], max_tokens: int) -> list[list[str]]:
        """Deal requests out to the ranks; returns the ids by rank."""
        shares = [list(requests)[i :: len(self.ranks)] for i in range(len(self.ranks))]
        for rank, ids in zip(self.ranks, shares, strict=True):
            rank.call(engine_ranks.submit, {r: requests[r] for r in ids}, max_tokens)
        return shares

    def results(self, shares: list[list[str]]) -> dict[str, Result]:
        return {
            request_id: result
            for rank, ids in zip(self.ranks, shares, strict=True)
            for request_id, result in rank.call(engine_ranks.results, ids).items()
        }

    def generate(self, requests: dict[str, Sequence[int]], max_tokens: int) -> dict[str, Result]:
        return self.results(self.submit(requests, max_tokens))


def alone(pool: worker_processes.Pool, model: Path, requests: Any, max_tokens: int, **config: Any
) -> dict[str, Result]:  # fmt: skip
    """The same requests on one rank, the reference of every comparison."""
    return Serving(pool, model, 1, contiguous(LAYERS, EXPERTS, 1, EXPERTS), **config).generate(
        requests, max_tokens
    )


def assert_same(got: dict[str, Result], wanted: dict[str, Result]) -> None:
    assert got.keys() == wanted.keys()
    for request_id, result in wanted.items():
        assert got[request_id].tokens == result.tokens, request_id
        assert got[request_id].digests == result.digests, request_id
        assert got[request_id].finished == result.finished, request_id


@pytest.mark.parametrize("top_k", [2, 4])
@pytest.mark.parametrize("kv", ["nvfp4", "bf16"])
def test_one_two_and_three_ranks_give_the_same_logits(
    pool: worker_processes.Pool, models: dict[int, Path], top_k: int, kv: str
) -> None:
    requests = prompts(6)
    wanted = alone(pool, models[top_k], requests, 12, kv=kv)
    assert len({tuple(result.tokens) for result in wanted.values()}) > 3
    for size in (2, 3):
        slots = contiguous(LAYERS, EXPERTS, size, 6)
        assert_same(Serving(pool, models[top_k], size, slots, kv=kv).generate(requests, 12), wanted)
