"""Dispatch, experts and combine over real processes: the result is the dense one, bit for bit."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_api.worker import Carrier
from moe_kernels.grouped_gemm import expert_mlp
from tests.support import expert_ranks, worker_processes

pytestmark = pytest.mark.processes
HIDDEN, INTERMEDIATE, EXPERTS = 32, 24, 8
generations = itertools.count(1)


@pytest.fixture(scope="module")
def pool() -> Iterator[worker_processes.Pool]:
    with worker_processes.pool(4) as ranks:
        yield ranks


def placement(num_ranks: int, copies: int, num_layers: int = 1, seed: int = 0) -> np.ndarray:
    """Experts dealt out to ranks at random, `copies` of them twice, one slot a rank left free."""
    rng = np.random.default_rng(seed)
    num_slots = -(-(EXPERTS + copies) // num_ranks) + 1
    slots = np.full((num_layers, num_ranks, num_slots), -1, dtype=np.int32)
    for layer in range(num_layers):
        experts = [*range(EXPERTS), *rng.choice(EXPERTS, copies, replace=False)]
        places = rng.permutation(num_ranks * (num_slots - 1))[: len(experts)]
        for expert, place in zip(experts, places, strict=True):
            slots[layer, place % num_ranks, place // num_ranks] = expert
    return slots


def shares(slots: np.ndarray, seed: int) -> np.ndarray:
    """Random shares of the copies, others for every sending rank, zeros among them."""
    rng = np.random.default_rng(seed)
    drawn = rng.integers(0, 4, (slots.shape[1], *slots.shape)).astype(float)
    for expert in range(EXPERTS):
        mine = drawn * (slots == expert)
        totals = mine.sum(axis=(2, 3), keepdims=True)
        even = (slots == expert) / (slots == expert).sum(axis=(1, 2), keepdims=True)
        share = np.where(totals > 0, mine / np.maximum(totals, 1), even)
        drawn = np.where(slots == expert, share, drawn)
    return np.where(slots >= 0, drawn, 0.0)


def batch(
    tokens: list[int], top_k: int, rank: int, seed: int, holes: bool
) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    count = tokens[rank]
    ids = torch.rand((count, EXPERTS), generator=generator).argsort(dim=1)[:, :top_k].contiguous()
    if holes:
        ids[torch.rand(ids.shape, generator=generator) < 0.2] = -1
    return {
        "x": torch.randn((count, HIDDEN), generator=generator),
        "ids": ids,
        "weights": torch.rand((count, top_k), generator=generator),
        "tokens": torch.tensor(tokens),
    }


def dense(batch: dict[str, torch.Tensor], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Every expert on every token with its own weights alone, added in top-k order."""
    experts = expert_ranks.random_experts(7, 1, EXPERTS, INTERMEDIATE, HIDDEN, dtype)[0]
    x, ids, weights = batch["x"], batch["ids"], batch["weights"]
    offsets = torch.tensor([0, len(x)])
    y = [expert_mlp(x, offsets, e.w13_2IH[None], e.w2_HI[None]) for e in experts]
    out = torch.zeros_like(x)
    for k in range(ids.shape[1]):
        for expert in range(EXPERTS):
            hit = ids[:, k] == expert
            out[hit] += weights[hit, k, None] * y[expert][hit]
    return out


def form(
    pool: worker_processes.Pool, size: int, slots: np.ndarray, carrier: Carrier = "tcp"
) -> None:
    addresses = [pool.address(i) for i in range(size)]
    plan = expert_ranks.plan_for(addresses, next(generations), slots)
    pool.each(expert_ranks.join, [(plan, rank) for rank in range(size)], carrier=carrier)


def run(
    pool: worker_processes.Pool,
    size: int,
    slots: np.ndarray,
    batches: list[dict[str, torch.Tensor]],
    **kwargs: Any,
) -> list[dict[str, Any]]:
    assert len(batches) == size
    return pool.each(expert_ranks.run_layers, [(slots, [b]) for b in batches], **kwargs)


@pytest.mark.parametrize(
    ("size", "carrier"), [(1, "tcp"), (2, "tcp"), (3, "tcp"), (4, "tcp"), (3, "gloo")]
)
def test_result_is_the_dense_one_bit_for_bit(
    pool: worker_processes.Pool, size: int, carrier: Carrier
) -> None:
    form(pool, size, placement(size, 0), carrier)

    @settings(max_examples=12, deadline=None, derandomize=True)
    @given(
        tokens=st.lists(st.sampled_from([0, 1, 7, 300]), min_size=size, max_size=size),
        top_k=st.sampled_from([1, 2, 4]),
        copies=st.integers(0, EXPERTS),
        holes=st.booleans(),
        uneven=st.booleans(),
        seed=st.integers(0, 10_000),
        dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    )
    def check(tokens, top_k, copies, holes, uneven, seed, dtype):
        copies = 0 if size == 1 else copies
        slots = placement(size, copies, seed=seed)
        batches = [batch(tokens, top_k, rank, seed, holes) for rank in range(size)]
        split = shares(slots, seed) if uneven else None
        results = run(pool, size, slots, batches, dtype=dtype, tokens_per_round=128,
                      shares_QLRS=split)  # fmt: skip
        for rank, result in enumerate(results):
            assert torch.equal(result["outputs"][0], dense(batches[rank], dtype))
        chosen = sum(int((b["ids"] >= 0).sum()) for b in batches)
        assert sum(np.sum(r["routed"]) for r in results) == chosen
        assert sum(np.sum(r["served"]) for r in results) == chosen

    check()


@pytest.mark.parametrize(("size", "carrier"), [(2, "tcp"), (4, "tcp"), (4, "gloo")])
def test_every_row_comes_back_from_where_it_was_sent(
    pool: worker_processes.Pool, size: int, carrier: Carrier
) -> None:
    slots_per_rank, top_k, tokens = 5, 3, [300, 0, 7, 1][:size]
    form(pool, size, placement(size, 0), carrier)
    generator = torch.Generator().manual_seed(size)
    physical = [
        torch.rand((t, size * slots_per_rank), generator=generator).argsort(dim=1)[:, :top_k]
        for t in tokens
    ]
    for table in physical:
        table[torch.rand(table.shape, generator=generator) < 0.1] = -1
    results = pool.each(
        expert_ranks.trace_dispatch, [(p, tokens, slots_per_rank, 128) for p in physical]
    )
    for rank, (table, result) in enumerate(zip(physical, results, strict=True)):
        for choice, back in enumerate(result["came_back"]):
            sent = table[:, choice] >= 0
            assert torch.equal(back[~sent], torch.zeros_like(back[~sent]))
            assert (back[sent, 0] == rank).all()
            assert torch.equal(back[sent, 1], torch.arange(len(table))[sent].float())
            assert torch.equal(back[sent, 2] * slots_per_rank + back[sent, 3],
                               table[sent, choice].float())  # fmt: skip
        # Of every token that has a choice there, and of no other.
        for source, other in enumerate(physical):
            touched = ((other // slots_per_rank == rank) & (other >= 0)).any(dim=1).sum()
            assert result["received"][source] == touched


def test_a_batch_larger_than_the_buffers_goes_in_rounds(pool: worker_processes.Pool) -> None:
    form(pool, 2, placement(2, 0))
    slots, tokens = placement(2, 2), [300, 0]
    batches = [batch(tokens, 2, rank, 1, holes=False) for rank in range(2)]
    wanted = [dense(b) for b in batches]
    for tokens_per_round in (1000, 128, 7):
        results = run(pool, 2, slots, batches, tokens_per_round=tokens_per_round, overlap_tokens=3)
        assert all(torch.equal(r["outputs"][0], w) for r, w in zip(results, wanted, strict=True))


def test_c03_an_invalid_expert_id_adds_nothing_and_is_counted(pool: worker_processes.Pool) -> None:
    form(pool, 2, placement(2, 0))
    ids = torch.tensor([[2, -1], [7, 8], [2147483647, 0]])
    both = batch([3, 3], 2, 0, 5, holes=False) | {"ids": ids}
    results = run(pool, 2, placement(2, 3), [both, both])
    for result in results:
        assert torch.equal(result["outputs"][0], dense(both))
        assert result["invalid"] == 2
        assert np.sum(result["routed"]) == 3


def test_g12_routed_tokens_are_counted_once_over_all_ranks(pool: worker_processes.Pool) -> None:
    form(pool, 4, placement(4, 0))
    tokens = [40, 0, 35, 25]
    batches = [batch(tokens, 2, rank, 9, holes=False) for rank in range(4)]
    results = run(pool, 4, placement(4, 4), batches)
    assert sum(np.sum(r["routed"]) for r in results) == 200
    assert sum(np.sum(r["served"]) for r in results) == 200
    chosen = np.bincount(torch.cat([b["ids"] for b in batches]).reshape(-1), minlength=EXPERTS)
    assert np.array_equal(np.sum([r["routed"] for r in results], axis=0)[0], chosen)
