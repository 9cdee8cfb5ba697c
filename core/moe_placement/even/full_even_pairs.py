"""How many copies each expert gets where every rank has two slots and so holds a pair.

Given the copies, pairing the heaviest with the lightest is the best there is, so only their numbers
matter: for each size x there must be no more copies that leave less than x on their rank than
copies (and free slots) that are lighter than x. What is missing at some sizes is the shortage of a
choice; one expert after another, the hottest first, takes the number of copies that makes it least.
Neighbours: `full_even_counts` gives the start, `full_even_deal` pairs.

Shapes: L layers, E logical experts, R ranks, X sizes from 0 to half the target, N numbers of copies
to choose from.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from moe_placement.bound import BoundL
from moe_placement.placement import CopiesLE
from moe_placement.score import LoadLE

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

FIRST_AIM = 0.02
"""Gap to aim at first."""
LESS = (0.5, 0.8, 0.9, 0.65, 0.75, 0.85) * 2
"""Then the gap reached, times these, one after another."""
LEAST_AIM = 0.005
NUM_SIZES = 64
CAPS = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4)
"""Shares, in units of the target, that an expert with many copies can choose between."""
FEW = 4
"""Up to so many ranks' worth an expert chooses between successive numbers of copies."""
LEAST_SHARE = 0.3
"""Where all experts of all layers are lighter, they keep their number of copies."""
MAX_WORK = 15_000_000
"""Bounds the sweeps after the first: layers × experts × choices × sizes."""
NO_SLOT = 100
"""A missing slot counts as so many missing copies."""
SHORTAGE_WEIGHT = 1000.0
"""Against the number of copies, which decides between equals."""
ROUNDING = 1e-9


def refined(
    load_LE: LoadLE, counts_LE: CopiesLE, num_ranks: int, level_L: BoundL, fewest: int, most: int
) -> CopiesLE:
    """Numbers of copies that pair better, or the given ones.

    Args:
        level_L: the bound of the layer's rank loads; layers where it is 0 keep their numbers.
        fewest, most: copies of one expert.
    """
    best_LE = counts_LE.copy()
    gap_L = _gaps(load_LE, best_LE, num_ranks, level_L)
    work = 0
    for less in (0.0, *LESS):
        aim_L = np.maximum(gap_L * less, LEAST_AIM if less else FIRST_AIM)
        todo_L = np.flatnonzero(gap_L > aim_L)
        if work > MAX_WORK or not len(todo_L):
            continue
        share_LE = load_LE[todo_L] / (level_L * (1 + aim_L))[todo_L, None]
        number = int((share_LE >= LEAST_SHARE).sum(axis=1).max())
        work += len(todo_L) * number * (len(CAPS) + 1) * NUM_SIZES
        found_LE = _sweep(share_LE, best_LE[todo_L], number, num_ranks, fewest, most)
        found_gap_L = _gaps(load_LE[todo_L], found_LE, num_ranks, level_L[todo_L])
        better_L = found_gap_L < gap_L[todo_L]
        best_LE[todo_L[better_L]] = found_LE[better_L]
        gap_L[todo_L[better_L]] = found_gap_L[better_L]
    return best_LE


def folded(load_LE: LoadLE, counts_LE: CopiesLE, num_ranks: int) -> Floats:
    """Largest pair when copies are dealt in two rounds as `full_even_deal` does, float64 [L]; inf
    where there are more copies than slots."""
    share_LE = load_LE / counts_LE
    order_LE = np.argsort(-share_LE, axis=1, kind="stable")
    largest_L = np.full(len(load_LE), np.inf)
    for layer, order_E in enumerate(order_LE):
        number_E = counts_LE[layer, order_E]
        free = 2 * num_ranks - int(number_E.sum())
        if free < 0:
            continue
        copies = np.concatenate([np.repeat(share_LE[layer, order_E], number_E), np.zeros(free)])
        ends_E = np.cumsum(number_E)
        middle = int(np.searchsorted(ends_E, num_ranks, side="right"))
        largest_L[layer] = _largest_pair(
            copies,
            # Copies of the expert in the middle that are dealt in the first and second round.
            num_ranks - int(ends_E[middle] - number_E[middle]) if middle < len(ends_E) else 0,
            int(ends_E[middle]) - num_ranks if middle < len(ends_E) else 0,
        )
    return largest_L


def _largest_pair(copies: Floats, first: int, second: int) -> float:
    """Args: copies: of two rounds, heaviest first; the last `first` of the first round and the
    first `second` of the second are of one expert and must not meet."""
    num_ranks = len(copies) // 2
    down = copies[:num_ranks][::-1]
    if first and second:
        strangers = down[first : first + second]
        down = np.concatenate([strangers, down[:first], down[first + second :]])
    return float((down + copies[num_ranks:]).max())


def _gaps(load_LE: LoadLE, counts_LE: CopiesLE, num_ranks: int, level_L: BoundL) -> Floats:
    loaded_L = level_L > 0
    peak_L = folded(load_LE, counts_LE, num_ranks)
    return np.where(loaded_L, peak_L / np.where(loaded_L, level_L, 1.0) - 1.0, 0.0)


def _sweep(
    share_LE: Floats, counts_LE: CopiesLE, number: int, num_ranks: int, fewest: int, most: int
) -> CopiesLE:
    """The `number` hottest experts choose once each, the hottest first.

    Args:
        share_LE: loads in units of the target.
    """
    counts_LE = counts_LE.copy()
    layers = np.arange(len(share_LE))
    excess_LX = _excess(share_LE, counts_LE, num_ranks)
    expert_LM = np.argsort(-share_LE, axis=1, kind="stable")[:, :number]
    share_LM = np.take_along_axis(share_LE, expert_LM, 1)
    now_LM = np.take_along_axis(counts_LE, expert_LM, 1)
    choice_LMN = np.concatenate(
        [now_LM[:, :, None], _choices(share_LM, fewest, most)], axis=2, dtype=np.float64
    )
    place_LMN, sign_LMN = _place(share_LM[:, :, None] / choice_LMN)
    signed_LMN = sign_LMN * choice_LMN
    sizes_X = np.arange(NUM_SIZES)
    for at in range(number):
        choice_LN = choice_LMN[:, at]
        # What each choice adds to the excess; the first is the present one.
        effect_LNX = (sizes_X >= place_LMN[:, at, :, None]) * signed_LMN[:, at, :, None]
        effect_LNX -= choice_LN[:, :, None]
        effect_LNX += (excess_LX - effect_LNX[:, 0])[:, None, :]
        missing_LNX = np.minimum(effect_LNX, 0.0)
        missing_LNX[:, :, 0] *= NO_SLOT
        shortage_LN = np.einsum("lnx,lnx->ln", missing_LNX, missing_LNX)
        chosen_L = (shortage_LN * SHORTAGE_WEIGHT + choice_LN).argmin(axis=1)
        counts_LE[layers, expert_LM[:, at]] = choice_LN[layers, chosen_L]
        excess_LX = effect_LNX[layers, chosen_L]
    return counts_LE


def _choices(share_LM: Floats, fewest: int, most: int) -> Floats:
    """Numbers of copies for experts of so much load, [L, M, N]."""
    share_LM1 = share_LM[:, :, None]
    by_cap_LMN = np.ceil(share_LM1 / CAPS - ROUNDING)
    successive_LMN = np.ceil(share_LM1 - ROUNDING) + np.arange(len(CAPS))
    return np.clip(np.where(share_LM1 > FEW, by_cap_LMN, successive_LMN), fewest, most)


def _excess(share_LE: Floats, counts_LE: CopiesLE, num_ranks: int) -> Floats:
    """Copies and free slots lighter than each size, less the copies that leave less than it on
    their rank, [L, X]."""
    place_LE, sign_LE = _place(share_LE / counts_LE)
    steps = np.zeros((len(share_LE), NUM_SIZES + 1))
    np.add.at(steps, (np.arange(len(share_LE))[:, None], place_LE), sign_LE * counts_LE)
    free_L1 = 2 * num_ranks - counts_LE.sum(axis=1, keepdims=True)
    return np.asarray(np.cumsum(steps, axis=1)[:, :NUM_SIZES] + free_L1)


def _place(share: Floats) -> tuple[Ints, Ints]:
    """(first size that is above the copy or above what it leaves, 1 for light and −1 for heavy)."""
    light = share <= 0.5
    size = np.where(light, share, 1.0 - share)
    place = np.floor(np.clip(size, 0.0, 0.5) * 2 * (NUM_SIZES - 1) + ROUNDING).astype(np.int64) + 1
    return np.where(size < -ROUNDING, 0, place), np.where(light, 1, -1)
