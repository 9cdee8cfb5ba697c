"""Evacuation: experts leave ranks that are about to go, in waves, while these ranks still serve.

A rank is about to go when its node is cordoned, which is what a drain does first. Experts that
nobody else holds go first, then nothing is sent there any more, and the eviction of its pod
interrupts nobody. Each wave follows from what is in force: nothing has to be remembered. Pure.
Neighbours: `rebalance` asks and announces, `disruption` holds evictions back meanwhile.

Shapes: L MoE layers, E logical experts, R ranks, S physical slots a rank.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np

from moe_api.plan import SlotsLRS
from moe_operator.members import MemberState, MemberView
from moe_placement.capacity import FlagsR
from moe_placement.placement import Placement, holders, received
from moe_placement.resplit import fitting, resplit
from moe_placement.score import LoadLE
from moe_placement.walk import membership, waves
from moe_placement.walk.waves import Limits


@dataclass(frozen=True)
class Evacuation:
    wave: Placement | None
    """The next epoch; None when nothing can move now."""
    moves: int
    """Experts that other ranks still have to receive."""


def leaving(members: Sequence[MemberView], cordoned: Collection[str]) -> tuple[int, ...]:
    """Ranks that are about to go; none when nobody would stay."""
    going = tuple(
        member.rank
        for member in members
        if member.state is MemberState.SERVING
        and member.pod is not None
        and member.pod.node in cordoned
    )
    return going if len(going) < len(members) else ()


def stranded(slots_LRS: SlotsLRS, ranks: Sequence[int]) -> int:
    """How many experts, over all layers, nobody but these ranks holds."""
    held_LRE = holders(slots_LRS, int(slots_LRS.max()) + 1)
    there_R = _flags(ranks, slots_LRS.shape[1])
    return int((held_LRE[:, there_R].any(axis=1) & ~held_LRE[:, ~there_R].any(axis=1)).sum())


def evacuate(
    current: Placement, ranks: Sequence[int], load_LE: LoadLE | None, limits: Limits
) -> Evacuation | None:
    """The next step of taking experts away from `ranks`; None when they hold nothing any more.

    Args:
        load_LE: known last, by which copies share tokens; None = unknown.
        limits: of a wave; its open ranks are set here.

    Raises:
        InsufficientSlots: the others cannot hold every expert.
    """
    slots_LRS = current.slots_LRS
    open_R = ~_flags(ranks, slots_LRS.shape[1])
    if not (slots_LRS[:, ~open_R] >= 0).any():
        return None
    target_LRS = membership.evacuate(
        slots_LRS,
        ranks,
        int(slots_LRS.max()) + 1,
        load_LE=fitting(load_LE, slots_LRS),
        max_moves=0,  # balance among those that stay is a matter of its own
    )
    wave_LRS = waves.next_wave(slots_LRS, target_LRS, replace(limits, open_R=open_R))
    wave = None if wave_LRS is None else _relieved(wave_LRS, open_R, load_LE)
    return Evacuation(wave, received(slots_LRS, target_LRS))


def _relieved(slots_LRS: SlotsLRS, open_R: FlagsR, load_LE: LoadLE | None) -> Placement:
    """Tokens go to a rank that is about to go only for what nobody else holds."""
    num_experts = int(slots_LRS.max()) + 1
    elsewhere_LE = np.asarray(holders(slots_LRS, num_experts)[:, open_R].any(axis=1))
    layers_L11 = np.arange(len(slots_LRS))[:, None, None]
    covered_LRS = elsewhere_LE[layers_L11, np.maximum(slots_LRS, 0)]
    used_LRS = np.where(covered_LRS & ~open_R[:, None], np.int32(-1), slots_LRS)
    return Placement(slots_LRS, resplit(used_LRS, load_LE).fractions_LRS)


def _flags(ranks: Sequence[int], num_ranks: int) -> FlagsR:
    flags_R = np.zeros(num_ranks, dtype=np.bool_)
    flags_R[list(ranks)] = True
    return flags_R
