"""Counters → the load to plan for: resets, gaps, too few tokens, and bounded memory."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_api.load import LoadReport
from moe_placement.decision.window import MAX_SAMPLES, LoadWindow, ServedSince, enough_tokens, noise
from moe_placement.placement import Placement


def report(
    member: int, routed: list[list[int]], incarnation: str = "a", epoch: int = 1
) -> LoadReport:
    return LoadReport(
        incarnation=incarnation, member=member, generation=1, epoch=epoch,
        monotonic_seconds=0, routed=routed, served=routed,
    )  # fmt: skip


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


def test_a05_dummy_tokens_of_a_warm_up_that_were_not_counted_are_no_sample() -> None:
    """Scaled 2 → 4, warm-up ran 512 dummy tokens a rank, then a whole window without a request."""
    window = LoadWindow(10)
    for second in range(12):
        window = window.observe([report(m, [[0, 0, 0, 0]], f"new{m}") for m in range(4)], second)
    assert window.load(4) is None, "no sample, not a load of zeros"
    assert window.forecast is not None
    assert not np.isnan(window.forecast.shares_LE(steady=True)).any()


def test_too_few_tokens_wait_for_more_before_they_change_the_forecast() -> None:
    window = LoadWindow(10).observe([report(0, [[0, 0]])], 0)
    window = window.observe([report(0, [[500, 500]])], 1)
    window = window.observe([report(0, [[510, 500]])], 2)
    assert window.unfed_LE is not None
    assert window.unfed_LE.tolist() == [[10.0, 0.0]]
    load = window.load(1)
    assert load is not None
    assert load.tolist() == [[510.0, 500.0]], "but they count"


def test_the_load_has_as_many_tokens_as_the_window_and_the_shares_of_the_forecast() -> None:
    window, counts = LoadWindow(10), np.zeros((2, 2), dtype=int)
    placement = Placement.even(np.array([[[0], [1]], [[0], [1]]], dtype=np.int32))
    for second in range(0, 60, 5):
        counts += np.array([[300, 100], [0, 0]])
        window = window.observe([report(0, counts.tolist())], second, placement)
    load = window.load(2)
    assert load is not None
    assert load == pytest.approx(np.array([[600.0, 200.0], [0, 0]]))


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.floats(0.01, 30), st.integers(0, 3000), st.booleans()), max_size=40))
def test_whatever_comes_when_there_is_a_load_or_none_never_nan_and_memory_is_bounded(
    looks: list[tuple[float, int, bool]],
) -> None:
    window, now, counts, life = LoadWindow(20), 0.0, np.zeros((2, 3), dtype=int), 0
    placement = Placement.even(np.array([[[0, 1], [2, -1]]] * 2, dtype=np.int32))
    for pause, tokens, restarts in looks:
        now += pause
        counts = counts * (not restarts) + [[tokens, 0, tokens // 2], [0, tokens, 0]]
        life += restarts
        window = window.observe([report(0, counts.tolist(), f"life{life}")], now, placement)
        load = window.load(2)
        assert load is None or (np.isfinite(load).all() and (load >= 0).all())
        assert load is None or load.sum(axis=1).max() >= 2 * 324 - 1
        assert len(window.samples) <= MAX_SAMPLES


def test_often_read_is_not_often_forgotten() -> None:
    window = LoadWindow(400)
    for second in range(400):
        window = window.observe([report(0, [[5 * second, 0]])], second)
    load = window.load(1)
    assert load is not None
    assert load.sum() >= 5 * 399 * (1 - 2 / MAX_SAMPLES)
    assert len(window.samples) <= MAX_SAMPLES


def test_another_model_begins_a_new_window() -> None:
    window = LoadWindow(10).observe([report(0, [[0, 0]])], 0).observe([report(0, [[900, 9]])], 1)
    other = window.observe([report(0, [[5, 5, 5]], "b")], 2)
    assert other.load(1) is None
    assert other.observe([report(0, [[505, 505, 505]], "b")], 3).load(1) is not None


def test_noise_is_what_chance_makes_of_balanced_ranks() -> None:
    assert noise(np.array([[3240.0, 0], [0, 0]]), 10) == pytest.approx(0.1)
    assert noise(np.zeros((1, 2)), 10) == 0.0


def test_served_is_measured_from_the_plan_in_force_only() -> None:
    served = ServedSince(generation=1, epoch=2).observe([report(0, [[9, 9]], epoch=1)])
    assert served.rank_loads([0]) is None
    served = served.observe([report(0, [[100, 0]], epoch=2), report(1, [[0, 50]], epoch=2)])
    served = served.observe([report(0, [[900, 0]], epoch=2), report(1, [[0, 650]], epoch=2)])
    loads = served.rank_loads([0, 1])
    assert loads is not None
    assert loads.tolist() == [[800.0, 600.0]]
