"""The walk from the placement in force to a target, in waves that are epochs of their own.

A wave fills free slots and gives up others; all ranks switch to it at one step border. Before the
switch the placement in force serves, after it the wave does, and every copy that the wave names
had arrived by then: so every expert has a finished copy on a live rank at every instant.
Neighbours: `arrivals`, `departures` and `detours` choose what a wave does, `migration` derives its
moves, `decide` asks for the next one.

Shapes: L MoE layers, E logical experts, R ranks, S physical slots a rank, N copies.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from moe_api.plan import SlotsLRS
from moe_placement.capacity import FlagsR, SlotsR
from moe_placement.placement import copies
from moe_placement.walk import arrivals, departures, detours
from moe_placement.walk.limits import Limits as Limits
from moe_placement.walk.limits import WalkError as WalkError
from moe_placement.walk.limits import fitting
from moe_placement.walk.remaining import Copies, Remaining

FlagsL = npt.NDArray[np.bool_]
FlagsN = npt.NDArray[np.bool_]


def walk(
    current_LRS: SlotsLRS, target_LRS: SlotsLRS, limits: Limits | None = None
) -> tuple[SlotsLRS, ...]:
    """All waves from `current` to `target`; none when it is reached.

    It ends short of the target where a layer has neither a free slot nor a second copy of any
    expert: see `migration.reached`.

    Raises:
        WalkError: as `next_wave`.
    """
    waves: list[SlotsLRS] = []
    while (wave := next_wave(waves[-1] if waves else current_LRS, target_LRS, limits)) is not None:
        assert len(waves) <= 4 * target_LRS.size, "every wave gets nearer or makes room to"
        waves.append(wave)
    return tuple(waves)


def next_wave(
    current_LRS: SlotsLRS, target_LRS: SlotsLRS, limits: Limits | None = None
) -> SlotsLRS | None:
    """The next epoch on the way to `target`, int32 [L, R, S] with S at least the physical slots
    that the limits name; None when it is reached, or when no slot lets anything move.

    Each rank takes at most one arrival per layer, into its lowest free slot. What counts is which
    rank holds what: an expert that is already on its target rank stays in the slot it has.

    Raises:
        WalkError: the target names a rank that is not open, or more experts than it has slots, or
        an expert that is held now is not in it.
    """
    limits = limits or Limits()
    width = max(current_LRS.shape[2], target_LRS.shape[2])
    if limits.slots_R is not None:
        width = max(width, int(limits.slots_R.max()))
    live_R, open_R, slots_R = _ranks(limits, current_LRS.shape[1], width)
    held_LRS, target_LRS = _wide(current_LRS, width), _wide(target_LRS, width)
    _check(held_LRS, target_LRS, slots_R, open_R)
    here_LRS = np.where(live_R[:, None], held_LRS, np.int32(-1))
    left = Remaining.between(here_LRS, target_LRS, slots_R, open_R)
    coming = arrivals.choose(left)
    may_N = departures.may_leave(left, coming)
    stalled_L = detours.stalled(left, coming, may_N)
    parked = detours.park(left, stalled_L, may_N)
    fits_N = fitting(here_LRS, Copies.joined([coming, parked]), limits)
    parked = parked.where(fits_N[fits_N >= coming.number] - coming.number)
    coming = coming.where(fits_N[fits_N < coming.number])
    wave_LRS = _settled(here_LRS, left, coming, parked, stalled_L, limits.max_moves)
    return None if np.array_equal(wave_LRS, held_LRS) else wave_LRS


def _ranks(limits: Limits, num_ranks: int, width: int) -> tuple[FlagsR, FlagsR, SlotsR]:
    """Who is live, who is open, how many physical slots each has."""
    live_R = np.ones(num_ranks, dtype=np.bool_) if limits.live_R is None else limits.live_R
    open_R = live_R if limits.open_R is None else live_R & limits.open_R
    slots_R = np.full(num_ranks, width) if limits.slots_R is None else limits.slots_R
    return live_R, open_R, np.minimum(slots_R, width)


def _wide(slots_LRS: SlotsLRS, width: int) -> SlotsLRS:
    missing = ((0, 0), (0, 0), (0, width - slots_LRS.shape[2]))
    return np.pad(slots_LRS, missing, constant_values=-1).astype(np.int32)


def _check(current_LRS: SlotsLRS, target_LRS: SlotsLRS, slots_R: SlotsR, open_R: FlagsR) -> None:
    if current_LRS.shape != target_LRS.shape:
        raise WalkError(
            f"the target has {target_LRS.shape[0]} layers on {target_LRS.shape[1]} ranks, "
            f"{current_LRS.shape[0]} layers on {current_LRS.shape[1]} ranks are in force"
        )
    filled_LR = (target_LRS >= 0).sum(axis=2)
    closed_R = ~open_R & (filled_LR > 0).any(axis=0)
    if closed_R.any():
        raise WalkError(
            f"the target names rank {int(closed_R.argmax())}, which is dead or about to leave"
        )
    over_R = (filled_LR > slots_R).any(axis=0)
    if over_R.any():
        rank = int(over_R.argmax())
        raise WalkError(
            f"the target puts {int(filled_LR[:, rank].max())} experts on rank {rank}, which has "
            f"{int(slots_R[rank])} slots"
        )
    num_experts = int(max(current_LRS.max(), target_LRS.max())) + 1
    lacks_LE = (copies(target_LRS, num_experts) == 0) & (copies(current_LRS, num_experts) > 0)
    if lacks_LE.any():
        layer, expert = (int(x) for x in np.argwhere(lacks_LE)[0])
        raise WalkError(f"the target has no copy of expert {expert} in layer {layer}")


def _settled(
    here_LRS: SlotsLRS,
    left: Remaining,
    coming: Copies,
    parked: Copies,
    stalled_L: FlagsL,
    max_moves: int | None,
) -> SlotsLRS:
    """The placement after the switch: who leaves for whom, and in each layer in which something
    still waits a free slot."""
    every = Copies.joined([coming, parked])
    may_N = departures.may_leave(left, every)
    going_N = departures.choose(left, coming, may_N, max_moves)
    going_N |= may_N & (stalled_L | _full(left, coming, parked, going_N))[left.leaving.layer_N]
    given = detours.give_up(left, np.flatnonzero(_full(left, coming, parked, going_N)).tolist())
    gone = Copies.joined([left.leaving.where(going_N), given])
    return _written(here_LRS, Copies.joined([coming, parked]), gone)


def _full(left: Remaining, coming: Copies, parked: Copies, going_N: FlagsN) -> FlagsL:
    """Layers in which something will wait and no open rank will have a free slot."""
    going = left.leaving.where(going_N & left.open_R[left.leaving.rank_N])
    came_LR, parked_LR = left.count_LR(coming), left.count_LR(parked)
    free_L = (left.free_LR - came_LR - parked_LR + left.count_LR(going)).sum(axis=1)
    return np.asarray(((left.pending_LR - came_LR).sum(axis=1) > 0) & (free_L < 1))


def _written(here_LRS: SlotsLRS, coming: Copies, gone: Copies) -> SlotsLRS:
    wave_LRS = here_LRS.copy()
    holds_NS = here_LRS[gone.layer_N, gone.rank_N] == gone.expert_N[:, None]
    copy_N, slot_N = np.nonzero(holds_NS)
    wave_LRS[gone.layer_N[copy_N], gone.rank_N[copy_N], slot_N] = -1
    lowest_N = (here_LRS[coming.layer_N, coming.rank_N] < 0).argmax(axis=1)
    wave_LRS[coming.layer_N, coming.rank_N, lowest_N] = coming.expert_N
    return wave_LRS
