"""Imbalance, gain, windows and the decision: exact small cases by hand."""

from __future__ import annotations

import numpy as np
import pytest

from moe_api.load import LoadReport
from moe_api.plan import SlotsLRS, even_fractions
from moe_placement import initial, score
from moe_placement.decide import Mode, Policy, Verdict, Walk, decide
from moe_placement.window import LoadWindow, ServedSince, enough_tokens

AUTO = Policy(Mode.AUTO, serving_slots=2, min_gain_percent=5, cooldown_seconds=60,
              max_moves_per_round=64)  # fmt: skip


def report(
    member: int, routed: list[list[int]], incarnation: str = "a", epoch: int = 1
) -> LoadReport:
    return LoadReport(
        incarnation=incarnation, member=member, generation=1, epoch=epoch,
        monotonic_seconds=0, routed=routed, served=routed,
    )  # fmt: skip


def test_a11_opposite_imbalances_do_not_cancel() -> None:
    slots = np.array([[[0], [1]], [[0], [1]]], dtype=np.int32)
    loads = score.rank_loads(slots, even_fractions(slots), np.array([[100.0, 0], [0, 100]]))
    found = score.imbalance(loads)
    assert found is not None
    assert found.per_layer == (2.0, 2.0)
    assert found.worst == 2.0  # balancedness 0.5 for each layer and for the deployment


def test_no_tokens_is_absent_not_zero() -> None:
    assert score.imbalance(np.zeros((2, 3))) is None
    found = score.imbalance(np.array([[0.0, 0.0], [3.0, 1.0]]))
    assert found is not None
    assert found.per_layer == (None, 1.5)
    assert found.mean == 1.5


def test_copies_share_an_experts_tokens_evenly() -> None:
    slots = np.array([[[0, -1], [0, 1]]], dtype=np.int32)
    loads = score.rank_loads(slots, even_fractions(slots), np.array([[100.0, 10.0]]))
    assert loads.tolist() == [[50.0, 60.0]]


def test_g12_every_ranks_own_tokens_are_counted_once() -> None:
    window = LoadWindow(60).observe([report(m, [[0, 0]]) for m in range(4)], 0)
    window = window.observe([report(m, [[30, 20]]) for m in range(4)], 1)
    assert window.samples[-1].routed_LE.tolist() == [[120.0, 80.0]]


def test_window_forgets_survives_restarts_and_wants_enough_tokens() -> None:
    window = LoadWindow(10).observe([report(0, [[500, 500]])], 0)
    assert window.load(1) is None, "the first report is only the baseline"
    window = window.observe([report(0, [[1500, 700]])], 1)
    load = window.load(1)
    assert load is not None
    assert load.tolist() == [[1000.0, 200.0]]
    window = window.observe([report(0, [[40, 60]], incarnation="b")], 2)
    load = window.load(1)
    assert load is not None
    assert load.tolist() == [[1040.0, 260.0]]
    assert window.observe([report(0, [[40, 60]], incarnation="b")], 30).load(1) is None
    assert not enough_tokens(np.array([[100.0, 100.0]]), num_ranks=2)


def test_a05_window_without_user_tokens_is_no_sample() -> None:
    window = LoadWindow(10).observe([report(0, [[0, 0]])], 0).observe([report(0, [[0, 0]])], 1)
    assert window.load(1) is None
    slots = initial.contiguous(1, 2, 1, 3)
    decision = decide(window.load(1), slots, even_fractions(slots), Walk(), AUTO, 100)
    assert (decision.verdict, decision.reason) == (Verdict.SKIPPED, "NoTraffic")
    assert decision.wave_LRS is None


def test_served_is_measured_from_the_plan_in_force_only() -> None:
    served = ServedSince(generation=1, epoch=2).observe([report(0, [[9, 9]], epoch=1)])
    assert served.rank_loads([0]) is None
    served = served.observe([report(0, [[100, 0]], epoch=2), report(1, [[0, 50]], epoch=2)])
    served = served.observe([report(0, [[900, 0]], epoch=2), report(1, [[0, 650]], epoch=2)])
    loads = served.rank_loads([0, 1])
    assert loads is not None
    assert loads.tolist() == [[800.0, 600.0]]


def skewed() -> tuple[SlotsLRS, np.ndarray]:
    return initial.contiguous(1, 4, 2, 4), np.array([[700.0, 100.0, 100.0, 100.0]])


def test_decision_names_what_it_gains_and_walks() -> None:
    slots, load = skewed()
    policy = Policy(Mode.AUTO, 3, 5, 60, 64)
    decision = decide(load, slots, even_fractions(slots), Walk(), policy, 0)
    assert (decision.verdict, decision.reason) == (Verdict.APPLIED, "AboveTarget")
    assert decision.figures is not None
    assert decision.figures.imbalance_now == pytest.approx(1.6)
    assert decision.figures.imbalance_predicted < 1.2
    assert decision.wave_LRS is not None
    going_on = decide(
        None, decision.wave_LRS, even_fractions(decision.wave_LRS),
        Walk(target_LRS=decision.target_LRS), policy, 1,
    )  # fmt: skip
    assert going_on.reason in ("WalkContinues", "NoTraffic")


@pytest.mark.parametrize(
    ("policy", "walk", "verdict", "reason"),
    [
        (Policy(Mode.OFF, 3, 5, 60, 64), Walk(), Verdict.SKIPPED, "ModeOff"),
        (Policy(Mode.RECOMMEND, 3, 5, 60, 64), Walk(), Verdict.RECOMMENDED, "AboveTarget"),
        (Policy(Mode.AUTO, 3, 90, 60, 64), Walk(), Verdict.SKIPPED, "GainBelowMinimum"),
        (Policy(Mode.AUTO, 3, 5, 60, 64), Walk(ended_seconds=90), Verdict.DEFERRED, "Cooldown"),
        (Policy(Mode.AUTO, 3, 5, 60, 0), Walk(), Verdict.SKIPPED, "NoFreeSlot"),
    ],
)
def test_every_no_has_its_reason(policy: Policy, walk: Walk, verdict: Verdict, reason: str) -> None:
    slots, load = skewed()
    decision = decide(load, slots, even_fractions(slots), walk, policy, 100)
    assert (decision.verdict, decision.reason) == (verdict, reason)
    assert decision.wave_LRS is None
