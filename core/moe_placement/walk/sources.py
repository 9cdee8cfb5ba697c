"""Who gives its weights to whom: for each arrival one of the expert's nearest holders, so that
within a layer the ranks share the giving.

Neighbours: `migration` asks for the moves of an epoch, `waves` to count bytes that cross a border.

Shapes: L MoE layers, R ranks, S physical slots a rank, N arrivals, O offers (an arrival and one
holder of its expert).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moe_api.plan import SlotsLRS
from moe_placement.capacity import FlagsR

IndexN = npt.NDArray[np.int64]
IndexO = npt.NDArray[np.int64]
NearnessRR = npt.NDArray[np.int64]

MAX_PASSES = 32


@dataclass(frozen=True, eq=False)
class Offers:
    """All holders of all arrivals' experts, those of one arrival together, best first."""

    layer_N: IndexN
    first_N: IndexN
    """Of an arrival its first offer."""
    count_N: IndexN
    rank_O: IndexO
    slot_O: IndexO
    distance_O: IndexO
    """0 = the receiver itself, then the fewer topology levels are shared the more."""
    num_ranks: int

    def choose(self) -> IndexN:
        """For each arrival the offer to take, −1 where there is none.

        It is one of the nearest. No rank gives two or more weights of a layer more than another
        one that is as near to one of its receivers.
        """
        has_N = self.count_N > 0
        chosen_N = np.where(has_N, self.first_N, -1)
        if not has_N.any():
            return chosen_N
        near_N = self._num_nearest()
        gives = np.zeros(int(self.layer_N.max() + 1) * self.num_ranks, dtype=np.int64)
        remote = chosen_N[has_N][self.distance_O[chosen_N[has_N]] > 0]
        np.add.at(gives, self._giver(remote), 1)
        for _ in range(MAX_PASSES):
            # Whose giver gives more than one, and who could ask another.
            crowded_N = has_N & (near_N > 1)
            crowded_N[crowded_N] = gives[self._giver(chosen_N[crowded_N])] > 1
            turn_N = np.flatnonzero(crowded_N)
            # Who has the smallest choice chooses first.
            turn_N = turn_N[np.argsort(near_N[turn_N], kind="stable")]
            if not self._reconsider(turn_N, near_N, chosen_N, gives):
                break
        return chosen_N

    def givers(self) -> IndexN:
        """For each arrival the rank that gives, −1 where none has it."""
        chosen_N = self.choose()
        out_N = np.full(len(chosen_N), -1)
        out_N[chosen_N >= 0] = self.rank_O[chosen_N[chosen_N >= 0]]
        return out_N

    def ordered(self, arrival: int, chosen: int) -> tuple[tuple[int, int], ...]:
        """(rank, slot) of an arrival's offers, the chosen one first."""
        if chosen < 0:
            return ()
        first = int(self.first_N[arrival])
        others = [o for o in range(first, first + int(self.count_N[arrival])) if o != chosen]
        return tuple((int(self.rank_O[o]), int(self.slot_O[o])) for o in (chosen, *others))

    def _reconsider(self, turn_N: IndexN, near_N: IndexN, chosen_N: IndexN, gives: IndexN) -> bool:
        """Let arrivals change to an equally near rank that gives less; whether one did.

        One arrival of each layer at a time: layers do not touch each other.
        """
        changed = False
        layer_turn = self.layer_N[turn_N]
        for arrivals in _one_of_each(layer_turn):
            move_N = turn_N[arrivals]
            old = self._giver(chosen_N[move_N])
            gives[old] -= 1
            width = int(near_N[move_N].max())
            offer = self.first_N[move_N][:, None] + np.arange(width)
            real = np.arange(width) < near_N[move_N][:, None]
            offer = np.where(real, offer, 0)
            giver = self.layer_N[move_N][:, None] * self.num_ranks + self.rank_O[offer]
            load = np.where(real, gives[giver], np.iinfo(np.int64).max)
            best = load.argmin(axis=1)
            rows = np.arange(len(move_N))
            better = load[rows, best] < gives[old]
            chosen_N[move_N[better]] = offer[rows, best][better]
            gives[self._giver(chosen_N[move_N])] += 1
            changed |= bool(better.any())
        return changed

    def _giver(self, offer: IndexO) -> IndexO:
        """Number of the (layer, rank) that makes an offer."""
        arrival = np.searchsorted(self.first_N, offer, side="right") - 1
        return np.asarray(self.layer_N[arrival] * self.num_ranks + self.rank_O[offer])

    def _num_nearest(self) -> IndexN:
        """How many holders of each arrival are as near as the nearest; the receiver is nearer than
        any."""
        arrival_O = np.repeat(np.arange(len(self.first_N)), self.count_N)
        nearest_O = self.distance_O == self.distance_O[self.first_N[arrival_O]]
        return np.bincount(arrival_O[nearest_O], minlength=len(self.first_N))


def offers(
    old_LRS: SlotsLRS,
    layer_N: IndexN,
    rank_N: IndexN,
    expert_N: IndexN,
    nearness_RR: NearnessRR | None,
    live_R: FlagsR | None,
) -> Offers:
    """What the holders under the plan in force offer to arrivals (layer, receiver, expert).

    Args:
        nearness_RR: shared topology levels of two ranks; absent = all are equally near.
        live_R: ranks that can give; absent = all.
    """
    num_ranks = old_LRS.shape[1]
    base = int(max(old_LRS.max(initial=-1), expert_N.max(initial=-1))) + 1
    held = old_LRS >= 0
    if live_R is not None:
        held &= live_R[:, None]
    layer_H, rank_H, slot_H = np.nonzero(held)
    key_H = layer_H * base + old_LRS[layer_H, rank_H, slot_H]
    order_H = np.argsort(key_H, kind="stable")
    sorted_H = key_H[order_H]
    key_N = layer_N * base + expert_N
    begin_N = np.searchsorted(sorted_H, key_N, side="left")
    count_N = np.searchsorted(sorted_H, key_N, side="right") - begin_N
    first_N = np.cumsum(count_N) - count_N
    arrival_O = np.repeat(np.arange(len(key_N)), count_N)
    holder_O = order_H[begin_N[arrival_O] + np.arange(len(arrival_O)) - first_N[arrival_O]]
    rank_O, receiver_O = rank_H[holder_O], rank_N[arrival_O]
    distance_O = np.ones(len(rank_O), dtype=np.int64)
    if nearness_RR is not None:
        distance_O = 1 + int(nearness_RR.max()) - nearness_RR[receiver_O, rank_O]
    distance_O[rank_O == receiver_O] = 0
    turn_O = (rank_O - receiver_O) % num_ranks
    best_O = np.lexsort((turn_O, distance_O, arrival_O))
    return Offers(
        layer_N, first_N, count_N, rank_O[best_O], slot_H[holder_O][best_O], distance_O[best_O],
        num_ranks,
    )  # fmt: skip


def shared_levels(domains: Sequence[Sequence[str]]) -> NearnessRR:
    """Of two ranks, how many topology levels they share from the broadest on, int64 [R, R]."""
    depth = len(domains[0]) if domains else 0
    out = np.zeros((len(domains), len(domains)), dtype=np.int64)
    for level in range(1, depth + 1):
        numbers: dict[tuple[str, ...], int] = {}
        path_R = np.array([numbers.setdefault(tuple(row[:level]), len(numbers)) for row in domains])
        out += path_R[:, None] == path_R[None, :]
    return out


def _one_of_each(layer_N: IndexN) -> list[IndexN]:
    """Positions split so that no part has a layer twice; the order within a layer stays."""
    order = np.argsort(layer_N, kind="stable")
    layer_sorted = layer_N[order]
    begins = np.searchsorted(layer_sorted, layer_sorted, side="left")
    turn = np.arange(len(order)) - begins
    by_turn = np.argsort(turn, kind="stable")
    cuts = np.flatnonzero(np.diff(turn[by_turn])) + 1
    return np.split(order[by_turn], cuts) if len(order) else []
