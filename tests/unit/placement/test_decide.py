"""The decision: every "no" has its reason, every wave of a "yes" is complete, and a walk ends."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_api.plan import decode_fractions, encode_layers
from moe_placement import initial, score
from moe_placement.capacity import Capacity
from moe_placement.copy_limits import CopyLimits
from moe_placement.decision.decide import Decision, Mode, Policy, Verdict, Walk, decide
from moe_placement.goal import Split
from moe_placement.placement import Placement, faults
from moe_placement.planned import Level
from moe_placement.score import LoadLE
from moe_placement.walk import migration
from tests.support.walk_judge import judge_wave

AUTO = Policy(Mode.AUTO, serving_slots=3, min_gain_percent=5, cooldown_seconds=60,
              max_moves_per_round=64)  # fmt: skip
SKEWED = np.array([[7000.0, 1000.0, 1000.0, 1000.0]])
FEW = np.array([[4.0, 3, 2.5, 2.5]])


def blocks(num_experts: int = 4, num_ranks: int = 2, num_slots: int = 4) -> Placement:
    return Placement.even(initial.contiguous(1, num_experts, num_ranks, num_slots))


def stored(placement: Placement) -> Placement:
    """As it comes back from the operator's plan: fractions in whole units."""
    layers = encode_layers(placement.slots_LRS, placement.fractions_LRS)
    return Placement(placement.slots_LRS, decode_fractions(layers, placement.slots_LRS))


def walked(
    load_LE: LoadLE | None, current: Placement, policy: Policy, walk: Walk | None = None
) -> tuple[list[Decision], Placement, Walk]:
    """Decide and obey until nothing changes, a second each time, no more than forty."""
    decisions, walk, now = [], walk or Walk(), 1000.0
    for _ in range(40):
        decision = decide(load_LE, current, walk, policy, now)
        decisions.append(decision)
        walk = decision.walk
        if decision.wave is None:
            return decisions, current, walk
        limits = policy.limits(
            policy.capacity(*current.slots_LRS.shape[1:2], 1, current.slots_LRS.shape[2]),
            current.slots_LRS.shape[2],
        )
        judge_wave(current.slots_LRS, decision.wave.slots_LRS, limits)
        current, now = stored(decision.wave), now + 1
        if walk.is_at(current):
            walk = walk.arrived(now)
    raise AssertionError("the walk does not end")


def test_a_skewed_load_is_told_with_numbers_and_walked_to_its_end() -> None:
    decisions, current, walk = walked(SKEWED, blocks(), AUTO)
    first = decisions[0]
    assert (first.verdict, first.reason) == (Verdict.APPLIED, "AboveTarget")
    assert first.figures is not None
    assert first.figures.imbalance_now == pytest.approx(1.6)
    assert first.figures.imbalance_predicted == pytest.approx(1.0, abs=0.03)
    assert first.figures.gain == pytest.approx(1 - 1.0 / 1.6, abs=0.02)
    assert first.figures.moves >= 1
    assert first.message.startswith("imbalance 1.600 → 1.0")
    assert f"gain {first.figures.gain:.1%}, {first.figures.moves} moves" in first.message
    assert {d.reason for d in decisions[1:-1]} <= {"WalkContinues"}
    assert (decisions[-1].verdict, decisions[-1].reason) == (Verdict.SKIPPED, "WithinTarget")
    loads = score.rank_loads(current.slots_LRS, current.fractions_LRS, SKEWED)
    assert loads.max() / loads.mean() < 1.03
    assert walk.target is None
    assert walk.ended_seconds is not None


@pytest.mark.parametrize(
    ("changes", "load", "walk", "verdict", "reason", "said"),
    [
        ({"mode": Mode.OFF}, SKEWED, Walk(), "Skipped", "ModeOff", "mode is Off"),
        ({}, None, Walk(), "Skipped", "NoTraffic", "too few tokens"),
        ({}, SKEWED * 0, Walk(), "Skipped", "NoTraffic", "too few tokens"),
        ({"mode": Mode.RECOMMEND}, SKEWED, Walk(), "Recommended", "AboveTarget", "1.600 →"),
        ({"min_gain_percent": 90}, SKEWED, Walk(), "Skipped", "GainBelowMinimum", "90 %"),
        ({}, FEW, Walk(), "Skipped", "GainBelowMinimum", "no more than chance makes"),
        ({}, SKEWED * 0 + 2500, Walk(), "Skipped", "WithinTarget", "imbalance 1.000"),
        ({}, SKEWED, Walk(None, 990), "Deferred", "Cooldown", "cooldown 50 s more"),
        ({}, SKEWED, Walk(None, 930), "Applied", "AboveTarget", "moves"),
        (
            {"bytes_per_expert": 10**12}, SKEWED, Walk(),
            "Skipped", "CostExceedsGain", "which the gain does not bring back in 600 s",
        ),
        (
            {"cooldown_seconds": 10}, SKEWED,
            Walk(None, 960, gain=0.5, realised=0.1, setbacks=3),
            "Deferred", "BackedOff", "brought 10.0% of 50.0% promised, the 3. in a row: cooldown",
        ),
        (
            {"serving_slots": 2}, np.array([[5000.0, 4000, 500, 500]]), Walk(),
            "Skipped", "NoFreeSlot", "spareSlotsPerRank",
        ),
    ],
)  # fmt: skip
def test_every_answer_has_its_reason(
    changes: dict, load: LoadLE | None, walk: Walk, verdict: str, reason: str, said: str
) -> None:
    current = blocks(num_slots=2 if changes.get("serving_slots") == 2 else 4)
    decision = decide(load, current, walk, replace(AUTO, **changes), 1000)
    assert (decision.verdict.value, decision.reason) == (verdict, reason)
    assert said in decision.message
    assert (decision.wave is None) == (verdict != "Applied")


def test_a_measured_stall_forbids_for_a_while_and_is_believed_less_and_less() -> None:
    walk = Walk(None, 1000)
    slow = decide(SKEWED, blocks(), walk, AUTO, 1100, stall_millis=50)
    assert (slow.verdict, slow.reason) == (Verdict.SKIPPED, "StallAboveMaximum")
    assert "maxStallMillis is 20" in slow.message
    assert decide(SKEWED, blocks(), walk, AUTO, 3000, stall_millis=50).verdict is Verdict.APPLIED
    assert decide(SKEWED, blocks(), walk, AUTO, 1100, stall_millis=10).verdict is Verdict.APPLIED


def test_a05_a_window_without_user_tokens_plans_nothing() -> None:
    current = blocks()
    for load in (None, np.zeros((1, 4))):
        decision = decide(load, current, Walk(), AUTO, 1000)
        assert (decision.verdict, decision.reason) == (Verdict.SKIPPED, "NoTraffic")
        assert decision.wave is None
        assert decision.target is None
        assert decision.figures is None, "no sample is not a figure, and never NaN"


def test_a11_each_layer_is_judged_and_planned_for_itself() -> None:
    """Loads [100, 0] and [0, 100] on two ranks with a slot each: 0.5 balanced each, not 1.0."""
    current = Placement.even(np.array([[[0], [1]], [[0], [1]]], dtype=np.int32))
    load = np.array([[10_000.0, 0], [0, 10_000]])
    decision = decide(load, current, Walk(), replace(AUTO, serving_slots=1), 1000)
    assert decision.figures is not None
    assert decision.figures.imbalance_now == 2.0
    assert decision.wave is None, "no placement of two slots does better"
    assert decision.reason == "WithinTarget"


def test_fractions_alone_are_an_epoch_without_moves() -> None:
    slots = np.array([[[0, 1, -1], [0, 2, -1]]], dtype=np.int32)
    load = np.array([[6000.0, 1000, 5000]])
    policy = replace(AUTO, serving_slots=2)
    decisions, current, _ = walked(load, Placement.even(slots), policy)
    assert decisions[0].level is Level.FRACTIONS
    assert decisions[0].figures is not None
    assert (decisions[0].figures.moves, decisions[0].figures.waves) == (0, 1)
    assert np.array_equal(current.slots_LRS, slots)
    assert len(decisions) == 2
    loads = score.rank_loads(current.slots_LRS, current.fractions_LRS, load)
    assert loads == pytest.approx(np.array([[6000.0, 6000]]), abs=1)


def test_an_even_split_is_kept_to() -> None:
    _, current, _ = walked(SKEWED, blocks(), replace(AUTO, split=Split.EVEN))
    assert np.array_equal(current.fractions_LRS, Placement.even(current.slots_LRS).fractions_LRS)


def test_a_walk_whose_target_has_become_worse_is_given_up() -> None:
    current = Placement.even(np.array([[[0, 1, -1], [2, 3, -1]]], dtype=np.int32))
    target = Placement.even(np.array([[[0, 2, -1], [1, 3, -1]]], dtype=np.int32))
    load = np.array([[3000.0, 1000, 3000, 1000]])
    walk = Walk(None).toward(current, load, target, 0.3)
    now_worse = np.array([[3000.0, 3000, 1000, 1000]])
    policy = replace(AUTO, serving_slots=2)
    decision = decide(now_worse, target, walk, policy, 50)
    assert (decision.verdict, decision.reason) == (Verdict.SKIPPED, "TargetOutdated")
    assert "would now have imbalance 1.500, 1.000 can be had" in decision.message
    assert (decision.walk.target, decision.walk.ended_seconds) == (None, 50)
    assert decide(load, target, walk, policy, 50).reason == "WalkContinues"
    assert decide(None, target, walk, policy, 50).reason == "WalkContinues", "no sample is no news"


def test_a_walk_that_brought_less_than_half_is_a_setback_and_a_good_one_ends_it() -> None:
    """What was promised is held against both placements under the load of now."""
    _, current, walk = walked(SKEWED, blocks(), AUTO)
    assert walk.ended_seconds is not None
    after = walk.ended_seconds + 61
    good = decide(SKEWED, current, walk, AUTO, after)
    assert (good.walk.setbacks, good.walk.origin) == (0, None)
    assert good.walk.realised == pytest.approx(walk.gain, abs=0.02)
    other = np.array([[1000.0, 1000, 1000, 7000]])
    bad = decide(other, current, walk, AUTO, after)
    assert bad.walk.setbacks == 1
    assert (bad.verdict, bad.reason) == (Verdict.DEFERRED, "BackedOff")
    again = decide(other, current, bad.walk, AUTO, after + 1)
    assert again.walk.setbacks == 1, "a walk is checked once"
    assert decide(other, current, bad.walk, AUTO, after + 60).verdict is Verdict.APPLIED


def test_another_membership_or_mode_ends_the_walk() -> None:
    begun = decide(SKEWED, blocks(), Walk(), AUTO, 0)
    assert begun.walk.target is not None
    three = decide(None, blocks(4, 3, 4), begun.walk, AUTO, 1)
    assert (three.reason, three.walk.target) == ("NoTraffic", None)
    asked = decide(SKEWED, blocks(), begun.walk, replace(AUTO, mode=Mode.RECOMMEND), 1)
    assert (asked.verdict, asked.walk.target) == (Verdict.RECOMMENDED, None)
    off = decide(SKEWED, blocks(), begun.walk, replace(AUTO, mode=Mode.OFF), 1)
    assert (off.reason, off.walk.target) == ("ModeOff", None)


def test_copies_in_one_domain_are_put_apart_though_it_gains_nothing() -> None:
    """Two ranks a host; the hot expert's copies are both on the first."""
    slots = np.array([[[0, 1, -1], [0, 2, -1], [3, 4, -1], [5, 6, -1]]], dtype=np.int32)
    load = np.array([[4000.0, 2000, 2000, 2000, 2000, 2000, 2000]])
    policy = replace(AUTO, serving_slots=2, domains=(0, 0, 1, 1))
    assert decide(load, Placement.even(slots), Walk(), policy, 0).reason == "WithinTarget"
    apart = replace(policy, spread_domains=2)
    decisions, current, _ = walked(load, Placement.even(slots), apart)
    assert (decisions[0].verdict, decisions[0].reason) == (Verdict.APPLIED, "CopiesTogether")
    assert "1 experts have copies in fewer domains than replicaSpread" in decisions[0].message
    on = {rank for rank in range(4) if 0 in current.slots_LRS[0, rank]}
    assert len(on & {0, 1}) == len(on & {2, 3}) == 1
    assert decisions[-1].reason == "WithinTarget"
    only = decide(load, Placement.even(slots), Walk(), replace(apart, mode=Mode.RECOMMEND), 0)
    assert (only.verdict, only.reason) == (Verdict.RECOMMENDED, "CopiesTogether")


def test_survivors_use_spare_slots_and_the_copies_they_can_hold() -> None:
    """Three ranks' experts on two: more than the serving slots, fewer copies than asked for."""
    current = Placement.even(initial.contiguous(1, 8, 2, 4))
    policy = replace(AUTO, serving_slots=3, copies=CopyLimits(min_copies=2))
    decision = decide(np.full((1, 8), 1000.0), current, Walk(), policy, 0)
    assert decision.reason == "WithinTarget"


@st.composite
def situations(draw: st.DrawFn) -> tuple[LoadLE, Placement, Policy]:
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    num_ranks, num_experts, layers = (int(rng.integers(1, n)) for n in (6, 14, 4))
    serving = -(-num_experts // num_ranks) + int(rng.integers(0, 3))
    current = initial.contiguous(layers, num_experts, num_ranks, serving + int(rng.integers(1, 3)))
    load = np.round(rng.lognormal(8, rng.uniform(0, 2), (layers, num_experts)))
    load[rng.random(layers) < 0.2] = 0
    policy = Policy(
        Mode.AUTO, serving, min_gain_percent=float(rng.choice([0, 1, 5])), cooldown_seconds=60,
        max_moves_per_round=int(rng.choice([1, 3, 64])),
        split=Split(rng.choice(["fractions", "even"])),
        bytes_per_expert=int(rng.choice([0, 1000])),
        speeds=None if rng.random() < 0.7 else tuple(rng.choice([0.7, 1.0], num_ranks)),
    )  # fmt: skip
    return load, Placement.even(current), policy


@settings(deadline=None, max_examples=40)
@given(situations())
def test_from_any_situation_a_walk_arrives_and_keeps_its_promise(
    situation: tuple[LoadLE, Placement, Policy],
) -> None:
    load, current, policy = situation
    num_layers, num_ranks, num_slots = current.slots_LRS.shape
    first = decide(load, current, Walk(), policy, 1000.0)
    again = decide(load, current, Walk(), policy, 1000.0)
    assert (first.verdict, first.message) == (again.verdict, again.message)
    if first.wave is None:
        assert first.message
        return
    assert first.figures is not None
    assert first.target is not None
    experts_L = np.full(num_layers, load.shape[1])
    capacity = Capacity.of(num_slots, num_ranks)
    at, walk, promised = current, first.walk, first.figures
    for step in range(200):
        decision = decide(None if step % 2 else load, at, walk, policy, 1000.0 + step)
        if decision.wave is None:
            break
        assert not list(faults(decision.wave, experts_L, capacity, spare=True))
        at, walk = decision.wave, decision.walk
        if walk.is_at(at):
            break
    assert migration.reached(at.slots_LRS, first.target.slots_LRS)
    speeds = np.ones(num_ranks) if policy.speeds is None else np.array(policy.speeds)
    loads = score.rank_loads(at.slots_LRS, at.fractions_LRS, load) / speeds
    found = score.imbalance(loads)
    assert found is not None
    assert found.worst == pytest.approx(promised.imbalance_predicted, abs=1e-6)
    assert promised.gain >= policy.min_gain
