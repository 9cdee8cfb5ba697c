"""The prefix cache over the life of a group: kept while numbers stay the same, gone with the
weights it was computed with. What is computed is counted by the tokens that experts were sent."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from moe_placement.initial import contiguous
from tests.support import engine_ranks, worker_processes
from tests.support.implementations import ON_CPUS
from tests.support.random_checkpoint import write_random_checkpoint
from tests.support.serving_group import ServingGroup, assert_same_logits, random_walk

pytestmark = pytest.mark.processes
EXPERTS, LAYERS, SLOTS, TOP_K = 8, 2, 6, 2
LENGTHS = (40, 33, 48, 20)
MAX_TOKENS = 6


@pytest.fixture(scope="module", params=ON_CPUS)
def pool(request: pytest.FixtureRequest) -> Iterator[worker_processes.Pool]:
    with worker_processes.pool(2, request.param) as ranks:
        yield ranks


def checkpoint(path: Path, seed: int) -> Path:
    return write_random_checkpoint(path, top_k=TOP_K, seed=seed)


def prompts(suffix: str) -> dict[str, list[int]]:
    generator = torch.Generator().manual_seed(5)
    return {
        f"r{i}{suffix}": torch.randint(0, 96, (length,), generator=generator).tolist()
        for i, length in enumerate(LENGTHS)
    }


def num_computed(group: ServingGroup) -> int:
    """Tokens that the group has computed in committed steps."""
    loads = [group.rank(member).call(engine_ranks.load) for member in group.members]
    return sum(sum(load.routed[0]) for load in loads) // TOP_K


CACHED = {"r0": 32, "r1": 32, "r2": 47, "r3": 16}
"""Whole blocks of 16; a prompt that ends with one is cached but for its last token."""
ALL_TOKENS = sum(LENGTHS) + len(LENGTHS) * (MAX_TOKENS - 1)


def test_d04_the_cache_outlives_moves_of_experts_and_generations_but_not_its_weights(
    pool: worker_processes.Pool, tmp_path: Path
) -> None:
    group = ServingGroup(pool, checkpoint(tmp_path / "a", 3), 2, kv="nvfp4", prefix_caching=True)
    placement = contiguous(LAYERS, EXPERTS, 2, SLOTS)
    group.form([0, 1], placement)
    wanted = group.generate(prompts(""), MAX_TOKENS)
    assert num_computed(group) == ALL_TOKENS

    with_hits = ALL_TOKENS - sum(CACHED.values())
    for number, slots in enumerate(random_walk(placement, 2, seed=4)):
        group.switch(slots)
        before = num_computed(group)
        again = group.generate(prompts(f"-{number}"), MAX_TOKENS)
        assert_same_logits(again, wanted, f"-{number}")
        cached = {name: again[f"{name}-{number}"].cached_tokens for name in CACHED}
        assert cached == CACHED
        assert num_computed(group) - before == with_hits, "experts moved, numbers did not"

    group.form([1, 0], placement)
    before = num_computed(group)
    crossed = group.generate(prompts("-formed"), MAX_TOKENS)
    assert_same_logits(crossed, wanted, "-formed")
    # The same ranks hold the same caches, but requests are dealt out in the order of members.
    assert num_computed(group) - before == ALL_TOKENS
    before = num_computed(group)
    assert_same_logits(group.generate(prompts("-again"), MAX_TOKENS), wanted, "-again")
    assert num_computed(group) - before == with_hits

    # Another revision of the model rolls the pods: new processes, with other weights.
    other = ServingGroup(pool, checkpoint(tmp_path / "b", 4), 2, kv="nvfp4", prefix_caching=True)
    other.form([0, 1], placement)
    renewed = other.generate(prompts(""), MAX_TOKENS)
    assert num_computed(other) == ALL_TOKENS, "nothing was known of the old weights"
    assert any(renewed[name].tokens != result.tokens for name, result in wanted.items())
    cold = ServingGroup(pool, checkpoint(tmp_path / "c", 4), 2, kv="nvfp4")
    cold.form([0, 1], placement)
    assert_same_logits(cold.generate(prompts(""), MAX_TOKENS), renewed, "")
