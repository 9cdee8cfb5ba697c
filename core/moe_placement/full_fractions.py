"""Full plan with fractions: a placement from nothing, whose copies serve shares of their own.

With as many slots as experts and ranks together, less one, all ranks get exactly their share
(`blocks`); with fewer, groups of ranks do (`groups`). Where limits of copies or unequal ranks are
in the way, other attempts follow, and each layer keeps the best. Neighbours: `step_fractions`
(from the plan in force), `full_even` (even split), `planner`.

Shapes: L layers, E logical experts, R ranks, S slots a rank.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from moe_api.plan import FractionsLRS, SlotsLRS
from moe_placement import blocks, extra_copies, groups
from moe_placement.bound import BoundL, GapL, gap, lower_bound
from moe_placement.capacity import SlotsR, SpeedsR
from moe_placement.carry import Filled
from moe_placement.copy_limits import CopyLimits
from moe_placement.placement import copies as copies_of
from moe_placement.score import LoadLE, rank_loads
from moe_placement.split import best_fractions

GOAL = 1e-4
"""Gap to the bound at which a layer is done."""
ANY = 1e300
"""Gap of a layer that is done with whatever keeps to the limits."""


@dataclass(frozen=True, eq=False)
class _Layers:
    """What is to be planned: every rank has a slot or more, and no more slots than experts."""

    load_LE: LoadLE
    slots_R: SlotsR
    speeds_R: SpeedsR
    copies: CopyLimits
    bound_L: BoundL

    @property
    def num_experts(self) -> int:
        return int(self.load_LE.shape[1])


def plan(
    load_LE: LoadLE, slots_R: SlotsR, speeds_R: SpeedsR, copies: CopyLimits
) -> tuple[SlotsLRS, FractionsLRS]:
    """Slots int32 and fractions float64, [L, R, most slots], with the least largest load ÷ speed.

    A layer without load is planned as if its experts were loaded alike.

    Raises:
        CopyLimitsError: the slots cannot hold min_copies of each expert on different ranks.
    """
    num_layers, num_experts = load_LE.shape
    copies.check(num_experts, slots_R)
    load_LE = np.where(load_LE.any(axis=1, keepdims=True), load_LE, 1.0)
    used_R = slots_R > 0
    layers = _Layers(
        load_LE,
        np.minimum(slots_R[used_R], num_experts),
        speeds_R[used_R],
        copies,
        lower_bound(load_LE, slots_R, speeds_R, copies.max_copies),
    )
    dims = (num_layers, len(slots_R), int(slots_R.max()))
    slots_LRS, fractions_LRS = np.full(dims, -1, dtype=np.int32), np.zeros(dims)
    gap_L = np.full(num_layers, np.inf)
    for attempt, goal in ATTEMPTS:
        todo_L = np.flatnonzero(gap_L > goal)
        rest = replace(layers, load_LE=load_LE[todo_L], bound_L=layers.bound_L[todo_L])
        found = attempt(rest) if len(todo_L) else None
        if found is None:
            continue
        found_L = _gap(rest, *found)
        better = found_L < gap_L[todo_L]
        gap_L[todo_L[better]] = found_L[better]
        at = np.ix_(todo_L[better], used_R, np.arange(found[0].shape[2]))
        slots_LRS[at], fractions_LRS[at] = found[0][better], found[1][better]
    return slots_LRS, fractions_LRS


def _linked(layers: _Layers, hasty_first: bool = False) -> tuple[SlotsLRS, FractionsLRS] | None:
    """All ranks linked by experts they share: exact where the slots suffice."""
    slots_R = _proportional(layers)
    if slots_R is None or layers.copies.max_copies == 1:
        return None
    filled = blocks.fill(layers.load_LE, slots_R, layers.speeds_R, hasty_first=hasty_first)
    return _finished(layers, filled)


def _linked_hasty_first(layers: _Layers) -> tuple[SlotsLRS, FractionsLRS] | None:
    return _linked(layers, hasty_first=True)


def _grouped(layers: _Layers) -> tuple[SlotsLRS, FractionsLRS] | None:
    """Ranks linked as far as slots go round."""
    single = layers.copies.max_copies == 1
    return _finished(
        layers,
        groups.fill(layers.load_LE, layers.slots_R, layers.speeds_R, layers.bound_L, single=single),
    )


def _spread(layers: _Layers) -> tuple[SlotsLRS, FractionsLRS] | None:
    """Copies dealt out as the limits ask for, whatever the load: always valid."""
    empty_LRS = np.full(
        (len(layers.load_LE), len(layers.slots_R), int(layers.slots_R.max())), -1, dtype=np.int32
    )
    slots_LRS = extra_copies.add(layers.load_LE, empty_LRS, layers.slots_R, layers.copies)
    return slots_LRS, best_fractions(layers.load_LE, slots_LRS, layers.speeds_R)


def _proportional(layers: _Layers) -> SlotsR | None:
    """Slots of each rank for one linked placement: in proportion to its speed, as the theorem in
    `carry` asks for, and no more than needed, so that the free ones are spread; None = too few."""
    most_R = layers.slots_R - 1
    wanted = layers.num_experts - 1
    if most_R.sum() < wanted:
        return None
    part_R = layers.speeds_R / layers.speeds_R.sum()
    low, high = wanted, int(np.ceil(wanted / part_R.min())) + 1
    while low < high:
        middle = (low + high) // 2
        enough = np.minimum(np.ceil(middle * part_R - 1e-9), most_R).sum() >= wanted
        low, high = (low, middle) if enough else (middle + 1, high)
    return np.asarray(1 + np.minimum(np.ceil(low * part_R - 1e-9), most_R), dtype=np.int64)


def _finished(layers: _Layers, filled: Filled) -> tuple[SlotsLRS, FractionsLRS]:
    """Fractions from tokens, and free slots used; where tokens found no slot the best split of
    what is placed, with the experts left over in free slots."""
    num_layers, num_experts = layers.load_LE.shape
    dims = (num_layers, len(layers.slots_R), int(layers.slots_R.max()))
    slots_LRS, fractions_LRS = np.full(dims, -1, dtype=np.int32), np.zeros(dims)
    width = slice(0, filled.slots_NRS.shape[2])
    slots_LRS[:, :, width] = filled.slots_NRS
    at = np.nonzero(slots_LRS >= 0)
    expert, tokens = at[0] * num_experts + slots_LRS[at], filled.tokens_NRS[at]
    fractions_LRS[at] = tokens / np.bincount(expert, tokens)[expert]
    slots_LRS = extra_copies.add(layers.load_LE, slots_LRS, layers.slots_R, layers.copies)
    partly_L = np.flatnonzero(~filled.whole_N)
    if len(partly_L):
        fractions_LRS[partly_L] = best_fractions(
            layers.load_LE[partly_L], slots_LRS[partly_L], layers.speeds_R
        )
    return slots_LRS, fractions_LRS


def _gap(layers: _Layers, slots_LRS: SlotsLRS, fractions_LRS: FractionsLRS) -> GapL:
    """inf where the limits of copies are broken."""
    loads_LR = rank_loads(slots_LRS, fractions_LRS, layers.load_LE)
    copies_LE = copies_of(slots_LRS, layers.num_experts)
    most = layers.copies.most(len(layers.slots_R))
    kept_L = ((copies_LE >= layers.copies.min_copies) & (copies_LE <= most)).all(axis=1)
    return np.where(kept_L, gap(loads_LR, layers.speeds_R, layers.bound_L), np.inf)


ATTEMPTS = ((_linked, GOAL), (_linked_hasty_first, GOAL), (_grouped, GOAL), (_spread, ANY))
