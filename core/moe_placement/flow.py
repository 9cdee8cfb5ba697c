"""Flow: tokens moved from copy to copy until no rank is above the lowest level possible.

A rank above its layer's level hands tokens of an expert to another rank that holds it, which may
hand on tokens of another expert, and so on to a rank below the level (an augmenting path of a
maximum flow; here along shortest paths, all paths of all layers at once). Where no such way exists,
the ranks that have none hold all copies of all experts they serve: their mean level is what no
split can beat, and becomes the level of the layer. Neighbours: `split` (its only caller).

Shapes: L layers, R ranks, K = L · R ranks of all layers, M experts with several copies in all
layers, N copies of them (sorted by expert).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]

TOLERANCE = 1e-9
"""Part of its level by which the fullest rank may stay above it."""
NOTHING = 1e-12
"""Part of a level below which a copy has no tokens to hand on."""
MAX_WAVES = 2000


@dataclass(frozen=True, eq=False)
class Copies:
    """Who can hand tokens of which expert to whom."""

    expert_N: Ints
    """Ascending, without gaps."""
    rank_N: Ints
    first_M: Ints
    count_M: Ints
    at_rank_N: Ints
    """Copies sorted by rank."""
    first_K: Ints
    """Of a rank in `at_rank_N`."""
    count_K: Ints

    @classmethod
    def of(cls, expert_N: Ints, rank_N: Ints, num_ranks: int) -> Copies:
        count_M, count_K = np.bincount(expert_N), np.bincount(rank_N, minlength=num_ranks)
        return cls(
            expert_N,
            rank_N,
            np.cumsum(count_M) - count_M,
            count_M,
            np.argsort(rank_N, kind="stable"),
            np.cumsum(count_K) - count_K,
            count_K,
        )

    def of_experts(self, expert_I: Ints) -> tuple[Ints, Ints]:
        """All copies of these experts: the position of the copy's expert, and the copy."""
        return _ragged(self.first_M[expert_I], self.count_M[expert_I])

    def on_ranks(self, rank_I: Ints) -> tuple[Ints, Ints]:
        """All copies on these ranks: the position of the copy's rank, and the copy."""
        owner, index = _ragged(self.first_K[rank_I], self.count_K[rank_I])
        return owner, self.at_rank_N[index]


def settle(copies: Copies, tokens_N: Floats, load_LR: Floats, speeds_R: Floats) -> Floats:
    """Tokens of each copy [N] for which each layer's largest load ÷ speed is smallest.

    Args:
        tokens_N: to start from; what an expert's copies have together stays.
        load_LR: of each rank with these tokens and all that can't be moved.
    """
    waves = _Waves(copies, tokens_N, load_LR, speeds_R)
    for _ in range(MAX_WAVES):
        if not waves.find_full():
            break
        ways = waves.find_ways()
        waves.raise_levels()
        for distance in range(len(ways) - 1, 0, -1):
            waves.hand_on(ways[distance], distance)
    return waves.tokens_N


class _Waves:
    def __init__(self, copies: Copies, tokens_N: Floats, load_LR: Floats, speeds_R: Floats) -> None:
        num_layers, num_ranks = load_LR.shape
        self.copies, self.tokens_N = copies, tokens_N.copy()
        self.load_K, self.speed_K = load_LR.ravel().copy(), np.tile(speeds_R, num_layers)
        self.layer_K = np.repeat(np.arange(num_layers), num_ranks)
        self.level_L = load_LR.sum(axis=1) / speeds_R.sum()
        self.nothing_N = NOTHING * self.level_L[self.layer_K[copies.rank_N]]
        self.below = TOLERANCE / (4 * num_ranks)
        self.dims = (num_layers, num_ranks)

    def find_full(self) -> bool:
        """Which ranks are above their level, in layers that are not settled."""
        self.target_K = self.level_L[self.layer_K] * self.speed_K
        self.over_K = self.load_K - self.target_K
        self.full_K = self.over_K > TOLERANCE * self.target_K
        self.open_K = self.full_K.reshape(self.dims).any(axis=1)[self.layer_K]
        return bool(self.open_K.any())

    def find_ways(self) -> list[Ints]:
        """Ranks by their distance to a rank below its level, until all full ranks have a way.

        Distances count experts passed; an expert is as far away as its nearest rank, a rank one
        further than the nearest expert it has tokens of.
        """
        copies = self.copies
        self.distance_K = np.full(len(self.load_K), -1)
        self.distance_M = np.full(len(copies.first_M), -1)
        self.way_less_K = self.full_K.copy()
        reached = np.flatnonzero(self.open_K & (self.over_K < -self.below * self.target_K))
        self.distance_K[reached] = 0
        ways = [reached]
        while len(reached) and self.way_less_K.any():
            distance = len(ways)
            expert = copies.expert_N[copies.on_ranks(reached)[1]]
            expert = expert[self.distance_M[expert] < 0]
            self.distance_M[expert] = distance - 1
            copy = copies.of_experts(_once(expert, self.distance_M, distance - 1))[1]
            rank = copies.rank_N[copy[self.tokens_N[copy] > self.nothing_N[copy]]]
            rank = rank[self.distance_K[rank] < 0]
            self.distance_K[rank] = distance
            reached = _once(rank, self.distance_K, distance)
            self.way_less_K[reached] = False
            ways.append(reached)
        return ways

    def raise_levels(self) -> None:
        """Where full ranks have no way, to the mean level of all ranks that have none."""
        stuck_L = self.way_less_K.reshape(self.dims).any(axis=1)
        if not stuck_L.any():
            return
        apart_LR = (self.distance_K < 0).reshape(self.dims)[stuck_L]
        load_LR = self.load_K.reshape(self.dims)[stuck_L]
        speed_LR = self.speed_K.reshape(self.dims)[stuck_L]
        self.level_L[stuck_L] = (load_LR * apart_LR).sum(axis=1) / (speed_LR * apart_LR).sum(axis=1)

    def hand_on(self, rank_I: Ints, distance: int) -> None:
        """Ranks at a distance hand what they have over their level one step down the way."""
        copies, nearer = self.copies, distance - 1
        rank_I = rank_I[self.over_K[rank_I] > self.below * self.target_K[rank_I]]
        if not len(rank_I):
            return
        owner, copy = copies.on_ranks(rank_I)
        downhill = self.distance_M[copies.expert_N[copy]] == nearer
        owner, copy = owner[downhill], copy[downhill]
        held_I = np.bincount(owner, self.tokens_N[copy], minlength=len(rank_I))
        part_I = np.minimum(self.over_K[rank_I] / np.maximum(held_I, 1e-300), 1.0)
        given = self.tokens_N[copy] * part_I[owner]
        self.tokens_N[copy] -= given
        handed_I = np.bincount(owner, given, minlength=len(rank_I))
        self._add(rank_I, -handed_I.astype(np.float64))

        expert, place = np.unique(copies.expert_N[copy], return_inverse=True)
        given_I = np.bincount(place, given)
        owner, copy = copies.of_experts(expert)
        downhill = self.distance_K[copies.rank_N[copy]] == nearer
        owner, copy = owner[downhill], copy[downhill]
        rank = copies.rank_N[copy]
        # The last step by what is wanted there; a rank on the way takes by its speed.
        weight = self.speed_K[rank] * 1e-9
        weight += np.maximum(-self.over_K[rank], 0.0) if nearer == 0 else self.speed_K[rank]
        taken = given_I[owner] * weight / np.bincount(owner, weight)[owner]
        self.tokens_N[copy] += taken
        self._add(rank, taken)

    def _add(self, rank: Ints, tokens: Floats) -> None:
        np.add.at(self.load_K, rank, tokens)
        np.add.at(self.over_K, rank, tokens)


def _ragged(first_I: Ints, count_I: Ints) -> tuple[Ints, Ints]:
    """All of first ≤ index < first + count, one range after the other: (number of range, index)."""
    owner = np.repeat(np.arange(len(first_I)), count_I)
    shift_I = first_I - (np.cumsum(count_I) - count_I)
    return owner, np.arange(len(owner)) + shift_I[owner]


def _once(index: Ints, distance: Ints, value: int) -> Ints:
    """`index` without repetitions, ascending, when these are the entries of `distance` that have
    this value."""
    if len(index) * 8 < len(distance):
        return np.unique(index)
    return np.flatnonzero(distance == value)
