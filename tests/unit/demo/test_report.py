"""The demo's verdict: each promise, broken alone, makes it fail and says so."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from examples.demo.report import (
    Measured,
    broken_promises,
    json_line,
    rows,
)

GOOD = Measured(
    first_token_seconds=0.2, requests=100, imbalance_before=1.5, imbalance_predicted=1.02,
    imbalance_after=1.03, tokens_after=20000, epoch=3, moves=4, swap_stall_millis=3.0,
    answers_equal=True, failed_on_killed_rank=2, survivors_serving_seconds=0.8,
    recovery_seconds=9.0, seconds_total=100.0,
)  # fmt: skip


def test_a_good_run_breaks_nothing() -> None:
    assert broken_promises(GOOD) == []


@pytest.mark.parametrize(
    "change",
    [
        {"imbalance_before": 1.2}, {"imbalance_before": None}, {"imbalance_after": 1.05},
        {"imbalance_after": None}, {"imbalance_predicted": None}, {"moves": 0},
        {"failed_requests": 1}, {"failed_on_survivors": 1}, {"answers_equal": False},
        {"answers_equal": None}, {"first_token_seconds": None},
        {"survivors_serving_seconds": None}, {"recovery_seconds": None},
    ],
)  # fmt: skip
def test_each_broken_promise_is_named(change: dict[str, object]) -> None:
    assert len(broken_promises(replace(GOOD, **change))) == 1


@pytest.mark.parametrize(("after", "number"), [(1.12, 0), (1.08, 1), (1.13, 1), (1.17, 2)])
def test_what_is_measured_has_to_be_what_was_predicted_and_good(after: float, number: int) -> None:
    broken = broken_promises(replace(GOOD, imbalance_predicted=1.105, imbalance_after=after))
    assert len(broken) == number


def test_last_line_is_json_with_every_figure() -> None:
    line = json_line(GOOD)
    assert line.startswith("demo: ")
    figures = json.loads(line.removeprefix("demo: "))
    wanted = """first_token_seconds requests failed_requests imbalance_before
    imbalance_predicted imbalance_after epoch moves swap_stall_millis
    survivors_serving_seconds recovery_seconds seconds_total"""
    assert set(wanted.split()) <= set(figures)
    assert rows(GOOD)
