"""Conditions: transition times, reasons that belong to their type, order."""

from __future__ import annotations

import pytest

from moe_api.conditions import (
    MAX_MESSAGE,
    REASONS,
    Condition,
    ConditionStatus,
    ConditionType,
    Reason,
    find,
    in_order,
    make_condition,
)


def ready(
    status: ConditionStatus, reason: Reason, now: str, previous: list[Condition]
) -> Condition:
    return make_condition(
        ConditionType.READY, status, reason, "why", generation=2, now=now, previous=previous
    )


def test_transition_time_is_kept_while_the_status_is_the_same() -> None:
    first = ready("False", Reason.GROUPS_NOT_READY, "2026-01-01T00:00:00Z", [])
    same = ready("False", Reason.NO_CAPACITY, "2026-01-01T00:01:00Z", [first])
    other = ready("True", Reason.ALL_GROUPS_SERVING, "2026-01-01T00:02:00Z", [same])
    assert same.last_transition_time == "2026-01-01T00:00:00Z"
    assert other.last_transition_time == "2026-01-01T00:02:00Z"


def test_reason_of_another_type_is_a_fault_of_ours() -> None:
    with pytest.raises(AssertionError):
        ready("True", Reason.COPYING, "2026-01-01T00:00:00Z", [])


def test_every_type_has_reasons_and_every_reason_a_type() -> None:
    assert set(REASONS) == set(ConditionType)
    assert {reason for reasons in REASONS.values() for reason in reasons} == set(Reason)


def test_long_message_is_cut_to_what_the_schema_allows() -> None:
    condition = make_condition(
        ConditionType.READY, "False", Reason.NO_CAPACITY, "x" * 5000, generation=1, now="n"
    )
    assert len(condition.message) == MAX_MESSAGE


def test_order_is_that_of_the_types_and_unknown_ones_come_last() -> None:
    late = Condition(type="Future", status="True", reason="R", last_transition_time="n")
    first = ready("True", Reason.ALL_GROUPS_SERVING, "n", [])
    assert in_order([late, first]) == [first, late]
    assert find([late, first], ConditionType.READY) == first
    assert find([late], ConditionType.READY) is None
