"""Crossing: the fractions with least traffic between domains while every rank keeps its load.

For a placement, some split of the tokens balances best (`split`); a little above that balance many
splits do, and they differ in what crosses. Start with every token that has a copy at home served
there, then relieve the ranks that are too full, each time along the chain of experts that costs
the fewest crossings, until none is: successive shortest paths, whose costs are whole numbers here
(one token sent abroad, or called back home). The result is the least possible crossing.
Neighbours: `dispatch` (who serves whom, and what crosses), `localise` (chooses the placement).

Shapes: L layers, E logical experts, D domains, R ranks, S physical slots a rank; flat: N copies of
experts that have several, J (layer, expert, domain) that hold such copies, M (layer, expert).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from moe_api.plan import FractionsLRS, SlotsLRS
from moe_placement.capacity import DomainsR, SpeedsR
from moe_placement.score import LoadLE, rank_loads
from moe_placement.split import best_fractions
from moe_placement.topology.dispatch import LoadLED, domain_fractions
from moe_placement.topology.relief import ROUNDING, relieve

SLACK = 0.02

Floats = npt.NDArray[np.float64]


def least_crossing(
    load_LED: LoadLED,
    slots_LRS: SlotsLRS,
    speeds_R: SpeedsR,
    domains_R: DomainsR,
    slack: float = SLACK,
    level_L: Floats | None = None,
) -> FractionsLRS:
    """Fractions float64 [L, R, S] with the least crossing among those that keep every rank's load
    ÷ speed within 1 + slack of the best that a split of this placement can do.

    Args:
        load_LED: loads by the domain that sends them.
        level_L: load ÷ speed that every rank may have, instead of that; a layer that cannot keep
            to it comes as near as it can.
    """
    if level_L is None:
        best_LRS = best_fractions(load_LED.sum(axis=2), slots_LRS, speeds_R)
        best_L = _level(load_LED, slots_LRS, best_LRS, speeds_R)
        return _bounded(load_LED, slots_LRS, speeds_R, domains_R, best_LRS, best_L * (1 + slack))
    limit_LR = level_L[:, None] * speeds_R
    out_LRS = _relieved(load_LED, slots_LRS, domains_R, limit_LR)
    over_L = _level(load_LED, slots_LRS, out_LRS, speeds_R) > level_L * (1 + 2 * ROUNDING)
    if over_L.any():
        load_LED, slots_LRS = load_LED[over_L], slots_LRS[over_L]
        best_LRS = best_fractions(load_LED.sum(axis=2), slots_LRS, speeds_R)
        best_L = np.maximum(level_L[over_L], _level(load_LED, slots_LRS, best_LRS, speeds_R))
        out_LRS[over_L] = _bounded(load_LED, slots_LRS, speeds_R, domains_R, best_LRS, best_L)
    return out_LRS


def _bounded(
    load_LED: LoadLED,
    slots_LRS: SlotsLRS,
    speeds_R: SpeedsR,
    domains_R: DomainsR,
    best_LRS: FractionsLRS,
    level_L: Floats,
) -> FractionsLRS:
    """Least crossing at a level that `best` keeps: if relief stops short of it, so much of what it
    found as the level allows, and the rest like `best`."""
    load_LE = load_LED.sum(axis=2)
    limit_LR = level_L[:, None] * speeds_R
    flow_LRS = _relieved(load_LED, slots_LRS, domains_R, limit_LR)
    best_LR = rank_loads(slots_LRS, best_LRS, load_LE)
    over_LR = rank_loads(slots_LRS, flow_LRS, load_LE) - best_LR
    room_LR = np.maximum(limit_LR * (1 + 2 * ROUNDING) - best_LR, 0.0)
    part_LR = np.where(over_LR > room_LR, room_LR / np.where(over_LR > 0, over_LR, 1.0), 1.0)
    part_L11 = part_LR.min(axis=1)[:, None, None]
    return np.asarray(best_LRS + part_L11 * (flow_LRS - best_LRS))


def least_crossing_tokens(
    load_LED: LoadLED, slots_LRS: SlotsLRS, domains_R: DomainsR, limit_LR: Floats
) -> Floats:
    """Tokens of each slot [L, R, S] that cross least with no rank above its limit; where no split
    can do that, with the least above it."""
    near_LRS = _near(load_LED, slots_LRS, domains_R)
    near_LRS *= expert_loads(load_LED.sum(axis=2), slots_LRS)
    return relieve(load_LED, slots_LRS, domains_R, near_LRS, limit_LR)


def expert_loads(load_LE: LoadLE, slots_LRS: SlotsLRS) -> Floats:
    """Load of the expert in each slot, of all its copies together; 0 for free slots."""
    layers_L11 = np.arange(len(slots_LRS))[:, None, None]
    return np.where(slots_LRS >= 0, load_LE[layers_L11, np.maximum(slots_LRS, 0)], 0.0)


def _relieved(
    load_LED: LoadLED, slots_LRS: SlotsLRS, domains_R: DomainsR, limit_LR: Floats
) -> FractionsLRS:
    token_LRS = least_crossing_tokens(load_LED, slots_LRS, domains_R, limit_LR)
    load_LRS = expert_loads(load_LED.sum(axis=2), slots_LRS)
    asked_LRS = load_LRS > 0
    idle_LRS = _near(load_LED, slots_LRS, domains_R)
    return np.where(asked_LRS, token_LRS / np.where(asked_LRS, load_LRS, 1.0), idle_LRS)


def _near(load_LED: LoadLED, slots_LRS: SlotsLRS, domains_R: DomainsR) -> FractionsLRS:
    """Fractions that cross least, whatever ranks can take: what a domain sends to an expert that
    it holds is shared by its own copies, what others send is shared by all copies."""
    copies_LED = domain_fractions(
        slots_LRS, np.where(slots_LRS >= 0, 1.0, 0.0), domains_R, *load_LED.shape[1:]
    )
    load_LE1 = load_LED.sum(axis=2, keepdims=True)
    share_LED = np.where(load_LE1 > 0, load_LED / np.where(load_LE1 > 0, load_LE1, 1.0), 0.0)
    home_LED = np.where(copies_LED > 0, share_LED, 0.0)
    rest_LE1 = 1.0 - home_LED.sum(axis=2, keepdims=True)
    each_LED = home_LED / np.maximum(copies_LED, 1.0)
    each_LED += rest_LE1 / np.maximum(copies_LED.sum(axis=2, keepdims=True), 1.0)
    layers_L11 = np.arange(len(slots_LRS))[:, None, None]
    each_LRS = each_LED[layers_L11, np.maximum(slots_LRS, 0), domains_R[None, :, None]]
    return np.where(slots_LRS >= 0, each_LRS, 0.0)


def _level(
    load_LED: LoadLED, slots_LRS: SlotsLRS, fractions_LRS: FractionsLRS, speeds_R: SpeedsR
) -> Floats:
    loads_LR = rank_loads(slots_LRS, fractions_LRS, load_LED.sum(axis=2))
    return np.asarray((loads_LR / speeds_R).max(axis=1))
