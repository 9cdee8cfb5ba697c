"""Gain against bytes and stalls, cool-down and setbacks: exact numbers by hand."""

from __future__ import annotations

import pytest

from moe_placement.decision import trigger
from moe_placement.decision.decide import Mode, Policy
from moe_placement.decision.policy import MAX_AIM
from moe_placement.decision.trigger import Effort

POLICY = Policy(Mode.AUTO, 4, 5, 60, 64, bytes_per_expert=10**8, max_bytes_per_second=2e8,
                horizon_seconds=600)  # fmt: skip
EFFORT = Effort(moves=40, bytes=40 * 10**8, rank_bytes=10 * 10**8, waves=4)


def test_a_walk_takes_its_bytes_and_its_waves() -> None:
    assert trigger.walk_seconds(EFFORT, POLICY) == 10**9 / 2e8 + 4 * trigger.WAVE_SECONDS


def test_it_costs_a_part_of_the_copying_and_every_stall() -> None:
    copying = 5.0 * trigger.INTERFERENCE
    assert trigger.cost_seconds(EFFORT, POLICY, 250) == pytest.approx(copying + 1.0)


def test_it_is_worth_what_is_saved_after_it_within_the_horizon() -> None:
    saved = 0.1 * (600 - 13)
    assert trigger.worth_seconds(0.1, EFFORT, POLICY, 0) == pytest.approx(saved - 0.5)
    late = Effort(10**6, 10**14, 10**12, 10**4)
    assert trigger.worth_seconds(0.5, late, POLICY, 0) < 0, "over before it pays"


def test_a_stall_is_half_believed_after_each_horizon() -> None:
    assert trigger.expected_stall_millis(None, 100, POLICY, 100) == 0
    assert trigger.expected_stall_millis(80, None, POLICY, 100) == 80
    assert trigger.expected_stall_millis(80, 100, POLICY, 1300) == 20


def test_each_setback_doubles_the_pause_up_to_a_bound() -> None:
    pauses = [trigger.pause_seconds(setbacks, POLICY) for setbacks in (0, 1, 2, 5, 50)]
    assert pauses == [60, 120, 240, 1920, 1920]
    assert trigger.is_setback(0.2, 0.099)
    assert not trigger.is_setback(0.2, 0.1)


@pytest.mark.parametrize(("percent", "aim"), [(5, 0.025), (2, 0.01), (50, MAX_AIM), (0, MAX_AIM)])
def test_a_plan_aims_well_below_what_begins_a_rebalance(percent: float, aim: float) -> None:
    assert Policy(Mode.AUTO, 4, percent, 60, 64).aim == aim


def test_a_wave_is_small_enough_to_come_in_half_its_deadline() -> None:
    assert POLICY.max_rank_bytes == 2e8 * 120 / 2
    assert Policy(Mode.AUTO, 4, 5, 60, 64).max_rank_bytes is None, "no size, no bound"
    huge = Policy(Mode.AUTO, 4, 5, 60, 64, bytes_per_expert=10**12)
    assert huge.max_rank_bytes == 10**12, "one weight has to fit"
