"""What one decision leaves to the next: the walk under way, or how the last one went.

Losing it costs one more plan, never correctness. Neighbours: `decide` reads and renews it, the
shells keep it and say when a walk arrived or was given up; `waves` finds the slots of a wave.

Shapes: L MoE layers, E logical experts, R ranks, S physical slots a rank.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from moe_api.plan import FRACTION_UNITS, FractionsLRS, SlotsLRS
from moe_placement.capacity import SpeedsR
from moe_placement.decision.trigger import is_setback
from moe_placement.goal import Split
from moe_placement.placement import Placement
from moe_placement.score import LoadLE
from moe_placement.split import best_fractions
from moe_placement.walk import migration, waves
from moe_placement.walk.waves import Limits

SAME_FRACTION = 2 / FRACTION_UNITS
"""Fractions are stored in whole units."""


@dataclass(frozen=True, eq=False)
class Walk:
    target: Placement | None = None
    """Where the walk under way leads; None = standing still."""
    ended_seconds: float | None = None
    """When the last walk arrived or was given up (the caller's monotonic clock)."""
    load_LE: LoadLE | None = None
    """That it was planned for; the fractions of its waves are solved for the same."""
    origin: Placement | None = None
    """What was in force before the walk under way, or before the last one until that is checked."""
    gain: float = 0.0
    """That was promised of it, without what chance may have made of it."""
    realised: float | None = None
    """What the last walk did bring, once that is checked."""
    setbacks: int = 0
    """Walks in a row that brought less than half of what was promised."""

    def toward(self, target: Placement, load_LE: LoadLE, origin: Placement, gain: float) -> Walk:
        """A walk begins."""
        return replace(self, target=target, load_LE=load_LE, origin=origin, gain=gain)

    def arrived(self, now_seconds: float) -> Walk:
        """The target is in force; what it brought is checked later."""
        return replace(self, target=None, load_LE=None, ended_seconds=now_seconds)

    def given_up(self, now_seconds: float) -> Walk:
        """The walk ended short of its target."""
        return replace(self.arrived(now_seconds), origin=None, gain=0.0)

    def checked(self, realised_gain: float) -> Walk:
        """The last walk's promise is held against what it brought."""
        setbacks = self.setbacks + 1 if is_setback(self.gain, realised_gain) else 0
        return replace(self, origin=None, realised=realised_gain, setbacks=setbacks)

    def stopped(self) -> Walk:
        """Nothing is under way any more, and no time need pass before the next: another membership
        or mode."""
        return replace(self, target=None, load_LE=None, origin=None, gain=0.0)

    def leads_on(self, current: Placement) -> bool:
        """Whether there is a target for this membership that is not in force."""
        target = self.target
        fits = target is not None and target.slots_LRS.shape == current.slots_LRS.shape
        return fits and not self.is_at(current)

    def is_at(self, current: Placement) -> bool:
        """Whether `current` is the target, in whichever slots."""
        if self.target is None or not migration.reached(current.slots_LRS, self.target.slots_LRS):
            return False
        wanted_LRS = carried(self.target, current.slots_LRS)
        return bool((np.abs(wanted_LRS - current.fractions_LRS) <= SAME_FRACTION).all())

    def next_wave(
        self, current: Placement, limits: Limits, split: Split, speeds_R: SpeedsR
    ) -> Placement | None:
        """The next epoch, with the fractions that suit its copies; None when no slot lets it get
        nearer."""
        assert self.target is not None, "only a walk has waves"
        assert self.load_LE is not None, "a walk was planned for a load"
        slots_LRS = waves.next_wave(current.slots_LRS, self.target.slots_LRS, limits)
        if slots_LRS is None:
            slots_LRS = current.slots_LRS
            if not migration.reached(slots_LRS, self.target.slots_LRS):
                return None
        if migration.reached(slots_LRS, self.target.slots_LRS):
            return Placement(slots_LRS, carried(self.target, slots_LRS))
        if split is Split.EVEN:
            return Placement.even(slots_LRS)
        return Placement(slots_LRS, best_fractions(self.load_LE, slots_LRS, speeds_R))


def carried(placement: Placement, slots_LRS: SlotsLRS) -> FractionsLRS:
    """Its fractions for the same copies in other slots of their ranks."""
    theirs_LRS = np.argsort(placement.slots_LRS, axis=2, kind="stable")
    ours_LRS = np.argsort(slots_LRS, axis=2, kind="stable")
    out_LRS = np.empty(slots_LRS.shape)
    values_LRS = np.take_along_axis(placement.fractions_LRS, theirs_LRS, 2)
    np.put_along_axis(out_LRS, ours_LRS, values_LRS, 2)
    return out_LRS
