"""A node is cordoned: experts leave its rank while it serves, then its pod may be evicted."""

from __future__ import annotations

from typing import Any

import pytest

from moe_operator.evacuation import stranded
from moe_operator.observe import NODES_SECONDS
from tests.support.reconcile_world import World

pytestmark = pytest.mark.apiserver
QUICK = {"intervalSeconds": 2, "windowSeconds": 20, "cooldownSeconds": 0}
THREE: dict[str, Any] = {"parallelism": {"expert": 3}, "rebalancing": QUICK}


def on_a_node(world: World, **spec: Any) -> str:
    """Member 1 runs on a node of its own; the group serves."""
    node = world.make_node()
    world.nodes[1] = node
    world.create(**THREE | spec)
    world.converge(world.is_ready)
    return node


def cordon(world: World, node: str, unschedulable: bool = True) -> None:
    world.api.patch(f"/api/v1/nodes/{node}", {"spec": {"unschedulable": unschedulable}})
    world.now += NODES_SECONDS


def held(world: World) -> Any:
    """Slots in force on the cordoned member's rank."""
    worker = world.worker(1)
    return worker.slots_LRS[:, worker.rank]


@pytest.mark.parametrize("mode", ["Auto", "Off"])
def test_experts_leave_a_cordoned_node_before_its_pod_may_go(world: World, mode: str):
    node = on_a_node(world, rebalancing=QUICK | {"mode": mode})
    assert world.budget() == 2
    world.fleet.switching = False
    cordon(world, node)
    world.converge(lambda: (world.placement() or {})["spec"]["epoch"] == 2)
    world.one_pass()
    assert world.budget() == 3, "not while it alone holds experts"
    assert world.condition("Rebalancing") == ("True", "Copying")
    world.fleet.switch()
    world.converge(lambda: world.budget() == 2)
    assert stranded(world.worker(0).slots_LRS, [1]) == 0
    world.converge(lambda: (held(world) == -1).all())
    assert world.is_ready(), "it serves its own requests on"
    [evacuated] = [d for d in world.status().decisions if d.reason == "Evacuation"]
    assert (evacuated.verdict, evacuated.moves, evacuated.bytes) == ("Applied", 4, 4000)
    assert evacuated.waves
    assert "member 1 is about to go" in evacuated.message
    generation = (world.placement() or {})["spec"]["generation"]
    world.delete_pod(1, grace_seconds=30)
    world.converge(lambda: (world.placement() or {})["spec"]["generation"] > generation)
    assert [m["id"] for m in (world.placement() or {})["spec"]["members"]] == [0, 2]


def test_an_operator_replaced_in_an_evacuation_goes_on(world: World):
    node = on_a_node(world, rebalancing=QUICK | {"budget": {"maxMovesPerRound": 1}})
    cordon(world, node)
    world.converge(lambda: (world.placement() or {})["spec"]["epoch"] >= 3)
    world.restart_operator()
    world.converge(lambda: (held(world) == -1).all())
    assert world.is_ready()


def test_switched_off_nothing_leaves(world: World):
    node = on_a_node(world, disruption={"evacuateOnCordon": False})
    cordon(world, node)
    for _ in range(5):
        world.one_pass()
    assert (world.placement() or {})["spec"]["epoch"] == 1
    assert world.budget() == 2
    assert world.condition("SpecHonoured") == ("True", "Complete")


def test_without_room_the_cordon_opens_the_way_and_says_what_it_does(world: World):
    node = on_a_node(world, experts={"slotsPerRank": 2, "spareSlotsPerRank": 0})
    assert world.budget() == 3
    cordon(world, node)
    world.converge(lambda: world.budget() == 2)
    assert any("interrupts the group" in note for _, note in world.events)
    assert (world.placement() or {})["spec"]["epoch"] == 1


def test_a_node_that_comes_back_is_used_again(world: World):
    node = on_a_node(world)
    cordon(world, node)
    world.converge(lambda: (held(world) == -1).all())
    cordon(world, node, unschedulable=False)
    skewed = [[3000, 3000, 1000, 1000, 1000, 1000]] * 2

    def used_again() -> bool:
        world.fleet.traffic(skewed)
        return bool((held(world) >= 0).any())

    world.converge(used_again)
    assert world.is_ready()
