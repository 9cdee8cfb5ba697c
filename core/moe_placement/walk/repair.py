"""Repair: a placement is made whole again with the fewest transfers.

Experts that nobody holds get a slot, the most loaded first: a free one, or that of a spare copy
whose tokens its expert's other ranks have room for. Ranks above their slots and experts above their
limit give up copies, experts below it get some. Nothing else moves; balance comes later. Only room
next door is looked at, so that a loss is repaired within milliseconds. Neighbours: `membership`
(who is left), `step_fractions` (balances what was repaired).

Shapes: L layers, E logical experts, R ranks, S physical slots a rank; N layers served in a turn.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from moe_api.plan import SlotsLRS
from moe_placement.capacity import SlotsR, SpeedsR
from moe_placement.copy_limits import CopyLimits
from moe_placement.score import LoadLE
from moe_placement.step.relabel import in_their_slots
from moe_placement.step.slot_arrays import any_slot, count_slots, sum_slots, to_slots

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

NEARLY = 1e-3
"""Slots whose gain differs by less than this part of a rank's mean load are as good."""
LAST = 1e-9
TIER = 1e6
"""Mean loads by which a slot of last resort is worse than any other."""


def whole(
    load_LE: LoadLE, slots_LRS: SlotsLRS, slots_R: SlotsR, speeds_R: SpeedsR, copies: CopyLimits
) -> SlotsLRS:
    """The placement with every expert covered, within the slots of each rank and the limits of
    copies as far as the slots allow; equal to `slots_LRS` if that already is. Who stays keeps its
    slot.

    Args:
        slots_LRS: at least as wide as the most slots.
    """
    repair = Repair(load_LE, slots_LRS, slots_R, speeds_R, copies)
    repair.drop_above_limit()
    repair.drop_above_slots()
    repair.cover()
    repair.raise_to_limit()
    if np.array_equal(repair.slots_LRS, slots_LRS):
        return repair.slots_LRS
    return in_their_slots(repair.slots_LRS, slots_LRS)


class Repair:
    """Placement, tokens and loads of all layers, an expert's tokens split evenly."""

    def __init__(
        self,
        load_LE: LoadLE,
        slots_LRS: SlotsLRS,
        slots_R: SlotsR,
        speeds_R: SpeedsR,
        copies: CopyLimits,
        exists_LE: Flags | None = None,
    ) -> None:
        """
        Args:
            exists_LE: layers may have fewer experts than columns; absent = all exist.
        """
        self.exists_LE = np.ones(load_LE.shape, np.bool_) if exists_LE is None else exists_LE
        total_L = np.where(self.exists_LE, load_LE, 0.0).sum(axis=1)
        # Of a layer without load all experts count alike.
        unit_LE = np.where(self.exists_LE, np.where(total_L[:, None] > 0, load_LE, 1.0), 0.0)
        unit_LE *= speeds_R.sum() / unit_LE.sum(axis=1, keepdims=True)
        self.load_LE, self.slots_R, self.speeds_R, self.copies = unit_LE, slots_R, speeds_R, copies
        # A selection of ranks may lie in memory in another order, which would cost time.
        self.slots_LRS = slots_LRS = slots_LRS.astype(np.int32, order="C")
        self.num_layers, self.num_ranks, self.num_slots = slots_LRS.shape
        self.num_experts = load_LE.shape[1]
        # Experts numbered through all layers; free slots hold one more that nobody asks for.
        self.first_L = np.arange(self.num_layers) * (self.num_experts + 1)
        self.flat_LRS = np.where(slots_LRS >= 0, slots_LRS, self.num_experts)
        self.flat_LRS = self.flat_LRS + self.first_L[:, None, None]
        count = np.bincount(self.flat_LRS.reshape(-1), minlength=self._padded(unit_LE).size)
        self.count_LE = count.reshape(self.num_layers, -1)[:, :-1]
        share_LE = self._padded(unit_LE / np.maximum(self.count_LE, 1))
        self.token_LRS = share_LE.reshape(-1)[self.flat_LRS]
        self.loads_LR = sum_slots(self.token_LRS)
        self.filled_LR = count_slots(self.slots_LRS >= 0)
        self.place_RS = np.arange(self.num_ranks * self.num_slots).reshape(-1, self.num_slots)

    def cover(self) -> list[tuple[int, int]]:
        """Every expert without a copy gets one; (layer, expert) of those that found no slot."""
        uncovered: list[tuple[int, int]] = []
        layer_M, expert_M = np.nonzero((self.count_LE == 0) & self.exists_LE)
        if self.slots_LRS.size == 0:
            return list(zip(layer_M.tolist(), expert_M.tolist(), strict=True))
        for layer, expert in self._turns(layer_M, expert_M):
            placed = self._place(layer, expert, last_resort=True)
            uncovered += zip(layer[~placed].tolist(), expert[~placed].tolist(), strict=True)
        return sorted(uncovered)

    def raise_to_limit(self) -> None:
        """Experts with fewer copies than they must have get more while slots allow it."""
        for wanted in range(2, self.copies.min_copies + 1):
            layer_M, expert_M = np.nonzero((self.count_LE < wanted) & self.exists_LE)
            for layer, expert in self._turns(layer_M, expert_M):
                placed = self._place(layer, expert, last_resort=False)
                for at in np.flatnonzero(~placed).tolist():
                    self._place_by_exchange(int(layer[at]), int(expert[at]))

    def drop_above_limit(self) -> None:
        """Experts with more copies than they may have give some up."""
        most = self.copies.most(self.num_ranks)
        while (self.count_LE > most).any():
            self._drop(self._count_LRS() > most, by_rank=False)

    def drop_above_slots(self, *, spare_only: bool = False) -> None:
        """Ranks with more experts than slots give copies up: spare ones if they have any.

        Args:
            spare_only: keep what would be nowhere else, even above the slots.
        """
        while True:
            above_LR = self.filled_LR > self.slots_R
            candidate_LRS = above_LR[:, :, None] & (self.slots_LRS >= 0)
            if spare_only:
                candidate_LRS &= self._count_LRS() > 1
            if not candidate_LRS.any():
                return
            self._drop(candidate_LRS, by_rank=True)

    def fill(self, rank: int, wanted_L: Ints) -> None:
        """Copies to a rank until it holds so many experts: of those with the fewest copies, from
        the ranks that hold and serve most."""
        while True:
            layer_N = np.flatnonzero(self.filled_LR[:, rank] < wanted_L)
            if not len(layer_N):
                return
            flat, slots = self.flat_LRS[layer_N], self.slots_LRS[layer_N]
            has_F = np.zeros(self.num_layers * (self.num_experts + 1), dtype=np.bool_)
            has_F[flat[:, rank]] = True
            wanted = (slots >= 0) & ~has_F[flat]
            count = self._count_LRS()[layer_N]
            for taste in (
                -count,
                to_slots(self.filled_LR[layer_N].astype(np.float64), self.num_slots),
                to_slots(np.round(self.loads_LR[layer_N], 9), self.num_slots),
                slots,
            ):
                best = np.where(wanted, taste, -np.inf).reshape(len(layer_N), -1).max(axis=1)
                wanted &= taste == best[:, None, None]
            found = wanted.reshape(len(layer_N), -1).any(axis=1)
            if not found.any():
                return
            place = wanted.reshape(len(layer_N), -1).argmax(axis=1)[found]
            expert = slots.reshape(len(layer_N), -1)[found, place].astype(np.int64)
            layer = layer_N[found]
            free = (self.slots_LRS[layer, rank] < 0).argmax(axis=1)
            self._add(layer, np.full(len(layer), rank), free, expert)

    def _turns(self, layer_M: Ints, expert_M: Ints) -> list[tuple[Ints, Ints]]:
        """The most loaded of each layer, then the next of each, and so on."""
        order = np.lexsort((expert_M, -self.load_LE[layer_M, expert_M], layer_M))
        layer_M, expert_M = layer_M[order], expert_M[order]
        start = np.flatnonzero(np.diff(layer_M, prepend=-1))
        turn_M = np.arange(len(layer_M)) - np.repeat(start, np.diff(np.append(start, len(layer_M))))
        return [
            (layer_M[turn_M == turn], expert_M[turn_M == turn])
            for turn in range(int(turn_M.max(initial=-1)) + 1)
        ]

    def _padded(self, values_LE: npt.NDArray[np.float64]) -> Floats:
        """With a column of zeros for free slots."""
        return np.pad(values_LE, ((0, 0), (0, 1)))

    def _count_LRS(self) -> Ints:
        """Copies of each slot's expert; 0 in free slots."""
        count_F = np.pad(self.count_LE, ((0, 0), (0, 1))).reshape(-1)
        return np.asarray(count_F[self.flat_LRS])

    def _offers(self, rows: Ints | slice) -> tuple[Floats, Floats]:
        """What each slot's rank could take if the slot held another expert: its room, what it could
        hand on, what the slot serves now. And the price: what of that found no room elsewhere."""
        flat, token = self.flat_LRS[rows], self.token_LRS[rows]
        free = np.maximum(self.speeds_R - self.loads_LR[rows], 0.0)
        room = to_slots(free, self.num_slots)
        size = self.num_layers * (self.num_experts + 1)
        all_F = np.bincount(flat.reshape(-1), room.reshape(-1), size)
        on = np.minimum(token, all_F[flat] - room)
        price = token - on
        return to_slots(free + sum_slots(on), self.num_slots) + price, price

    def _place(self, layer_N: Ints, expert_N: Ints, *, last_resort: bool) -> Flags:
        """One more copy of an expert in each of some layers; which found a slot."""
        rows: Ints | slice = layer_N
        if len(layer_N) == self.num_layers:
            rows = slice(None)
        load_N = self.load_LE[layer_N, expert_N] / (self.count_LE[layer_N, expert_N] + 1)
        takes_NRS, price_NRS = self._offers(rows)
        gain_NRS = np.minimum(takes_NRS, load_N[:, None, None]) - price_NRS
        gain_NRS -= self._unwilling(rows, last_resort)
        if (self.count_LE[layer_N, expert_N] > 0).any():
            holds_NR = any_slot(self.slots_LRS[rows] == expert_N[:, None, None])
            gain_NRS[holds_NR] = -np.inf
        gain_NP = gain_NRS.reshape(len(layer_N), -1)
        best_N = gain_NP.max(axis=1)
        found_N = np.isfinite(best_N)
        # Of equally good slots a free one, the first, then the coldest copy, the last.
        taste_NRS = to_slots(NEARLY * self.loads_LR[rows] / self.speeds_R, self.num_slots)
        taste_NRS += self.token_LRS[rows] - LAST * (self.slots_LRS[rows] >= 0) * self.place_RS
        near_NP = gain_NP >= (best_N - NEARLY)[:, None]
        place_N = np.where(near_NP, taste_NRS.reshape(gain_NP.shape), np.inf).argmin(axis=1)
        layer, place = layer_N[found_N], place_N[found_N]
        rank, slot = place // self.num_slots, place % self.num_slots
        self._remove(layer, rank, slot)
        self._add(layer, rank, slot, expert_N[found_N])
        return np.asarray(found_N)

    def _unwilling(self, rows: Ints | slice, last_resort: bool) -> Floats:
        """0 for slots within the rules, TIER for those of last resort, infinite for the others."""
        resort = TIER if last_resort else np.inf
        count, filled = self.count_LE[rows], self.filled_LR[rows]
        serves_R = np.where(self.slots_R > 0, 0.0, np.inf)
        by_expert = np.where(count > self.copies.min_copies, 0.0, resort)
        by_expert[count <= 1] = np.inf
        by_rank = np.where(filled <= self.slots_R, 0.0, resort) + serves_R
        if_free = np.where(filled < self.slots_R, 0.0, resort) + serves_R
        by_expert_F = np.zeros((self.num_layers, self.num_experts + 1))
        by_expert_F[rows, :-1] = by_expert
        held = self.slots_LRS[rows] >= 0
        by_slot = by_expert_F.reshape(-1)[self.flat_LRS[rows]]
        by_slot += to_slots(by_rank, self.num_slots)
        return np.where(held, by_slot, to_slots(if_free, self.num_slots))

    def _place_by_exchange(self, layer: int, expert: int) -> None:
        """Another expert moves to where this one is already held, and leaves its slot to it."""
        slots = self.slots_LRS[layer]
        holds = (slots == expert).any(axis=1)
        filled = (slots >= 0).sum(axis=1)
        count = self.count_LE[layer][np.maximum(slots, 0)]
        for rank in np.flatnonzero(holds & (self.slots_R > 0)).tolist():
            spare = (slots[rank] >= 0) & (count[rank] > self.copies.min_copies)
            spare &= slots[rank] != expert
            free = (slots[rank] < 0) & (filled[rank] < self.slots_R[rank])
            for slot in np.flatnonzero(free | spare).tolist():
                movable = ~holds[:, None] & (slots >= 0) & ~np.isin(slots, slots[rank])
                if not movable.any():
                    continue
                other, seat = (int(x) for x in np.argwhere(movable)[0])
                mover = int(slots[other, seat])
                for at, to in (((rank, slot), mover), ((other, seat), expert)):
                    self._remove(*(np.array([x]) for x in (layer, *at)))
                    self._add(*(np.array([x]) for x in (layer, *at, to)))
                return

    def _drop(self, candidate_LRS: Flags, *, by_rank: bool) -> None:
        """Of each rank, or each expert, with candidates one gives up its slot: a spare copy first,
        then the one whose tokens find room elsewhere."""
        count_LRS = self._count_LRS()
        tier_LRS = np.where(count_LRS > self.copies.min_copies, 0.0, 1.0) + (count_LRS <= 1)
        cost_LRS = tier_LRS * TIER + self._offers(slice(None))[1] + NEARLY * self.token_LRS
        layer_M, rank_M, slot_M = np.nonzero(candidate_LRS)
        expert_M = self.slots_LRS[layer_M, rank_M, slot_M].astype(np.int64)
        cost_M = cost_LRS[layer_M, rank_M, slot_M]
        order = np.lexsort((-slot_M, -rank_M, cost_M))
        groups = [layer_M * self.num_experts + expert_M]
        if by_rank:
            groups.insert(0, layer_M * self.num_ranks + rank_M)
        for group_M in groups:
            order = order[np.sort(np.unique(group_M[order], return_index=True)[1])]
        self._remove(layer_M[order], rank_M[order], slot_M[order])

    def _remove(self, layer_N: Ints, rank_N: Ints, slot_N: Ints) -> None:
        """Frees slots, one expert of a layer at most once; its other copies share the tokens."""
        expert_N = self.slots_LRS[layer_N, rank_N, slot_N].astype(np.int64)
        held = expert_N >= 0
        layer_N, rank_N, slot_N, expert_N = (x[held] for x in (layer_N, rank_N, slot_N, expert_N))
        self.slots_LRS[layer_N, rank_N, slot_N] = -1
        self.flat_LRS[layer_N, rank_N, slot_N] = self.first_L[layer_N] + self.num_experts
        # A rank may free several slots at once, so that plain subtraction would count one.
        np.subtract.at(self.loads_LR, (layer_N, rank_N), self.token_LRS[layer_N, rank_N, slot_N])
        np.subtract.at(self.filled_LR, (layer_N, rank_N), 1)
        self.token_LRS[layer_N, rank_N, slot_N] = 0.0
        self.count_LE[layer_N, expert_N] -= 1
        self._share(layer_N, expert_N)

    def _add(self, layer_N: Ints, rank_N: Ints, slot_N: Ints, expert_N: Ints) -> None:
        self.slots_LRS[layer_N, rank_N, slot_N] = expert_N
        self.flat_LRS[layer_N, rank_N, slot_N] = self.first_L[layer_N] + expert_N
        self.filled_LR[layer_N, rank_N] += 1
        self.count_LE[layer_N, expert_N] += 1
        self._share(layer_N, expert_N)

    def _share(self, layer_N: Ints, expert_N: Ints) -> None:
        """Splits experts evenly among the copies they have now."""
        slots_NP = self.slots_LRS.reshape(self.num_layers, -1)[layer_N]
        which, place = np.divmod(np.flatnonzero(slots_NP == expert_N[:, None]), slots_NP.shape[1])
        layer, rank, slot = layer_N[which], place // self.num_slots, place % self.num_slots
        share = self.load_LE[layer_N, expert_N] / np.maximum(self.count_LE[layer_N, expert_N], 1)
        change = share[which] - self.token_LRS[layer, rank, slot]
        self.token_LRS[layer, rank, slot] += change
        np.add.at(self.loads_LR, (layer, rank), change)
