"""Split: the fractions that balance a given placement best, without moving anything.

For a placement no split can do better than the largest, over sets A of experts, of load(A) ÷ speed
of the ranks that hold a copy of A; `flow` reaches exactly that. Neighbours: `placement` (the
value), `flow` (how), `bound` (what no placement can beat), `full_fractions` and `step_fractions`
(choose placements for such splits).

Shapes: L layers, E logical experts, R ranks, S physical slots a rank, N copies of the experts that
have several.
"""

from __future__ import annotations

import numpy as np

from moe_api.plan import FractionsLRS, SlotsLRS
from moe_placement import flow
from moe_placement.capacity import SpeedsR
from moe_placement.score import LoadLE, rank_loads


def best_fractions(
    load_LE: LoadLE,
    slots_LRS: SlotsLRS,
    speeds_R: SpeedsR,
    given_LRS: FractionsLRS | None = None,
) -> FractionsLRS:
    """Fractions float64 [L, R, S] for which the largest load ÷ speed of each layer is smallest.

    Experts without load are split evenly; experts without a copy are left out.

    Args:
        given_LRS: fractions to start from, such as those in force, and to stay close to where
            that costs nothing; absent = even.
    """
    num_layers, num_experts = load_LE.shape
    _, num_ranks, num_slots = slots_LRS.shape
    slot_N = np.flatnonzero(slots_LRS.ravel() >= 0)
    key_N = slot_N // (num_ranks * num_slots) * num_experts + slots_LRS.ravel()[slot_N]
    count = np.bincount(key_N, minlength=num_layers * num_experts)
    loaded = load_LE.ravel() > 0
    fractions_LRS = np.zeros(slots_LRS.shape)
    fractions_LRS.ravel()[slot_N] = 1.0 / count[key_N]
    if given_LRS is not None:
        given = given_LRS.ravel()[slot_N]
        known = np.bincount(key_N, given, minlength=len(count))
        keep_N = loaded[key_N] & (known[key_N] > 0)
        fractions_LRS.ravel()[slot_N[keep_N]] = given[keep_N] / known[key_N[keep_N]]

    movable_N = (count >= 2)[key_N] & loaded[key_N]
    if not movable_N.any():
        return fractions_LRS
    order_N = np.argsort(key_N[movable_N], kind="stable")
    slot_N, key_N = slot_N[movable_N][order_N], key_N[movable_N][order_N]
    expert_N = np.cumsum(np.diff(key_N, prepend=key_N[0]) > 0)
    copies = flow.Copies.of(expert_N, slot_N // num_slots, num_layers * num_ranks)
    tokens_N = flow.settle(
        copies,
        fractions_LRS.ravel()[slot_N] * load_LE.ravel()[key_N],
        rank_loads(slots_LRS, fractions_LRS, load_LE),
        speeds_R,
    )
    fractions_LRS.ravel()[slot_N] = tokens_N / np.bincount(expert_N, tokens_N)[expert_N]
    return fractions_LRS
