"""What a planning run brought: figures before and after, what it costs to get there.

Neighbours: `plan` and `repair` make one, `figures` are its measures.

Shapes: L MoE layers, R ranks, S physical slots a rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from moe_placement import initial
from moe_placement.capacity import Capacity, FlagsR
from moe_placement.command.figures import NO_LIMITS, Figures, figures
from moe_placement.command.journey import walk
from moe_placement.command.load_files import Load
from moe_placement.copy_limits import CopyLimits
from moe_placement.placement import Placement, received, remaining
from moe_placement.topology import dispatch
from moe_placement.walk import migration
from moe_placement.walk.waves import Limits


@dataclass(frozen=True, eq=False)
class Outcome:
    placement: Placement
    seconds: float
    """Of planning alone."""
    moves: int
    """Weights that some rank has to receive; where nothing is in force, all of them."""
    waves: int | None
    """None where no walk leads there with the spare slots given."""
    before_name: str
    before: Figures | None
    after: Figures
    crossing: tuple[float, float] | None
    """Share of assignments that leave their domain, before and after; None in one domain."""

    def to_json(self, bytes_per_expert: int) -> dict[str, Any]:
        after = self.after.to_json()
        out: dict[str, Any] = {
            key: after.pop(key) for key in ("gap_worst", "gap_mean", "imbalance")
        }
        out["moves"] = self.moves
        out["bytes"] = self.moves * bytes_per_expert
        out["waves"] = self.waves
        out["plan_seconds"] = self.seconds
        out["bytes_per_expert"] = bytes_per_expert
        if self.crossing is not None:
            out["crossing_before"], out["crossing"] = self.crossing
        if self.before is not None:
            before = self.before.to_json()
            before.pop("layers")
            out["before"] = {"plan": self.before_name, **before}
        return {**out, **after}


def outcome(
    placement: Placement,
    seconds: float,
    load: Load,
    capacity: Capacity,
    current: Placement | None,
    spare_slots: int,
    copies: CopyLimits = NO_LIMITS,
) -> Outcome:
    """Measure `placement` against what is in force, or against experts laid out in order."""
    name, before = "current", current
    if current is None:
        name, before = "in order", _in_order(load, capacity)
    shown = None
    if before is not None:
        present = surviving(before, capacity.live_R)
        shown = figures(present, load, capacity, capacity.live_R)
        before = present
    return Outcome(
        placement=placement,
        seconds=seconds,
        moves=_moves(current, placement, capacity),
        waves=0 if current is None else _waves(current, placement, capacity, spare_slots),
        before_name=name,
        before=shown,
        after=figures(placement, load, capacity, copies=copies),
        crossing=_crossing(before or placement, placement, load, capacity),
    )


def surviving(placement: Placement, live_R: FlagsR) -> Placement:
    """What is left of a placement on live ranks: their copies take over."""
    if live_R.all():
        return placement
    slots_LRS = np.where(live_R[None, :, None], placement.slots_LRS, np.int32(-1))
    return remaining(slots_LRS, placement.fractions_LRS)


def _in_order(load: Load, capacity: Capacity) -> Placement | None:
    """Experts laid out as they are numbered, one copy each: what there is without a plan."""
    slots_R = capacity.slots_R[capacity.open_R]
    num_layers, num_experts = load.load_LE.shape
    if (load.experts_L != num_experts).any() or len(np.unique(slots_R)) > 1:
        return None
    try:
        slots = initial.contiguous(num_layers, num_experts, len(slots_R), int(slots_R[0]))
    except initial.InsufficientSlots:
        return None
    out = np.full((num_layers, capacity.num_ranks, slots.shape[2]), -1, dtype=np.int32)
    out[:, capacity.open_R] = slots
    return Placement.even(out)


def _moves(current: Placement | None, placement: Placement, capacity: Capacity) -> int:
    if current is None:
        return int((placement.slots_LRS >= 0).sum())
    return received(surviving(current, capacity.live_R).slots_LRS, placement.slots_LRS)


def _waves(
    current: Placement, target: Placement, capacity: Capacity, spare_slots: int
) -> int | None:
    """Waves from `current` to `target`; None when no walk gets there."""
    count, at_LRS = 0, surviving(current, capacity.live_R).slots_LRS
    for wave_LRS in walk(at_LRS, target.slots_LRS, Limits.within(capacity, spare_slots)):
        count, at_LRS = count + 1, wave_LRS
    return count if migration.reached(at_LRS, target.slots_LRS) else None


def _crossing(
    before: Placement, after: Placement, load: Load, capacity: Capacity
) -> tuple[float, float] | None:
    if len(np.unique(capacity.domains_R)) < 2:
        return None
    sources_LED = dispatch.source_loads(load.load_LE, capacity.domains_R)
    total_L = load.load_LE.sum(axis=1)
    if not total_L.any():
        return 0.0, 0.0
    before_share, after_share = (
        float(
            np.average(
                dispatch.crossing_share(
                    placement.slots_LRS, placement.fractions_LRS, capacity.domains_R, sources_LED
                ),
                weights=total_L,
            )
        )
        for placement in (before, after)
    )
    return before_share, after_share
