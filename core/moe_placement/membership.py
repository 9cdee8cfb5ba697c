"""Placements when ranks come and go: repair after a loss, room for newcomers, spare slots restored.

Neighbours: `initial` makes the first placement, `greedy` balances later. Members that stay keep
every expert in its slot, so they receive only what would otherwise be nowhere.

Shapes: L MoE layers, E logical experts, R ranks, S physical slots a rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from moe_api.plan import SlotsLRS
from moe_placement.initial import InsufficientSlots


def repair(slots_LRS: SlotsLRS, survivors: Sequence[int], num_experts: int) -> SlotsLRS:
    """The survivors' placement, int32 [L, len(survivors), S], rows in the order given.

    Experts whose copies are all lost go into free slots (spare ones too), the emptiest rank first,
    then into slots of redundant copies: the fewest transfers that cover every expert.

    Raises:
        InsufficientSlots: the survivors' slots cannot hold every expert; lists the uncovered ones.
    """
    return admit(slots_LRS, list(survivors), num_experts, slots_LRS.shape[2])


def admit(
    slots_LRS: SlotsLRS, keep: Sequence[int | None], num_experts: int, serving_slots: int
) -> SlotsLRS:
    """Placement of a new membership, int32 [L, len(keep), S].

    Args:
        keep: per new rank the old rank whose slots it keeps, or None for a newcomer.
        serving_slots: where newcomers relieve a rank that holds more than this, its surplus is
        dropped.

    A newcomer gets first what nobody holds, then copies from the ranks that hold most until it
    holds E ÷ R experts, and those ranks give up copies beyond `serving_slots`.

    Raises:
        InsufficientSlots: not every expert finds a slot.
    """
    num_layers, _, num_slots = slots_LRS.shape
    out = np.full((num_layers, len(keep), num_slots), -1, dtype=np.int32)
    for rank, old in enumerate(keep):
        if old is not None:
            out[:, rank] = slots_LRS[:, old]
    newcomers = [rank for rank, old in enumerate(keep) if old is None]
    uncovered: list[tuple[int, int]] = []
    for layer in range(num_layers):
        uncovered += [(layer, e) for e in _cover(out[layer], num_experts, newcomers)]
        for rank in newcomers:
            _share(out[layer], rank, num_experts // len(keep))
        if newcomers:
            _shed(out[layer], serving_slots)
    if uncovered:
        raise InsufficientSlots(
            f"{len(keep)} ranks × {num_slots} slots cannot hold {num_experts} experts: "
            f"{len(uncovered)} (layer, expert) pairs have no slot, first {uncovered[:3]}",
            uncovered,
        )
    return out


def survives_rank_loss(slots_LRS: SlotsLRS, num_experts: int) -> bool:
    """Whether, whichever single rank is lost, the others' slots could still hold every expert."""
    num_ranks, num_slots = slots_LRS.shape[1:]
    return bool(num_ranks > 1 and (num_ranks - 1) * num_slots >= num_experts)


def _cover(slots_RS: npt.NDArray[np.int32], num_experts: int, newcomers: list[int]) -> list[int]:
    """Give every expert without a holder a free slot, or that of a redundant copy; returns those
    that found none."""
    left = []
    for expert in sorted(set(range(num_experts)) - set(slots_RS.ravel().tolist())):
        filled_R = (slots_RS >= 0).sum(axis=1)
        open_ranks = [r for r in range(len(slots_RS)) if filled_R[r] < slots_RS.shape[1]]
        if not open_ranks:
            rank_of_copy = _give_up_copy(slots_RS)
            if rank_of_copy is None:
                left.append(expert)
                continue
            open_ranks = [rank_of_copy]
        rank = min(open_ranks, key=lambda r: (r not in newcomers, filled_R[r], r))
        slots_RS[rank, int(np.flatnonzero(slots_RS[rank] < 0)[0])] = expert
    return left


def _give_up_copy(slots_RS: npt.NDArray[np.int32]) -> int | None:
    """Free the last slot of the most copied expert; its rank, None when none has a second copy."""
    copies_E = np.bincount(slots_RS[slots_RS >= 0])
    if not len(copies_E) or copies_E.max() < 2:
        return None
    rank, slot = (int(x) for x in np.argwhere(slots_RS == int(copies_E.argmax()))[-1])
    slots_RS[rank, slot] = -1
    return rank


def _share(slots_RS: npt.NDArray[np.int32], rank: int, wanted: int) -> None:
    """Copy experts to `rank` from the ranks that hold most, scarce experts first, until it has
    `wanted`."""
    while (slots_RS[rank] >= 0).sum() < min(wanted, slots_RS.shape[1]):
        copies = np.bincount(slots_RS[slots_RS >= 0])
        filled_R = (slots_RS >= 0).sum(axis=1)
        own = set(slots_RS[rank].tolist())
        candidates = [
            (int(copies[expert]), -int(filled_R[other]), -int(expert), other)
            for other in range(len(slots_RS))
            for expert in slots_RS[other].tolist()
            if expert >= 0 and expert not in own
        ]
        if not candidates:
            return
        expert = -min(candidates)[2]
        slots_RS[rank, int(np.flatnonzero(slots_RS[rank] < 0)[0])] = expert


def _shed(slots_RS: npt.NDArray[np.int32], serving_slots: int) -> None:
    """Ranks over `serving_slots` give up copies that exist elsewhere, the highest slot first."""
    for rank in range(len(slots_RS)):
        for slot in range(slots_RS.shape[1] - 1, -1, -1):
            expert = slots_RS[rank, slot]
            if (slots_RS[rank] >= 0).sum() <= serving_slots:
                break
            if expert >= 0 and (slots_RS == expert).sum() > 1:
                slots_RS[rank, slot] = -1
