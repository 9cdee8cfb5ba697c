"""Decisions in status: counted up, completed, bounded."""

from __future__ import annotations

from typing import Any

from moe_api.status import MAX_DECISIONS, Decision
from moe_operator.decisions import REPEAT_SECONDS, Repeats, recorded


def decision(verdict: Any, reason: str = "R", time: str = "t1", **more: Any) -> Decision:
    return Decision(
        time=time, group=more.pop("group", "g0"), verdict=verdict, reason=reason, **more
    )


def test_the_same_refusal_again_only_counts_up():
    first = recorded([], [decision("Skipped")])
    [again] = recorded(first, [decision("Skipped", time="t2")])
    assert (again.time, again.since, again.count) == ("t1", "t2", 2)


def test_another_reason_is_another_decision_newest_first():
    known = recorded([], [decision("Skipped", "NoTraffic")])
    out = recorded(known, [decision("Skipped", "WithinTarget", "t2")])
    assert [d.reason for d in out] == ["WithinTarget", "NoTraffic"]


def test_groups_do_not_count_for_each_other():
    known = recorded([], [decision("Skipped"), decision("Skipped", group="g1")])
    [one, two] = recorded(known, [decision("Skipped", time="t2")])
    assert [(d.group, d.count) for d in (one, two)] == [("g1", 1), ("g0", 2)]


def test_a_rebalance_is_completed_by_what_is_measured_later():
    known = recorded([], [decision("Applied", moves=3), decision("Skipped", time="t2")])
    out = recorded(known, [decision("Applied", moves=3, measured_gain=0.2)])
    assert [d.verdict for d in out] == ["Skipped", "Applied"]
    assert out[1].measured_gain == 0.2


def test_two_rebalances_are_two():
    known = recorded([], [decision("Applied")])
    assert len(recorded(known, [decision("Applied", time="t2")])) == 2


def test_an_abandoned_epoch_is_told_once():
    known = recorded([], [decision("Aborted", message="epoch 4")])
    assert recorded(known, [decision("Aborted", time="t2", message="epoch 4")]) == known
    assert len(recorded(known, [decision("Aborted", time="t2", message="epoch 6")])) == 2


def test_the_list_is_bounded():
    known: list[Decision] = []
    for number in range(30):
        known = recorded(known, [decision("Skipped", f"R{number}")])
    assert [d.reason for d in known] == [f"R{29 - i}" for i in range(MAX_DECISIONS)]


def test_f03_a_repeated_decision_is_told_once_a_minute_with_the_whole_count():
    known, repeats = recorded([], [decision("Skipped")]), Repeats()
    for second in range(int(REPEAT_SECONDS)):
        assert repeats.due(known, [decision("Skipped", time="t2")], float(second)) == []
    due = repeats.due(known, [decision("Skipped", time="t3")], REPEAT_SECONDS)
    [told] = recorded(known, due)
    assert (told.count, told.since) == (1 + REPEAT_SECONDS + 1, "t3")


def test_a_new_decision_is_told_at_once():
    known, repeats = recorded([], [decision("Skipped")]), Repeats()
    repeats.due(known, [decision("Skipped")], 0.0)
    for new in (decision("Applied"), decision("Skipped", "Other"), decision("Aborted")):
        assert repeats.due(known, [new], 1.0) == [new]


def test_a_rebalance_told_before_does_not_silence_what_is_decided_since():
    known = recorded([], [decision("Applied", moves=3), decision("Skipped", time="t2")])
    repeats, applied = Repeats(), decision("Applied", moves=3)
    repeats.due(known, [applied, decision("Skipped", time="t3")], 0.0)
    for second in range(1, 60):
        assert repeats.due(known, [applied, decision("Skipped")], float(second)) == []
    [told] = repeats.due(known, [applied, decision("Skipped", time="t9")], 60.0)
    assert (told.verdict, told.time, told.count) == ("Skipped", "t9", 61)


def test_a_rebalance_that_fell_out_does_not_come_back_as_new():
    known: list[Decision] = []
    for number in range(MAX_DECISIONS):
        known = recorded(known, [decision("Skipped", f"R{number}", f"t{number + 1}")])
    assert recorded(known, [decision("Applied", time="t0")]) == known
    assert recorded(known, [decision("Applied", time="t99")])[0].verdict == "Applied"
