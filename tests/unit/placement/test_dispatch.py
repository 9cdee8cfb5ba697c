"""Who serves whom: a plan's fractions kept exactly, own copies first, least that crosses."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from moe_placement.topology import dispatch

A, B = 0, 1


@st.composite
def plans(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(slots, fractions, domains, loads by source) with 1 to 3 domains, some without ranks."""
    num_ranks = draw(st.integers(1, 6))
    num_experts = draw(st.integers(1, 5))
    num_domains = draw(st.integers(1, 3))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    domains = rng.integers(0, num_domains, num_ranks)
    slots = np.full((2, num_ranks, num_experts), -1, dtype=np.int32)
    for layer in range(2):
        for expert in range(num_experts):
            on = rng.permutation(num_ranks)[: rng.integers(1, num_ranks + 1)]
            slots[layer, on, expert] = expert
    fractions = np.where(slots >= 0, rng.random(slots.shape) * rng.integers(0, 2, slots.shape), 0)
    fractions[:, :, :] += np.where(slots >= 0, 1e-12, 0)
    fractions /= fractions.sum(axis=1, keepdims=True)
    loads = rng.random((2, num_experts, num_domains)) * rng.integers(
        0, 2, (2, num_experts, num_domains)
    )
    return slots, fractions, domains, loads


@settings(deadline=None, max_examples=200)
@given(plans())
def test_shares_of_all_domains_add_up_to_the_fractions(
    plan: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray],
) -> None:
    slots, fractions, domains, loads = plan
    shares = dispatch.source_shares(slots, fractions, domains, loads)
    assert (shares >= 0).all()
    assert np.allclose(shares.sum(axis=2), 1.0), "each domain sends all of its tokens"
    assert (shares[:, slots < 0] == 0).all()
    total = loads.sum(axis=2)
    weight = np.where(total[..., None] > 0, loads / np.where(total > 0, total, 1)[..., None], 0)
    # Slot number = expert number in these plans.
    served = np.einsum("dlre,led->lre", shares, weight)
    asked = np.broadcast_to((total > 0)[:, None], served.shape)
    assert np.allclose(served[asked], fractions[asked])


@settings(deadline=None, max_examples=60)
@given(plans())
def test_no_dispatch_that_keeps_the_fractions_crosses_less(
    plan: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray],
) -> None:
    slots, fractions, domains, loads = plan
    told = dispatch.crossing_share(slots, fractions, domains, loads)
    shares = dispatch.source_shares(slots, fractions, domains, loads)
    for layer in range(2):
        abroad = domains[None, :, None] != np.arange(loads.shape[2])[:, None, None]
        sent = shares[:, layer] * loads[layer].T[:, None, :]
        total = loads[layer].sum()
        measured = float((sent * abroad).sum() / total) if total else 0.0
        best = sum(
            _least(fractions[layer, :, expert], domains, loads[layer, expert])
            for expert in range(loads.shape[1])
        )
        assert measured == pytest.approx(best / total if total else 0.0, abs=1e-9)
        assert told[layer] == pytest.approx(measured, abs=1e-9)


def _least(fraction_R: np.ndarray, domains_R: np.ndarray, load_D: np.ndarray) -> float:
    """Least tokens that cross, by linear programming: supplies of domains to demands of ranks."""
    if not load_D.sum():
        return 0.0
    num_domains, num_ranks = len(load_D), len(domains_R)
    cost = (domains_R[None, :] != np.arange(num_domains)[:, None]).astype(float).ravel()
    rows = np.kron(np.eye(num_domains), np.ones(num_ranks))
    columns = np.kron(np.ones(num_domains), np.eye(num_ranks))
    # The last demand follows from the others.
    equal = np.vstack([rows, columns[:-1]])
    wanted = np.concatenate([load_D, fraction_R[:-1] * load_D.sum()])
    result = linprog(cost, A_eq=equal, b_eq=wanted, method="highs")
    assert result.success, result.message
    return float(result.fun)


def test_own_copies_first_then_where_there_is_room() -> None:
    """Three domains send alike; A has half of the expert, B a third, C a sixth."""
    slots = np.zeros((1, 3, 1), dtype=np.int32)
    fractions = np.array([1 / 2, 1 / 3, 1 / 6]).reshape(1, 3, 1)
    shares = dispatch.source_shares(slots, fractions, np.array([0, 1, 2]))[:, 0, :, 0]
    assert shares == pytest.approx(np.array([[1, 0, 0], [0, 1, 0], [0.5, 0, 0.5]]))
    loads = np.full((1, 1, 3), 7.0)
    assert dispatch.crossing_share(slots, fractions, np.array([0, 1, 2]), loads) == pytest.approx(
        [1 / 6]
    )


def test_copies_of_a_domain_share_its_tokens_by_their_fractions() -> None:
    slots = np.zeros((1, 3, 1), dtype=np.int32)
    fractions = np.array([0.3, 0.1, 0.6]).reshape(1, 3, 1)
    shares = dispatch.source_shares(slots, fractions, np.array([A, A, B]), np.array([0.4, 0.6]))
    assert shares[A, 0, :, 0] == pytest.approx([0.75, 0.25, 0])
    assert shares[B, 0, :, 0] == pytest.approx([0, 0, 1])


def test_one_domain_of_many_is_the_same_as_all_at_once() -> None:
    rng = np.random.default_rng(5)
    slots = np.arange(24, dtype=np.int32).reshape(1, 6, 4) % 9
    fractions = rng.random(slots.shape)
    for expert in range(9):
        fractions[slots == expert] /= fractions[slots == expert].sum()
    domains = np.array([0, 0, 1, 1, 2, 2])
    both = dispatch.source_shares(slots, fractions, domains)
    for domain in range(3):
        assert np.array_equal(both[domain], dispatch.shares_of(domain, slots, fractions, domains))


def test_a_domain_that_sends_nothing_would_use_its_own_copy() -> None:
    slots = np.zeros((1, 2, 1), dtype=np.int32)
    fractions = np.array([0.8, 0.2]).reshape(1, 2, 1)
    shares = dispatch.source_shares(slots, fractions, np.array([A, B]), np.array([1.0, 0.0]))
    assert shares[A, 0, :, 0] == pytest.approx([0.8, 0.2])
    assert shares[B, 0, :, 0] == pytest.approx([0, 1])


def test_ranks_that_send_alike_make_domains_send_by_their_size() -> None:
    assert dispatch.uniform_sources(np.array([0, 0, 0, 2])) == pytest.approx([0.75, 0, 0.25])
    loads = dispatch.source_loads(np.array([[8.0, 4.0]]), np.array([0, 0, 0, 1]))
    assert loads == pytest.approx(np.array([[[6, 2], [3, 1]]]))


def test_no_load_crosses_nowhere() -> None:
    slots = np.zeros((1, 2, 1), dtype=np.int32)
    fractions = np.full((1, 2, 1), 0.5)
    assert dispatch.crossing_share(
        slots, fractions, np.array([A, B]), np.zeros((1, 1, 2))
    ) == pytest.approx([0])
