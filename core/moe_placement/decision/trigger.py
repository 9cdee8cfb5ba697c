"""Trigger: does a plan pay? Its gain against the bytes and stalls of the walk, and how long ago and
how well the last one went.

Numbers only. Neighbours: `decide` asks and makes words of the answers, `policy` holds the user's
bounds.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from moe_placement.decision.policy import Policy

INTERFERENCE = 0.1
"""Part of its speed that a rank loses while weights come in at the full rate allowed."""
WAVE_SECONDS = 2.0
"""Between two waves, besides copying: store, announce, agree."""
MAX_SETBACKS = 5
"""Cool-down is doubled at most so often."""


class Reason(StrEnum):
    MODE_OFF = "ModeOff"
    NO_TRAFFIC = "NoTraffic"
    WITHIN_TARGET = "WithinTarget"
    GAIN_BELOW_MINIMUM = "GainBelowMinimum"
    COST_EXCEEDS_GAIN = "CostExceedsGain"
    STALL_ABOVE_MAXIMUM = "StallAboveMaximum"
    NO_FREE_SLOT = "NoFreeSlot"
    COOLDOWN = "Cooldown"
    BACKED_OFF = "BackedOff"
    TARGET_OUTDATED = "TargetOutdated"
    ABOVE_TARGET = "AboveTarget"
    COPIES_TOGETHER = "CopiesTogether"
    WALK_CONTINUES = "WalkContinues"


@dataclass(frozen=True)
class Effort:
    """What a walk costs."""

    moves: int
    """Experts that some rank has to receive."""
    bytes: int
    rank_bytes: int
    """That the busiest rank receives."""
    waves: int
    """At least."""


def walk_seconds(effort: Effort, policy: Policy) -> float:
    """From the first wave to the target."""
    return effort.waves * WAVE_SECONDS + effort.rank_bytes / policy.max_bytes_per_second


def cost_seconds(effort: Effort, policy: Policy, stall_millis: float) -> float:
    """Work that all ranks lose to the walk: slower while weights come, standing at each switch."""
    copying = effort.rank_bytes / policy.max_bytes_per_second * INTERFERENCE
    return copying + effort.waves * stall_millis / 1e3


def worth_seconds(gain: float, effort: Effort, policy: Policy, stall_millis: float) -> float:
    """Work saved within the horizon, less what the walk costs; before its end it saves nothing.

    Args:
        gain: part of the slowest ranks' work that is saved.
    """
    serving = policy.horizon_seconds - walk_seconds(effort, policy)
    return gain * max(0.0, serving) - cost_seconds(effort, policy, stall_millis)


def expected_stall_millis(
    measured: float | None, ended_seconds: float | None, policy: Policy, now_seconds: float
) -> float:
    """Pause at the next switch, from the longest one of the last walk: less and less believed, so
    that one bad measurement does not forbid rebalancing for good."""
    if measured is None:
        return 0.0
    age = 0.0 if ended_seconds is None else now_seconds - ended_seconds
    return float(measured * 0.5 ** (age / policy.horizon_seconds))


def pause_seconds(setbacks: int, policy: Policy) -> float:
    """Between the end of a walk and the next: longer after walks that brought less than half."""
    return float(policy.cooldown_seconds * 2 ** min(setbacks, MAX_SETBACKS))


def is_setback(predicted_gain: float, realised_gain: float) -> bool:
    return predicted_gain > 0 and realised_gain < predicted_gain / 2
