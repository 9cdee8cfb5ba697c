from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from moe_placement.initial import contiguous
from moe_placement.walk.waves import Limits, next_wave
from moe_worker.engine.wave import conflict


def test_a_wave_fills_free_slots_and_gives_others_up() -> None:
    current = np.asarray([[[0, 1, -1], [2, -1, -1]]], dtype=np.int32)
    wave = np.asarray([[[-1, 1, 2], [2, 0, -1]]], dtype=np.int32)
    assert conflict(current, wave) is None


def test_a_wave_into_a_slot_in_use_is_named() -> None:
    current = np.asarray([[[0, 1, -1], [2, -1, -1]]], dtype=np.int32)
    wave = np.asarray([[[0, 2, -1], [2, 1, -1]]], dtype=np.int32)
    assert "layer 0 rank 0 slot 1 holds expert 1, the wave wants 2" in (
        conflict(current, wave) or ""
    )


def test_another_shape_is_named() -> None:
    current = np.zeros((1, 2, 3), dtype=np.int32)
    assert "[1, 2, 4]" in (conflict(current, np.zeros((1, 2, 4), dtype=np.int32)) or "")


@given(st.integers(0, 10_000))
def test_the_operators_waves_never_conflict(seed: int) -> None:
    rng = np.random.default_rng(seed)
    current = contiguous(2, 8, 3, 5)
    target = np.full_like(current, -1)
    for layer in range(2):
        for place, expert in enumerate([*rng.permutation(8), *rng.integers(0, 8, 4)]):
            target[layer, place % 3, place // 3] = expert
    wave = next_wave(current, target, Limits(max_moves=5))
    assert wave is None or conflict(current, wave) is None
