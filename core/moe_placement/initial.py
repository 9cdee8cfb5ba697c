"""The first placement of a group, made before any load is known: contiguous blocks of experts.

Neighbours: `membership` changes a placement when ranks come and go, `planner` when load is known.

Shapes: L MoE layers, E logical experts, R ranks, S physical slots a rank (serving + spare).
"""

from __future__ import annotations

import numpy as np

from moe_api.plan import SlotsLRS


class InsufficientSlots(ValueError):
    """Not every expert finds a slot. `uncovered` lists (layer, expert), lowest first."""

    def __init__(self, message: str, uncovered: list[tuple[int, int]]) -> None:
        super().__init__(message)
        self.uncovered = uncovered


def contiguous(num_layers: int, num_experts: int, num_ranks: int, slots_per_rank: int) -> SlotsLRS:
    """Rank r holds experts [r·E/R, (r+1)·E/R) in its lowest slots; all other slots stay free.

    Returns int32 [L, R, S] with S = `slots_per_rank`, −1 = free.

    Raises:
        InsufficientSlots: naming the slots that would be enough.
    """
    needed = -(-num_experts // num_ranks)
    if slots_per_rank < needed:
        room = slots_per_rank * num_ranks
        uncovered = [(0, expert) for expert in range(room, num_experts)]
        raise InsufficientSlots(
            f"{num_experts} experts need {needed} slots on each of {num_ranks} ranks, "
            f"there are {slots_per_rank}: raise experts.slotsPerRank to {needed} or more, "
            "or parallelism.expert",
            uncovered,
        )
    slots = np.full((num_layers, num_ranks, slots_per_rank), -1, dtype=np.int32)
    borders = [rank * num_experts // num_ranks for rank in range(num_ranks + 1)]
    for rank in range(num_ranks):
        block = np.arange(borders[rank], borders[rank + 1], dtype=np.int32)
        slots[:, rank, : len(block)] = block
    return slots
