"""What one group's load looks like, and what a rebalance brought: exact small numbers."""

from __future__ import annotations

import numpy as np
import pytest

from moe_api.load import LoadReport
from moe_api.worker import MigrationState
from moe_operator.balance import Balance, Trip, peaks
from moe_placement.decision.decide import Figures, Walk
from moe_placement.placement import Placement
from tests.support.group_views import plan_of, serving_group, worker

PLAN = plan_of(serving_group().pods)
MEMBERS = [0, 1, 2]


def reports(routed: list[int], served: list[list[int]], epoch: int = 1, number: int = 3):
    """One report a member: the same routed counts, and each its own served slots of one layer."""
    return [
        LoadReport(
            incarnation=f"u{member}", member=member, generation=1, epoch=epoch,
            monotonic_seconds=0.0, routed=[routed], served=[served[member]],
        )
        for member in range(number)
    ]  # fmt: skip


def begun(window_seconds: float = 10.0) -> Balance:
    """With the baseline read at 0 s."""
    zero = reports([0] * 6, [[0]] * 3)
    return Balance.begin(window_seconds, PLAN, 0.0).read(zero, MEMBERS, 0.0)


def test_the_first_look_is_the_baseline_and_no_sample():
    assert begun().load_LE is None
    assert begun().measured is None
    assert begun().heard


def test_load_and_imbalance_of_what_came_since():
    seen = begun().read(reports([400, 0, 0, 0, 0, 0], [[900], [300], [0]]), MEMBERS, 2.0)
    assert seen.load_LE is not None
    assert seen.load_LE.tolist() == [[1200, 0, 0, 0, 0, 0]]
    assert seen.measured is not None
    assert seen.measured.worst == pytest.approx(900 * 3 / 1200)
    assert seen.peaks == pytest.approx(0.75)
    assert [(h.expert, h.share) for h in seen.hot_experts()[:1]] == [(0, 1.0)]
    assert seen.imbalance_without_replication(PLAN.slots()[:1]) == pytest.approx(3.0)


def test_too_few_tokens_are_no_sample():
    seen = begun().read(reports([3, 0, 0, 0, 0, 0], [[9], [0], [0]]), MEMBERS, 2.0)
    assert seen.load_LE is None
    assert seen.measured is None


def test_a_missing_report_is_no_sample_and_no_zero():
    partly = reports([400] * 6, [[900]] * 3, number=2)
    seen = begun().read(partly, MEMBERS, 2.0)
    assert (seen.heard, seen.load_LE) == (False, None)


def test_a_new_epoch_is_measured_anew():
    seen = begun().read(reports([400] + [0] * 5, [[900], [300], [0]]), MEMBERS, 2.0)
    moved = seen.under(PLAN, 2, 3.0)
    assert moved.measured is None
    assert moved.window == seen.window, "what requests chose does not depend on where experts are"


def test_another_membership_ends_the_walk():
    walking = Balance.begin(10.0, PLAN, 0.0)
    target = Placement.even(PLAN.slots())
    walking = Balance(walking.window, walking.served, 0.0, walk=Walk(target, 1.0), trip=trip())
    other = walking.under(PLAN.model_copy(update={"generation": 2}), 2, 3.0)
    assert other.walk.target is None
    assert other.trip is None
    assert walking.under(PLAN, 1, 3.0) is walking


def trip(**changes) -> Trip:
    figures = Figures(imbalance_now=2.0, imbalance_predicted=1.0, gain=0.5, moves=2)
    known = {"arrived": True, "peaks_before": 0.8} | changes
    return Trip("t", "AboveTarget", figures, 2, "m", generation=1, newest_epoch=3, **known)


def test_the_measured_gain_compares_the_fullest_ranks():
    balance = begun()
    balance = Balance(balance.window, balance.served, 0.0, trip=trip())
    seen = balance.read(reports([0] * 6, [[0]] * 3), MEMBERS, 0.0)
    seen = seen.read(reports([400] * 6, [[400], [400], [400]]), MEMBERS, 2.0)
    assert seen.trip is not None
    assert seen.trip.measured_gain == pytest.approx((0.8 - 1 / 3) / 0.8)


def test_a_trip_adds_up_its_waves_once():
    def states(epoch: int, stall: float | None):
        return [
            worker(f"u{m}", m, migration=MigrationState(epoch=epoch, bytes=100, stall_millis=stall))
            for m in range(3)
        ]

    walked = trip().switched(2, states(2, None)).switched(3, states(3, 4.0))
    assert (walked.bytes, walked.stall_millis) == (600, 4.0)
    assert walked.switched(3, states(3, 9.0)) == walked


def test_layers_without_tokens_do_not_count():
    assert peaks(np.asarray([[0.0, 0.0], [3.0, 1.0]])) == 0.75
    assert peaks(np.zeros((2, 2))) is None
