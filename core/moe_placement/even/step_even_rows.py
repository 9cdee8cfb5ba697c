"""Rows: the full ranks that act in one round of a search, their takers, and what is barred.

Of few ranks the fullest acts and all others may take. Of many, several act at once, each with
takers of its own, so that no rank is touched twice. Neighbours: `step_even_scene` is what there is,
`step_even_actions` rates what rows can do.

Shapes: L layers, F experts and the free slot, R ranks, S physical slots a rank, N rows (a layer's
full rank), B slots of the full rank, T takers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moe_api.plan import SlotsLRS
from moe_placement.copy_limits import CopyLimits
from moe_placement.even.step_even_scene import Effects, Flags, Floats, Ints, Scene, Taboo, strain

TAKERS = 128
"""With twice as many ranks or more, two full ranks act at once, and so on."""


@dataclass(eq=False)
class Rows:
    """The full ranks and their takers."""

    layer_N: Ints
    below_N1: Floats
    full_N: Ints
    expert_NB: Ints
    present_NB: Flags
    copy_NB: Floats
    share_NB: Floats
    more_NB: Floats
    further_NB: Floats
    """Relief of the expert's other holders by a further copy."""
    retire_NB: Floats
    level_N1: Floats
    strain_N1: Floats
    pace_N1: Floats
    taker_NT: Ints
    slots_NTS: SlotsLRS
    copy_NTS: Floats
    share_NTS: Floats
    retire_NTS: Floats
    level_NT1: Floats
    strain_NT1: Floats
    pace_NT: Floats
    third_N: Ints
    """The lightest taker with a free slot."""
    has_third_N: Flags
    acts_NT: Flags
    """The taker is itself the full rank of a row of its layer, so nothing may come to it."""

    @classmethod
    def of(cls, scene: Scene, effects: Effects, below_L: Floats) -> Rows:
        num_layers, num_ranks = scene.level_LR.shape
        per_layer = max(1, num_ranks // TAKERS)
        order_LR = np.argsort(scene.level_LR, axis=1, kind="stable")
        order_LR = order_LR[:, : num_ranks - num_ranks % per_layer]
        # The fullest rank of a layer is the full one of the first row, and so on; each row has
        # every so-maniest rank as takers.
        full_N = _fullest(scene.level_LR, per_layer).ravel()
        layer = np.repeat(np.arange(num_layers), per_layer)
        taker = order_LR.reshape(num_layers, -1, per_layer).swapaxes(1, 2).reshape(len(layer), -1)
        of, to = (layer, full_N), (layer[:, None], taker)
        expert_NB = scene.slots_LRS[of].astype(np.int64)
        at = (layer[:, None], expert_NB)
        level_N1, strain_N1 = scene.level_LR[of][:, None], effects.strain_LR[of][:, None]
        below_N1, pace_N1 = below_L[layer][:, None], scene.pace_R[full_N][:, None]
        share_NB, more_NB = scene.share_LF[at], scene.more_LF[at]
        own_NB = strain(level_N1 - (share_NB - more_NB) * pace_N1, below_N1) - strain_N1
        slots_NTS, level_NT = scene.slots_LRS[to], scene.level_LR[to]
        acts_NT = _any_full(scene, layer, full_N)[to]
        open_NT = scene.open_LR[to] & ~acts_NT
        return cls(
            layer_N=layer,
            below_N1=below_N1,
            full_N=full_N,
            expert_NB=expert_NB,
            present_NB=expert_NB >= 0,
            copy_NB=scene.copy_LRS[of],
            share_NB=share_NB,
            more_NB=more_NB,
            further_NB=effects.further_LF[at] - own_NB,
            retire_NB=effects.retire_LRS[of],
            level_N1=level_N1,
            strain_N1=strain_N1,
            pace_N1=pace_N1,
            taker_NT=taker,
            slots_NTS=slots_NTS,
            copy_NTS=scene.copy_LRS[to],
            share_NTS=scene.share_LF[layer[:, None, None], slots_NTS],
            retire_NTS=effects.retire_LRS[to],
            level_NT1=level_NT[:, :, None],
            strain_NT1=effects.strain_LR[to][:, :, None],
            pace_NT=scene.pace_R[taker],
            third_N=np.where(open_NT, level_NT, np.inf).argmin(axis=1),
            has_third_N=np.asarray(open_NT.any(axis=1)),
            acts_NT=acts_NT,
        )


@dataclass(eq=False)
class Barred:
    """What rows may not do."""

    further_NBT: Flags
    """A further copy of the expert at the taker."""
    move_NBT: Flags
    home_N11: Flags
    """The full rank takes nobody in but for somebody."""
    third_NBT: Flags
    """The expert is on the third rank, so nobody can go there in the same action."""
    retire_NTS: Flags
    come_NTS: Flags
    go_on_NTS: Flags

    @classmethod
    def of(cls, scene: Scene, rows: Rows, limits: CopyLimits, taboo: Taboo) -> Barred:
        num_rows, num_ranks = len(rows.layer_N), scene.level_LR.shape[1]
        number = np.arange(num_rows)
        filled_NTS = rows.slots_NTS >= 0
        third_NS = rows.slots_NTS[number, rows.third_N]
        on_full_NTS = _any_of(rows.slots_NTS, rows.expert_NB)
        on_third_NTS = _any_of(rows.slots_NTS, third_NS.astype(np.int64))
        held_LF = taboo.not_from_LF
        held_NTS = held_LF[rows.layer_N[:, None, None], rows.slots_NTS] | ~filled_NTS
        at = (rows.layer_N[:, None], rows.expert_NB)
        enough_LF = scene.counts_LF >= limits.most(num_ranks)
        meets_NBT = (rows.slots_NTS[:, None] == rows.expert_NB[:, :, None, None]).any(axis=3)
        meets_NBT |= ~rows.present_NB[:, :, None]
        meets_NBT |= rows.acts_NT[:, None, :]
        go_on_NTS = held_NTS | on_third_NTS | ~rows.has_third_N[:, None, None]
        go_on_NTS[number, rows.third_N] = True
        third_NBT = (rows.expert_NB[:, :, None] == third_NS[:, None, :]).any(axis=2)[:, :, None]
        return cls(
            further_NBT=meets_NBT | (enough_LF | taboo.no_more_LF)[at][:, :, None],
            move_NBT=meets_NBT | held_LF[at][:, :, None],
            home_N11=~scene.open_LR[rows.layer_N, rows.full_N][:, None, None],
            third_NBT=third_NBT,
            retire_NTS=on_full_NTS & filled_NTS,
            come_NTS=held_NTS | on_full_NTS,
            go_on_NTS=go_on_NTS,
        )


def _fullest(level_LR: Floats, number: int) -> Ints:
    """The fullest ranks of each layer, fullest first, of equals the lowest; [L, `number`]."""
    if number == 1:
        return np.asarray(level_LR.argmax(axis=1)[:, None])
    return np.asarray(np.argsort(-level_LR, axis=1, kind="stable")[:, :number])


def _any_full(scene: Scene, layer_N: Ints, full_N: Ints) -> Flags:
    """Whether a rank is the full one of a row, [L, R]."""
    full_LR = np.zeros(scene.level_LR.shape, dtype=np.bool_)
    full_LR[layer_N, full_N] = True
    return full_LR


def _any_of(slots_NTS: SlotsLRS, expert_NB: Ints) -> Flags:
    """Whether the expert of each slot is one of these, [N, T, S]; free slots are if any is."""
    return np.asarray((slots_NTS[..., None] == expert_NB[:, None, None, :]).any(axis=3))
