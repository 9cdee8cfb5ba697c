from __future__ import annotations

import numpy as np
import pytest

from moe_api.plan import Fence, GroupPlan, Member, encode_layers
from moe_worker.engine.fence import Door, Verdict, judge, names, names_another


def plan(
    leader: int, generation: int, epoch: int, slots: list[list[int]] | None = None
) -> GroupPlan:
    placement = np.asarray([slots or [[0], [1]]], dtype=np.int32)
    members = [
        Member(id=i, pod=f"p{i}", uid=f"u{i}", address=f"127.0.0.{2 + i}", incarnation=f"i{i}")
        for i in range(2)
    ]
    return GroupPlan(
        namespace="n", deployment="d", group=0, leader_epoch=leader, generation=generation,
        epoch=epoch, members=members, layers=encode_layers(placement),
    )  # fmt: skip


def taken(*plans: GroupPlan) -> Door:
    door = Door()
    for each in plans:
        door, answer = judge(door, each)
        assert answer.verdict is Verdict.TAKEN
    return door


@pytest.mark.parametrize("newer", [(1, 2, 6), (1, 3, 1), (2, 1, 1)])
def test_numbers_are_compared_leader_generation_epoch(newer: tuple[int, int, int]) -> None:
    door, answer = judge(taken(plan(1, 2, 5)), plan(*newer))
    assert answer.verdict is Verdict.TAKEN
    assert door.fence == Fence(*newer)


@pytest.mark.parametrize("older", [(1, 2, 4), (1, 1, 9), (0 + 1, 2, 3)])
def test_what_is_not_newer_is_refused_with_what_is_in_force(older: tuple[int, int, int]) -> None:
    door = taken(plan(1, 2, 5))
    after, answer = judge(door, plan(*older))
    assert after == door
    assert answer.refused
    assert answer.in_force == Fence(1, 2, 5)


def test_a_stale_leader_is_refused_whatever_it_numbers() -> None:
    _, answer = judge(taken(plan(3, 2, 5)), plan(2, 9, 9))
    assert answer.refused


def test_the_same_twice_is_known() -> None:
    _, answer = judge(taken(plan(1, 2, 5)), plan(1, 2, 5))
    assert answer.verdict is Verdict.KNOWN


def test_a_new_leader_of_the_same_plan_only_raises_the_fence() -> None:
    door, answer = judge(taken(plan(1, 2, 5)), plan(4, 2, 5))
    assert answer.verdict is Verdict.KNOWN
    assert door.fence == Fence(4, 2, 5)
    assert judge(door, plan(3, 2, 6))[1].refused


def test_another_content_under_the_same_numbers_is_refused() -> None:
    door = taken(plan(1, 2, 5))
    assert judge(door, plan(1, 2, 5, [[1], [0]]))[1].refused
    raised, answer = judge(door, plan(2, 2, 5, [[1], [0]]))
    assert answer.refused
    assert raised.fence == Fence(2, 2, 5)


def test_an_abandoned_epoch_is_refused_also_by_who_never_had_it() -> None:
    door = taken(plan(1, 2, 5)).abandon(2, 6)
    assert judge(door, plan(1, 2, 6))[1].refused
    assert judge(door, plan(2, 2, 6))[1].refused
    assert judge(door, plan(1, 2, 7))[1].verdict is Verdict.TAKEN
    assert judge(door, plan(1, 3, 6))[1].verdict is Verdict.TAKEN


def test_a_plan_names_an_incarnation_not_just_a_member() -> None:
    assert names(plan(1, 1, 1), 1, "i1") == 1
    assert names(plan(1, 1, 1), 1, "other") is None
    assert names(plan(1, 1, 1), 7, "i7") is None
    assert names_another(plan(1, 1, 1), 1, "other") == "i1"
    assert names_another(plan(1, 1, 1), 1, "i1") is None
    assert names_another(plan(1, 1, 1), 7, "i7") is None
