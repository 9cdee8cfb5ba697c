"""What becomes of each group: exact cases."""

from __future__ import annotations

import pytest

from moe_api.conditions import Reason
from moe_operator.acceptance import VALID, Acceptance
from moe_operator.rollout import intents
from moe_operator.rules import Intent

KEEP, ROLL, WAIT = Intent.KEEP, Intent.ROLL, Intent.WAIT
REFUSE, REMOVE = Intent.REFUSE, Intent.REMOVE


@pytest.mark.parametrize(
    ("replicas", "serving", "outdated", "expected"),
    [
        (1, {}, {}, {0: KEEP}),
        (0, {0: True}, {0: False}, {0: REMOVE}),
        (1, {0: True, 1: True}, {}, {0: KEEP, 1: REMOVE}),
        (1, {0: True}, {0: True}, {0: ROLL}),
        (2, {0: True, 1: True}, {0: True, 1: True}, {0: ROLL, 1: WAIT}),
        (2, {0: False, 1: True}, {0: False, 1: True}, {0: KEEP, 1: WAIT}),
        (2, {0: True, 1: True}, {0: False, 1: True}, {0: KEEP, 1: ROLL}),
        (2, {0: True, 1: False}, {0: True, 1: True}, {0: ROLL, 1: ROLL}),
        (3, {0: True, 1: True}, {0: False, 1: False}, {0: KEEP, 1: KEEP, 2: KEEP}),
    ],
)
def test_groups_are_rolled_one_by_one_and_those_that_do_not_serve_at_once(
    replicas, serving, outdated, expected
):
    assert intents(replicas, serving, outdated, VALID) == expected


def test_a_refusal_by_the_model_removes_and_one_by_the_spec_waits():
    serving = {0: True, 2: True}
    model = Acceptance(Reason.MODEL_HAS_NO_EXPERTS, "no experts")
    assert intents(1, serving, {}, model) == {0: REFUSE, 2: REMOVE}
    source = Acceptance(Reason.MODEL_SOURCE_UNSUPPORTED, "hf:// is not supported")
    assert intents(1, serving, {}, source) == {0: WAIT, 2: REMOVE}
