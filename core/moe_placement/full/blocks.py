"""Blocks: `carry` in two levels, so that 1,024 ranks take 64 steps instead of 1,024.

Ranks with k_r slots can, together, take 1 + Σ (k_r − 1) experts and share them out as they should;
so blocks of ranks are filled like ranks with that many slots, then the ranks of all blocks at
once. A block shares an expert with the next one only, as do its ranks. Neighbours: `carry` (why
it works, and when), `groups` (parts that share nothing), `full_fractions` (the recipe).

Shapes: L layers, E experts, R ranks, S slots a rank, B blocks (parts), Q ranks a block (most), N =
L · B, K experts a part (most).
"""

from __future__ import annotations

from math import isqrt

import numpy as np

from moe_placement.full import carry
from moe_placement.full.carry import Filled, Floats, Ints


def fill(load_LE: Floats, slots_R: Ints, shares_R: Floats, *, hasty_first: bool = False) -> Filled:
    """Fills the ranks of each layer.

    Args:
        slots_R: 1 or more.
        shares_R: what each rank should serve, in any unit.
        hasty_first: begin with the ranks that have most to do for their slots; else with those
            that have least, which then get many experts with little load. Matters where ranks
            differ.
    """
    num_layers, num_experts = load_LE.shape
    rank_BQ = _alike(slots_R, shares_R, isqrt(len(slots_R)), hasty_first)
    exists_BQ = rank_BQ >= 0
    room_B = 1 + np.where(exists_BQ, slots_R[rank_BQ] - 1, 0).sum(axis=1)
    share_B = np.where(exists_BQ, shares_R[rank_BQ], 0.0).sum(axis=1)
    blocks = carry.fill(
        load_LE,
        np.full(num_layers, num_experts),
        np.tile(room_B, (num_layers, 1)),
        np.tile(share_B, (num_layers, 1)),
    )
    return fill_parts(blocks, np.tile(rank_BQ, (num_layers, 1, 1)), slots_R, shares_R)


def fill_parts(parts: Filled, rank_LBQ: Ints, slots_R: Ints, shares_R: Floats) -> Filled:
    """Shares what each part of the ranks got among its ranks, all parts of all layers at once.

    Args:
        parts: its "ranks" are the parts: experts [L, B, K] and their tokens.
        rank_LBQ: the ranks of each part, in the order to fill them; −1 = none (last).
    """
    num_layers, num_parts, room = parts.slots_NRS.shape
    num_problems = num_layers * num_parts
    exists_NQ = (rank_LBQ >= 0).reshape(num_problems, -1)
    rank_NQ = rank_LBQ.reshape(num_problems, -1)
    expert_NE = parts.slots_NRS.reshape(num_problems, room)
    inner = carry.fill(
        parts.tokens_NRS.reshape(num_problems, room),
        (expert_NE >= 0).sum(axis=1),
        np.where(exists_NQ, slots_R[rank_NQ], 0),
        np.where(exists_NQ, shares_R[rank_NQ], 0.0),
    )
    problems = np.arange(num_problems)[:, None, None]
    slots_NQS = np.where(inner.slots_NRS >= 0, expert_NE[problems, inner.slots_NRS], -1)

    num_slots = int(slots_R.max())
    slots_LRS = np.full((num_layers, len(slots_R), num_slots), -1, dtype=np.int32)
    tokens_LRS = np.zeros(slots_LRS.shape)
    at = (np.nonzero(exists_NQ)[0] // num_parts, rank_NQ[exists_NQ])
    slots_LRS[at] = slots_NQS[exists_NQ]
    tokens_LRS[at] = inner.tokens_NRS[exists_NQ]
    whole_L = parts.whole_N & inner.whole_N.reshape(num_layers, num_parts).all(axis=1)
    return Filled(slots_LRS, tokens_LRS, whole_L)


def _alike(slots_R: Ints, shares_R: Floats, most: int, hasty_first: bool) -> Ints:
    """Ranks of each block, int64 [B, Q], −1 = none: at most `most`, and all alike, so that sharing
    out inside a block always works."""
    haste_R = shares_R / np.maximum(slots_R - 1, 0.5)
    order = np.argsort(-haste_R if hasty_first else haste_R, kind="stable").tolist()
    blocks: list[list[int]] = []
    for rank in order:
        if (
            not blocks
            or len(blocks[-1]) == most
            or slots_R[rank] != slots_R[blocks[-1][0]]
            or shares_R[rank] != shares_R[blocks[-1][0]]
        ):
            blocks.append([])
        blocks[-1].append(rank)
    out_BQ = np.full((len(blocks), max(len(ranks) for ranks in blocks)), -1, dtype=np.int64)
    for block, ranks in enumerate(blocks):
        out_BQ[block, : len(ranks)] = ranks
    return out_BQ
