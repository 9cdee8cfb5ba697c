"""Experts leave ranks that are about to go: who goes, what goes first, what is sent there still."""

from __future__ import annotations

import numpy as np
import pytest

from moe_operator.evacuation import evacuate, leaving, stranded
from moe_placement.initial import InsufficientSlots
from moe_placement.placement import Placement
from moe_placement.walk.waves import Limits
from tests.support.group_views import decided, pod, serving_group, with_pods, worker

BLOCKS = np.asarray([[[0, 1, -1, -1], [2, 3, -1, -1], [4, 5, -1, -1]]] * 2, dtype=np.int32)


def walk(slots: np.ndarray, ranks: list[int], load=None, **limits) -> list[Placement]:
    """Waves until nothing is left to do."""
    waves = [Placement.even(slots)]
    while (step := evacuate(waves[-1], ranks, load, Limits(**limits))) is not None:
        assert step.wave is not None, "it never stands still"
        waves.append(step.wave)
        assert len(waves) < 30
    return waves[1:]


def test_only_serving_ranks_of_cordoned_nodes_go():
    members = decided(serving_group()).members
    assert leaving(members, {"node1"}) == (1,)
    assert leaving(members, {"node9"}) == ()
    draining = with_pods(serving_group(), pod(2, worker("u2", 2), deleting=True))
    assert leaving(decided(draining).members, {"node1", "node2"}) == (1,), "2 leaves by itself"


def test_where_nobody_would_stay_nobody_goes():
    members = decided(serving_group()).members
    assert leaving(members, {"node0", "node1", "node2"}) == ()


def test_experts_that_nobody_else_holds_arrive_elsewhere_and_then_the_rank_is_empty():
    waves = walk(BLOCKS, [1])
    assert stranded(BLOCKS, [1]) == 4
    assert stranded(waves[0].slots_LRS, [1]) == 0, "both experts of both layers in one wave"
    assert (waves[-1].slots_LRS[:, 1] == -1).all()
    for wave in waves:
        for layer in wave.slots_LRS:
            assert set(range(6)) <= set(layer.ravel().tolist())


def test_a_budget_takes_more_waves_and_stranded_experts_come_first():
    slots = BLOCKS.copy()
    slots[0, 0, 2] = 2  # expert 2 of layer 0 has a second copy
    waves = walk(slots, [1], max_moves=1)
    left = [stranded(wave.slots_LRS, [1]) for wave in waves]
    assert left[:3] == [2, 1, 0]


def test_nothing_is_sent_there_but_what_nobody_else_holds():
    waves = walk(BLOCKS, [1], max_moves=2)
    for wave in waves:
        for layer, slot in np.argwhere(wave.slots_LRS[:, 1] >= 0):
            expert = wave.slots_LRS[layer, 1, slot]
            alone = (wave.slots_LRS[layer] == expert).sum() == 1
            assert wave.fractions_LRS[layer, 1, slot] == float(alone)


def test_copies_that_stay_share_by_the_load_known_last():
    slots = np.asarray([[[0, 1, 2, -1], [0, 3, -1, -1], [0, 4, 5, -1]]], dtype=np.int32)
    load = np.asarray([[100.0, 10, 10, 10, 10, 10]])
    *_, last = walk(slots, [2], load)
    loads = [
        (np.where(row >= 0, load[0][row], 0) * share).sum()
        for row, share in zip(last.slots_LRS[0], last.fractions_LRS[0], strict=True)
    ]
    assert loads == pytest.approx([75.0, 75.0, 0.0])


def test_a_rank_that_holds_nothing_is_done():
    empty = BLOCKS.copy()
    empty[:, 1], empty[:, 0, 2:] = -1, [2, 3]
    assert evacuate(Placement.even(empty), [1], None, Limits()) is None


def test_too_little_room_is_told():
    tight = np.asarray([[[0, 1], [2, 3], [4, 5]]], dtype=np.int32)
    with pytest.raises(InsufficientSlots, match="cannot hold 6 experts"):
        evacuate(Placement.even(tight), [1], None, Limits())
