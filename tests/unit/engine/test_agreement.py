from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_worker.engine.agreement import AgreementBroken, Ballot, decide

BALLOT = Ballot(
    step=4, generation=2, epoch_active=7, epoch_ready=0, epoch_abandoned=0, generation_ready=0,
    num_tokens=0, num_rounds=0, draining=0,
)  # fmt: skip


def votes(*changes: dict[str, int]) -> list[Ballot]:
    return [BALLOT._replace(**change) for change in changes]


def test_tokens_are_known_per_rank() -> None:
    agreement = decide(votes({"num_tokens": 3, "num_rounds": 1}, {}, {}))
    assert agreement.tokens_R == (3, 0, 0)
    assert not agreement.idle
    assert decide(votes({}, {})).idle


def test_an_epoch_is_switched_when_all_are_ready_for_it() -> None:
    assert decide(votes({"epoch_ready": 8}, {})).switch_to is None
    assert decide(votes({"epoch_ready": 8}, {"epoch_ready": 8})).switch_to == 8
    assert decide(votes({"epoch_ready": 8}, {"epoch_ready": 9})).switch_to is None


def test_one_wish_abandons_an_epoch_even_if_all_are_ready() -> None:
    agreement = decide(
        votes({"epoch_ready": 8}, {"epoch_ready": 8, "epoch_abandoned": 8}, {"epoch_ready": 8})
    )
    assert agreement.switch_to is None
    assert agreement.abandon == {8}


def test_a_generation_begins_when_all_could_begin_it() -> None:
    assert decide(votes({"generation_ready": 3}, {})).begin_generation is None
    agreement = decide(votes(*[{"generation_ready": 3, "epoch_ready": 8}] * 2))
    assert agreement.begin_generation == 3
    assert agreement.switch_to is None


def test_a_group_dissolves_when_all_have_drained() -> None:
    assert not decide(votes({"draining": 2}, {"draining": 1})).dissolve
    assert decide(votes({"draining": 2}, {"draining": 2})).dissolve


@pytest.mark.parametrize("field", ["step", "generation", "epoch_active"])
def test_ranks_in_different_steps_fail_at_once(field: str) -> None:
    with pytest.raises(AgreementBroken):
        decide(votes({}, {field: 99}))


def test_rounds_that_do_not_follow_from_the_tokens_fail_at_once() -> None:
    with pytest.raises(AgreementBroken):
        decide(votes({"num_tokens": 600, "num_rounds": 2}, {"num_tokens": 10, "num_rounds": 3}))


@given(
    st.lists(
        st.fixed_dictionaries(
            {
                "epoch_ready": st.sampled_from([0, 8, 9]),
                "epoch_abandoned": st.sampled_from([0, 0, 8, 9]),
                "generation_ready": st.sampled_from([0, 3]),
                "draining": st.integers(0, 2),
            }
        ),
        min_size=1,
        max_size=5,
    )
)
def test_at_most_one_thing_ends_or_changes_in_a_step(changes: list[dict[str, int]]) -> None:
    agreement = decide(votes(*changes))
    happens = [
        agreement.switch_to is not None,
        agreement.begin_generation is not None,
        agreement.dissolve,
    ]
    assert sum(happens[1:]) <= 1
    assert not (happens[0] and happens[1])
    if agreement.switch_to is not None:
        assert agreement.switch_to not in agreement.abandon
        assert all(change["epoch_ready"] == agreement.switch_to for change in changes)
