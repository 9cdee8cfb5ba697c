"""Rank loads as characters."""

from __future__ import annotations

import numpy as np
import pytest

from moe_placement.command import bars, tables


@pytest.mark.parametrize(
    ("value", "expected"),
    [(8.0, "████"), (4.0, "██"), (1.0, "▌"), (0.01, "▏"), (0.0, ""), (9.0, "████")],
)
def test_a_bar(value: float, expected: str) -> None:
    assert bars.bar(value, 8.0, 4) == expected


def test_a_bar_of_nothing() -> None:
    assert bars.bar(0.0, 0.0, 4) == ""


def test_a_strip_has_a_character_for_each_rank() -> None:
    values = np.array([8.0, 4.0, 0.0, np.nan, 1.0])
    assert bars.strip(values, 3) == ["█▄ ", "×▁"]


def test_ranks_are_joined_by_their_largest() -> None:
    joined, size = bars.joined(np.array([1.0, 5.0, 2.0, np.nan, np.nan]), 3)
    assert size == 2
    assert joined[:2].tolist() == [5.0, 2.0]
    assert np.isnan(joined[2])
    same, size = bars.joined(np.array([1.0, 2.0]), 2)
    assert size == 1
    assert same.tolist() == [1.0, 2.0]


def test_units() -> None:
    assert tables.size(44_040_192) == "44.0 MB"
    assert tables.size(12) == "12 B"
    assert tables.size(3.2e15) == "3200.0 TB"
    assert tables.percent(-1e-9) == "0.00 %"
    assert tables.seconds(0.0139) == "14 ms"
    assert tables.seconds(2.25) == "2.2 s"
