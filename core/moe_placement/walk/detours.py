"""Ways round where nothing fits: park a copy in a spare slot, or give up a second one for a while.

A cycle of experts that each wait for the other's slot is broken by parking one of them elsewhere.
Where no slot is free, a copy beyond the first leaves and comes back last: `arrivals` keeps the last
free slot of a layer for what lets others move.
Neighbours: `arrivals` and `departures` do the straight part, `waves` puts all together.

Shapes: L MoE layers, E logical experts, R ranks, N copies.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from moe_placement.walk.remaining import Copies, Remaining

FlagsL = npt.NDArray[np.bool_]
FlagsN = npt.NDArray[np.bool_]


def stalled(left: Remaining, arriving: Copies, may_N: FlagsN) -> FlagsL:
    """Layers in which something waits, nothing can come and no slot waited for gets free."""
    leaving = left.leaving
    out_L = left.pending_LR.sum(axis=1) > 0
    out_L[arriving.layer_N] = False
    at_LR = (leaving.layer_N, leaving.rank_N)
    useful_N = may_N & (left.pending_LR[at_LR] > 0) & (left.free_LR[at_LR] < 1)
    out_L[leaving.layer_N[useful_N]] = False
    return np.asarray(out_L)


def park(left: Remaining, stalled_L: FlagsL, may_N: FlagsN) -> Copies:
    """In each stalled layer that nothing may leave, one copy to bring into a free slot for each
    cycle of ranks that wait for each other's slots.

    It leaves a rank that can then take what only waits for its slot; the longest waiting first.
    """
    parked: list[tuple[int, int, int]] = []
    tied_L = stalled_L.copy()
    tied_L[left.leaving.layer_N[may_N]] = False
    for layer in np.flatnonzero(tied_L & (left.free_LR.sum(axis=1) > 0)).tolist():
        free_R = left.free_LR[layer].copy()
        for expert in _tied(left, layer):
            into = int(free_R.argmax())
            if free_R[into] < 1:
                break
            free_R[into] = 0  # one arrival each
            parked.append((layer, into, expert))
    return Copies.of(parked)


def give_up(left: Remaining, layers: Iterable[int]) -> Copies:
    """One copy that the target does want, from each layer that has an expert with two of them."""
    given: list[tuple[int, int, int]] = []
    for layer in layers:
        kept_E = left.kept_LE[layer]
        if kept_E.max() < 2:
            continue
        kept = left.kept
        here = kept.where((kept.layer_N == layer) & left.open_R[kept.rank_N])
        here = here.where(kept_E[here.expert_N] > 1)
        if here.number:
            waits_N = left.pending_LR[layer, here.rank_N]
            best = np.lexsort((here.rank_N, here.expert_N, -kept_E[here.expert_N], -waits_N))[0]
            given.append((layer, int(here.rank_N[best]), int(here.expert_N[best])))
    return Copies.of(given)


def _tied(left: Remaining, layer: int) -> list[int]:
    """Experts to take away, one for each set of ranks that are tied by waiting for each other."""
    leaving = left.leaving.where(left.leaving.layer_N == layer)
    pending = left.pending.where(left.pending.layer_N == layer)
    moves = left.kept_LE[layer, pending.expert_N] == 0
    targets = pending.where(moves)
    root = list(range(left.free_LR.shape[1]))

    def find(rank: int) -> int:
        while root[rank] != rank:
            root[rank] = root[root[rank]]
            rank = root[rank]
        return rank

    wanted_by: dict[int, int] = {}
    for rank, expert in zip(targets.rank_N.tolist(), targets.expert_N.tolist(), strict=True):
        root[find(wanted_by.setdefault(expert, rank))] = find(rank)
    for rank, expert in zip(leaving.rank_N.tolist(), leaving.expert_N.tolist(), strict=True):
        if expert in wanted_by:
            root[find(rank)] = find(wanted_by[expert])
    waiting = set(targets.rank_N.tolist())
    best: dict[int, tuple[int, int, int]] = {}
    for rank, expert in zip(leaving.rank_N.tolist(), leaving.expert_N.tolist(), strict=True):
        if rank in waiting:
            key = (-int(left.pending_LR[layer, rank]), rank, expert)
            best[find(rank)] = min(best.get(find(rank), key), key)
    return [expert for _, _, expert in sorted(best.values())]
