"""Logits and tokens do not depend, bit for bit, on the number of ranks or where experts live."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from moe_api.plan import even_fractions
from moe_placement.initial import contiguous
from tests.support import engine_ranks, worker_processes
from tests.support.implementations import ON_CPUS
from tests.support.random_checkpoint import write_random_checkpoint
from tests.support.serving_group import (
    ServingGroup,
    assert_same,
    assert_same_logits,
    prompts,
    random_walk,
)
from tests.support.worker_processes import wait_until

pytestmark = pytest.mark.processes
EXPERTS, LAYERS, SLOTS = 8, 2, 5


@pytest.fixture(scope="module", params=ON_CPUS)
def pool(request: pytest.FixtureRequest) -> Iterator[worker_processes.Pool]:
    with worker_processes.pool(3, request.param) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """By top-k: one held in bfloat16, one in float32."""
    root = tmp_path_factory.mktemp("models")
    return {
        2: write_random_checkpoint(root / "top2", top_k=2, seed=2, dtype=torch.bfloat16),
        4: write_random_checkpoint(root / "top4", top_k=4, seed=4),
    }


def one_rank(
    pool: worker_processes.Pool, model: Path, requests: dict[str, list[int]], max_tokens: int,
    temperature: float = 0.0, **config: object,
) -> dict[str, engine_ranks.Result]:  # fmt: skip
    """The reference of every comparison: everything on one rank."""
    group = ServingGroup(pool, model, 1, **config)
    group.form([0], contiguous(LAYERS, EXPERTS, 1, EXPERTS))
    return group.generate(requests, max_tokens, temperature)


@pytest.mark.parametrize("top_k", [2, 4])
@pytest.mark.parametrize("kv", ["nvfp4", "bf16"])
def test_one_two_and_three_ranks_give_the_same_logits(
    pool: worker_processes.Pool, models: dict[int, Path], top_k: int, kv: str
) -> None:
    requests = prompts(6)
    wanted = one_rank(pool, models[top_k], requests, 12, temperature=0.7, kv=kv)
    assert len({tuple(result.tokens) for result in wanted.values()}) > 3
    for size in (2, 3):
        group = ServingGroup(pool, models[top_k], size, kv=kv)
        group.form(range(size), contiguous(LAYERS, EXPERTS, size, 6))
        assert_same(group.generate(requests, 12, temperature=0.7), wanted)


def test_chunks_of_a_prompt_and_company_do_not_matter_across_ranks(
    pool: worker_processes.Pool, models: dict[int, Path]
) -> None:
    requests = prompts(6)
    wanted = one_rank(pool, models[4], requests, 8)
    group = ServingGroup(pool, models[4], 2, max_batched_tokens=8)
    group.form([0, 1], contiguous(LAYERS, EXPERTS, 2, 6))
    assert_same(group.generate(requests, 8), wanted)
    for name, prompt in requests.items():
        alone = group.generate({f"{name}-alone": prompt}, 8)
        assert_same_logits(alone, {name: wanted[name]}, "-alone")


@pytest.mark.parametrize("top_k", [2, 4])
def test_before_during_and_after_a_rebalance_the_logits_are_the_same(
    pool: worker_processes.Pool, models: dict[int, Path], top_k: int
) -> None:
    requests = prompts(6)
    wanted = one_rank(pool, models[top_k], requests, 16, kv="nvfp4")
    group = ServingGroup(pool, models[top_k], 3, kv="nvfp4")
    placement = contiguous(LAYERS, EXPERTS, 3, SLOTS)
    group.form(range(3), placement)
    assert_same(group.generate(requests, 16), wanted)
    stalls = []
    for number, slots in enumerate(random_walk(placement, 3, seed=top_k)):
        during = {f"{name}-{number}": prompt for name, prompt in requests.items()}
        shares = group.submit(during, 16)
        group.switch(slots)
        assert_same_logits(group.results(shares), wanted, f"-{number}")
        stalls += [s.migration.stall_millis for s in group.states() if s.migration]
    assert any(stalls), "every switch fell into a pause: nothing was under way"
    group.check_slots()
    after = {f"{name}-after": prompt for name, prompt in requests.items()}
    assert_same_logits(group.generate(after, 16), wanted, "-after")


def test_copies_of_a_hot_expert_share_its_tokens_and_change_no_logits(
    pool: worker_processes.Pool, models: dict[int, Path]
) -> None:
    requests = prompts(9, seed=3)
    wanted = one_rank(pool, models[2], requests, 30)
    group = ServingGroup(pool, models[2], 3)
    group.form(range(3), contiguous(LAYERS, EXPERTS, 3, SLOTS))
    assert_same(group.generate(requests, 30), wanted)
    loads = [group.rank(i).call(engine_ranks.load) for i in range(3)]
    hot = int(np.sum([load.routed[0] for load in loads], axis=0).argmax())
    slots = contiguous(LAYERS, EXPERTS, 3, SLOTS)
    for rank in range(3):
        if hot not in slots[0, rank]:
            slots[0, rank, -1] = hot
    fractions = even_fractions(slots)
    for rank, share in enumerate((0.6, 0.3, 0.1)):
        fractions[0, rank, slots[0, rank] == hot] = share
    group.switch(slots, fractions)
    before = [group.rank(i).call(engine_ranks.load) for i in range(3)]
    again = {f"{name}-again": prompt for name, prompt in requests.items()}
    assert_same_logits(group.generate(again, 30), wanted, "-again")
    after = [group.rank(i).call(engine_ranks.load) for i in range(3)]
    served = [
        sum(after[r].served[0][s] - before[r].served[0][s] for s in range(SLOTS)
            if slots[0, r, s] == hot)
        for r in range(3)
    ]  # fmt: skip
    # Each of three senders is off a copy's share by a token or so.
    assert served == pytest.approx([s * sum(served) for s in (0.6, 0.3, 0.1)], abs=8), served


def test_b04_a_rebalance_at_every_step_for_fifty_steps_changes_nothing(
    pool: worker_processes.Pool, models: dict[int, Path]
) -> None:
    """Each step of a decoding group begins with a switch; at each the slots are compared with
    the checkpoint."""
    requests = prompts(10)
    wanted = one_rank(pool, models[4], requests, 60)
    group = ServingGroup(pool, models[4], 3)
    first = contiguous(LAYERS, EXPERTS, 3, SLOTS)
    plan = group.form(range(3), first)
    walk = random_walk(first, 50, seed=50)
    assert all((a != b).any() for a, b in zip([first, *walk], walk, strict=False))
    rng = np.random.default_rng(4)
    # Also the fractions change at every step; encoding makes them sum to 1.
    plans = [
        group.operator.rebalance(plan, slots, rng.integers(0, 3, slots.shape).astype(float))
        for slots in walk
    ]
    for rank in range(3):
        group.rank(rank).call(engine_ranks.rebalance_every_step, plans)
    got = group.generate(requests, 60)
    assert_same(got, wanted)
    wait_until(lambda: all(s.applied_epoch == plans[-1].epoch for s in group.states()), "the walk")
    assert [group.rank(rank).call(engine_ranks.num_switches) for rank in range(3)] == [50] * 3
