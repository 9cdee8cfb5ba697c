"""Placements when ranks come and go: repair after a loss, evacuation before one, room for
newcomers.

Members that stay keep every expert in its slot and receive only what would otherwise be nowhere, or
what balance is worth. Neighbours: `initial` makes the first placement, `repair` covers experts,
`step_fractions` balances, `planner` does both for whoever knows the load.

Shapes: L MoE layers, E logical experts, R ranks, S physical slots a rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from moe_api.plan import SlotsLRS
from moe_placement.capacity import SlotsR, SpeedsR
from moe_placement.copy_limits import CopyLimits
from moe_placement.initial import InsufficientSlots
from moe_placement.placement import ExpertsL
from moe_placement.score import LoadLE
from moe_placement.step import step_fractions
from moe_placement.walk.repair import Repair

BALANCE = 0.05
"""An evacuation moves more than it must until ranks are within this of the bound."""


def repair(
    slots_LRS: SlotsLRS,
    survivors: Sequence[int],
    num_experts: int | ExpertsL,
    *,
    load_LE: LoadLE | None = None,
    min_copies: int = 1,
) -> SlotsLRS:
    """The survivors' placement, int32 [L, len(survivors), S], rows in the order given.

    Experts whose copies are all lost, the most loaded first, take free slots (spare ones too) or
    those of copies that their experts can do without: one transfer each, the fewest that cover
    every expert.

    Args:
        num_experts: of every layer, or of each.
        load_LE: absent = unknown, all experts count alike.
        min_copies: experts go below only where nothing else is left.

    Raises:
        InsufficientSlots: the survivors' slots cannot hold every expert; lists the uncovered ones.
    """
    return _covered(slots_LRS, list(survivors), num_experts, load_LE, min_copies).slots_LRS


def admit(
    slots_LRS: SlotsLRS,
    keep: Sequence[int | None],
    num_experts: int | ExpertsL,
    serving_slots: int,
    *,
    load_LE: LoadLE | None = None,
    min_copies: int = 1,
) -> SlotsLRS:
    """Placement of a new membership, int32 [L, len(keep), S].

    What nobody holds is covered as in `repair`. Then a newcomer gets copies, of the experts with
    fewest and from the ranks that hold most, until it holds E ÷ R of them, and ranks that hold more
    than `serving_slots` give up spare copies.

    Args:
        keep: per new rank the old rank whose slots it keeps, or None for a newcomer.
        num_experts, load_LE, min_copies: as in `repair`.

    Raises:
        InsufficientSlots: not every expert finds a slot.
    """
    work = _covered(slots_LRS, keep, num_experts, load_LE, min_copies)
    newcomers = [rank for rank, old in enumerate(keep) if old is None]
    experts_L = work.exists_LE.sum(axis=1)
    for rank in newcomers:
        work.fill(rank, np.minimum(experts_L // len(keep), work.num_slots))
    if newcomers:
        work.slots_R = np.full(len(keep), serving_slots)
        work.drop_above_slots(spare_only=True)
    return work.slots_LRS


def evacuate(
    slots_LRS: SlotsLRS,
    leaving: Sequence[int],
    num_experts: int,
    *,
    load_LE: LoadLE | None = None,
    slots_R: SlotsR | None = None,
    speeds_R: SpeedsR | None = None,
    limits: CopyLimits | None = None,
    max_moves: int | None = None,
) -> SlotsLRS:
    """Placement to walk to before some ranks leave: they hold nothing any more, int32 [L, R, S].

    What only they hold goes to others, one transfer each. Where the load is known, more copies
    follow until the others are balanced within `BALANCE`, as long as there are moves.

    Args:
        slots_R, speeds_R: of all ranks; absent = all S slots, all alike.
        max_moves: beyond those that empty the ranks; None = as many as balance takes.

    Raises:
        InsufficientSlots: the others cannot hold every expert.
    """
    num_ranks = slots_LRS.shape[1]
    stays_R = np.ones(num_ranks, dtype=np.bool_)
    stays_R[list(leaving)] = False
    staying = np.flatnonzero(stays_R)
    all_slots_R = np.full(num_ranks, slots_LRS.shape[2]) if slots_R is None else slots_R
    ranks = (all_slots_R[staying], (np.ones(num_ranks) if speeds_R is None else speeds_R)[staying])
    limits = limits or CopyLimits()
    load = np.ones((len(slots_LRS), num_experts)) if load_LE is None else load_LE
    work = Repair(load, slots_LRS[:, staying], *ranks, limits)
    _cover(work)
    covered_LRS = work.slots_LRS
    if load_LE is not None:
        covered_LRS, _ = step_fractions.improve(
            load_LE, covered_LRS, *ranks, limits, BALANCE, max_moves
        )
    target_LRS = np.full_like(slots_LRS, -1)
    target_LRS[:, staying] = covered_LRS
    return target_LRS


def survives_rank_loss(slots_LRS: SlotsLRS, num_experts: int | ExpertsL) -> bool:
    """Whether, whichever single rank is lost, the others' slots could still hold every expert."""
    num_ranks, num_slots = slots_LRS.shape[1:]
    return bool(num_ranks > 1 and (num_ranks - 1) * num_slots >= np.max(num_experts))


def _covered(
    slots_LRS: SlotsLRS,
    keep: Sequence[int | None],
    num_experts: int | ExpertsL,
    load_LE: LoadLE | None,
    min_copies: int,
) -> Repair:
    """The old ranks' slots and the newcomers' empty ones, every expert covered."""
    num_layers, _, num_slots = slots_LRS.shape
    kept_LRS = np.full((num_layers, len(keep), num_slots), -1, dtype=np.int32)
    for rank, old in enumerate(keep):
        if old is not None:
            kept_LRS[:, rank] = slots_LRS[:, old]
    experts_L = np.broadcast_to(np.asarray(num_experts), num_layers)
    exists_LE = np.arange(int(experts_L.max())) < experts_L[:, None]
    work = Repair(
        np.ones(exists_LE.shape) if load_LE is None else load_LE,
        kept_LRS,
        np.full(len(keep), num_slots),
        np.ones(len(keep)),
        CopyLimits(min_copies),
        exists_LE,
    )
    _cover(work)
    return work


def _cover(work: Repair) -> None:
    uncovered = work.cover()
    if uncovered:
        raise InsufficientSlots(
            f"{work.num_ranks} ranks × {work.num_slots} slots cannot hold {work.num_experts} "
            f"experts: {len(uncovered)} (layer, expert) pairs have no slot, first {uncovered[:3]}",
            uncovered,
        )
