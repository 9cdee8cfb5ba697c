"""Exchanging: a full rank and a light one swap the experts that make both alike.

All layers at once, in each round every rank that is too full with one partner: the fullest with the
lightest, in the next round with the second lightest, and so on. Of all ways to swap one expert, or
two for two (a free slot counts as an expert without load), a pair takes the one that levels it
best. How many copies an expert has stays as it is. Neighbour: `full_even_deal`, where this starts.

Shapes: L layers, R ranks, S slots a rank, P pairs of ranks, N ways to choose slots of a rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import combinations

import numpy as np
import numpy.typing as npt

from moe_api.plan import SlotsLRS
from moe_placement.bound import BoundL
from moe_placement.capacity import SlotsR, SpeedsR

TokensLRS = npt.NDArray[np.float64]
IntsP = npt.NDArray[np.int64]

MAX_ROUNDS = 60
PATIENCE = 4
"""Rounds in which a layer's excess must shrink, or it is given up."""
FAR, FAR_KEPT, NEAR_KEPT = 0.02, 0.75, 0.97
"""From an excess of FAR × level on, at most FAR_KEPT of it may remain; nearer, NEAR_KEPT."""
MAX_CHOICES = 50
"""Ways to choose slots of a rank: with more, two for two is not tried (one for one is fine
enough)."""
MAX_SWAPS_AT_ONCE = 2_000_000
"""Bounds memory: pairs × ways looked at in one go."""
_NEVER = 1e30
_LESS = 1.0 - 1e-9


@dataclass(eq=False)
class _Pairs:
    """One rank that gives and one that takes, each of one layer."""

    layer_P: IntsP
    full_P: IntsP
    light_P: IntsP

    def part(self, begin: int, end: int) -> _Pairs:
        part = slice(begin, end)
        return _Pairs(self.layer_P[part], self.full_P[part], self.light_P[part])


def exchange(
    slots_LRS: SlotsLRS,
    token_LRS: TokensLRS,
    slots_R: SlotsR,
    speeds_R: SpeedsR,
    level_L: BoundL,
    goal: float,
) -> None:
    """Levels the ranks in place, until no load ÷ speed is above (1 + goal) × level or no more is to
    be had.

    Args:
        token_LRS: load of each slot, 0 where free; changed along with `slots_LRS`.
    """
    closed_RS = np.arange(slots_LRS.shape[2]) >= slots_R[:, None]
    load_LR = token_LRS.sum(axis=2)
    half = len(slots_R) // 2
    active_L = np.arange(len(slots_LRS))
    excess_L = np.full(len(slots_LRS), np.inf)
    for turn in range(MAX_ROUNDS if half else 0):
        over_L = (load_LR[active_L] / speeds_R).max(axis=1) - level_L[active_L]
        keep_L = over_L > goal * level_L[active_L]
        if turn % PATIENCE == 0:
            kept_L = np.where(over_L > FAR * level_L[active_L], FAR_KEPT, NEAR_KEPT)
            keep_L &= over_L < kept_L * excess_L[active_L]
            excess_L[active_L] = over_L
        active_L = active_L[keep_L]
        if not len(active_L):
            return
        order_LR = np.argsort(-load_LR[active_L] / speeds_R, axis=1, kind="stable")
        full_LR = order_LR[:, :half]
        light_LR = np.roll(order_LR[:, ::-1][:, :half], turn % half, axis=1)
        height_LR = np.take_along_axis(load_LR[active_L] / speeds_R, full_LR, 1)
        too_full_LR = height_LR > (1 + goal / 2) * level_L[active_L, None]
        row_P, place_P = np.nonzero(too_full_LR)
        pairs = _Pairs(active_L[row_P], full_LR[row_P, place_P], light_LR[row_P, place_P])
        for part in _in_parts(pairs, slots_LRS.shape[2]):
            _swap(part, slots_LRS, token_LRS, load_LR, closed_RS, speeds_R)


def _in_parts(pairs: _Pairs, slots: int) -> list[_Pairs]:
    size = max(1, MAX_SWAPS_AT_ONCE // max(len(choice) for choice in _choices(slots)) ** 2)
    return [pairs.part(at, at + size) for at in range(0, len(pairs.layer_P), size)]


def _swap(
    pairs: _Pairs,
    slots_LRS: SlotsLRS,
    token_LRS: TokensLRS,
    load_LR: npt.NDArray[np.float64],
    closed_RS: npt.NDArray[np.bool_],
    speeds_R: SpeedsR,
) -> None:
    """Each pair makes its best swap, if one levels it at all."""
    layer, full, light = pairs.layer_P, pairs.full_P, pairs.light_P
    number = np.arange(len(layer))
    give_PS, take_PS = token_LRS[layer, full], token_LRS[layer, light]
    expert_PS, other_PS = slots_LRS[layer, full], slots_LRS[layer, light]
    shared_PSS = (expert_PS[:, :, None] == other_PS[:, None, :]) & (expert_PS >= 0)[:, :, None]
    give_PS = np.where(shared_PSS.any(axis=2) | closed_RS[full], _NEVER, give_PS)
    take_PS = np.where(shared_PSS.any(axis=1) | closed_RS[light], -_NEVER, take_PS)
    speed_P, other_speed_P = speeds_R[full], speeds_R[light]
    wanted_P = load_LR[layer, full] * other_speed_P - load_LR[layer, light] * speed_P
    wanted_P = wanted_P / (speed_P + other_speed_P)
    # Tokens given too few burden the full rank, too many the light one, each by its speed.
    slope_P = speed_P / other_speed_P
    best_P = np.abs(wanted_P) * _LESS
    choice_P, swap_P = np.full(len(layer), -1), np.zeros(len(layer), dtype=np.int64)
    for size, choice_NK in enumerate(_choices(slots_LRS.shape[2])):
        short_PN = wanted_P[:, None] - give_PS[:, choice_NK].sum(axis=2)
        short_PNN = short_PN[:, :, None] + take_PS[:, choice_NK].sum(axis=2)[:, None, :]
        if (slope_P == 1.0).all():
            miss_PN = np.abs(short_PNN).reshape(len(layer), -1)
        else:
            miss_PNN = np.maximum(short_PNN, -short_PNN * slope_P[:, None, None])
            miss_PN = miss_PNN.reshape(len(layer), -1)
        found_P = miss_PN.argmin(axis=1)
        better_P = miss_PN[number, found_P] < best_P
        best_P = np.where(better_P, miss_PN[number, found_P], best_P)
        choice_P, swap_P = np.where(better_P, size, choice_P), np.where(better_P, found_P, swap_P)
    for size, choice_NK in enumerate(_choices(slots_LRS.shape[2])):
        of_P = np.flatnonzero(choice_P == size)
        here_PK, there_PK = (choice_NK[part] for part in np.divmod(swap_P[of_P], len(choice_NK)))
        here = (layer[of_P, None], full[of_P, None], here_PK)
        there = (layer[of_P, None], light[of_P, None], there_PK)
        for values in (slots_LRS, token_LRS):
            values[here], values[there] = values[there], values[here]
    load_LR[layer, full] = token_LRS[layer, full].sum(axis=1)
    load_LR[layer, light] = token_LRS[layer, light].sum(axis=1)


@cache
def _choices(slots: int) -> tuple[npt.NDArray[np.int64], ...]:
    """Ways to choose one slot, and two slots, of a rank: int64 [N, 1] and [N, 2]."""
    single = np.arange(slots)[:, None]
    pairs = np.asarray(list(combinations(range(slots), 2)), dtype=np.int64).reshape(-1, 2)
    return (single, pairs) if 2 < slots and len(pairs) <= MAX_CHOICES else (single,)
