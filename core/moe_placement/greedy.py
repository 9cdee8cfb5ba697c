"""A simple planner: from the placement in force towards balance, one best change after another.

Each layer is planned alone, with an even split among copies. A step takes the fullest rank and
tries, for each of its experts, to add a copy elsewhere, to replace a spare copy there, to move it,
or to swap it; the step that lowers the layer's load profile most is kept. It stops when no step
helps, so an unchanged load that is already served as well as it can be yields the placement in
force.

Neighbours: `score` judges, `migration` walks there, `decide` asks whether it pays.

Shapes: L MoE layers, E logical experts, R ranks, S physical slots a rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moe_api.plan import SlotsLRS
from moe_placement.score import LoadLE, check_load

MIN_STEP_GAIN = 1e-3
"""A step must lower the profile by this share of the layer's mean rank load: less is not worth a
move."""

HoldersRE = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class _Change:
    """Copies that appear (+) and disappear (−), as (rank, expert)."""

    added: tuple[tuple[int, int], ...]
    removed: tuple[tuple[int, int], ...]

    def applied(self, holders_RE: HoldersRE) -> HoldersRE:
        out = holders_RE.copy()
        for rank, expert in self.removed:
            out[rank, expert] = False
        for rank, expert in self.added:
            out[rank, expert] = True
        return out


def plan(load_LE: npt.NDArray[np.generic], current_LRS: SlotsLRS, serving_slots: int) -> SlotsLRS:
    """Target placement for a load, int32 [L, R, S]; experts that stay keep their slots.

    Args:
        load_LE: tokens per logical expert in a window.
        current_LRS: placement in force, complete (every expert has a slot).
        serving_slots: how many slots a rank may keep filled; the rest is room for migration.

    Raises:
        ValueError: a load with NaN, infinite or negative entries, or of another shape.
    """
    load = check_load(load_LE)
    if load.shape[0] != current_LRS.shape[0] or load.shape[1] <= int(current_LRS.max()):
        raise ValueError(
            f"load has shape {load.shape}, the placement has {current_LRS.shape[0]} layers "
            f"and experts up to {int(current_LRS.max())}"
        )
    return np.stack(
        [
            _place(slots_RS, _plan_layer(load_E, _holders(slots_RS, load.shape[1]), serving_slots))
            for load_E, slots_RS in zip(load, current_LRS, strict=True)
        ]
    )


def _holders(slots_RS: npt.NDArray[np.int32], num_experts: int) -> HoldersRE:
    holders = np.zeros((slots_RS.shape[0], num_experts), dtype=np.bool_)
    for rank, row in enumerate(slots_RS):
        holders[rank, row[row >= 0]] = True
    return holders


def _plan_layer(load_E: LoadLE, holders_RE: HoldersRE, serving_slots: int) -> HoldersRE:
    if load_E.sum() <= 0:
        return holders_RE
    threshold = MIN_STEP_GAIN * float(load_E.sum()) / holders_RE.shape[0]
    for _ in range(4 * holders_RE.size):
        profile = _profile(load_E, holders_RE)
        best: tuple[tuple[float, ...], HoldersRE] | None = None
        for change in _changes(load_E, holders_RE, serving_slots):
            candidate = change.applied(holders_RE)
            key = (*_profile(load_E, candidate), float(len(change.added)))
            if best is None or key < best[0]:
                best = (key, candidate)
        if best is None or not _better(best[0], profile, threshold):
            return holders_RE
        holders_RE = best[1]
    return holders_RE


def _profile(load_E: LoadLE, holders_RE: HoldersRE) -> tuple[float, float]:
    """(largest rank load, root of the sum of squares): the second breaks plateaus of the first."""
    share_E = load_E / holders_RE.sum(axis=0)
    loads_R = np.round(holders_RE @ share_E, 9)
    return float(loads_R.max()), float(np.sqrt((loads_R**2).sum()))


def _better(key: tuple[float, ...], profile: tuple[float, float], threshold: float) -> bool:
    lower_peak = key[0] < profile[0] - threshold
    return lower_peak or (key[0] <= profile[0] and key[1] < profile[1] - threshold)


def _changes(load_E: LoadLE, holders_RE: HoldersRE, serving_slots: int) -> Iterator[_Change]:
    """Everything one step may do to relieve the fullest rank, lowest ids first."""
    copies_E = holders_RE.sum(axis=0)
    filled_R = holders_RE.sum(axis=1)
    fullest = int(np.argmax(np.round(holders_RE @ (load_E / copies_E), 9)))
    for expert in np.flatnonzero(holders_RE[fullest] & (load_E > 0)).tolist():
        for rank in range(holders_RE.shape[0]):
            if rank == fullest or holders_RE[rank, expert]:
                continue
            here, there = (fullest, expert), (rank, expert)
            if filled_R[rank] < serving_slots:
                yield _Change((there,), ())
                yield _Change((there,), (here,))
            for other in np.flatnonzero(holders_RE[rank]).tolist():
                if copies_E[other] > 1:
                    yield _Change((there,), ((rank, other),))
                    yield _Change((there,), ((rank, other), here))
                if not holders_RE[fullest, other]:
                    yield _Change((there, (fullest, other)), (here, (rank, other)))


def _place(slots_RS: npt.NDArray[np.int32], target_RE: HoldersRE) -> npt.NDArray[np.int32]:
    """Slots for a target: who stays keeps its slot, who arrives takes the lowest slot left free."""
    out = np.full_like(slots_RS, -1)
    for rank, row in enumerate(slots_RS):
        wanted = set(np.flatnonzero(target_RE[rank]).tolist())
        for slot, expert in enumerate(row.tolist()):
            if expert in wanted:
                out[rank, slot] = expert
                wanted.remove(expert)
        free = np.flatnonzero(out[rank] < 0)
        # Slots that are free already come first: an arrival there needs no departure before it.
        order = sorted(free.tolist(), key=lambda slot: (row[slot] >= 0, slot))
        for slot, expert in zip(order, sorted(wanted), strict=False):
            out[rank, slot] = expert
    return out
