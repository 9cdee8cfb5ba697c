"""Exchanges: two transfers, where no single copy relieves a bottleneck.

Room can be locked up: on ranks all of whose slots hold the only copy of something. Then an expert
there makes way to another rank, and its slot takes the copy that opens the bottleneck. It goes
either into a slot that `opening` would offer as well (`detour`), or into that of the very expert
that it makes way for (`swap`), which is all there is without spare copies. Neighbours: `opening`
(one transfer), `bottleneck`, `step_fractions_search`.

Shapes: L layers, E logical experts, R ranks, S physical slots a rank, P = R·S; N layers in which an
exchange is looked for; M slots that change.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from moe_placement.copy_limits import CopyLimits
from moe_placement.step.bottleneck import NEARLY, Bottlenecks, Pressure
from moe_placement.step.opening import LEAST_RELIEF, Offers, Openings, joined
from moe_placement.step.residual import Residual
from moe_placement.step.slot_arrays import any_slot, to_slots

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

MAX_RANKS = 4
"""Ranks of a bottleneck from which a swap is tried."""


def detours(
    residual: Residual,
    bottlenecks: Bottlenecks,
    given: Offers,
    copies: CopyLimits,
    banned_LRS: Flags,
) -> Openings:
    """Of each layer, for its worst bottleneck: the slots of the copy and of who makes way, in this
    order, if the two transfers are worth it."""
    first = np.diff(bottlenecks.layer_B, prepend=-1) != 0
    layer_N, expert_N = bottlenecks.layer_B[first], bottlenecks.expert_B[first]
    excess_N = bottlenecks.excess_B[first]
    if not len(layer_N):
        return joined([])
    slots_NRS, token_NRS = residual.slots_LRS[layer_N], residual.token_LRS[layer_N]
    num_slots = residual.num_slots
    which = np.arange(len(layer_N))
    # Who makes way: the lightest expert that has no other copy, of the rank that can take most.
    only_NRS = (given.count_LRS[layer_N] == 1) & ~banned_LRS[layer_N]
    only_NRS[any_slot(slots_NRS == expert_N[:, None, None])] = False
    gain_NRS = to_slots(given.behind_LR[layer_N], num_slots) + token_NRS
    gain_NRS = np.minimum(gain_NRS, excess_N[:, None, None]) - token_NRS
    gain_NP = np.where(only_NRS, gain_NRS, -np.inf).reshape(len(layer_N), -1)
    near_NP = gain_NP >= NEARLY * gain_NP.max(axis=1, keepdims=True)
    token_NP = token_NRS.reshape(len(layer_N), -1)
    place_N = np.where(near_NP, token_NP, np.inf).argmin(axis=1)
    gain_N, moved_N = gain_NP[which, place_N] + token_NP[which, place_N], token_NP[which, place_N]
    rank_N, slot_N = place_N // num_slots, place_N % num_slots
    mover_N = slots_NRS[which, rank_N, slot_N].astype(np.int64)
    # Where to: what the slot costs, and what of the mover finds no room there.
    cost_NRS = given.price_LRS[layer_N]
    cost_NRS = cost_NRS + np.maximum(moved_N[:, None, None] - given.takes_LRS[layer_N], 0.0)
    cost_NRS[~given.usable_LRS[layer_N] | banned_LRS[layer_N]] = np.inf
    cost_NRS[which, rank_N] = np.inf
    cost_NRS[any_slot(slots_NRS == mover_N[:, None, None])] = np.inf
    to_N = cost_NRS.reshape(len(layer_N), -1).argmin(axis=1)
    relief_N = np.minimum(gain_N, excess_N) - cost_NRS.reshape(len(layer_N), -1)[which, to_N]
    worth_N = relief_N >= 2 * np.minimum(LEAST_RELIEF, excess_N / 4)
    count_LE = residual.copies_F.reshape(residual.num_layers, -1)
    worth_N &= count_LE[layer_N, expert_N] < copies.most(residual.num_ranks)
    copy = Openings(layer_N, rank_N, slot_N, expert_N, relief_N / 2)
    move = Openings(layer_N, to_N // num_slots, to_N % num_slots, mover_N, relief_N / 2)
    return joined([copy.only(worth_N), move.only(worth_N)])


def swaps(
    residual: Residual,
    pressure: Pressure,
    wanted_L: Flags,
    given: Offers,
    banned_LRS: Flags,
    *,
    at_any_price: bool = False,
) -> Openings:
    """Of each layer where it is wanted: two experts that change places, if it is worth it.

    Args:
        at_any_price: the best ones even if they relieve nothing.
    """
    by_rank_LR = pressure.by_rank_Q.reshape(residual.num_layers, -1)
    layer_N = np.flatnonzero(wanted_L)
    if not len(layer_N):
        return joined([])
    which = np.arange(len(layer_N))
    slots_NRS, token_NRS = residual.slots_LRS[layer_N], residual.token_LRS[layer_N]
    num_slots = residual.num_slots
    slots_NP, token_NP = (x.reshape(len(layer_N), -1) for x in (slots_NRS, token_NRS))
    behind_NP = np.repeat(given.behind_LR[layer_N], num_slots, axis=1)
    held_NRE = _held(residual, layer_N)
    best_N = np.full(len(layer_N), -np.inf)
    from_N, out_N, to_N = (np.zeros(len(layer_N), dtype=np.int64) for _ in range(3))
    order_NR = np.argsort(-by_rank_LR[layer_N], axis=1, kind="stable")
    for rank_N in order_NR[:, :MAX_RANKS].T:
        excess_N = by_rank_LR[layer_N, rank_N]
        for slot in range(num_slots):
            expert_N = slots_NRS[which, rank_N, slot].astype(np.int64)
            less_NP = token_NRS[which, rank_N, slot][:, None] - token_NP
            gain_NP = np.minimum(less_NP, excess_N[:, None])
            gain_NP -= np.maximum(less_NP - behind_NP, 0.0)
            there_NR = held_NRE[which, :, np.maximum(expert_N, 0)]
            refused_NP = np.repeat(there_NR, num_slots, axis=1)
            refused_NP |= held_NRE[which[:, None], rank_N[:, None], np.maximum(slots_NP, 0)]
            refused_NP |= (slots_NP < 0) | banned_LRS[layer_N].reshape(len(layer_N), -1)
            refused_NP |= (expert_N < 0)[:, None]
            gain_NP[refused_NP] = -np.inf
            place_N = gain_NP.argmax(axis=1)
            better_N = gain_NP[which, place_N] > best_N
            best_N = np.where(better_N, gain_NP[which, place_N], best_N)
            from_N, out_N = np.where(better_N, rank_N, from_N), np.where(better_N, slot, out_N)
            to_N = np.where(better_N, place_N, to_N)
    excess_N = by_rank_LR[layer_N, from_N]
    worth_N = best_N >= 2 * np.minimum(LEAST_RELIEF, excess_N / 4)
    worth_N |= at_any_price & np.isfinite(best_N)
    worth_N &= excess_N > 0
    there = slots_NRS[which, from_N, out_N].astype(np.int64)
    here = slots_NP[which, to_N].astype(np.int64)
    to_rank, to_slot = to_N // num_slots, to_N % num_slots
    copy = Openings(layer_N, to_rank, to_slot, there, best_N / 2)
    back = Openings(layer_N, from_N, out_N, here, best_N / 2)
    return joined([copy.only(worth_N), back.only(worth_N)])


def _held(residual: Residual, layer_N: Ints) -> Flags:
    """Which rank of which of the layers holds which expert, [N, R, E]."""
    slots_NRS = residual.slots_LRS[layer_N]
    held_NRE = np.zeros((*slots_NRS.shape[:2], residual.num_experts), dtype=np.bool_)
    at = np.nonzero(slots_NRS >= 0)
    held_NRE[at[0], at[1], slots_NRS[at]] = True
    return held_NRE
