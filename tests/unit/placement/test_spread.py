"""Copies apart: in as many domains as wanted, with as many copies and as much balance as before."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench import placement_loads
from moe_placement.capacity import Capacity
from moe_placement.copy_limits import CopyLimits
from moe_placement.full import full_fractions
from moe_placement.placement import Placement, copies, faults
from moe_placement.score import rank_loads
from moe_placement.split import best_fractions
from moe_placement.topology.spread import UnderSpread, spread, under_spread
from moe_placement.topology.topology import interleaved

Case = tuple[Placement, np.ndarray, np.ndarray, np.ndarray, np.ndarray]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """(placement, load, slots, speeds, domains): any valid placement, with free slots."""
    num_ranks, num_experts = draw(st.integers(1, 8)), draw(st.integers(1, 9))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    width = draw(st.integers(-(-num_experts // num_ranks), num_experts))
    per_rank = np.full(num_ranks, width)
    slots = np.full((2, num_ranks, width + 1), -1, dtype=np.int32)
    for layer in range(2):
        for rank in range(num_ranks):
            mine = np.arange(rank, num_experts, num_ranks)
            others = rng.permutation(np.setdiff1d(np.arange(num_experts), mine))
            held = np.concatenate([mine, others[: rng.integers(0, width - len(mine) + 1)]])
            slots[layer, rank, rng.permutation(width + 1)[: len(held)]] = held
    load = rng.lognormal(0, 1, (2, num_experts))
    speeds = rng.choice([0.7, 1.0], num_ranks)
    domains = rng.integers(0, draw(st.integers(1, 4)), num_ranks)
    fractions = best_fractions(load, slots, speeds)
    return Placement(slots, fractions), load, per_rank, speeds, domains


@settings(deadline=None, max_examples=120)
@given(cases(), st.integers(1, 4))
def test_copies_go_apart_until_no_change_of_two_places_helps(case: Case, wanted: int) -> None:
    before, load, per_rank, speeds, domains = case
    after = Placement(
        *spread(before.slots_LRS, before.fractions_LRS, load, per_rank, speeds, domains, wanted)
    )
    experts = load.shape[1]
    capacity = Capacity.of(per_rank.tolist(), speeds=speeds)
    assert not list(faults(after, np.full(2, experts), capacity))
    assert np.array_equal(copies(after.slots_LRS, experts), copies(before.slots_LRS, experts))
    short_before = {u[:2]: u for u in under_spread(before.slots_LRS, domains, wanted)}
    short_after = {u[:2]: u for u in under_spread(after.slots_LRS, domains, wanted)}
    for key, short in short_after.items():
        assert key in short_before, "nobody comes nearer together than wanted"
        assert short.domains >= short_before[key].domains
    for layer, expert in short_after:
        assert not _helped(after.slots_LRS[layer], expert, per_rank, domains, wanted)


def _helped(
    slots: np.ndarray, expert: int, per_rank: np.ndarray, domains: np.ndarray, wanted: int
) -> bool:
    """Whether a copy of the expert can change places so that it is in one more domain, nobody is
    twice on a rank and nobody else falls below what is wanted."""
    spots = [tuple(spot) for spot in np.argwhere(slots >= -1).tolist()]
    was = {u.expert: u.domains for u in under_spread(slots[None], domains, wanted)}
    for here in spots:
        if slots[here] != expert:
            continue
        for there in spots:
            new = slots.copy()
            new[here], new[there] = slots[there], slots[here]
            rows = [row[row >= 0] for row in new]
            if any(len(row) > room for row, room in zip(rows, per_rank, strict=True)):
                continue
            if any(len(row) != len(set(row.tolist())) for row in rows):
                continue
            now = {u.expert: u.domains for u in under_spread(new[None], domains, wanted)}
            more = now.get(expert, wanted) > was[expert]
            if more and all(e in was and now[e] >= was[e] for e in now):
                return True
    return False


@pytest.mark.parametrize("kind", ["zipf1.0", "lognorm1.0"])
@pytest.mark.parametrize("wanted", [2, 4])
def test_balance_stays_when_neighbours_are_in_different_domains(kind: str, wanted: int) -> None:
    shape = placement_loads.SHAPES["b"]
    load = placement_loads.make_load("b", kind, salt=5)[:20]
    domains = np.arange(shape.ranks) * shape.nodes // shape.ranks
    per_rank = np.full(shape.ranks, shape.slots // shape.ranks)
    speeds, order = np.ones(shape.ranks), interleaved(domains)
    planned, fractions = full_fractions.plan(load, per_rank, speeds, CopyLimits())
    slots, shares = np.empty_like(planned), np.empty_like(fractions)
    slots[:, order], shares[:, order] = planned, fractions
    apart, _ = spread(slots, shares, load, per_rank, speeds, domains, wanted)
    assert under_spread(apart, domains, wanted) == []
    assert len(under_spread(planned, domains, 2)) > 10 * len(under_spread(slots, domains, 2))
    loads = rank_loads(apart, best_fractions(load, apart, speeds), load)
    assert (loads.max(axis=1) <= loads.mean(axis=1) * (1.005 if wanted == 2 else 1.02)).all()


def test_scarce_experts_survive_the_loss_of_any_domain() -> None:
    """Two copies of every expert, three domains: no domain is the only home of one."""
    rng = np.random.default_rng(4)
    load, domains = rng.lognormal(0, 1, (4, 12)), np.arange(6) // 2
    per_rank, speeds = np.full(6, 5), np.ones(6)
    slots, fractions = full_fractions.plan(load, per_rank, speeds, CopyLimits(min_copies=2))
    slots, _ = spread(slots, fractions, load, per_rank, speeds, domains, 2)
    assert under_spread(slots, domains, 2) == []
    for domain in range(3):
        assert copies(slots[:, domains != domain], 12).min() >= 1


def test_a_copy_takes_a_free_slot_before_anything_else_moves() -> None:
    slots = np.array([[[0, 1], [0, -1], [2, -1]]], dtype=np.int32)
    fractions = np.where(slots >= 0, 1.0, 0.0)
    fractions[0, :2, 0] = [0.4, 0.6]
    moved, shares = spread(
        slots, fractions, np.array([[5.0, 1.0, 1.0]]), np.full(3, 2), np.ones(3),
        np.array([0, 0, 1]), 2,
    )  # fmt: skip
    assert moved.tolist() == [[[-1, 1], [0, -1], [2, 0]]]
    assert shares[0, 2, 1] == pytest.approx(0.4)
    assert shares[0, 0, 0] == 0


def test_what_cannot_be_spread_is_told() -> None:
    """Ranks 0 and 1 are one domain; rank 2 is the other and holds as many as it may."""
    slots = np.array([[[0], [0], [1]]], dtype=np.int32)
    domains = np.array([0, 0, 1])
    assert under_spread(slots, domains, 2) == [UnderSpread(0, 0, domains=1, wanted=2)]
    same, _ = spread(
        slots, np.array([[[0.5], [0.5], [1.0]]]), np.ones((1, 2)), np.ones(3, dtype=np.int64),
        np.ones(3), domains, 2,
    )  # fmt: skip
    assert sorted(same.ravel().tolist()) == [0, 0, 1]
    assert under_spread(same, domains, 2) == []
    assert under_spread(slots, domains, 1) == []
    assert under_spread(np.array([[[0], [1]]], dtype=np.int32), np.array([0, 1]), 2) == []
