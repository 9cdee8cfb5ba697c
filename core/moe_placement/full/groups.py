"""Groups: parts of the ranks that share no expert, for when slots are too few to link all ranks.

With room for E experts and F more copies, R ranks fall into R − F groups or more. A group of ranks
with k_r slots each takes 1 + Σ (k_r − 1) experts and shares them out as it should (`carry`), so
what is left is to pack experts into groups of equal load per speed: most loaded first, then
exchanges. F = 0 is plain bin packing, a group for each rank; F = R − 1 a single group, exact.
Neighbours: `blocks` (fills the ranks of a group), `full_fractions` (the recipe).

Shapes: L layers, E experts, R ranks, S slots a rank, G groups, Q ranks a group (most), K experts
a group (most).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from moe_placement.full import blocks
from moe_placement.full.carry import Filled, Floats, Ints

MAX_EXCHANGES = 2000
MAX_PAIRS = 1_000_000
"""Exchanges to look at in one step: bounds the memory."""
GAIN = 1e-9
"""Part of the largest load that an exchange must win."""
GOAL = 1e-6
"""Exchanges end where the largest load is this close to the bound."""


def fill(load_LE: Floats, slots_R: Ints, speeds_R: Floats, bound_L: Floats, links: int) -> Filled:
    """Fills the ranks of each layer.

    Args:
        slots_R: 1 or more.
        bound_L: a largest load ÷ speed that would do.
        links: copies to link ranks with, beside one of each expert; there is room for them, and
            they are fewer than ranks.
    """
    num_ranks = len(slots_R)
    size_LG = _sizes(load_LE, num_ranks, links, bound_L / speeds_R.mean())
    rank_LGQ = _seat(size_LG, np.argsort(-(slots_R * num_ranks) - speeds_R, kind="stable"))
    exists_LGQ = rank_LGQ >= 0
    room_LG = np.where(exists_LGQ, slots_R[rank_LGQ] - 1, 0).sum(axis=2) + 1
    speed_LG = np.where(exists_LGQ, speeds_R[rank_LGQ], 0.0).sum(axis=2)
    group_LE = pack(load_LE, room_LG, speed_LG, bound_L)
    return blocks.fill_parts(_members(load_LE, group_LE, room_LG), rank_LGQ, slots_R, speeds_R)


def pack(load_LE: Floats, room_LG: Ints, speed_LG: Floats, bound_L: Floats) -> Ints:
    """Group of each expert, int64 [L, E], so that the largest load ÷ speed is small.

    Args:
        room_LG: experts a group can take; together at least E.
        bound_L: a largest load ÷ speed that would do.
    """
    group_LE = _most_loaded_first(load_LE, room_LG, speed_LG)
    pairs = int(room_LG.max()) * (load_LE.shape[1] + room_LG.shape[1])
    step = max(1, MAX_PAIRS // pairs)
    for first in range(0, len(load_LE), step):
        at = slice(first, first + step)
        group_LE[at] = _exchange(
            load_LE[at], group_LE[at], room_LG[at], speed_LG[at], bound_L[at] * (1 + GOAL)
        )
    return group_LE


def _sizes(load_LE: Floats, num_ranks: int, links: int, per_rank_L: Floats) -> Ints:
    """Ranks of each group, int64 [L, G]: enough for its share of the most loaded experts, one
    each, else alike."""
    num_groups = num_ranks - links
    heavy_LG = np.zeros((len(load_LE), num_groups))
    most_loaded = -np.sort(-load_LE, axis=1)[:, :num_groups]
    heavy_LG[:, : most_loaded.shape[1]] = most_loaded
    need_LG = np.maximum(np.ceil(heavy_LG / per_rank_L[:, None] * (1 - 1e-9)), 1).astype(np.int64)
    # Heavy experts get what they need while it lasts; the rest is dealt to the smallest groups.
    extra_LG = np.minimum(np.cumsum(need_LG - 1, axis=1), links)
    size_LG = 1 + np.diff(extra_LG, axis=1, prepend=0)
    for _ in range(links):
        layers = np.flatnonzero(size_LG.sum(axis=1) < num_ranks)
        if not len(layers):
            break
        size_LG[layers, size_LG[layers].argmin(axis=1)] += 1
    return size_LG


def _seat(size_LG: Ints, order_R: Ints) -> Ints:
    """Ranks of each group, int64 [L, G, Q], −1 = none: dealt in the order given, one a group and
    round."""
    num_layers = len(size_LG)
    width = int(size_LG.max())
    seat_LQG = np.arange(width)[None, :, None] < size_LG[:, None, :]
    rank_LQG = np.full(seat_LQG.shape, -1, dtype=np.int64)
    rank_LQG[seat_LQG] = np.tile(order_R, num_layers)
    return rank_LQG.transpose(0, 2, 1)


def _most_loaded_first(load_LE: Floats, room_LG: Ints, speed_LG: Floats) -> Ints:
    num_layers, num_experts = load_LE.shape
    layers = np.arange(num_layers)
    order_LE = np.argsort(-load_LE, axis=1, kind="stable")
    group_LE = np.empty((num_layers, num_experts), dtype=np.int64)
    free_LG, sum_LG = room_LG.copy(), np.zeros(room_LG.shape)
    for nth in range(num_experts):
        expert_L = order_LE[:, nth]
        load_L = load_LE[layers, expert_L]
        level_LG = np.where(free_LG > 0, (sum_LG + load_L[:, None]) / speed_LG, np.inf)
        group_L = level_LG.argmin(axis=1)
        group_LE[layers, expert_L] = group_L
        sum_LG[layers, group_L] += load_L
        free_LG[layers, group_L] -= 1
    return group_LE


def _exchange(
    load_LE: Floats, group_LE: Ints, room_LG: Ints, speed_LG: Floats, goal_L: Floats
) -> Ints:
    """Exchanges an expert of the fullest group for a lighter one, or a free place, elsewhere, as
    long as that lowers the larger of the two groups' levels: always the best such exchange."""
    group_LE = group_LE.copy()
    num_layers, num_experts = load_LE.shape
    num_groups = room_LG.shape[1]
    # A free place of a group is an expert without load.
    load_LN = np.concatenate([load_LE, np.zeros((num_layers, num_groups))], axis=1)
    place_LG = np.broadcast_to(np.arange(num_groups), (num_layers, num_groups))
    sum_LG = np.zeros(room_LG.shape)
    np.add.at(sum_LG, (np.arange(num_layers)[:, None], group_LE), load_LE)
    count_LG = np.zeros(room_LG.shape, dtype=np.int64)
    np.add.at(count_LG, (np.arange(num_layers)[:, None], group_LE), 1)

    open_L = np.arange(num_layers if num_groups > 1 else 0)
    for _ in range(MAX_EXCHANGES):
        level_LG = sum_LG[open_L] / speed_LG[open_L]
        high = level_LG.max(axis=1, initial=0.0) > goal_L[open_L]
        open_L, level_LG = open_L[high], level_LG[high]
        if not len(open_L):
            break
        rows = np.arange(len(open_L))
        fullest_L = level_LG.argmax(axis=1)
        height_L, speed_L = level_LG[rows, fullest_L], speed_LG[open_L, fullest_L]
        place = np.where(count_LG[open_L] < room_LG[open_L], place_LG[open_L], fullest_L[:, None])
        there = np.concatenate([group_LE[open_L], place], axis=1)
        member_LK = _rows_of(group_LE[open_L] == fullest_L[:, None])
        mine = np.where(member_LK >= 0, load_LE[open_L[:, None], np.maximum(member_LK, 0)], -np.inf)
        less = mine[:, :, None] - load_LN[open_L][:, None, :]
        here = height_L[:, None, None] - less / speed_L[:, None, None]
        theirs = (
            (level_LG[rows[:, None], there])[:, None, :]
            + less / (speed_LG[open_L[:, None], there])[:, None, :]
        )
        worse = np.maximum(here, theirs)
        worse[np.broadcast_to((there == fullest_L[:, None])[:, None, :], worse.shape)] = np.inf
        flat = worse.reshape(len(open_L), -1)
        best = flat.argmin(axis=1)
        gain = flat[rows, best] < height_L * (1 - GAIN)
        nth, other = np.divmod(best, num_experts + num_groups)
        open_L, rows = open_L[gain], rows[gain]
        expert, group = member_LK[rows, nth[gain]], there[rows, other[gain]]
        other, fullest = other[gain], fullest_L[gain]
        moved = load_LE[open_L, expert] - load_LN[open_L, other]
        sum_LG[open_L, fullest] -= moved
        sum_LG[open_L, group] += moved
        swapped = other < num_experts
        group_LE[open_L, expert] = group
        group_LE[open_L[swapped], other[swapped]] = fullest[swapped]
        count_LG[open_L[~swapped], fullest[~swapped]] -= 1
        count_LG[open_L[~swapped], group[~swapped]] += 1
    return group_LE


def _rows_of(flags_NE: npt.NDArray[np.bool_]) -> Ints:
    """Columns that are set in each row, int64 [N, K], −1 = none."""
    count_N = flags_NE.sum(axis=1)
    out_NK = np.full((len(flags_NE), max(int(count_N.max()), 1)), -1, dtype=np.int64)
    row_N, column_N = np.nonzero(flags_NE)
    out_NK[row_N, np.arange(len(row_N)) - (np.cumsum(count_N) - count_N)[row_N]] = column_N
    return out_NK


def _members(load_LE: Floats, group_LE: Ints, room_LG: Ints) -> Filled:
    num_layers, num_groups = room_LG.shape
    flags = group_LE[:, None, :] == np.arange(num_groups)[None, :, None]
    expert_NK = _rows_of(flags.reshape(num_layers * num_groups, -1))
    expert_LGK = expert_NK.reshape(num_layers, num_groups, -1)
    layers = np.arange(num_layers)[:, None, None]
    tokens_LGK = np.where(expert_LGK >= 0, load_LE[layers, np.maximum(expert_LGK, 0)], 0.0)
    return Filled(expert_LGK.astype(np.int32), tokens_LGK, np.ones(num_layers, dtype=np.bool_))
