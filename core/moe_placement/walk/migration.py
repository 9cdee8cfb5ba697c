"""From one placement to another: the moves between two epochs, and who gives the weights.

Every rank derives the same moves from the two plans, so nothing is negotiated. Neighbours: `waves`
makes the placements between two that are far apart, `sources` chooses among holders.

Shapes: L MoE layers, R ranks, S physical slots a rank, N moves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moe_api.plan import SlotsLRS
from moe_placement.capacity import FlagsR
from moe_placement.walk import sources

IndexN = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Move:
    """One expert's weights to bring into a slot. `sources` are its holders under the plan in force,
    best first, as (rank, slot); empty = only the checkpoint has it."""

    layer: int
    expert: int
    rank: int
    slot: int
    sources: tuple[tuple[int, int], ...]


def diff(
    old_LRS: SlotsLRS,
    new_LRS: SlotsLRS,
    domains: Sequence[Sequence[str]] | None = None,
    *,
    rank: int | None = None,
    live_R: FlagsR | None = None,
) -> list[Move]:
    """Moves that make `new` out of `old`: wherever it names an expert that the slot did not hold.

    Args:
        domains: per rank its topology domains, broad to narrow.
        rank: only the moves of this receiver; the sources are those it has among all.
        live_R: ranks that can give; absent = all.

    Returns moves ordered by layer, rank, slot. The first source is the rank itself where it holds
    the expert in another slot, else the one of the nearest holders that gives least in this layer.
    The others follow by nearness, equally near ones rotated by the receiver's rank.
    """
    if old_LRS.shape[:2] != new_LRS.shape[:2]:
        raise ValueError(
            f"placements of {old_LRS.shape[:2]} and {new_LRS.shape[:2]} layers and ranks: "
            "moves lead from one placement of a membership to another"
        )
    arrives_LRS = new_LRS >= 0
    shared = min(old_LRS.shape[2], new_LRS.shape[2])
    arrives_LRS[:, :, :shared] &= new_LRS[:, :, :shared] != old_LRS[:, :, :shared]
    layer_N, rank_N, slot_N = np.nonzero(arrives_LRS)
    expert_N = new_LRS[layer_N, rank_N, slot_N].astype(np.int64)
    nearness_RR = None if domains is None else sources.shared_levels(domains)
    offers = sources.offers(old_LRS, layer_N, rank_N, expert_N, nearness_RR, live_R)
    first_N = offers.choose()
    wanted_N = np.arange(len(layer_N)) if rank is None else np.flatnonzero(rank_N == rank)
    return [
        Move(
            int(layer_N[move]),
            int(expert_N[move]),
            int(rank_N[move]),
            int(slot_N[move]),
            offers.ordered(move, int(first_N[move])),
        )
        for move in wanted_N.tolist()
    ]


def reached(current_LRS: SlotsLRS, target_LRS: SlotsLRS) -> bool:
    """True when every rank holds exactly what the target wants, in whichever slots."""
    width = max(current_LRS.shape[2], target_LRS.shape[2])
    return bool(np.array_equal(_sorted(current_LRS, width), _sorted(target_LRS, width)))


def _sorted(slots_LRS: SlotsLRS, width: int) -> SlotsLRS:
    missing = ((0, 0), (0, 0), (0, width - slots_LRS.shape[2]))
    return np.sort(np.pad(slots_LRS, missing, constant_values=-1), axis=2)
