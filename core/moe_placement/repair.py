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

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

NEARLY = 1e-3
"""Slots whose gain differs by less than this part of a rank's mean load are as good."""
TIER = 1e6
"""Mean loads by which a slot of last resort is worse than any other."""


def whole(
    load_LE: LoadLE, slots_LRS: SlotsLRS, slots_R: SlotsR, speeds_R: SpeedsR, copies: CopyLimits
) -> SlotsLRS:
    """The placement with every expert covered, within the slots of each rank and the limits of
    copies as far as the slots allow; equal to `slots_LRS` if that already is.

    Args:
        slots_LRS: at least as wide as the most slots.
    """
    repair = Repair(load_LE, slots_LRS, slots_R, speeds_R, copies)
    repair.drop_above_limit()
    repair.drop_above_slots()
    repair.cover()
    repair.raise_to_limit()
    return repair.slots_LRS


class Repair:
    """Placement, tokens and loads of all layers, an expert's tokens split evenly."""

    def __init__(
        self,
        load_LE: LoadLE,
        slots_LRS: SlotsLRS,
        slots_R: SlotsR,
        speeds_R: SpeedsR,
        copies: CopyLimits,
    ) -> None:
        total_L = load_LE.sum(axis=1)
        # Of a layer without load all experts count alike.
        unit_LE = np.where(total_L[:, None] > 0, load_LE, 1.0)
        unit_LE = unit_LE * (speeds_R.sum() / unit_LE.sum(axis=1, keepdims=True))
        self.load_LE, self.slots_R, self.speeds_R, self.copies = unit_LE, slots_R, speeds_R, copies
        self.slots_LRS = slots_LRS.astype(np.int32)
        self.num_layers, self.num_ranks, self.num_slots = slots_LRS.shape
        self.num_experts = load_LE.shape[1]
        held = np.flatnonzero(self.slots_LRS.reshape(-1) >= 0)
        expert = self.slots_LRS.reshape(-1)[held] + held // slots_LRS[0].size * self.num_experts
        count = np.bincount(expert, minlength=load_LE.size)
        self.count_LE = count.reshape(load_LE.shape)
        share_LE = unit_LE / np.maximum(self.count_LE, 1)
        self.token_LRS = np.zeros(slots_LRS.shape)
        self.token_LRS.reshape(-1)[held] = share_LE.reshape(-1)[expert]
        self.loads_LR = self.token_LRS.sum(axis=2)
        self.filled_LR = (self.slots_LRS >= 0).sum(axis=2)

    def cover(self) -> list[tuple[int, int]]:
        """Every expert without a copy gets one; (layer, expert) of those that found no slot."""
        uncovered: list[tuple[int, int]] = []
        layer_M, expert_M = np.nonzero(self.count_LE == 0)
        for layer, expert in self._turns(layer_M, expert_M):
            placed = self._place(layer, expert, last_resort=True)
            uncovered += zip(layer[~placed].tolist(), expert[~placed].tolist(), strict=True)
        return sorted(uncovered)

    def raise_to_limit(self) -> None:
        """Experts with fewer copies than they must have get more while slots allow it."""
        for wanted in range(2, self.copies.min_copies + 1):
            layer_M, expert_M = np.nonzero(self.count_LE < wanted)
            for layer, expert in self._turns(layer_M, expert_M):
                placed = self._place(layer, expert, last_resort=False)
                for at in np.flatnonzero(~placed).tolist():
                    self._place_by_exchange(int(layer[at]), int(expert[at]))

    def drop_above_limit(self) -> None:
        """Experts with more copies than they may have give some up."""
        most = self.copies.most(self.num_ranks)
        while (self.count_LE > most).any():
            self._drop(self._count_LRS() > most, by_rank=False)

    def drop_above_slots(self) -> None:
        """Ranks with more experts than slots give copies up: spare ones if they have any."""
        while (self.filled_LR > self.slots_R).any():
            above_LR = self.filled_LR > self.slots_R
            self._drop(above_LR[:, :, None] & (self.slots_LRS >= 0), by_rank=True)

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

    def _count_LRS(self) -> Ints:
        """Copies of each slot's expert; 0 in free slots."""
        layers = np.arange(self.num_layers)[:, None, None]
        count_LRS = self.count_LE[layers, np.maximum(self.slots_LRS, 0)]
        return np.where(self.slots_LRS >= 0, count_LRS, 0)

    def _room_LR(self, layer: Ints | slice) -> Floats:
        return np.asarray(np.maximum(self.speeds_R - self.loads_LR[layer], 0.0))

    def _price(self, layer: Ints | slice) -> Floats:
        """What the other ranks of a slot's expert have no room for if it gives up the slot."""
        slots, token = self.slots_LRS[layer], self.token_LRS[layer]
        room = self._room_LR(layer)
        first = np.arange(len(slots))[:, None, None] * self.num_experts
        flat = (np.maximum(slots, 0) + first).reshape(-1)
        weight = np.where(slots >= 0, room[:, :, None], 0.0)
        all_room = np.bincount(flat, weight.reshape(-1), len(slots) * self.num_experts)
        others = all_room[flat].reshape(slots.shape) - weight
        return np.asarray(np.maximum(token - others, 0.0))

    def _place(self, layer_N: Ints, expert_N: Ints, *, last_resort: bool) -> Flags:
        """One more copy of an expert in each of some layers; which found a slot."""
        slots, token = self.slots_LRS[layer_N], self.token_LRS[layer_N]
        filled = self.filled_LR[layer_N][:, :, None]
        serves = self.slots_R[:, None] > 0
        first = np.arange(len(slots))[:, None, None] * self.num_experts
        count = self.count_LE[layer_N].reshape(-1)[np.maximum(slots, 0) + first]
        free = (slots < 0) & (filled < self.slots_R[:, None])
        spare = (slots >= 0) & (count > self.copies.min_copies) & (filled <= self.slots_R[:, None])
        usable = free | (spare & serves)
        if last_resort:
            usable_at_need = ((slots < 0) & serves) | ((slots >= 0) & (count > 1) & serves)
        else:
            usable_at_need = usable
        holds = (slots == expert_N[:, None, None]).any(axis=2)[:, :, None]
        load = self.load_LE[layer_N, expert_N] / (self.count_LE[layer_N, expert_N] + 1)
        room = self._room_LR(layer_N)[:, :, None]
        gain = np.minimum(load[:, None, None], room + token) - self._price(layer_N)
        gain = np.where(usable, gain, gain - TIER)
        gain = np.where(usable_at_need & ~holds, gain, -np.inf).reshape(len(slots), -1)
        best = gain.max(axis=1)
        found = np.isfinite(best)
        near = gain >= (best - NEARLY)[:, None]
        # Of equally good slots a free one, then the coldest copy, then the rank with most room.
        level = self.loads_LR[layer_N] / self.speeds_R
        taste = token + NEARLY * level[:, :, None]
        place = np.where(near, -taste.reshape(len(slots), -1), -np.inf).argmax(axis=1)
        rank, slot = place // self.num_slots, place % self.num_slots
        self._remove(layer_N[found], rank[found], slot[found])
        self._add(layer_N[found], rank[found], slot[found], expert_N[found])
        return np.asarray(found)

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
        cost_LRS = tier_LRS * TIER + self._price(slice(None)) + NEARLY * self.token_LRS
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
        self.loads_LR[layer_N, rank_N] -= self.token_LRS[layer_N, rank_N, slot_N]
        self.token_LRS[layer_N, rank_N, slot_N] = 0.0
        self.filled_LR[layer_N, rank_N] -= 1
        self.count_LE[layer_N, expert_N] -= 1
        self._share(layer_N, expert_N)

    def _add(self, layer_N: Ints, rank_N: Ints, slot_N: Ints, expert_N: Ints) -> None:
        self.slots_LRS[layer_N, rank_N, slot_N] = expert_N
        self.filled_LR[layer_N, rank_N] += 1
        self.count_LE[layer_N, expert_N] += 1
        self._share(layer_N, expert_N)

    def _share(self, layer_N: Ints, expert_N: Ints) -> None:
        """Splits experts evenly among the copies they have now."""
        which, rank, slot = np.nonzero(self.slots_LRS[layer_N] == expert_N[:, None, None])
        layer = layer_N[which]
        share = self.load_LE[layer_N, expert_N] / np.maximum(self.count_LE[layer_N, expert_N], 1)
        change = share[which] - self.token_LRS[layer, rank, slot]
        self.token_LRS[layer, rank, slot] += change
        np.add.at(self.loads_LR, (layer, rank), change)
