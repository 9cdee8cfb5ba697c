"""What workers tell of their model reaches the planner."""

from __future__ import annotations

import pytest

from moe_api.plan import Member
from moe_operator.allowance import bytes_per_expert, expert_groups
from moe_operator.members import MemberState, MemberView
from tests.support.group_views import SHAPE, pod, worker

GROUPED = SHAPE.model_copy(update={"expert_groups": 3})


def member(number: int, **state: object) -> MemberView:
    view = pod(number, worker(f"u{number}", number, **state))
    named = Member(
        id=number, uid=view.uid, address="10.0.0.1", pod=f"p{number}", incarnation=view.uid
    )
    return MemberView(number, named, view, MemberState.SERVING)


@pytest.mark.parametrize(
    ("model", "groups", "size"), [(GROUPED, 3, 1000), (SHAPE, None, 1000), (None, None, 1)]
)
def test_the_first_worker_that_knows_the_model_tells(model: object, groups: object, size: int):
    members = [member(0, model=None), member(1, model=model)]
    assert expert_groups(members) == groups
    assert bytes_per_expert(members) == size


def test_nobody_tells_of_no_members():
    assert expert_groups([]) is None
    assert bytes_per_expert([]) == 1
