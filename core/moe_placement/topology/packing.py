"""Packing: the copies that a domain holds, put on its ranks so that their loads are alike.

The most loaded copy first, on the rank with the lowest load; then exchanges between the fullest
rank and any other, as long as they lower the higher of the two. All domains of all layers go on
at once. Neighbours: `homes` (which copies a domain holds), `levelling` (uses the exchanges again).

Shapes: L layers, E logical experts, D domains, R ranks, S physical slots a rank; P problems
(layer, domain), Q ranks of a domain (at most), I copies in a domain (at most).
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import numpy.typing as npt

from moe_api.plan import SlotsLRS
from moe_placement.topology.homes import CountsLED
from moe_placement.topology.topology import Topology

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
SlotsPQS = npt.NDArray[np.int32]
Number = TypeVar("Number", bound=np.generic)

MAX_EXCHANGES = 200
_FREE = -1


def deal(counts_LED: CountsLED, each_LED: Floats, topology: Topology) -> tuple[SlotsLRS, Floats]:
    """Slots int32 [L, R, most slots] that hold the counted copies, none twice on a rank (where that
    is not possible, a copy too few), and the load of each slot.

    Args:
        each_LED: load that each copy of the expert in the domain is expected to carry.
    """
    num_layers = len(counts_LED)
    slots_PQ, speeds_PQ = _ranks(topology, num_layers)
    expert_PI, load_PI = _items(counts_LED, each_LED)
    rows = np.arange(len(slots_PQ))
    held_PQS = np.full((*slots_PQ.shape, topology.slots_R.max()), _FREE, dtype=np.int32)
    load_PQS = np.zeros(held_PQS.shape)
    filled_PQ = np.zeros(slots_PQ.shape, dtype=np.int64)
    total_PQ = np.zeros(slots_PQ.shape)
    has_PQ = np.zeros(slots_PQ.shape, dtype=np.bool_)
    for item in range(expert_PI.shape[1]):
        expert_P, load_P = expert_PI[:, item], load_PI[:, item]
        if item:
            has_PQ &= (expert_P == expert_PI[:, item - 1])[:, None]
        open_PQ = (filled_PQ < slots_PQ) & ~has_PQ
        level_PQ = (total_PQ + load_P[:, None]) / speeds_PQ
        rank_P = np.argmin(np.where(open_PQ, level_PQ, np.inf), axis=1)
        put = np.flatnonzero((expert_P >= 0) & open_PQ[rows, rank_P])
        at = (put, rank_P[put])
        held_PQS[*at, filled_PQ[at]] = expert_P[put]
        load_PQS[*at, filled_PQ[at]] = load_P[put]
        filled_PQ[at] += 1
        total_PQ[at] += load_P[put]
        has_PQ[at] = True
    return _by_rank(held_PQS, topology, _FREE), _by_rank(load_PQS, topology, 0)


def exchange(
    slots_LRS: SlotsLRS, token_LRS: Floats, topology: Topology, tolerance: float
) -> SlotsLRS:
    """The same copies in each domain, exchanged between its ranks until none is more than
    `tolerance` above the domain's mean load ÷ speed, or no exchange of two helps.

    Args:
        token_LRS: load of each slot; it goes with its copy.
    """
    if not len(slots_LRS):
        return slots_LRS
    slots_PQ, speeds_PQ = _ranks(topology, len(slots_LRS))
    held_PQS = _by_domain(slots_LRS, topology, _FREE)
    load_PQS = _by_domain(token_LRS, topology, 0)
    real_PQ = slots_PQ > 0
    speed_P = np.where(real_PQ, speeds_PQ, 0.0).sum(axis=1)
    goal_P = (1 + tolerance) * load_PQS.sum(axis=(1, 2)) / np.maximum(speed_P, 1e-300)
    going_P = np.arange(len(held_PQS))
    for _ in range(MAX_EXCHANGES):
        held, load, speeds = held_PQS[going_P], load_PQS[going_P], speeds_PQ[going_P]
        level_PQ = load.sum(axis=2) / speeds
        top_P, high_P = np.argmax(level_PQ, axis=1), level_PQ.max(axis=1)
        peak_PSQS = _peaks(held, load, slots_PQ[going_P], speeds, top_P)
        best_P = np.argmin(peak_PSQS.reshape(len(going_P), -1), axis=1)
        slot_P, rank_P, other_P = np.unravel_index(best_P, peak_PSQS.shape[1:])
        peak_P = peak_PSQS[np.arange(len(going_P)), slot_P, rank_P, other_P]
        helps_P = (high_P > goal_P[going_P]) & (peak_P < high_P * (1 - 1e-9))
        going_P = going_P[helps_P]
        if not len(going_P):
            break
        here = (going_P, top_P[helps_P], slot_P[helps_P])
        there = (going_P, rank_P[helps_P], other_P[helps_P])
        held_PQS[here], held_PQS[there] = held_PQS[there], held_PQS[here]
        load_PQS[here], load_PQS[there] = load_PQS[there], load_PQS[here]
    return _by_rank(held_PQS, topology, _FREE)


def _peaks(
    held_PQS: SlotsPQS, load_PQS: Floats, slots_PQ: Ints, speeds_PQ: Floats, top_P: Ints
) -> Floats:
    """Higher level of the two ranks after an exchange of a slot of the fullest rank with a slot of
    another one, [P, S, Q, S]; inf where it is not allowed."""
    rows = np.arange(len(held_PQS))
    mine_PS = held_PQS[rows, top_P]
    total_PQ = load_PQS.sum(axis=2)
    shift_PSQS = load_PQS[rows, top_P][:, :, None, None] - load_PQS[:, None]
    mine_PSQS = (total_PQ[rows, top_P][:, None, None, None] - shift_PSQS) / speeds_PQ[rows, top_P][
        :, None, None, None
    ]
    other_PSQS = (total_PQ[:, None, :, None] + shift_PSQS) / speeds_PQ[:, None, :, None]
    # Neither rank may get an expert that it has.
    there_PSQ = (mine_PS[:, :, None, None] == held_PQS[:, None]).any(axis=3)
    here_PQS = (held_PQS[:, :, :, None] == mine_PS[:, None, None, :]).any(axis=3)
    here_PQS &= held_PQS >= 0
    allowed = (mine_PS >= 0)[:, :, None, None] & ~there_PSQ[..., None] & ~here_PQS[:, None]
    allowed &= (np.arange(held_PQS.shape[2]) < slots_PQ[:, :, None])[:, None]
    allowed[rows, :, top_P] = False
    return np.where(allowed, np.maximum(mine_PSQS, other_PSQS), np.inf)


def _items(counts_LED: CountsLED, each_LED: Floats) -> tuple[Ints, Floats]:
    """The copies of each problem, the most loaded first, those of an expert together: expert and
    load, [P, I], −1 and 0 past the last."""
    num_experts = counts_LED.shape[1]
    count_PE = counts_LED.transpose(0, 2, 1).reshape(-1, num_experts)
    each_PE = each_LED.transpose(0, 2, 1).reshape(-1, num_experts)
    order_PE = np.argsort(np.where(count_PE > 0, -each_PE, np.inf), axis=1, kind="stable")
    ordered_PE = np.take_along_axis(count_PE, order_PE, 1)
    problem_N, place_N = np.nonzero(ordered_PE)
    repeat_N = ordered_PE[problem_N, place_N]
    expert_N = np.repeat(order_PE[problem_N, place_N], repeat_N)
    problem_N = np.repeat(problem_N, repeat_N)
    item_N = np.arange(len(problem_N)) - np.searchsorted(problem_N, problem_N)
    dims = (len(count_PE), int(ordered_PE.sum(axis=1).max(initial=0)))
    expert_PI, load_PI = np.full(dims, _FREE, dtype=np.int64), np.zeros(dims)
    expert_PI[problem_N, item_N] = expert_N
    load_PI[problem_N, item_N] = each_PE[problem_N, expert_N]
    return expert_PI, load_PI


def _ranks(topology: Topology, num_layers: int) -> tuple[Ints, Floats]:
    """Slots and speeds of the ranks of each problem [P, Q], 0 and 1 past the last."""
    members_DQ = topology.members_DQ
    slots_DQ = np.where(members_DQ >= 0, topology.slots_R[members_DQ], 0)
    speeds_DQ = np.where(members_DQ >= 0, topology.speeds_R[members_DQ], 1.0)
    return np.tile(slots_DQ, (num_layers, 1)), np.tile(speeds_DQ, (num_layers, 1))


def _by_domain(
    value_LRS: npt.NDArray[Number], topology: Topology, empty: int
) -> npt.NDArray[Number]:
    members_DQ = topology.members_DQ
    value_LDQS = value_LRS[:, members_DQ]
    value_LDQS[:, members_DQ < 0] = empty
    return value_LDQS.reshape(-1, *value_LDQS.shape[2:])


def _by_rank(value_PQS: npt.NDArray[Number], topology: Topology, empty: int) -> npt.NDArray[Number]:
    members_DQ = topology.members_DQ
    value_LDQS = value_PQS.reshape(-1, *members_DQ.shape, value_PQS.shape[2])
    dims = (len(value_LDQS), topology.num_ranks, value_PQS.shape[2])
    out_LRS = np.full(dims, empty, dtype=value_PQS.dtype)
    out_LRS[:, members_DQ[members_DQ >= 0]] = value_LDQS[:, members_DQ >= 0]
    return out_LRS
