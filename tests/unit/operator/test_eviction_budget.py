"""How many ranks must stay: exact cases."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from moe_operator.disruption import interrupted, min_available
from moe_operator.rules import GroupView
from tests.support.group_views import (
    decided,
    plan_of,
    pod,
    rules,
    serving_group,
    stored,
    waiting,
    with_pods,
)

TIGHT = np.asarray([[[0, 1], [2, 3], [4, 5]]] * 2, dtype=np.int32)


def tight_group():
    """Two slots a rank: a loss leaves experts without a rank."""
    view = serving_group()
    return replace(view, stored=stored(plan_of(view.pods, slots=TIGHT)))


def budget(view, given=None, cordoned=(), ages=None):
    given = given or rules()
    return min_available(decided(view, given), given, cordoned, ages or {})


def test_one_of_three_may_go_when_the_others_hold_every_expert():
    assert budget(serving_group()) == 2


def test_while_one_is_missing_no_other_may_go():
    assert budget(with_pods(serving_group(), gone=[1])) == 2


def test_but_not_for_ever():
    view = with_pods(serving_group(), pod(1, waiting("n1", 1)))
    two = plan_of([view.pods[0], view.pods[2]], slots=np.asarray(
        [[[0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5]]] * 2, dtype=np.int32))  # fmt: skip
    roomy = replace(with_pods(serving_group(), gone=[1]), stored=stored(two))
    assert budget(roomy, ages={("short", 0): 10.0}) == 2
    assert budget(roomy, ages={("short", 0): 601.0}) == 1


@pytest.mark.parametrize(("cordoned", "expected"), [((), 3), (("node1",), 2), (("node9",), 3)])
def test_where_a_loss_stops_the_group_only_a_cordon_opens_the_way(cordoned, expected):
    assert budget(tight_group(), rules(slots_per_rank=2), cordoned) == expected


@pytest.mark.parametrize(
    ("ages", "expected"), [({}, 3), ({("cordoned", 0): 599.0}, 3), ({("cordoned", 0): 601.0}, 2)]
)
def test_while_experts_leave_a_cordoned_node_its_pod_stays_but_not_for_ever(ages, expected):
    given, outcome = rules(), decided(serving_group())
    assert min_available(outcome, given, {"node1"}, ages, evacuates=True) == expected
    assert min_available(outcome, given, {"node1"}, ages, evacuates=False) == 2
    assert min_available(outcome, given, {"node9"}, ages, evacuates=True) == 2


def test_with_its_experts_elsewhere_the_pod_may_go():
    slots = np.asarray([[[0, 1, 2], [2, -1, -1], [3, 4, 5]]] * 2, dtype=np.int32)
    view = serving_group()
    moved = replace(view, stored=stored(plan_of(view.pods, slots=slots)))
    assert min_available(decided(moved), rules(), {"node1"}, {}, evacuates=True) == 2


def test_what_nobody_has_room_for_holds_no_eviction_back():
    given = rules(slots_per_rank=2)
    outcome = decided(tight_group(), given)
    assert min_available(outcome, given, {"node1"}, {}, evacuates=True) == 2


def test_min_serving_ranks_count():
    assert budget(serving_group(), rules(min_serving_ranks=3)) == 3


def test_a_group_of_one_never_blocks():
    pods = serving_group().pods[:1]
    slots = np.arange(6, dtype=np.int32).reshape(1, 1, 6).repeat(2, 0)
    alone = GroupView(0, pods, stored(plan_of(pods, slots=slots)))
    assert budget(alone, rules(width=1, slots_per_rank=6)) == 0


def test_a_group_that_does_not_serve_yet_never_blocks():
    pods = tuple(pod(m, waiting(f"u{m}", m)) for m in range(3))
    assert budget(replace(serving_group(), pods=pods, stored=None)) == 0


def test_a_drain_of_two_nodes_at_once_is_told_where_the_rest_has_no_room():
    outcome = decided(serving_group())
    assert interrupted(outcome, rules(), {"node1"}) == ""
    assert "interrupts the group" in interrupted(outcome, rules(), {"node1", "node2"})


@pytest.mark.parametrize(("view", "told"), [(tight_group(), True), (serving_group(), False)])
def test_a_drain_that_stops_the_group_is_told(view, told):
    given = rules(slots_per_rank=2)
    assert bool(interrupted(decided(view, given), given, {"node1"})) is told
    assert interrupted(decided(view, given), given, {"node9"}) == ""
