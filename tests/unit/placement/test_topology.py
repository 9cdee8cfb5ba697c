"""Domains of ranks: what they can take together, and orders and homes that respect them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_placement.topology import expert_groups
from moe_placement.topology.topology import Topology, interleaved


def test_domains_add_up_the_ranks_that_have_slots() -> None:
    topology = Topology(
        np.array([3, 0, 2, 4]), np.array([1.0, 0.7, 0.5, 1.0]), np.array([0, 0, 2, 2]), 3
    )
    assert topology.ranks_D.tolist() == [1, 0, 2]
    assert topology.slots_D.tolist() == [3, 0, 6]
    assert topology.speeds_D == pytest.approx([1.0, 0.0, 1.5])
    assert topology.members_DQ.tolist() == [[0, -1], [-1, -1], [2, 3]]


@settings(deadline=None, max_examples=200)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=24))
def test_interleaved_ranks_are_all_ranks_and_no_two_of_a_domain_in_a_row(
    domains: list[int],
) -> None:
    order = interleaved(np.array(domains))
    assert sorted(order.tolist()) == list(range(len(domains)))
    in_order = [domains[rank] for rank in order]
    largest = max(domains.count(domain) for domain in domains)
    if largest <= len(domains) - largest + 1:
        assert all(one != two for one, two in itertools.pairwise(in_order))
    sizes = {domains.count(domain) for domain in domains}
    if len(sizes) == 1:
        turns = [in_order[start : start + len(set(domains))] for start in range(len(domains))]
        assert all(len(turn) == len(set(turn)) for turn in turns)


def test_ranks_of_a_domain_keep_their_order() -> None:
    assert interleaved(np.array([0, 0, 0, 1, 1, 1])).tolist() == [0, 3, 1, 4, 2, 5]
    assert interleaved(np.array([0, 0, 0, 0, 1, 1])).tolist() == [0, 4, 1, 5, 2, 3]


def _domains(num_domains: int, slots: int, speeds: list[float] | None = None) -> Topology:
    return Topology(
        np.full(num_domains, slots),
        np.ones(num_domains) if speeds is None else np.array(speeds),
        np.arange(num_domains),
        num_domains,
    )


@settings(deadline=None, max_examples=100)
@given(st.integers(0, 2**32 - 1), st.integers(2, 3), st.integers(1, 3))
def test_groups_fit_their_domains_and_no_exchange_of_two_levels_them_more(
    seed: int, num_domains: int, per_domain: int
) -> None:
    rng = np.random.default_rng(seed)
    num_groups = num_domains * per_domain
    load = rng.lognormal(0, 1, (2, num_groups * 4))
    speeds = rng.choice([0.7, 1.0], num_domains)
    topology = _domains(num_domains, per_domain * 4 + 1, speeds.tolist())
    home = expert_groups.home_domains(load, num_groups, topology)
    groups = home.reshape(2, num_groups, 4)
    assert (groups == groups[:, :, :1]).all(), "a group stays together"
    for layer in range(2):
        counts = np.bincount(groups[layer, :, 0], minlength=num_domains)
        assert counts.tolist() == [per_domain] * num_domains
        loads = load[layer].reshape(num_groups, 4).sum(axis=1)
        for one, two in itertools.combinations(range(num_groups), 2):
            a, b = groups[layer, one, 0], groups[layer, two, 0]
            total = np.bincount(groups[layer, :, 0], loads, num_domains) / speeds
            shift = loads[one] - loads[two]
            after = max(total[a] - shift / speeds[a], total[b] + shift / speeds[b])
            assert a == b or after >= max(total[a], total[b]) * (1 - 1e-6)


def test_four_groups_on_two_domains_are_levelled() -> None:
    load = np.array([[8.0, 1.0, 7.0, 2.0]])
    assert expert_groups.home_domains(load, 4, _domains(2, 2)).tolist() == [[0, 0, 1, 1]]


def test_a_group_without_a_domain_that_has_room_for_it_has_no_home() -> None:
    assert expert_groups.home_domains(np.ones((1, 6)), 2, _domains(3, 2)).tolist() == [[-1] * 6]
