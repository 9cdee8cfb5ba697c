"""Policy: what the user allows and what the ranks can take, as every rebalancing decision needs it.

Neighbours: `decide` takes one, `trigger` weighs by it; `planner`, `waves` and `capacity` get their
part of it from here.

Shapes: R ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from moe_placement.capacity import Capacity
from moe_placement.copy_limits import CopyLimits
from moe_placement.goal import Goal, Split
from moe_placement.walk.waves import Limits

MAX_WAVES_OF_MOVES = 8
"""A walk of single moves has at most this many waves' worth of them."""
MAX_AIM = 0.03
WAVE_SHARE_OF_DEADLINE = 0.5
"""A wave is made so small that its weights come in this part of its deadline."""


class Mode(StrEnum):
    OFF = "Off"
    RECOMMEND = "Recommend"
    AUTO = "Auto"


@dataclass(frozen=True)
class Policy:
    """Units as in `spec.rebalancing`; what is not given bounds nothing."""

    mode: Mode
    serving_slots: int
    """Of a rank and layer; survivors that need more to hold every expert may use spare ones."""
    min_gain_percent: float
    cooldown_seconds: float
    max_moves_per_round: int
    """Weights that all ranks together receive in one wave."""
    split: Split = Split.FRACTIONS
    copies: CopyLimits = field(default_factory=CopyLimits)
    bytes_per_expert: int = 0
    """0 = not known: bytes cost nothing."""
    max_bytes_per_second: float = 200e6
    """That a rank receives."""
    max_link_bytes: int | None = None
    """That one wave brings from one domain to another."""
    max_stall_millis: float = 20.0
    """Longest predicted pause at a switch that is still worth it."""
    deadline_seconds: float = 120.0
    """Of one wave."""
    horizon_seconds: float = 600.0
    """How long a plan is expected to fit: its gain over that time has to pay for it."""
    speeds: tuple[float, ...] | None = None
    domains: tuple[int, ...] | None = None
    """Number of each rank's domain; absent = all in one."""
    near: bool = False
    """Weigh what crosses between domains."""
    num_groups: int | None = None
    """Of experts that the model's router chooses as a unit."""
    spread_domains: int = 1
    """Domains wanted for the copies of an expert that has as many."""
    draining: tuple[int, ...] = ()
    """Ranks that are about to leave: no plan names them."""

    @property
    def min_gain(self) -> float:
        return self.min_gain_percent / 100

    @property
    def aim(self) -> float:
        """How near to the bound a plan goes: much nearer than what begins a rebalance, so that the
        next small change does not begin another."""
        return min(MAX_AIM, self.min_gain / 2) if self.min_gain > 0 else MAX_AIM

    def capacity(self, num_ranks: int, num_experts: int, num_slots: int) -> Capacity:
        """What the ranks can take, each with `num_slots` physical slots."""
        needed = -(-num_experts // (num_ranks - len(self.draining)))
        return Capacity.of(
            min(max(self.serving_slots, needed), num_slots),
            num_ranks,
            speeds=self.speeds,
            draining=self.draining,
            domains=self.domains,
        )

    def goal(self, max_moves: int | None, capacity: Capacity, num_experts: int) -> Goal:
        """With as many copies as asked for, or as the ranks that are left can hold."""
        copies = self.copies.within_reach(num_experts, capacity.slots_R[capacity.open_R])
        return Goal(
            self.split, copies, max_moves, self.aim, self.near, self.num_groups, self.spread_domains
        )

    @property
    def max_moves(self) -> int:
        """On a whole walk, unless a full plan is worth more."""
        return MAX_WAVES_OF_MOVES * self.max_moves_per_round

    @property
    def max_rank_bytes(self) -> int | None:
        """That a rank receives or gives in one wave, so that it is over in time."""
        if self.bytes_per_expert < 1:
            return None
        in_time = self.max_bytes_per_second * self.deadline_seconds * WAVE_SHARE_OF_DEADLINE
        return max(self.bytes_per_expert, int(in_time))

    def limits(self, capacity: Capacity, num_slots: int) -> Limits:
        """Of one wave, on ranks with `num_slots` physical slots each."""
        link = self.max_link_bytes
        return Limits.within(
            capacity,
            spare_slots=num_slots - int(capacity.slots_R.max()),
            max_moves=self.max_moves_per_round,
            bytes_per_expert=max(1, self.bytes_per_expert),
            max_rank_bytes=self.max_rank_bytes,
            max_link_bytes=None if link is None else max(link, 1, self.bytes_per_expert),
        )
