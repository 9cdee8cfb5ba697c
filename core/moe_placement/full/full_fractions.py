"""Full plan with fractions: a placement from nothing, whose copies serve shares of their own.

With as many slots as experts and ranks together, less one, all ranks get exactly their share
(`blocks`); with fewer, groups of ranks do (`groups`). Where limits of copies or unequal ranks are
in the way, other attempts follow, and each layer keeps the best. Neighbours: `step_fractions`
(from the plan in force), `full_even` (even split), `planner`.

Shapes: L layers, E logical experts, R ranks, S slots a rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from moe_api.plan import FractionsLRS, SlotsLRS
from moe_placement.bound import BoundL, GapL, gap, lower_bound
from moe_placement.capacity import SlotsR, SpeedsR
from moe_placement.copy_limits import CopyLimits
from moe_placement.even import full_even
from moe_placement.full import blocks, extra_copies, groups, polish
from moe_placement.full.carry import Filled
from moe_placement.placement import copies as copies_of
from moe_placement.score import LoadLE, rank_loads
from moe_placement.split import best_fractions

GOAL = 1e-4
"""Gap to the bound at which a layer is done."""


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


Attempt = Callable[[_Layers], tuple[SlotsLRS, FractionsLRS]]


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
        lower_bound(load_LE, slots_R, speeds_R, copies.max_copies, copies.min_copies),
    )
    dims = (num_layers, len(slots_R), int(slots_R.max()))
    slots_LRS, fractions_LRS = np.full(dims, -1, dtype=np.int32), np.zeros(dims)
    gap_L = np.full(num_layers, np.inf)
    for attempt in _attempts(layers):
        todo_L = np.flatnonzero(gap_L > GOAL)
        if not len(todo_L):
            break
        rest = replace(layers, load_LE=load_LE[todo_L], bound_L=layers.bound_L[todo_L])
        found = attempt(rest)
        found_L = _gap(rest, *found)
        better = found_L < gap_L[todo_L]
        gap_L[todo_L[better]] = found_L[better]
        at = np.ix_(todo_L[better], used_R, np.arange(found[0].shape[2]))
        slots_LRS[at], fractions_LRS[at] = found[0][better], found[1][better]
    assert np.isfinite(gap_L).all(), "full_even keeps to limits that were checked"
    todo_L = np.flatnonzero(gap_L > GOAL)
    if len(todo_L) and polish.affordable(num_experts, layers.slots_R):
        at = np.ix_(todo_L, used_R, np.arange(int(layers.slots_R.max())))
        slots_LRS[at], fractions_LRS[at] = polish.polish(
            load_LE[todo_L],
            slots_LRS[at],
            layers.slots_R,
            layers.speeds_R,
            copies,
            layers.bound_L[todo_L] * (1 + GOAL),
        )
    return slots_LRS, fractions_LRS


def _attempts(layers: _Layers) -> Iterator[Attempt]:
    """What to try, best first, each for the layers that are not done.

    Fewer links between ranks leave more slots for copies that must be, and make fewer copies where
    these must not be.
    """
    links = min(int(layers.slots_R.sum()) - layers.num_experts, len(layers.slots_R) - 1)
    limited = layers.copies != CopyLimits()
    if layers.copies.max_copies == 1:
        links = 0
    if links == len(layers.slots_R) - 1:
        yield _linked
        yield partial(_linked, hasty_first=True)
    while links > 0:
        yield partial(_grouped, links=links)
        links = links // 2 if limited else 0
    yield partial(_grouped, links=0)
    yield _even


def _linked(layers: _Layers, hasty_first: bool = False) -> tuple[SlotsLRS, FractionsLRS]:
    """All ranks linked by experts they share: exact where the slots suffice."""
    slots_R = _portion(layers, layers.num_experts + len(layers.slots_R) - 1)
    filled = blocks.fill(layers.load_LE, slots_R, layers.speeds_R, hasty_first=hasty_first)
    return _finished(layers, filled)


def _grouped(layers: _Layers, links: int) -> tuple[SlotsLRS, FractionsLRS]:
    """Ranks linked by so many copies only."""
    slots_R = _portion(layers, layers.num_experts + links) if links else layers.slots_R
    filled = groups.fill(layers.load_LE, slots_R, layers.speeds_R, layers.bound_L, links)
    return _finished(layers, filled)


def _even(layers: _Layers) -> tuple[SlotsLRS, FractionsLRS]:
    """The placement for an even split, with better fractions."""
    slots_LRS = full_even.plan(layers.load_LE, layers.slots_R, layers.speeds_R, layers.copies)
    return slots_LRS, best_fractions(layers.load_LE, slots_LRS, layers.speeds_R)


def _portion(layers: _Layers, wanted: int) -> SlotsR:
    """Slots of each rank to use when `wanted` are, or a few more so that ranks stay alike: each
    one, and the others in proportion to its speed (see the theorem in `carry`). The rest is spread
    so over all ranks."""
    more_R, more = layers.slots_R - 1, wanted - len(layers.slots_R)
    part_R = layers.speeds_R / layers.speeds_R.sum()
    low, high = 0, int(np.ceil((more + 1) / part_R.min()))
    while low < high:
        middle = (low + high) // 2
        enough = np.minimum(np.ceil(middle * part_R - 1e-9), more_R).sum() >= more
        low, high = (low, middle) if enough else (middle + 1, high)
    return np.asarray(1 + np.minimum(np.ceil(low * part_R - 1e-9), more_R), dtype=np.int64)


def _finished(layers: _Layers, filled: Filled) -> tuple[SlotsLRS, FractionsLRS]:
    """Fractions from tokens, and free slots used; where that isn't level, or experts were left
    over, the best split with the copies that were added."""
    num_layers, num_experts = layers.load_LE.shape
    dims = (num_layers, len(layers.slots_R), int(layers.slots_R.max()))
    slots_LRS, fractions_LRS = np.full(dims, -1, dtype=np.int32), np.zeros(dims)
    width = slice(0, filled.slots_NRS.shape[2])
    slots_LRS[:, :, width] = filled.slots_NRS
    at = np.nonzero(slots_LRS >= 0)
    expert, tokens = at[0] * num_experts + slots_LRS[at], filled.tokens_NRS[at]
    fractions_LRS[at] = tokens / np.bincount(expert, tokens)[expert]
    added_LRS = extra_copies.add(layers.load_LE, slots_LRS, layers.slots_R, layers.copies)
    loads_LR = rank_loads(slots_LRS, fractions_LRS, layers.load_LE)
    uneven_L = gap(loads_LR, layers.speeds_R, layers.bound_L) > GOAL
    added_L = (added_LRS != slots_LRS).any(axis=(1, 2))
    todo_L = np.flatnonzero(~filled.whole_N | (uneven_L & added_L))
    if len(todo_L):
        fractions_LRS[todo_L] = best_fractions(
            layers.load_LE[todo_L], added_LRS[todo_L], layers.speeds_R, fractions_LRS[todo_L]
        )
    return added_LRS, fractions_LRS


def _gap(layers: _Layers, slots_LRS: SlotsLRS, fractions_LRS: FractionsLRS) -> GapL:
    """inf where the limits of copies are broken."""
    loads_LR = rank_loads(slots_LRS, fractions_LRS, layers.load_LE)
    copies_LE = copies_of(slots_LRS, layers.num_experts)
    most = layers.copies.most(len(layers.slots_R))
    kept_L = ((copies_LE >= layers.copies.min_copies) & (copies_LE <= most)).all(axis=1)
    return np.where(kept_L, gap(loads_LR, layers.speeds_R, layers.bound_L), np.inf)
