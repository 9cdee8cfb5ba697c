"""Arrivals are drawn, bounded and reproducible."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_worker.bench.arrivals import ClosedLoop, OpenLoop, arrivals, poisson

RATES = st.floats(0.01, 1000.0)


@given(RATES, st.integers(0, 60), st.floats(0.001, 100.0), st.integers(0, 2**32))
def test_open_arrivals_ascend_within_both_bounds_and_repeat(
    rate: float, num_requests: int, duration: float, seed: int
) -> None:
    def drawn() -> list[float | None]:
        return list(arrivals(OpenLoop(rate, 4), num_requests, duration, random.Random(seed)))

    offsets = [offset for offset in drawn() if offset is not None]
    assert offsets == drawn()
    assert len(offsets) <= num_requests
    assert offsets == sorted(offsets)
    assert all(0 <= offset < duration for offset in offsets)
    if len(offsets) < num_requests:  # only the duration can have ended them
        following = itertools.islice(poisson(rate, random.Random(seed)), len(offsets), None)
        assert next(following) >= duration


@pytest.mark.parametrize("rate", [0.5, 3.0, 200.0])
def test_gaps_are_exponential(rate: float) -> None:
    offsets = list(itertools.islice(poisson(rate, random.Random(7)), 20_000))
    gaps = [later - earlier for earlier, later in itertools.pairwise([0.0, *offsets])]
    mean = sum(gaps) / len(gaps)
    variance = sum((gap - mean) ** 2 for gap in gaps) / len(gaps)
    assert mean * rate == pytest.approx(1.0, abs=0.03)
    assert variance**0.5 / mean == pytest.approx(1.0, abs=0.03)
    longer = sum(gap > 1 / rate for gap in gaps) / len(gaps)
    assert longer == pytest.approx(0.368, abs=0.01)  # e⁻¹


@given(st.integers(0, 100), st.integers(1, 64))
def test_users_of_a_closed_loop_have_no_times(num_requests: int, users: int) -> None:
    drawn = list(arrivals(ClosedLoop(users), num_requests, 1.0, random.Random(0)))
    assert drawn == [None] * num_requests
