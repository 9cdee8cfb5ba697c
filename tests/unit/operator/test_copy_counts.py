"""As many copies as asked for: without load, within the slots, in waves."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from moe_operator.copy_counts import counted, recount
from moe_placement.copy_limits import CopyLimits
from moe_placement.placement import Placement, copies
from moe_placement.walk.waves import Limits
from tests.support.group_views import decided, pod, rules, serving_group, waiting

BLOCKS = np.asarray([[[0, 1, -1, -1, -1], [2, 3, -1, -1, -1], [4, 5, -1, -1, -1]]] * 2, np.int32)
"""Four serving slots and a spare one."""


def walk(slots: np.ndarray, limits: CopyLimits, leaving=(), **wave_limits) -> list[Placement]:
    found = [Placement.even(slots)]
    while (step := recount(found[-1], leaving, limits, 4, None, Limits(**wave_limits))) is not None:
        assert step.wave is not None, "it never stands still"
        found.append(step.wave)
        assert len(found) < 30
    return found[1:]


def test_what_has_enough_copies_stays_as_it_is():
    assert counted(BLOCKS, CopyLimits(1), 4) is BLOCKS
    assert walk(BLOCKS, CopyLimits(1)) == []


def test_each_expert_gets_its_second_copy_in_serving_slots():
    slots = counted(BLOCKS, CopyLimits(2), 4)
    assert (copies(slots, 6) == 2).all()
    assert ((slots >= 0).sum(axis=2) == 4).all(), "the spare slot stays free"
    roomy = counted(np.pad(BLOCKS, ((0, 0), (0, 0), (0, 2)), constant_values=-1), CopyLimits(2), 6)
    assert np.array_equal(roomy[:, :, :2], BLOCKS[:, :, :2]), "who is there keeps its slot"


def test_more_than_the_slots_can_hold_is_as_many_as_they_can():
    assert (copies(counted(BLOCKS, CopyLimits(3), 4), 6) == 2).all()


def test_waves_lead_there_with_every_expert_covered():
    waves = walk(BLOCKS, CopyLimits(2), max_moves=3)
    assert len(waves) >= 4
    assert (copies(waves[-1].slots_LRS, 6) == 2).all()
    assert all((copies(wave.slots_LRS, 6) >= 1).all() for wave in waves)
    assert waves[-1].fractions_LRS[0, 0, :2].tolist() == [0.5, 0.5]


def test_too_many_copies_are_given_up():
    slots = BLOCKS.copy()
    slots[0, 1, 2] = slots[0, 2, 2] = 0
    [wave] = walk(slots, CopyLimits(1, 2))
    assert copies(wave.slots_LRS, 6)[0].tolist() == [2, 1, 1, 1, 1, 1]


def test_copies_on_a_rank_that_goes_count_for_nothing():
    slots = counted(BLOCKS, CopyLimits(2), 4)
    without = slots.copy()
    without[:, 2] = -1
    assert walk(without, CopyLimits(2), leaving=[2]) == [], "two ranks have room for one each"
    assert recount(Placement.even(slots), [2], CopyLimits(2), 4, None, Limits()) is None


@pytest.mark.parametrize(("asked", "found"), [(1, 1), (2, 2)])
def test_a_group_forms_with_them(asked, found):
    pods = tuple(pod(m, waiting(f"u{m}", m)) for m in range(3))
    view = replace(serving_group(), pods=pods, stored=None)
    plan = decided(view, rules(slots_per_rank=5, min_copies=asked)).plan
    assert (copies(plan.slots(), 6) == found).all()
