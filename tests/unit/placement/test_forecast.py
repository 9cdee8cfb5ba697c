"""Two averages and the change that makes the fast one the forecast, layer by layer."""

from __future__ import annotations

import numpy as np
import pytest

from bench.recorded_loads import trace
from moe_placement.capacity import Capacity
from moe_placement.decision.forecast import FAST_WINDOWS, SLOW_WINDOWS, Forecast
from moe_placement.placement import Placement
from moe_placement.planner import plan
from moe_placement.score import LoadLE

TWO = Placement.even(np.array([[[0, 1], [2, 3]], [[0, 1], [2, 3]]], dtype=np.int32))


def test_old_tokens_count_less_by_the_age_of_each_average() -> None:
    forecast = Forecast.begin(np.array([[100.0, 0.0]])).after(np.array([[0.0, 100.0]]), 2.0)
    fast, slow = forecast.shares_LE(steady=False)[0, 0], forecast.shares_LE(steady=True)[0, 0]
    for share, age in ((fast, FAST_WINDOWS), (slow, SLOW_WINDOWS)):
        assert share == pytest.approx(np.exp(-2 / age) / (1 + np.exp(-2 / age)))


def test_a_change_in_one_layer_begins_that_layer_again_and_no_other() -> None:
    even = np.full((2, 4), 2500.0)
    forecast = Forecast.begin(even)
    for _ in range(5):
        forecast = forecast.after(even, 1.0, TWO)
    shifted = np.array([[4000.0, 4000, 1000, 1000], [2500, 2500, 2500, 2500]])
    assert forecast.changed(shifted, TWO).tolist() == [True, False]
    after = forecast.after(shifted, 1.0, TWO)
    assert after.slow_LE[0].tolist() == after.fast_LE[0].tolist() == shifted[0].tolist()
    assert after.slow_LE[1].sum() > 40_000
    assert forecast.after(shifted, 1.0).slow_LE[0].sum() > 40_000, "nobody looked"


def test_what_chance_does_is_no_change() -> None:
    rng = np.random.default_rng(1)
    shares, seen = np.full(8, 1 / 8), 0
    placement = Placement.even(np.arange(8, dtype=np.int32).reshape(1, 8, 1))
    forecast = Forecast.begin(np.full((1, 8), 1e6))
    for _ in range(300):
        seen += int(
            forecast.changed(rng.multinomial(3000, shares)[None].astype(float), placement)[0]
        )
    assert seen <= 3


def test_a_better_fitting_load_is_no_change() -> None:
    skewed = Forecast.begin(np.array([[9000.0, 0, 500, 500]] * 2))
    assert not skewed.changed(np.full((2, 4), 2500.0), TWO).any()


def test_layers_without_tokens_have_no_share_and_no_nan() -> None:
    forecast = Forecast.begin(np.zeros((2, 4))).after(np.zeros((2, 4)), 1.0, TWO)
    assert (forecast.shares_LE(steady=True) == 0).all()
    counted = forecast.after(np.array([[1.0, 0, 0, 0], [0, 0, 0, 0]]), 1.0, TWO)
    assert counted.shares_LE(steady=True).tolist() == [[1, 0, 0, 0], [0, 0, 0, 0]]


@pytest.mark.parametrize("tokens", [512, 1024, 2048])
def test_on_the_recorded_trace_it_beats_every_single_average(tokens: int) -> None:
    """Mean gap between the forecast's and the next window's shares, over 64 to 128 windows."""
    windows, capacity = trace(tokens), Capacity.of(5, 16)

    def error(forecasts: list[LoadLE]) -> float:
        pairs = zip(forecasts, windows[1:], strict=False)
        return float(np.mean([np.abs(f / f.sum(1)[:, None] - w / w.sum(1)[:, None]).sum(1).mean()
                              for f, w in pairs]))  # fmt: skip

    def averaged(newest: float) -> list[LoadLE]:
        out = [windows[0]]
        for load in windows[1:]:
            out.append((1 - newest) * out[-1] + newest * load)
        return out

    forecast, ours = Forecast.begin(windows[0]), [windows[0]]
    for load in windows[1:]:
        in_force = plan(ours[-1], capacity).placement
        forecast = forecast.after(load, 1.0, in_force)
        ours.append(forecast.shares_LE(steady=True))
    assert error(ours) < min(error(averaged(newest)) for newest in (0.3, 0.5, 0.7, 1.0))
