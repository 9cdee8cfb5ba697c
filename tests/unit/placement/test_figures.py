"""Imbalance and gain: exact small cases by hand."""

from __future__ import annotations

import numpy as np

from moe_api.plan import even_fractions
from moe_placement import score


def test_a11_opposite_imbalances_do_not_cancel() -> None:
    slots = np.array([[[0], [1]], [[0], [1]]], dtype=np.int32)
    loads = score.rank_loads(slots, even_fractions(slots), np.array([[100.0, 0], [0, 100]]))
    found = score.imbalance(loads)
    assert found is not None
    assert found.per_layer == (2.0, 2.0)
    assert found.worst == 2.0  # balancedness 0.5 for each layer and for the deployment


def test_no_tokens_is_absent_not_zero() -> None:
    assert score.imbalance(np.zeros((2, 3))) is None
    found = score.imbalance(np.array([[0.0, 0.0], [3.0, 1.0]]))
    assert found is not None
    assert found.per_layer == (None, 1.5)
    assert found.mean == 1.5


def test_copies_share_an_experts_tokens_evenly() -> None:
    slots = np.array([[[0, -1], [0, 1]]], dtype=np.int32)
    loads = score.rank_loads(slots, even_fractions(slots), np.array([[100.0, 10.0]]))
    assert loads.tolist() == [[50.0, 60.0]]


def test_gain_is_the_part_of_the_slowest_ranks_work_that_is_saved() -> None:
    now, then = np.array([[8.0, 2.0], [6.0, 6.0]]), np.array([[5.0, 5.0], [6.0, 6.0]])
    assert score.gain(now, then) == (14 - 11) / 14
    assert score.gain(now * 0, then) == 0
