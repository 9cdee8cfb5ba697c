"""Which copies come in one wave: on each rank and layer at most one, those first that let others
move.

Neighbours: `remaining` is what there is to choose from, `detours` steps in where nothing fits,
`departures` makes the room.

Shapes: L MoE layers, E logical experts, R ranks, N copies.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from moe_placement.walk.remaining import Copies, CountLE, Remaining

FlagsN = npt.NDArray[np.bool_]
IndexN = npt.NDArray[np.int64]

LOST, FLEEING, OTHER = 0, 1, 2
"""An expert without a live copy, one with copies on leaving ranks only, all others."""


def choose(left: Remaining) -> Copies:
    """The arrivals of a wave without a budget, most urgent first.

    First come experts without a live copy, then those whose only copies are on leaving ranks, then
    those that make room on a rank which would stand still, then other moves, then further copies;
    ties go to the lowest layer, rank and expert.
    """
    pending = left.pending
    fits_N = left.free_LR[pending.layer_N, pending.rank_N] > 0
    rest = pending.where(fits_N & ~takes_last_slot(left))
    urgency_LE = _urgency(left)
    settled_LE = left.kept_LE > 0
    picked, keys = [], []
    while rest.number:
        kind_N, gain_N = _kinds(left, rest, settled_LE, urgency_LE)
        order = np.lexsort((rest.expert_N, -gain_N, kind_N, rest.rank_N, rest.layer_N))
        place = rest.layer_N[order] * left.free_LR.shape[1] + rest.rank_N[order]
        best = order[np.diff(place, prepend=-1) != 0]
        # One arrival settles an expert: the other ranks that would take it choose again.
        expert = rest.layer_N[best] * settled_LE.shape[1] + rest.expert_N[best]
        wins = settled_LE.ravel()[expert]
        wins[np.unique(expert, return_index=True)[1]] = True
        won = best[wins]
        picked.append(rest.where(won))
        keys.append(np.stack([kind_N[won], -gain_N[won], rest.layer_N[won], rest.rank_N[won]]))
        settled_LE[rest.layer_N[won], rest.expert_N[won]] = True
        taken_LR = left.count_LR(rest.where(won)) > 0
        rest = rest.where(~taken_LR[rest.layer_N, rest.rank_N])
    if not picked:
        return pending.where(np.zeros(0, dtype=np.int64))
    kind_N, gain_N, layer_N, rank_N = np.concatenate(keys, axis=1)
    return Copies.joined(picked).where(np.lexsort((rank_N, gain_N, layer_N, kind_N)))


def takes_last_slot(left: Remaining) -> FlagsN:
    """Of the pending copies, those that would fill the last free slot of a layer and let nothing
    leave, while others wait: with that slot gone the others could not move any more."""
    pending = left.pending
    at_LE = (pending.layer_N, pending.expert_N)
    last_L = (left.free_LR.sum(axis=1) == 1) & (left.pending_LR.sum(axis=1) > 1)
    return np.asarray(
        last_L[pending.layer_N] & (left.kept_LE[at_LE] > 0) & (left.copies_LE[at_LE] > 0)
    )


def _kinds(
    left: Remaining, copies: Copies, settled_LE: npt.NDArray[np.bool_], urgency_LE: CountLE
) -> tuple[IndexN, IndexN]:
    """Of each copy its kind, and how much its arrival is worth within that."""
    at_LE = (copies.layer_N, copies.expert_N)
    settles_N = ~settled_LE[at_LE]
    kind_N = np.full(copies.number, OTHER)
    kind_N[settles_N & (left.staying_LE[at_LE] == 0)] = FLEEING
    kind_N[settles_N & (left.copies_LE[at_LE] == 0)] = LOST
    return kind_N, np.where(settles_N, 1 + urgency_LE[at_LE], 0)


def _urgency(left: Remaining) -> CountLE:
    """How many arrivals wait on a rank that has no room for the next one unless this expert
    leaves."""
    leaving = left.leaving
    easy_N = left.kept_LE[leaving.layer_N, leaving.expert_N] > 0
    took_LR = (left.pending_LR > 0) & (left.free_LR > 0)
    room_LR = left.free_LR - took_LR + left.count_LR(leaving.where(easy_N))
    waiting_LR = np.where(room_LR < 1, left.pending_LR - took_LR, 0)
    out_LE = np.zeros_like(left.copies_LE)
    np.maximum.at(
        out_LE, (leaving.layer_N, leaving.expert_N), waiting_LR[leaving.layer_N, leaving.rank_N]
    )
    return out_LE
