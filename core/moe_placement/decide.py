"""The rebalancing decision: loads, plan in force, state and time → the next wave, or why not.

One pure function with two shells: `moe_operator.rebalance` and `moe_worker.local`. It chains
`score` (is it bad?) → `greedy` (what would be better?) → trigger (does it pay?) → `migration`
(the next epoch on the way there).

Shapes: L MoE layers, E logical experts, R ranks, S physical slots a rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from moe_api.plan import FractionsLRS, SlotsLRS, even_fractions
from moe_placement import greedy, migration, score, waves
from moe_placement.score import LoadLE
from moe_placement.waves import Limits


class Mode(StrEnum):
    OFF = "Off"
    RECOMMEND = "Recommend"
    AUTO = "Auto"


class Verdict(StrEnum):
    APPLIED = "Applied"
    """A wave is to be stored and announced."""
    RECOMMENDED = "Recommended"
    SKIPPED = "Skipped"
    DEFERRED = "Deferred"
    ABORTED = "Aborted"


@dataclass(frozen=True)
class Policy:
    """What the user allows; units as in `spec.rebalancing`."""

    mode: Mode
    serving_slots: int
    min_gain_percent: float
    cooldown_seconds: float
    max_moves_per_round: int


@dataclass(frozen=True)
class Walk:
    """State between decisions; losing it costs one more plan, never correctness."""

    target_LRS: SlotsLRS | None = None
    """Where the walk under way leads; None = standing still."""
    ended_seconds: float | None = None
    """When the last walk reached its target or was given up (the caller's monotonic clock)."""


@dataclass(frozen=True)
class Figures:
    """What the plan promises under the window's load."""

    imbalance_now: float
    imbalance_predicted: float
    gain: float
    moves: int
    """Experts that some rank has to receive on the whole way to the target."""


@dataclass(frozen=True)
class Decision:
    verdict: Verdict
    reason: str
    message: str
    wave_LRS: SlotsLRS | None = None
    """Placement of the next epoch; None = keep what is in force."""
    target_LRS: SlotsLRS | None = None
    figures: Figures | None = None
    """Absent where there was nothing to plan with."""


def decide(
    load_LE: LoadLE | None,
    slots_LRS: SlotsLRS,
    fractions_LRS: FractionsLRS,
    walk: Walk,
    policy: Policy,
    now_seconds: float,
) -> Decision:
    """What to do now. Every "no" has a reason; no sample (`load_LE` None) changes nothing.

    A walk under way goes on without asking again whether it pays: half a walk is the worst place
    to stay.
    """
    if policy.mode is Mode.OFF:
        return _skip("ModeOff", "spec.rebalancing.mode is Off")
    if walk.target_LRS is not None and walk.target_LRS.shape == slots_LRS.shape:
        if not migration.reached(slots_LRS, walk.target_LRS):
            return _step(slots_LRS, walk.target_LRS, policy, "WalkContinues", "walk goes on")
    if load_LE is None:
        return _skip("NoTraffic", "no sample: too few tokens in the window")
    now_LR = score.rank_loads(slots_LRS, fractions_LRS, load_LE)
    imbalance_now = score.imbalance(now_LR)
    if imbalance_now is None:
        return _skip("NoTraffic", "no tokens in the window")
    target = greedy.plan(load_LE, slots_LRS, policy.serving_slots)
    then_LR = score.rank_loads(target, even_fractions(target), load_LE)
    predicted = score.imbalance(then_LR)
    assert predicted is not None, "the same load has tokens under every placement"
    gain = score.gain(now_LR, then_LR)
    moves = len(migration.diff(slots_LRS, target))
    figures = Figures(imbalance_now.worst, predicted.worst, gain, moves)
    if migration.reached(slots_LRS, target):
        return _skip("WithinTarget", "no change of placement would balance better", figures)
    if gain * 100 < policy.min_gain_percent:
        message = (
            f"gain {gain:.1%} is below minGainPercent {policy.min_gain_percent:g} %: "
            f"imbalance {imbalance_now.worst:.3f}, a plan would reach {predicted.worst:.3f}"
        )
        return _skip("GainBelowMinimum", message, figures)
    message = (
        f"imbalance {imbalance_now.worst:.3f} → {predicted.worst:.3f} predicted, "
        f"gain {gain:.1%}, {moves} moves"
    )
    if policy.mode is Mode.RECOMMEND:
        return Decision(
            Verdict.RECOMMENDED, "AboveTarget", message, target_LRS=target, figures=figures
        )
    if walk.ended_seconds is not None:
        left = policy.cooldown_seconds - (now_seconds - walk.ended_seconds)
        if left > 0:
            return Decision(
                Verdict.DEFERRED,
                "Cooldown",
                f"{message}; cooldown {left:.0f} s more",
                figures=figures,
            )
    return _step(slots_LRS, target, policy, "AboveTarget", message, figures)


def _step(
    slots_LRS: SlotsLRS,
    target_LRS: SlotsLRS,
    policy: Policy,
    reason: str,
    message: str,
    figures: Figures | None = None,
) -> Decision:
    wave = waves.next_wave(slots_LRS, target_LRS, Limits(max_moves=policy.max_moves_per_round))
    if wave is None:
        return _skip(
            "NoFreeSlot",
            f"{message}; no free slot to move through: raise experts.spareSlotsPerRank",
            figures,
        )
    return Decision(
        Verdict.APPLIED, reason, message, wave_LRS=wave, target_LRS=target_LRS, figures=figures
    )


def _skip(reason: str, message: str, figures: Figures | None = None) -> Decision:
    return Decision(Verdict.SKIPPED, reason, message, figures=figures)
