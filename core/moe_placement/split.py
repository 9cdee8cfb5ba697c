"""Split: the fractions that balance a given placement best, without moving anything.

For a placement no split can do better than max over sets A of experts of load(A) ÷ speed of the
ranks that hold a copy of A. Handing out one expert after another to the least loaded of its ranks
(water filling) walks down to exactly that value: rank loads form a base polytope, on which the
least-squares point is also the min-max point. Neighbours: `placement` (the value), `bound` (what
no placement can beat), `full_fractions` and `step_fractions` (choose placements for such splits).

Shapes: L layers, E logical experts, R ranks, S physical slots a rank, M experts with several
copies (at most, in a layer), C their copies (at most).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from moe_api.plan import FractionsLRS, SlotsLRS, even_fractions
from moe_placement.capacity import SpeedsR
from moe_placement.score import LoadLE, rank_loads

TOLERANCE = 1e-7
MAX_SWEEPS = 400


def best_fractions(
    load_LE: LoadLE,
    slots_LRS: SlotsLRS,
    speeds_R: SpeedsR,
    given_LRS: FractionsLRS | None = None,
) -> FractionsLRS:
    """Fractions float64 [L, R, S] for which the largest load ÷ speed of each layer is smallest.

    Experts without load are split evenly; experts without a copy are left out.

    Args:
        given_LRS: fractions to start from, such as those in force; absent = even.
    """
    fractions_LRS = np.array(even_fractions(slots_LRS) if given_LRS is None else given_LRS)
    experts_LMC = _shared_slots(slots_LRS, load_LE)
    if experts_LMC is None:
        return fractions_LRS
    flat_LN = fractions_LRS.reshape(len(slots_LRS), -1)
    slot_LMC, used_LMC = experts_LMC
    num_layers, num_shared, _ = slot_LMC.shape
    layers = np.arange(num_layers)[:, None]
    rank_LMC = slot_LMC // slots_LRS.shape[2]
    expert_LM = slots_LRS.reshape(num_layers, -1)[layers, slot_LMC[:, :, 0]]
    load_LM = np.where(used_LMC.any(axis=2), load_LE[layers, expert_LM], 0.0)
    token_LMC = np.where(used_LMC, flat_LN[layers[:, :, None], slot_LMC], 0.0) * load_LM[:, :, None]
    loads_LR = rank_loads(slots_LRS, fractions_LRS, load_LE)
    speed_LMC = np.where(used_LMC, speeds_R[rank_LMC], 0.0)

    open_L = np.arange(num_layers)
    for _ in range(MAX_SWEEPS):
        rows = open_L[:, None]
        for shared in range(num_shared):
            ranks = rank_LMC[open_L, shared]
            used = used_LMC[open_L, shared]
            token = token_LMC[open_L, shared]
            rest = loads_LR[rows, ranks] - token
            new = _fill(rest, speed_LMC[open_L, shared], load_LM[open_L, shared])
            change = np.where(used, new - token, 0.0)
            token_LMC[open_L, shared] = np.where(used, new, 0.0)
            np.add.at(loads_LR, (rows, ranks), change)
        level_LR = loads_LR / speeds_R
        bound_L = _level_bound(
            level_LR[open_L], load_LE[open_L], slots_LRS[open_L], loads_LR[open_L], speeds_R
        )
        open_L = open_L[level_LR[open_L].max(axis=1) > bound_L * (1 + TOLERANCE)]
        if not len(open_L):
            break

    share_LMC = token_LMC / np.where(load_LM > 0, load_LM, 1.0)[:, :, None]
    total_LM1 = share_LMC.sum(axis=2, keepdims=True)
    share_LMC = share_LMC / np.where(total_LM1 > 0, total_LM1, 1.0)
    write = used_LMC & (load_LM > 0)[:, :, None]
    layers_N = np.nonzero(write)[0]
    flat_LN[layers_N, slot_LMC[write]] = share_LMC[write]
    return fractions_LRS


def _shared_slots(
    slots_LRS: SlotsLRS, load_LE: LoadLE
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]] | None:
    """Flat slot numbers [L, M, C] of the loaded experts with several copies, and which are real."""
    num_layers = len(slots_LRS)
    num_experts = load_LE.shape[1]
    flat_LN = slots_LRS.reshape(num_layers, -1)
    order_LN = np.argsort(flat_LN, axis=1, kind="stable")
    sorted_LN = np.take_along_axis(flat_LN, order_LN, 1)
    layer_N, place_N = np.nonzero(sorted_LN >= 0)
    expert_N = sorted_LN[layer_N, place_N].astype(np.int64)
    slot_N = order_LN[layer_N, place_N]
    key_N = layer_N * num_experts + expert_N
    count = np.bincount(key_N, minlength=num_layers * num_experts)
    first = np.cumsum(count) - count
    shared = (count >= 2) & (load_LE.ravel() > 0)
    if not shared.any():
        return None
    shared_LE = shared.reshape(num_layers, num_experts)
    number_LE = np.cumsum(shared_LE, axis=1) - 1
    dims = (num_layers, int(shared_LE.sum(axis=1).max()), int(count[shared].max()))
    slot_LMC = np.zeros(dims, dtype=np.int64)
    used_LMC = np.zeros(dims, dtype=np.bool_)
    keep = shared[key_N]
    copy_N = np.arange(len(key_N)) - first[key_N]
    at = (layer_N[keep], number_LE.ravel()[key_N[keep]], copy_N[keep])
    slot_LMC[at] = slot_N[keep]
    used_LMC[at] = True
    return slot_LMC, used_LMC


def _fill(
    rest_NC: npt.NDArray[np.float64], speed_NC: npt.NDArray[np.float64], load_N: LoadLE
) -> npt.NDArray[np.float64]:
    """Hands load_N to columns of speed > 0 so that the highest (rest + share) ÷ speed is least."""
    level_NC = np.where(speed_NC > 0, rest_NC / np.where(speed_NC > 0, speed_NC, 1.0), np.inf)
    order_NC = np.argsort(level_NC, axis=1, kind="stable")
    rest_sum = np.cumsum(np.take_along_axis(np.where(speed_NC > 0, rest_NC, 0.0), order_NC, 1), 1)
    speed_sum = np.cumsum(np.take_along_axis(speed_NC, order_NC, 1), 1)
    level_after = (rest_sum + load_N[:, None]) / np.where(speed_sum > 0, speed_sum, 1.0)
    level_N = np.where(speed_sum > 0, level_after, np.inf).min(axis=1)
    level_N = np.where(load_N > 0, level_N, 0.0)
    share = np.maximum(level_N[:, None] - np.where(speed_NC > 0, level_NC, 0.0), 0.0) * speed_NC
    return np.asarray(share)


def _level_bound(
    level_LR: npt.NDArray[np.float64],
    load_LE: LoadLE,
    slots_LRS: SlotsLRS,
    loads_LR: npt.NDArray[np.float64],
    speeds_R: SpeedsR,
) -> npt.NDArray[np.float64]:
    """What no split can beat: the best of load(A) ÷ speed(T) over T = the n most loaded ranks, A =
    the experts that have copies on T alone."""
    num_layers, num_ranks, _ = slots_LRS.shape
    order_LR = np.argsort(-level_LR, axis=1, kind="stable")
    place_LR = np.empty_like(order_LR)
    np.put_along_axis(place_LR, order_LR, np.arange(num_ranks)[None, :].repeat(num_layers, 0), 1)
    last_LE = np.zeros(load_LE.shape, dtype=np.int64)
    layer_N, rank_N, slot_N = np.nonzero(slots_LRS >= 0)
    expert_N = slots_LRS[layer_N, rank_N, slot_N]
    np.maximum.at(last_LE, (layer_N, expert_N), place_LR[layer_N, rank_N])
    held_LE = np.zeros(load_LE.shape, dtype=np.bool_)
    held_LE[layer_N, expert_N] = True
    load_LR = np.zeros((num_layers, num_ranks))
    layers = np.arange(num_layers)[:, None]
    np.add.at(load_LR, (layers, last_LE), np.where(held_LE, load_LE, 0.0))
    speed_LR = np.cumsum(speeds_R[order_LR], axis=1)
    return np.asarray((np.cumsum(load_LR, axis=1) / speed_LR).max(axis=1))
