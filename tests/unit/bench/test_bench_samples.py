"""Percentiles of what is kept are those of what was measured."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_worker.bench.samples import Distribution, Samples

VALUES = st.lists(st.floats(0, 1e6), min_size=1, max_size=60)


def found(values: list[float], max_kept: int = 1000) -> Distribution:
    samples = Samples(random.Random(0), max_kept)
    samples.add(values)
    distribution = samples.distribution()
    assert distribution is not None
    return distribution


@given(VALUES)
def test_percentiles_are_ordered_and_equal_those_of_all_values(values: list[float]) -> None:
    of = found(values)
    assert (of.count, of.max) == (len(values), max(values))
    assert of.mean == pytest.approx(np.mean(values))
    expected = np.percentile(values, [50, 90, 99], method="linear")
    assert [of.p50, of.p90, of.p99] == pytest.approx(expected)
    assert min(values) <= of.p50 <= of.p90 <= of.p99 <= of.max


@given(VALUES, st.randoms(use_true_random=False))
def test_order_does_not_matter(values: list[float], shuffler: random.Random) -> None:
    shuffled = list(values)
    shuffler.shuffle(shuffled)
    before, after = found(values), found(shuffled)
    assert (before.p50, before.p90, before.p99) == (after.p50, after.p90, after.p99)


@given(st.lists(st.floats(0, 10), min_size=1, max_size=200), st.integers(1, 20))
def test_memory_is_bounded_and_sums_stay_exact(values: list[float], max_kept: int) -> None:
    samples = Samples(random.Random(1), max_kept)
    samples.add(values)
    assert samples.num_kept == min(len(values), max_kept)
    of = found(values, max_kept)
    assert (of.count, of.max) == (len(values), max(values))
    assert of.mean == pytest.approx(sum(values) / len(values))
    assert of.p99 <= of.max


def test_a_sample_of_many_has_their_percentiles() -> None:
    values = [index / 100_000 for index in range(100_000)]  # ascending: the worst order
    of = found(values, 10_000)
    assert of.p50 == pytest.approx(0.50, abs=0.02)
    assert of.p90 == pytest.approx(0.90, abs=0.01)
    assert of.p99 == pytest.approx(0.99, abs=0.004)


def test_no_values_have_no_percentiles() -> None:
    assert Samples(random.Random(0)).distribution() is None
