"""Trades: experts change domains where a domain cannot shed what it has too much.

When chains (`relief`) find no way out of a set of full ranks, every expert with tokens there has
all its copies there. An expert of the set then changes places with a less loaded one from outside:
the pair that takes just the excess away, and of those the one whose tokens cross least for it.
Neighbour: `levelling`, which says when.

Shapes: L layers, E logical experts, D domains, R ranks, S physical slots a rank; in one layer: N
slots of experts with a single copy, I of them inside the set, O outside.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from moe_api.plan import SlotsLRS
from moe_placement.placement import copies
from moe_placement.topology.dispatch import LoadLED
from moe_placement.topology.topology import Topology

Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]

EXCESS_WEIGHT = 10.0
"""A token too much counts like so many that cross."""


def trade(
    load_LED: LoadLED,
    slots_LRS: SlotsLRS,
    topology: Topology,
    room_LR: Floats,
    blocked_LR: Flags,
    worth_LED: LoadLED,
) -> SlotsLRS:
    """The slots with one exchange in each layer that has a pair which helps.

    Args:
        room_LR: what each rank may take more; less than 0 = it has too much.
        blocked_LR: ranks from which no chain leads to room.
        worth_LED: what it is worth, in tokens that cross, that a domain holds an expert.
    """
    out_LRS = slots_LRS.copy()
    load_LE = load_LED.sum(axis=2)
    single_LE = copies(slots_LRS, load_LE.shape[1]) == 1
    for layer in range(len(slots_LRS)):
        blocked_R, room_R = blocked_LR[layer], room_LR[layer]
        rank_N, slot_N = np.nonzero(slots_LRS[layer] >= 0)
        expert_N = slots_LRS[layer, rank_N, slot_N]
        rank_N, slot_N, expert_N = (
            array[single_LE[layer, expert_N]] for array in (rank_N, slot_N, expert_N)
        )
        inside, outside = np.flatnonzero(blocked_R[rank_N]), np.flatnonzero(~blocked_R[rank_N])
        if not len(inside) or not len(outside):
            continue
        cost_IO = _costs(
            load_LE[layer, expert_N],
            worth_LED[layer][expert_N],
            topology.domains_R[rank_N],
            inside,
            outside,
            float(-np.minimum(room_R, 0.0).sum()),
            topology.total(np.where(blocked_R, 0.0, np.maximum(room_R, 0.0))),
        )
        best = int(np.argmin(cost_IO))
        if np.isfinite(cost_IO.flat[best]):
            i, o = inside[best // len(outside)], outside[best % len(outside)]
            out_LRS[layer, rank_N[i], slot_N[i]] = expert_N[o]
            out_LRS[layer, rank_N[o], slot_N[o]] = expert_N[i]
    return out_LRS


def _costs(
    load_N: Floats,
    worth_ND: Floats,
    domain_N: npt.NDArray[np.int64],
    inside: npt.NDArray[np.int64],
    outside: npt.NDArray[np.int64],
    excess: float,
    room_D: Floats,
) -> Floats:
    """Tokens that cross for a change of places, and those that stay too much; inf where it does not
    help."""
    shift_IO = load_N[inside][:, None] - load_N[outside]
    left_IO = np.maximum(excess - shift_IO, 0.0)
    left_IO += np.maximum(shift_IO - room_D[domain_N[outside]], 0.0)
    worth_N = worth_ND[np.arange(len(load_N)), domain_N]
    loss_IO = worth_N[inside][:, None] + worth_N[outside]
    loss_IO -= worth_ND[inside][:, domain_N[outside]]
    loss_IO -= worth_ND[outside][:, domain_N[inside]].T
    return np.where(left_IO < excess, EXCESS_WEIGHT * left_IO + loss_IO, np.inf)
