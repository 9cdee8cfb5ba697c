"""Load → decision → waves → measured, on a real API server with fake workers."""

from __future__ import annotations

from typing import Any

import pytest

from moe_api.status import Decision
from tests.support.reconcile_world import World

pytestmark = pytest.mark.apiserver
QUICK = {"intervalSeconds": 2, "windowSeconds": 20, "cooldownSeconds": 0}
THREE: dict[str, Any] = {"parallelism": {"expert": 3}, "rebalancing": QUICK}
SKEWED = [[3000, 3000, 100, 100, 100, 100]] * 2
"""Both hot experts are on rank 0: imbalance 6000 / 2133 = 2.81."""
EVEN = [[500] * 6] * 2


def epoch(world: World) -> int:
    placement = world.placement()
    assert placement is not None
    return int(placement["spec"]["epoch"])


def decisions(world: World, verdict: str) -> list[Decision]:
    return [d for d in world.status().decisions if d.verdict == verdict]


def under_traffic(world: World, load: list[list[int]] = SKEWED) -> Any:
    """A condition for `converge` that first sends one more batch of traffic."""

    def done(condition: Any) -> Any:
        def step() -> Any:
            world.fleet.traffic(load)
            return condition()

        return step

    return done


def test_a_skewed_load_is_balanced_in_waves_and_measured(world: World):
    world.create(**THREE)
    world.converge(world.is_ready)
    traffic = under_traffic(world)
    world.converge(traffic(lambda: decisions(world, "Applied")))
    world.converge(traffic(lambda: decisions(world, "Applied")[0].measured_gain is not None))
    [applied] = decisions(world, "Applied")
    assert epoch(world) > 1
    assert applied.predicted_gain > 0.3
    assert applied.measured_gain == pytest.approx(applied.predicted_gain, abs=0.05)
    assert applied.moves >= 2
    assert applied.bytes == applied.moves * 1000
    assert applied.measured_stall_millis == 2.0
    world.converge(traffic(lambda: world.condition("Balanced")[0] == "True"))
    placement = world.status().placement
    assert placement is not None
    assert placement.imbalance == pytest.approx(placement.predicted_imbalance, abs=0.05)
    assert placement.imbalance_without_replication == pytest.approx(2.81, abs=0.01)
    assert [(h.layer, h.expert) for h in placement.hot_experts[:2]] == [(0, 0), (0, 1)]
    assert world.condition("Rebalancing") == ("False", "Idle")
    stored = world.placement()["status"]  # type: ignore[index]
    assert (stored["phase"], stored["appliedEpoch"]) == ("Applied", epoch(world))
    assert stored["imbalanceBefore"] == pytest.approx(2.81, abs=0.02)
    assert stored["imbalanceMeasured"] < 1.5
    assert (stored["moves"], stored["stallMillis"]) == (applied.moves, 2.0)
    assert [m["id"] for m in stored["members"]] == [0, 1, 2]
    assert "RebalanceApplied" in [reason for reason, _ in world.events]
    assert world.is_ready()
    assert len(world.status().decisions) <= 10


def test_an_even_load_moves_nothing_and_says_why(world: World):
    world.create(**THREE)
    world.converge(world.is_ready)
    world.converge(under_traffic(world, EVEN)(lambda: decisions(world, "Skipped")))
    world.converge(
        under_traffic(world, EVEN)(lambda: world.status().decisions[0].reason == "WithinTarget")
    )
    world.converge(under_traffic(world, EVEN)(lambda: world.status().decisions[0].count >= 3))
    newest = world.status().decisions[0]
    assert newest.since is not None
    assert epoch(world) == 1
    assert world.condition("Balanced") == ("True", "WithinTarget")


def test_a11_opposite_imbalances_of_two_layers_do_not_cancel(world: World):
    """A11: the figure is the worst layer's, and each layer is planned for itself."""
    opposite = [[3000, 3000, 0, 0, 0, 0], [0, 0, 0, 0, 3000, 3000]]
    world.create(**THREE | {"rebalancing": QUICK | {"mode": "Recommend"}})
    world.converge(world.is_ready)
    world.converge(
        under_traffic(world, opposite)(
            lambda: world.status().placement and world.status().placement.imbalance
        )
    )
    assert world.status().placement.imbalance == pytest.approx(3.0)


def test_recommend_writes_the_decision_and_moves_nothing(world: World):
    world.create(**THREE | {"rebalancing": QUICK | {"mode": "Recommend"}})
    world.converge(world.is_ready)
    world.converge(under_traffic(world)(lambda: decisions(world, "Recommended")))
    [recommended] = decisions(world, "Recommended")
    assert recommended.predicted_gain > 0.3
    assert epoch(world) == 1
    assert world.condition("Balanced") == ("False", "AboveTarget")


def test_a09_off_never_plans(world: World):
    world.create(**THREE | {"rebalancing": QUICK | {"mode": "Off"}})
    world.converge(world.is_ready)
    world.converge(under_traffic(world)(lambda: decisions(world, "Skipped")))
    assert {d.reason for d in world.status().decisions} == {"ModeOff"}
    assert epoch(world) == 1


def test_no_tokens_are_no_load(world: World):
    world.create(**THREE)
    world.converge(world.is_ready)
    world.converge(lambda: world.condition("Balanced") == ("Unknown", "NoTraffic"))
    placement = world.status().placement
    assert placement is not None
    assert placement.imbalance is None
    assert epoch(world) == 1


def test_a05_a_window_without_requests_after_a_resize_is_no_sample(world: World):
    """EP 2 → 4 after a skewed load: what counts from then on is the new group's own requests."""
    quick = QUICK | {"mode": "Recommend"}
    world.create(parallelism={"expert": 2}, rebalancing=quick)
    world.converge(world.is_ready)
    world.converge(under_traffic(world)(lambda: decisions(world, "Recommended")))
    world.edit({"parallelism": {"expert": 4}, "rebalancing": QUICK})
    world.converge(lambda: world.is_ready() and world.status().ranks.summary == "4/4")
    formed = world.placement()
    assert formed is not None
    asked = world.now
    world.converge(lambda: world.now > asked + 2 * QUICK["windowSeconds"])
    status = world.status()
    assert status.placement is not None
    assert status.placement.imbalance is None, "absent, neither 1 nor NaN"
    assert status.placement.hot_experts == []
    assert status.placement.cross_domain_share is None
    assert status.decisions[0].reason == "NoTraffic"
    assert decisions(world, "Applied") == []
    assert world.condition("Balanced") == ("Unknown", "NoTraffic")
    assert world.placement()["spec"] == formed["spec"]  # type: ignore[index]


def test_an_abandoned_wave_leaves_the_last_epoch_in_force(world: World):
    world.create(**THREE)
    world.converge(world.is_ready)
    world.fleet.switching = False
    world.converge(under_traffic(world)(lambda: epoch(world) == 2))
    world.one_pass()
    assert world.condition("Rebalancing") == ("True", "Copying")
    world.fleet.abandon()
    world.converge(lambda: decisions(world, "Aborted"))
    assert world.condition("Rebalancing") == ("False", "Aborted")
    assert world.status().groups[0].epoch == 1
    assert world.placement()["status"]["phase"] == "Aborted"  # type: ignore[index]
    assert "RebalanceAborted" in [reason for reason, _ in world.events]
    assert world.is_ready()
    world.fleet.switching = True
    world.converge(under_traffic(world)(lambda: epoch(world) == 3))
    previous = world.placement()["spec"]["previous"]  # type: ignore[index]
    assert previous["epoch"] == 1
    world.converge(under_traffic(world)(lambda: world.status().groups[0].epoch >= 3))
    assert len(decisions(world, "Aborted")) == 1


def test_an_operator_replaced_in_a_wave_goes_on_from_what_is_stored(world: World):
    world.create(**THREE)
    world.converge(world.is_ready)
    world.fleet.switching = False
    world.converge(under_traffic(world)(lambda: epoch(world) == 2))
    world.restart_operator()
    world.one_pass()
    assert epoch(world) == 2
    world.fleet.switch()
    world.converge(under_traffic(world)(lambda: world.condition("Balanced")[0] == "True"))
    assert world.is_ready()
    slots = {m.plan.hash for m in world.fleet.workers.values() if m.plan}
    assert slots == {world.placement()["spec"]["hash"]}  # type: ignore[index]


def test_a_rank_lost_in_a_wave_begins_a_generation_from_what_was_in_force(world: World):
    world.create(**THREE)
    world.converge(world.is_ready)
    world.fleet.switching = False
    world.converge(under_traffic(world)(lambda: epoch(world) == 2))
    world.delete_pod(1)
    world.one_pass()
    placement = world.placement()
    assert placement is not None
    assert (placement["spec"]["generation"], placement["spec"]["epoch"]) == (2, 3)
    assert "previous" not in placement["spec"]
    world.fleet.switching = True
    world.converge(world.is_ready)


def test_survivors_after_a_rebalance_with_copies_still_hold_every_expert(world: World):
    world.create(**THREE, experts={"redundantSlotsPerRank": 1, "spareSlotsPerRank": 0})
    world.converge(world.is_ready)
    world.converge(under_traffic(world)(lambda: decisions(world, "Applied")))
    world.converge(under_traffic(world)(lambda: world.condition("Balanced")[0] == "True"))
    before = world.placement()["spec"]["generation"]  # type: ignore[index]
    world.delete_pod(0)
    world.one_pass()
    assert world.placement()["spec"]["generation"] == before + 1  # type: ignore[index]
    world.converge(world.is_ready)
