"""The best next action of each layer: what to do about the expert copies on its fullest rank.

An action takes one expert of the fullest rank to a taker, where it takes a free slot or the place
of another expert:

* the expert stays on the fullest rank as well (a further copy), or it leaves;
* the expert whose place it takes retires (it has other copies), comes to the fullest rank (a swap)
  or goes to a third rank, the lightest with a free slot.

Or a copy on the fullest rank simply retires. All are rated by how much they lower the layer's
strain, per weight that has to move. Where ranks are many, each of several full ranks acts, with
takers of its own. Neighbours: `step_even_rows` says who may act and with whom, `step_even_search`
takes one action after another.

Shapes: L layers, F experts and the free slot, R ranks, S physical slots a rank, N rows (a layer's
full rank), B slots of the full rank, T takers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from moe_api.plan import SlotsLRS
from moe_placement.copy_limits import CopyLimits
from moe_placement.even.step_even_rows import Barred, Rows
from moe_placement.even.step_even_scene import Effects, Flags, Floats, Ints, Scene, Taboo, strain

RETIRE_COST = 0.5
"""A copy that retires moves no weight, but copies are worth keeping."""


class Fate(IntEnum):
    """Of the expert whose place is taken."""

    RETIRES = 0
    COMES_HERE = 1
    GOES_ON = 2


@dataclass(eq=False)
class Actions:
    """One for each row; several rows of a layer touch different ranks."""

    layer_N: Ints
    value_N: Floats
    """Change of strain per cost: below 0 is an improvement, inf = no action."""
    full_N: Ints
    slot_N: Ints
    """Slot there of the expert in question."""
    taker_N: Ints
    """Where it goes; −1 = nowhere, the copy retires."""
    place_N: Ints
    stays_N: Flags
    fate_N: Ints
    third_N: Ints

    def experts(self, slots_LRS: SlotsLRS) -> tuple[Ints, Ints]:
        """(the expert in question, the one whose place it takes or −1) of each row."""
        expert_N = slots_LRS[self.layer_N, self.full_N, self.slot_N].astype(np.int64)
        other_N = slots_LRS[self.layer_N, self.taker_N, self.place_N].astype(np.int64)
        return expert_N, np.where(self.taker_N >= 0, other_N, -1)

    def only(self, rows_N: Flags) -> Actions:
        return Actions(*(values[rows_N] for values in vars(self).values()))

    def and_(self, others: Actions) -> Actions:
        pairs = zip(vars(self).values(), vars(others).values(), strict=True)
        return Actions(*(np.concatenate(pair) for pair in pairs))

    def writes(self, slots_LRS: SlotsLRS) -> Iterator[tuple[Ints, Ints, Ints, Ints]]:
        """(layer, rank, slot, expert) of each slot that changes, in the order to write them."""
        layer, full, taker, third = self.layer_N, self.full_N, self.taker_N, self.third_N
        expert_N, other_N = self.experts(slots_LRS)
        goes_N = taker >= 0
        leaves_N = ~goes_N | ~self.stays_N
        home_N = np.where(leaves_N, self.slot_N, (slots_LRS[layer, full] < 0).argmax(axis=1))
        beyond_N = (slots_LRS[layer, third] < 0).argmax(axis=1)
        free_N = np.full(len(layer), -1)
        for of_N, rank_N, slot_N, what_N in (
            (leaves_N, full, self.slot_N, free_N),
            (goes_N, taker, self.place_N, expert_N),
            (goes_N & (self.fate_N == Fate.COMES_HERE), full, home_N, other_N),
            (goes_N & (self.fate_N == Fate.GOES_ON), third, beyond_N, other_N),
        ):
            yield layer[of_N], rank_N[of_N], slot_N[of_N], what_N[of_N]


def best(
    scene: Scene, below_L: Floats, limits: CopyLimits, taboo: Taboo, moves_cost: tuple[float, float]
) -> tuple[Actions, Actions]:
    """(the action of each row that lowers its layer's strain most per cost, the one that raises it
    least among those that make a further copy); ties: fewest moves, then the lowest slot, the
    lightest taker and the lowest place.

    Args:
        below_L: weight of load below the target in the strain.
        moves_cost: of an action that moves one weight, and of one that moves two.
    """
    rows = Rows.of(scene, Effects.of(scene, below_L, limits, taboo), below_L)
    barred = Barred.of(scene, rows, limits, taboo)
    alone_NB = rows.retire_NB + strain(rows.level_N1 - rows.copy_NB, rows.below_N1) - rows.strain_N1
    rated = [(np.where(rows.present_NB, alone_NB, np.inf) / RETIRE_COST, False, Fate.RETIRES)]
    for stays in (True, False):
        for fate, value in _rated(rows, barred, stays):
            rated.append((value / moves_cost[fate != Fate.RETIRES], stays, fate))
    further = [rating for rating in rated if rating[1]]
    return _lowest(rows, rated), _lowest(rows, further)


def _rated(rows: Rows, barred: Barred, stays: bool) -> Iterator[tuple[Fate, Floats]]:
    """Change of strain, [N, B, T, S], of each fate of the expert in the place."""
    below_N1, below_N11 = rows.below_N1, rows.below_N1[:, :, None]
    below_N111 = below_N11[..., None]
    number = np.arange(len(rows.layer_N))
    share_NB = rows.more_NB if stays else rows.share_NB
    others_NB = rows.further_NB if stays else np.zeros(share_NB.shape)
    barred_NBT = barred.further_NBT if stays else barred.move_NBT
    # The taker, with the expert in place of another.
    without_NTS = rows.level_NT1 - rows.copy_NTS
    arriving_NBT = share_NB[:, :, None] * rows.pace_NT[:, None, :]
    there = strain(without_NTS[:, None] + arriving_NBT[..., None], below_N111)
    there -= rows.strain_NT1[:, None]
    # The full rank, if nobody comes.
    home_NB = rows.level_N1 - rows.copy_NB + (share_NB * rows.pace_N1 if stays else 0.0)
    alone_NB = others_NB + strain(home_NB, below_N1) - rows.strain_N1

    retire_NTS = np.where(barred.retire_NTS, np.inf, rows.retire_NTS)
    yield Fate.RETIRES, there + _unless(barred_NBT, alone_NB) + retire_NTS[:, None]

    coming_NTS = rows.share_NTS * rows.pace_N1[:, :, None]
    value = strain(home_NB[:, :, None, None] + coming_NTS[:, None], below_N111) + there
    value += np.where(barred.come_NTS, np.inf, 0.0)[:, None]
    nobody_NBT = barred_NBT | barred.home_N11 if stays else barred_NBT
    yield Fate.COMES_HERE, value + _unless(nobody_NBT, others_NB - rows.strain_N1)

    third_level_N11 = rows.level_NT1[number, rows.third_N][:, None]
    third_pace_N11 = rows.pace_NT[number, rows.third_N][:, None, None]
    third_NTS = strain(third_level_N11 + rows.share_NTS * third_pace_N11, below_N11)
    third_NTS -= rows.strain_NT1[number, rows.third_N][:, None]
    third_NTS = np.where(barred.go_on_NTS, np.inf, third_NTS)
    nowhere_NBT = barred_NBT | barred.third_NBT
    yield Fate.GOES_ON, there + _unless(nowhere_NBT, alone_NB) + third_NTS[:, None]


def _lowest(rows: Rows, rated: list[tuple[Floats, bool, Fate]]) -> Actions:
    number = np.arange(len(rows.layer_N))
    flat = [value.reshape(len(number), -1) for value, _, _ in rated]
    found = np.stack([value.argmin(axis=1) for value in flat])
    least = np.stack([value[number, at] for value, at in zip(flat, found, strict=True)])
    kind_N = least.argmin(axis=0)
    goes_N = np.array([value.ndim == 4 for value, _, _ in rated])[kind_N]
    at_N = found[kind_N, number]
    num_takers, num_slots = rows.slots_NTS.shape[1:]
    taker_N = rows.taker_NT[number, at_N // num_slots % num_takers]
    return Actions(
        layer_N=rows.layer_N,
        value_N=least[kind_N, number],
        full_N=rows.full_N,
        slot_N=np.where(goes_N, at_N // (num_takers * num_slots), at_N),
        taker_N=np.where(goes_N, taker_N, -1),
        place_N=np.where(goes_N, at_N % num_slots, 0),
        stays_N=np.array([stays for _, stays, _ in rated])[kind_N],
        fate_N=np.array([fate for _, _, fate in rated], dtype=np.int64)[kind_N],
        third_N=rows.taker_NT[number, rows.third_N],
    )


def _unless(barred_NBT: Flags, value_NB: Floats) -> Floats:
    return np.asarray(np.where(barred_NBT, np.inf, value_NB[:, :, None])[..., None])
