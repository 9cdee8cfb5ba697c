"""What a plan promises under a load and what it takes to get there, in the figures of a decision.

Neighbours: `decide` compares prospects, `planner` makes the plans, `trigger` weighs gain and
effort, `score` has the formulas.

Shapes: L MoE layers, E logical experts, R ranks, S physical slots a rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moe_placement import score
from moe_placement.capacity import Capacity
from moe_placement.decision.policy import Policy
from moe_placement.decision.trigger import Effort
from moe_placement.decision.under_way import Walk
from moe_placement.decision.window import noise
from moe_placement.goal import Split
from moe_placement.placement import Placement, holders
from moe_placement.planned import Level, Planned
from moe_placement.score import LoadLE, RankLoadsLR
from moe_placement.split import best_fractions
from moe_placement.topology.spread import under_spread

CHANCE_PART = 0.5
"""Of that noise; forecasts count more than one window's tokens. Asking for all of it balances worse
on recorded windows and moves no less."""


@dataclass(frozen=True)
class Figures:
    """What the plan promises under the window's load."""

    imbalance_now: float
    imbalance_predicted: float
    gain: float
    moves: int
    """Experts that some rank has to receive on the whole way to the target."""
    bytes: int = 0
    waves: int = 0
    """At least; 0 = nothing changes."""
    given_up: tuple[str, ...] = ()
    """What was wanted and could not be had."""


@dataclass(frozen=True, eq=False)
class Prospect:
    planned: Planned
    figures: Figures
    effort: Effort
    together: int
    """Experts whose copies would still be in fewer domains than wanted."""

    @property
    def told(self) -> str:
        figures = self.figures
        size = f" ({figures.bytes / 1e6:.0f} MB)" if figures.bytes else ""
        return (
            f"imbalance {figures.imbalance_now:.3f} → {figures.imbalance_predicted:.3f} predicted, "
            f"gain {figures.gain:.1%}, {figures.moves} moves{size} in {figures.waves} waves"
        )


@dataclass(frozen=True, eq=False)
class Sight:
    """What a decision looks at."""

    load_LE: LoadLE
    current: Placement
    walk: Walk
    policy: Policy
    capacity: Capacity
    stall_millis: float
    now_seconds: float

    def rank_times(self, placement: Placement) -> RankLoadsLR:
        """Load ÷ speed."""
        loads_LR = score.rank_loads(placement.slots_LRS, placement.fractions_LRS, self.load_LE)
        return np.asarray(loads_LR / self.capacity.speeds_R)

    @property
    def chance(self) -> float:
        """Gain that chance makes: perfectly balanced ranks would read an imbalance of 1 + noise,
        and a plan would seem to undo it."""
        reads = noise(self.load_LE, self.capacity.num_ranks)
        return CHANCE_PART * reads / (1 + reads)

    def gain(self, placement: Placement, over: Placement) -> float:
        return score.gain(self.rank_times(over), self.rank_times(placement))

    def imbalance(self, placement: Placement) -> float:
        found = score.imbalance(self.rank_times(placement))
        return 1.0 if found is None else found.worst

    def together(self, placement: Placement) -> int:
        """Experts whose copies are in fewer domains than wanted and possible."""
        wanted = self.policy.spread_domains
        if wanted < 2:
            return 0
        return len(under_spread(placement.slots_LRS, self.capacity.domains_R, wanted))

    def best_split(self, placement: Placement) -> Placement:
        if self.policy.split is Split.EVEN:
            return Placement.even(placement.slots_LRS)
        speeds_R = self.capacity.speeds_R
        return Placement(
            placement.slots_LRS, best_fractions(self.load_LE, placement.slots_LRS, speeds_R)
        )

    def prospect(self, planned: Planned) -> Prospect:
        effort = self._effort(planned)
        gain = self.gain(planned.placement, over=self.current)
        figures = Figures(
            self.imbalance(self.current),
            self.imbalance(planned.placement),
            gain,
            effort.moves,
            effort.bytes,
            effort.waves,
            planned.given_up,
        )
        return Prospect(planned, figures, effort, self.together(planned.placement))

    def _effort(self, planned: Planned) -> Effort:
        """Of the walk to a plan. A rank takes one weight a layer and wave."""
        num_experts = self.load_LE.shape[1]
        has_LRE = holders(self.current.slots_LRS, num_experts)
        comes_LRE = holders(planned.placement.slots_LRS, num_experts) & ~has_LRE
        come_LR = comes_LRE.sum(axis=2)
        moves, busiest = int(come_LR.sum()), int(come_LR.sum(axis=0).max())
        size = self.policy.bytes_per_expert
        waves = max(
            int(come_LR.max()),
            -(-moves // max(1, self.policy.max_moves_per_round)),
            -(-busiest * size // (self.policy.max_rank_bytes or 1)) if size else 0,
            0 if planned.level is Level.KEPT else 1,
        )
        return Effort(moves, moves * size, busiest * size, waves)
