"""The search for a better even split: one action after another in all layers at once.

First it levels (strain counts what is below the target too), which needs the fewest moves; where
nothing levels any more it looks ever more at what is too full only. In a dead end it does the least
harmful thing, forbids itself to take it back for a while, and goes on. Every layer ends after a
bounded number of actions without progress. Neighbours: `step_even_actions` rates the actions,
`step_even_trail` keeps what was done.

Shapes: L layers, E logical experts, F = E + 1, R ranks, S physical slots a rank.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moe_api.plan import SlotsLRS
from moe_placement.bound import BoundL
from moe_placement.capacity import SlotsR, SpeedsR
from moe_placement.copy_limits import CopyLimits
from moe_placement.even.step_even_actions import Actions, Fate, best
from moe_placement.even.step_even_scene import Scene, Taboo
from moe_placement.even.step_even_trail import Trail
from moe_placement.score import LoadLE

BELOW = (3.0, 0.3, 0.03, 0.003)
"""How much the load below the target counts, from levelling to relieving only."""
AFTER_DETOUR = 1
"""The phase in which a layer repairs what a detour overloaded."""
ROUND_WORK = 20_000
PROGRESS = 1e-6
ROUNDING = 1e-9


@dataclass(frozen=True)
class Effort:
    """Bounds of a search."""

    moves_cost: tuple[float, float] = (1.0, 5.0)
    """Of an action that moves one weight, and of one that moves two: more than twice as much, as
    many small steps leave more open than one large one."""
    max_work: int = 20_000_000
    """Places looked at in all layers and rounds, plus ROUND_WORK for each round."""
    patience: int = 60
    """Actions of a layer without progress."""
    max_detours: int = 40
    """Actions of a layer that make it worse for the time being."""
    detour_rounds: int = 30
    """How long an expert that was part of a detour stays as it is."""


class Search:
    """State of the layers that are still searched."""

    def __init__(self, load_LE: LoadLE, slots_LRS: SlotsLRS, effort: Effort) -> None:
        num_layers, num_experts = load_LE.shape
        self.slots_LRS = slots_LRS.copy()
        self.active_L = np.arange(num_layers)
        self.phase_L = np.zeros(num_layers, dtype=np.int64)
        self.least_L = np.full(num_layers, np.inf)
        self.idle_L = np.zeros(num_layers, dtype=np.int64)
        self.detours_L = np.zeros(num_layers, dtype=np.int64)
        self.no_more_until_LF = np.zeros((num_layers, num_experts + 1), dtype=np.int64)
        self.not_from_until_LF = np.zeros((num_layers, num_experts + 1), dtype=np.int64)


def search(
    load_LE: LoadLE,
    slots_LRS: SlotsLRS,
    slots_R: SlotsR,
    speeds_R: SpeedsR,
    limits: CopyLimits,
    target_L: BoundL,
    effort: Effort,
) -> Trail:
    """Lowers the largest load ÷ speed of each layer towards its target.

    Args:
        slots_LRS: valid: every expert has a copy, no rank holds one twice or more than its slots.
        target_L: where a layer is done; 0 for layers that are left alone.
    """
    unit_L1 = np.where(target_L > 0, target_L, np.inf)[:, None]
    load_LE = load_LE / unit_L1
    at = Search(load_LE, slots_LRS, effort)
    trail = Trail(slots_LRS.copy())
    moves_L = np.zeros(len(load_LE), dtype=np.int64)
    places = slots_LRS.shape[1] * slots_LRS.shape[2] ** 2
    work = 0
    for turn in itertools.count():
        scene = Scene.of(load_LE[at.active_L], at.slots_LRS[at.active_L], slots_R, speeds_R)
        peak_L = np.full(len(load_LE), np.inf)
        peak_L[at.active_L] = scene.level_LR.max(axis=1)
        trail.peaks_TL.append(peak_L)
        trail.moves_TL.append(moves_L.copy())
        going_L = _going(at, scene, effort)
        work += int(going_L.sum()) * places + ROUND_WORK
        if not going_L.any() or work > effort.max_work:
            break
        if not going_L.all():
            at.active_L = at.active_L[going_L]
            scene = Scene.of(load_LE[at.active_L], at.slots_LRS[at.active_L], slots_R, speeds_R)
        taboo = Taboo(
            at.no_more_until_LF[at.active_L] > turn, at.not_from_until_LF[at.active_L] > turn
        )
        below_L = np.asarray(BELOW)[at.phase_L[at.active_L]]
        actions, further = best(scene, below_L, limits, taboo, effort.moves_cost)
        actions, ended_L = _admit(at, scene, actions, further, effort)
        actions.layer_N = at.active_L[actions.layer_N]
        _forbid(at, actions, turn + 1 + effort.detour_rounds)
        _do(at, actions, turn + 1, trail, moves_L)
        at.active_L = at.active_L[~ended_L]
        if not len(at.active_L):
            break
    return trail


def _going(at: Search, scene: Scene, effort: Effort) -> npt.NDArray[np.bool_]:
    """Which active layers are not done and have made progress lately."""
    over_L = (np.maximum(scene.level_LR - 1.0, 0.0) ** 2).sum(axis=1)
    better_L = over_L < at.least_L[at.active_L] * (1 - PROGRESS)
    at.least_L[at.active_L[better_L]] = over_L[better_L]
    at.idle_L[at.active_L] = np.where(better_L, 0, at.idle_L[at.active_L] + 1)
    too_full_L = scene.level_LR.max(axis=1) > 1.0 + ROUNDING
    return np.asarray(too_full_L & (at.idle_L[at.active_L] <= effort.patience))


def _admit(
    at: Search, scene: Scene, actions: Actions, further: Actions, effort: Effort
) -> tuple[Actions, npt.NDArray[np.bool_]]:
    """(the actions that help and do not get into each other's way, layers at their end).

    A layer where none helps enters its next phase; in the last phase it makes a detour, its first
    row's action, as long as it may.
    """
    active_L = at.active_L
    row_N = actions.layer_N
    helps_N = actions.value_N < -ROUNDING
    helps_L = np.zeros(len(active_L), dtype=np.bool_)
    helps_L[row_N[helps_N]] = True
    last_L = at.phase_L[active_L] == len(BELOW) - 1
    first_N = np.append(True, row_N[1:] != row_N[:-1])
    possible_L = np.isfinite(further.value_N[first_N])
    detour_L = ~helps_L & last_L & possible_L & (at.detours_L[active_L] < effort.max_detours)
    at.detours_L[active_L[detour_L]] += 1
    at.phase_L[active_L[~helps_L & ~last_L]] += 1
    at.phase_L[active_L[detour_L]] = AFTER_DETOUR
    helping = _apart(actions.only(helps_N), scene)
    return helping.and_(further.only(first_N & detour_L[row_N])), ~helps_L & ~detour_L & last_L


def _apart(actions: Actions, scene: Scene) -> Actions:
    """Without actions that concern an expert which an earlier one of the layer concerns."""
    if len(np.unique(actions.layer_N)) == len(actions.layer_N):
        return actions
    seen_LF = np.zeros(scene.share_LF.shape, dtype=np.bool_)
    keep_N = np.zeros(len(actions.layer_N), dtype=np.bool_)
    experts = np.stack(actions.experts(scene.slots_LRS), axis=1)
    for row, (layer, held) in enumerate(zip(actions.layer_N, experts, strict=True)):
        keep_N[row] = not seen_LF[layer, held].any()
        if keep_N[row]:
            seen_LF[layer, held] = True
            seen_LF[layer, -1] = False
    return actions.only(keep_N)


def _forbid(at: Search, actions: Actions, until: int) -> None:
    """In layers that made a detour nothing is taken back for a while."""
    detoured = actions.only(at.detours_L[actions.layer_N] > 0)
    expert_N, other_N = detoured.experts(at.slots_LRS)
    goes_N = detoured.taker_N >= 0
    retires_N = goes_N & (detoured.fate_N == Fate.RETIRES)
    at.not_from_until_LF[detoured.layer_N[goes_N], expert_N[goes_N]] = until
    at.no_more_until_LF[detoured.layer_N[~goes_N], expert_N[~goes_N]] = until
    at.no_more_until_LF[detoured.layer_N[retires_N], other_N[retires_N]] = until
    at.no_more_until_LF[:, -1] = 0


def _do(
    at: Search, actions: Actions, turn: int, trail: Trail, moves_L: npt.NDArray[np.int64]
) -> None:
    """Writes the actions down and counts their moves."""
    start = trail.start_LRS
    for layer_N, rank_N, slot_N, expert_N in actions.writes(at.slots_LRS):
        old_N = at.slots_LRS[layer_N, rank_N, slot_N]
        held_NS = start[layer_N, rank_N]
        came_N = (expert_N >= 0) & (held_NS != expert_N[:, None]).all(axis=1)
        went_N = (old_N >= 0) & (held_NS != old_N[:, None]).all(axis=1)
        np.add.at(moves_L, layer_N, came_N.astype(np.int64) - went_N)
        at.slots_LRS[layer_N, rank_N, slot_N] = expert_N
        trail.writes.append((turn, layer_N, rank_N, slot_N, expert_N))
