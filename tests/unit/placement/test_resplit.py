from __future__ import annotations

import numpy as np

from moe_placement import score
from moe_placement.resplit import resplit

SLOTS = np.asarray([[[0, 1], [0, 2]]], dtype=np.int32)


def test_the_load_known_last_decides_the_split():
    load = np.asarray([[60.0, 40.0, 0.0]])
    placement = resplit(SLOTS, load)
    loads = score.rank_loads(placement.slots_LRS, placement.fractions_LRS, load)
    assert loads.tolist() == [[50.0, 50.0]]


def test_without_a_load_or_with_that_of_another_model_the_split_is_even():
    for load in (None, np.ones((2, 3)), np.ones((1, 4))):
        assert resplit(SLOTS, load).fractions_LRS.tolist() == [[[0.5, 1.0], [0.5, 1.0]]]


def test_a_layer_without_load_is_split_evenly():
    assert resplit(SLOTS, np.zeros((1, 3))).fractions_LRS.tolist() == [[[0.5, 1.0], [0.5, 1.0]]]
