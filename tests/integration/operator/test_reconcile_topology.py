"""Racks: copies apart where the spec asks for it, else tokens near; what status tells of both."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from moe_api.plan import GroupPlan
from moe_api.status import PlacementStatus
from tests.support.reconcile_world import World

pytestmark = pytest.mark.apiserver
LOAD = [[4000, 3000, 500, 500, 500, 500]] * 2
RACKS = [{"name": "rack", "nodeLabel": "test/rack"}]
FOUR: dict[str, Any] = {
    "parallelism": {"expert": 4},
    "experts": {"slotsPerRank": 3, "minReplicas": 1},
    "rebalancing": {"intervalSeconds": 2, "windowSeconds": 20, "cooldownSeconds": 0},
}


absent = PlacementStatus()


def on_two_racks(world: World, **topology: Any) -> None:
    """Members 0 and 1 in rack a, 2 and 3 in rack b; the group serves."""
    for member, rack in enumerate("aabb"):
        world.nodes[member] = world.make_node(f"-{member}", **{"test/rack": rack})
    world.create(**FOUR, topology={"levels": RACKS, **topology})
    world.converge(world.is_ready)


def plan(world: World) -> GroupPlan:
    placement = world.placement()
    assert placement is not None
    return GroupPlan.model_validate(placement["spec"])


def under_traffic(world: World, done: Any, load: list[list[int]] = LOAD) -> None:
    def step() -> Any:
        world.fleet.traffic(load)
        return done()

    world.converge(step)


def test_copies_are_spread_over_racks_where_the_spec_asks_for_it(world: World):
    on_two_racks(world, replicaSpread={"level": "rack", "minDomains": 2})
    assert [m.domains for m in plan(world).members] == [["a"], ["a"], ["b"], ["b"]]
    assert world.condition("SpecHonoured") == ("True", "Complete")
    under_traffic(world, lambda: world.condition("Balanced")[0] == "True" and plan(world).epoch > 1)
    slots = plan(world).slots()
    for layer in slots:
        for expert in range(6):
            ranks = sorted({int(rank) for rank, _ in np.argwhere(layer == expert)})
            if len(ranks) > 1:
                assert ranks[0] < 2 <= ranks[-1], f"expert {expert} on ranks {ranks}"
    shown = world.status().placement
    assert shown is not None
    assert shown.hot_experts[0].copies >= 2
    assert shown.hot_experts[0].domains == 2
    assert shown.cross_domain_share is not None


def test_without_that_wish_tokens_stay_in_their_rack_and_balance_stays(world: World):
    on_two_racks(world)
    assert plan(world).sources is None
    under_traffic(world, lambda: world.condition("Balanced")[0] == "True" and plan(world).sources)
    under_traffic(world, lambda: (world.status().placement or absent).imbalance is not None)
    shown = world.status().placement
    assert shown is not None
    assert shown.imbalance is not None
    assert shown.imbalance < 1.05
    assert shown.cross_domain_share is not None
    assert shown.cross_domain_share < 0.4, "half would cross if ranks sent to all copies alike"
    rank_share = [units / 65535 for units in plan(world).sources or []]
    assert rank_share == pytest.approx([0.25] * 4, abs=0.01)


def test_copies_asked_for_are_there(world: World):
    world.create(**FOUR | {"experts": {"slotsPerRank": 4, "minReplicas": 2, "maxReplicas": 3}})
    world.converge(world.is_ready)
    assert world.condition("SpecHonoured") == ("True", "Complete")
    assert world.status().placement.min_copies == 2, "from the first plan on"  # type: ignore[union-attr]
    assert world.condition("ExpertsCovered") == ("True", "FullyCovered")
    under_traffic(world, lambda: world.condition("Balanced")[0] == "True" and plan(world).epoch > 1)
    for layer in plan(world).slots():
        copies = np.bincount(layer[layer >= 0], minlength=6)
        assert copies.min() >= 2
        assert copies.max() <= 3


def test_copies_lost_with_a_rank_come_back_without_any_load(world: World):
    world.create(**FOUR | {"experts": {"slotsPerRank": 4, "minReplicas": 2}})
    world.converge(world.is_ready)
    world.delete_pod(1)
    world.converge(lambda: world.is_ready() and plan(world).epoch > 1)
    world.converge(lambda: (world.status().placement or absent).min_copies == 2)
    assert world.condition("ExpertsCovered") == ("True", "FullyCovered")
    reasons = {d.reason for d in world.status().decisions}
    assert reasons <= {"CopyLimits", "NoTraffic"}, "no load was looked at"
