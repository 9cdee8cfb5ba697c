"""Copies asked for: `experts.minReplicas` and `maxReplicas` hold also where balance is not worth a
move, and without any load.

Each wave follows from what is in force: nothing has to be remembered. Pure. Neighbours: `next_wave`
asks, `regroup` begins a group with them, `moe_placement.walk.repair` finds the slots.

Shapes: L MoE layers, E logical experts, R ranks, S physical slots a rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from moe_api.plan import SlotsLRS
from moe_placement.copy_limits import CopyLimits
from moe_placement.placement import Placement, copies, received
from moe_placement.resplit import fitting, resplit
from moe_placement.score import LoadLE
from moe_placement.walk import waves
from moe_placement.walk.repair import whole
from moe_placement.walk.waves import Limits


@dataclass(frozen=True)
class Recount:
    wave: Placement | None
    """The next epoch; None when nothing can move now."""
    moves: int
    """Experts that ranks still have to receive."""


def counted(
    slots_LRS: SlotsLRS, limits: CopyLimits, serving_slots: int, load_LE: LoadLE | None = None
) -> SlotsLRS:
    """The placement with as many copies as asked for, or as many as the serving slots can hold;
    itself when it has them. Who stays keeps its slot."""
    num_layers, num_ranks, _ = slots_LRS.shape
    num_experts = int(slots_LRS.max()) + 1
    slots_R = np.full(num_ranks, serving_slots)
    reachable = limits.within_reach(num_experts, slots_R)
    count_LE = copies(slots_LRS, num_experts)
    wrong_LE = (count_LE < reachable.min_copies) | (count_LE > reachable.most(num_ranks))
    if not wrong_LE.any():
        return slots_LRS
    known_LE = fitting(load_LE, slots_LRS)
    if known_LE is None:
        known_LE = np.ones((num_layers, num_experts))
    return whole(known_LE, slots_LRS, slots_R, np.ones(num_ranks), reachable)


def recount(
    current: Placement,
    leaving: Sequence[int],
    limits: CopyLimits,
    serving_slots: int,
    load_LE: LoadLE | None,
    wave_limits: Limits,
) -> Recount | None:
    """The next step towards the number of copies asked for; None when every expert has it.

    Args:
        leaving: ranks that are about to go; their copies count for nothing.
        load_LE: known last; None = unknown.
    """
    slots_LRS = current.slots_LRS
    staying = [rank for rank in range(slots_LRS.shape[1]) if rank not in set(leaving)]
    here_LRS = slots_LRS[:, staying]
    if int(here_LRS.max()) < int(slots_LRS.max()):  # an evacuation is under way
        return None
    there_LRS = counted(here_LRS, limits, serving_slots, load_LE)
    if np.array_equal(there_LRS, here_LRS):
        return None
    target_LRS = np.full_like(slots_LRS, -1)
    target_LRS[:, staying] = there_LRS
    open_R = np.isin(np.arange(slots_LRS.shape[1]), staying)
    wave_LRS = waves.next_wave(slots_LRS, target_LRS, replace(wave_limits, open_R=open_R))
    wave = None if wave_LRS is None else resplit(wave_LRS, load_LE)
    return Recount(wave, received(slots_LRS, target_LRS))
