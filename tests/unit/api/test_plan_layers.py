"""Layers of a plan on the wire: slots and fractions there and back, exact sums, honest refusals."""

from __future__ import annotations

import base64

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy

from moe_api.plan import (
    FRACTION_UNITS,
    LayerPlacement,
    PlanError,
    decode_fractions,
    decode_slots,
    encode_layers,
    even_fractions,
    fraction_units,
)

SLOTS = np.asarray([[[0, 1, -1], [1, 0, -1], [0, -1, -1]]], dtype=np.int32)
PLACEMENTS = st.tuples(st.integers(1, 3), st.integers(1, 5), st.integers(1, 4)).flatmap(
    lambda shape: st_numpy.arrays(np.int32, shape, elements=st.integers(-1, 5))
)


@settings(max_examples=200)
@given(slots=PLACEMENTS, data=st.data())
def test_units_sum_exactly_for_every_expert_and_are_near_what_was_given(slots, data):
    raw = data.draw(st_numpy.arrays(np.float64, slots.shape, elements=st.floats(0, 1)))
    units = fraction_units(slots, raw)
    assert (units[slots < 0] == 0).all()
    for layer in range(len(slots)):
        for expert in set(slots[layer][slots[layer] >= 0].tolist()):
            mine = slots[layer] == expert
            assert units[layer][mine].sum() == FRACTION_UNITS
            if raw[layer][mine].sum() > 1e-9:
                exact = raw[layer][mine] / raw[layer][mine].sum() * FRACTION_UNITS
                assert np.abs(units[layer][mine] - exact).max() < 1 + 1e-6


@settings(max_examples=100)
@given(slots=PLACEMENTS, seed=st.integers(0, 1000))
def test_what_was_written_once_is_written_again_the_same(slots, seed):
    shares = fraction_units(slots, np.random.default_rng(seed).random(slots.shape))
    layers = encode_layers(slots, shares / FRACTION_UNITS)
    again = decode_fractions(layers, decode_slots(layers, slots.shape[1]))
    assert np.array_equal(fraction_units(slots, again), shares)
    assert encode_layers(slots, again) == layers


def test_an_even_split_is_left_out():
    layers = encode_layers(SLOTS, even_fractions(SLOTS))
    assert layers == encode_layers(SLOTS)
    assert layers[0].fractions is None
    assert decode_fractions(layers, SLOTS)[0, :, 0].tolist() == [1 / 3, 1 / 2, 1 / 3]


def test_one_uneven_layer_alone_carries_fractions():
    slots = np.concatenate([SLOTS, SLOTS])
    fractions = even_fractions(slots)
    fractions[1, 0, 1], fractions[1, 1, 0] = 0.9, 0.1
    first, second = encode_layers(slots, fractions)
    assert first.fractions is None
    assert second.fractions is not None
    assert decode_fractions([first, second], slots)[1, 0, 1] == pytest.approx(0.9, abs=1e-5)


def test_a_copy_may_serve_nothing():
    fractions = even_fractions(SLOTS)
    fractions[0, 0, 1], fractions[0, 1, 0] = 1.0, 0.0
    [layer] = encode_layers(SLOTS, fractions)
    assert decode_fractions([layer], SLOTS)[0, 1, 0] == 0.0


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("AAA", "layer 7: fractions are not base64"),
        (base64.b64encode(b"abc").decode(), "layer 7: fractions are not base64 of uint16"),
        (base64.b64encode(b"ab").decode(), "layer 7: 1 fractions for 9 slots"),
    ],
)
def test_fractions_that_do_not_fit_are_refused_by_layer(text, told):
    layer = LayerPlacement(layer=7, slots="0,1,-1;1,0,-1;0,-1,-1", fractions=text)
    with pytest.raises(PlanError, match=told):
        decode_fractions([layer], SLOTS)


def test_f02_numbers_of_the_largest_plan():
    """EP 32, 61 layers, 256 experts in 288 serving and 32 spare slots, two placements beside each
    other: a third of what may be stored."""
    rng = np.random.default_rng(0)
    slots = np.full((61, 32, 10), -1, dtype=np.int32)
    for layer in slots:
        copies = np.concatenate([np.arange(256), rng.integers(0, 256, 32)])
        layer[:, :9] = rng.permutation(copies).reshape(32, 9)
    layers = encode_layers(slots, rng.random(slots.shape) * (slots >= 0))
    size = sum(len(layer.model_dump_json(by_alias=True)) for layer in layers)
    assert 110_000 < size < 130_000
