"""Openings: slots outside a bottleneck that take a copy and let its excess out.

A free slot takes the copy as it is. A full rank first gives up a copy of an expert with others:
what the others cannot absorb of its tokens is the price. What the rank can take then is its room,
the tokens it gave up, and what it can hand on. On a tree these three are exact, because giving up
the copy cuts the tree in two. Neighbours: `bottleneck` (what is stuck), `residual` (room behind
copies), `exchange` (two transfers, where no single copy helps), `step_fractions_search` (carries
changes out and looks what they brought).

Shapes: L layers, E logical experts, R ranks, S physical slots a rank, P = R·S; B bottlenecks, of
which N are served in a turn; M openings.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moe_placement.capacity import SlotsR
from moe_placement.copy_limits import CopyLimits
from moe_placement.step.bottleneck import NEARLY, Bottlenecks
from moe_placement.step.overflow import NOTHING
from moe_placement.step.residual import Absorb, Residual
from moe_placement.step.slot_arrays import any_slot, count_slots, sum_slots, to_slots

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

MAX_TURNS = 24
"""Openings of one layer before the flow is looked at again."""
LEAST_RELIEF = 1e-3
"""A copy that relieves less of a rank's capacity, and less than a quarter of the bottleneck, is not
worth its move."""


@dataclass(frozen=True, eq=False)
class Openings:
    """At most one a rank."""

    layer_M: Ints
    rank_M: Ints
    slot_M: Ints
    expert_M: Ints
    relief_M: Floats
    """Expected, in parts of the target."""

    def __len__(self) -> int:
        return len(self.layer_M)

    def only(self, keep_M: Flags) -> Openings:
        return Openings(
            self.layer_M[keep_M],
            self.rank_M[keep_M],
            self.slot_M[keep_M],
            self.expert_M[keep_M],
            self.relief_M[keep_M],
        )


@dataclass(frozen=True, eq=False)
class Offers:
    """What every slot of some layers could do for an excess elsewhere."""

    usable_LRS: Flags
    """Free, or holding a copy that may go."""
    takes_LRS: Floats
    """What its rank can take once the slot holds a copy of an expert under pressure."""
    price_LRS: Floats
    """What is left over of the expert that gives up the slot."""
    elsewhere_LRS: Floats
    """Room that the expert's other ranks have for it."""
    behind_LR: Floats
    """Room of the rank, and what it can hand on."""
    room_LR: Floats
    count_LRS: Ints
    """Copies of each slot's expert; 0 in free slots."""


def offers(residual: Residual, absorb: Absorb, slots_R: SlotsR, copies: CopyLimits) -> Offers:
    shape = residual.slots_LRS.shape
    held_LRS = residual.slots_LRS >= 0
    token_LRS, room_LR = residual.token_LRS, residual.room_Q().reshape(shape[:2])
    elsewhere_LRS = np.zeros(shape)
    elsewhere_LRS.reshape(-1)[residual.edges.slot_N] = absorb.by_others_N
    on_LRS = np.minimum(token_LRS, elsewhere_LRS)
    price_LRS = token_LRS - on_LRS
    behind_LR = room_LR + sum_slots(on_LRS)
    first = np.arange(shape[0])[:, None, None] * residual.num_experts
    count_LRS = residual.copies_F[np.maximum(residual.slots_LRS, 0) + first] * held_LRS
    filled_LR = count_slots(held_LRS)
    free_LRS = to_slots((filled_LR < slots_R).astype(np.float64), shape[2]) > 0
    usable_LRS = np.where(held_LRS, count_LRS > copies.min_copies, free_LRS)
    return Offers(
        usable_LRS,
        to_slots(behind_LR, shape[2]) + price_LRS,
        price_LRS,
        elsewhere_LRS,
        behind_LR,
        room_LR,
        count_LRS,
    )


def choose(
    residual: Residual,
    bottlenecks: Bottlenecks,
    given: Offers,
    copies: CopyLimits,
    banned_LRS: Flags,
    *,
    at_any_price: bool = False,
) -> Openings:
    """For each bottleneck the slots that relieve it most, until it should be relieved; of nearly
    equal ones that on the rank with most room.

    In a turn each layer gets one opening, for what is then its worst bottleneck. A rank is used
    once, and the room that a given up copy needs elsewhere is not offered again; that openings may
    share room further away is not known here, so what they bring has to be looked at.

    Args:
        at_any_price: the best one of each layer even if it relieves nothing.
    """
    num_slots, most = residual.num_slots, copies.most(residual.num_ranks)
    work = _Work.of(residual, given, copies, banned_LRS)
    excess_B = bottlenecks.excess_B.copy()
    taken: list[Openings] = []
    for _ in range(1 if at_any_price else MAX_TURNS):
        turn = _worst(bottlenecks.layer_B, excess_B)
        if not len(turn):
            break
        layer_N, expert_N = bottlenecks.layer_B[turn], bottlenecks.expert_B[turn]
        slots_NRS = residual.slots_LRS[layer_N]
        refuses_NR = any_slot(slots_NRS == expert_N[:, None, None])
        refuses_NR |= (work.count_LE[layer_N, expert_N] >= most)[:, None]
        relief_NRS = np.minimum(excess_B[turn, None, None], work.takes_LRS[layer_N])
        relief_NRS -= work.price_LRS[layer_N]
        relief_NRS[~work.usable_LRS[layer_N]] = -np.inf
        relief_NRS[refuses_NR] = -np.inf
        relief_NP = relief_NRS.reshape(len(turn), -1)
        best_N = relief_NP.max(axis=1)
        room_NP = np.repeat(given.room_LR[layer_N], num_slots, axis=1)
        near_NP = relief_NP >= best_N[:, None] - (1 - NEARLY) * np.abs(best_N)[:, None]
        place_N = np.where(near_NP, room_NP, -1.0).argmax(axis=1)
        worth_N = best_N >= np.minimum(LEAST_RELIEF, excess_B[turn] / 4)
        worth_N |= at_any_price & np.isfinite(best_N)
        excess_B[turn] = np.where(worth_N, excess_B[turn] - best_N, 0.0)
        rank_N, slot_N = place_N // num_slots, place_N % num_slots
        now = Openings(layer_N, rank_N, slot_N, expert_N, best_N).only(worth_N)
        work.take(now)
        taken.append(now)
    return joined(taken)


@dataclass(frozen=True, eq=False)
class _Work:
    """What is left of the offers while openings are chosen."""

    residual: Residual
    min_copies: int
    usable_LRS: Flags
    takes_LRS: Floats
    price_LRS: Floats
    elsewhere_LRS: Floats
    count_LE: Ints

    @classmethod
    def of(cls, residual: Residual, given: Offers, copies: CopyLimits, banned_LRS: Flags) -> _Work:
        return cls(
            residual,
            copies.min_copies,
            given.usable_LRS & ~banned_LRS,
            given.takes_LRS.copy(),
            given.price_LRS.copy(),
            given.elsewhere_LRS.copy(),
            residual.copies_F.reshape(residual.num_layers, residual.num_experts).copy(),
        )

    def take(self, now: Openings) -> None:
        """One opening a layer is taken, and a copy of another expert given up for it."""
        slots_LRS, token_LRS = self.residual.slots_LRS, self.residual.token_LRS
        self.usable_LRS[now.layer_M, now.rank_M] = False
        self.count_LE[now.layer_M, now.expert_M] += 1
        given_up_M = slots_LRS[now.layer_M, now.rank_M, now.slot_M].astype(np.int64)
        now, given_up_M = now.only(given_up_M >= 0), given_up_M[given_up_M >= 0]
        self.count_LE[now.layer_M, given_up_M] -= 1
        slots_MP = slots_LRS.reshape(len(slots_LRS), -1)[now.layer_M]
        which, place = np.divmod(np.flatnonzero(slots_MP == given_up_M[:, None]), slots_MP.shape[1])
        layer, (rank, slot) = now.layer_M[which], np.divmod(place, slots_LRS.shape[2])
        left = self.count_LE[layer, given_up_M[which]]
        self.usable_LRS[layer, rank, slot] &= left > self.min_copies
        # Its tokens need room elsewhere, and its rank has none for this expert any more.
        needed_M = self.takes_LRS[now.layer_M, now.rank_M, now.slot_M]
        elsewhere = np.maximum(self.elsewhere_LRS[layer, rank, slot] - needed_M[which], 0.0)
        dearer = token_LRS[layer, rank, slot] - np.minimum(token_LRS[layer, rank, slot], elsewhere)
        dearer -= self.price_LRS[layer, rank, slot]
        self.elsewhere_LRS[layer, rank, slot] = elsewhere
        self.price_LRS[layer, rank, slot] += dearer
        # The slot itself takes as much as before, the others of its rank can hand on less.
        self.takes_LRS[layer, rank] -= dearer[:, None]
        self.takes_LRS[layer, rank, slot] += dearer


def joined(parts: list[Openings]) -> Openings:
    """All of them, in their order."""
    none = np.zeros(0, dtype=np.int64)
    parts = [Openings(none, none, none, none, np.zeros(0)), *parts]
    return Openings(
        np.concatenate([part.layer_M for part in parts]),
        np.concatenate([part.rank_M for part in parts]),
        np.concatenate([part.slot_M for part in parts]),
        np.concatenate([part.expert_M for part in parts]),
        np.concatenate([part.relief_M for part in parts]),
    )


def _worst(layer_B: Ints, excess_B: Floats) -> Ints:
    """The worst bottleneck of each layer that has one."""
    open_B = np.flatnonzero(excess_B > NOTHING)
    order = open_B[np.lexsort((open_B, -excess_B[open_B], layer_B[open_B]))]
    first_B = np.diff(layer_B[order], prepend=-1) != 0
    return np.asarray(order[first_B])
