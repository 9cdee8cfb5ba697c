"""The rebalancing decision: load, placement in force, state and time → the next wave, or why not.

One pure function with two shells: `moe_operator.rebalance` and `moe_worker.local`. It chains
`score` (is it bad?) → `planner` (what would be better?) → `trigger` (does it pay?) → `under_way`
(the next epoch on the way there).

Shapes: L MoE layers, E logical experts, R ranks, S physical slots a rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

import numpy as np

from moe_placement import score
from moe_placement.decision import trigger
from moe_placement.decision.policy import Mode as Mode
from moe_placement.decision.policy import Policy as Policy
from moe_placement.decision.prospect import Figures as Figures
from moe_placement.decision.prospect import Prospect, Sight
from moe_placement.decision.trigger import Reason
from moe_placement.decision.under_way import Walk as Walk
from moe_placement.placement import Placement
from moe_placement.planned import Level, Planned
from moe_placement.planner import plan
from moe_placement.score import LoadLE

NO_GAIN = 1e-3
"""Share of work that is not worth a word: fractions are stored in units of 1/65535."""


class Verdict(StrEnum):
    APPLIED = "Applied"
    """A wave is to be stored and announced."""
    RECOMMENDED = "Recommended"
    SKIPPED = "Skipped"
    DEFERRED = "Deferred"
    ABORTED = "Aborted"


@dataclass(frozen=True, eq=False)
class Decision:
    verdict: Verdict
    reason: str
    """One word of `trigger.Reason`."""
    message: str
    wave: Placement | None = None
    """The next epoch; None = keep what is in force."""
    target: Placement | None = None
    """Where it leads, or would."""
    figures: Figures | None = None
    """Absent where there was nothing to plan with."""
    walk: Walk = field(default_factory=Walk)
    """What the next decision is to be given."""
    level: Level = Level.KEPT
    """How far the plan goes."""


def decide(
    load_LE: LoadLE | None,
    current: Placement,
    walk: Walk,
    policy: Policy,
    now_seconds: float,
    stall_millis: float | None = None,
) -> Decision:
    """What to do now. Every "no" has a reason; no sample (`load_LE` None) changes nothing.

    A walk under way goes on without asking again whether it pays, unless its target has become
    worse than what is in force. Keep `walk` of the answer, and tell it when it arrived.

    Args:
        load_LE: tokens per logical expert to plan for.
        current: in force, on every rank.
        stall_millis: longest measured pause at a switch of the last walk.
    """
    if policy.mode is Mode.OFF:
        return Decision(
            Verdict.SKIPPED,
            Reason.MODE_OFF.value,
            "spec.rebalancing.mode is Off",
            walk=walk.stopped(),
        )
    no_load_LE = np.zeros((len(current.slots_LRS), int(current.slots_LRS.max()) + 1))
    known_LE = no_load_LE if load_LE is None else load_LE
    num_ranks, num_slots = current.slots_LRS.shape[1:]
    sight = Sight(
        known_LE, current, walk, policy,
        policy.capacity(num_ranks, known_LE.shape[1], num_slots),
        trigger.expected_stall_millis(stall_millis, walk.ended_seconds, policy, now_seconds),
        now_seconds,
    )  # fmt: skip
    if walk.leads_on(current) and policy.mode is Mode.AUTO:
        return _go_on(sight)
    sight = replace(sight, walk=_ended(walk, current, now_seconds))
    if score.imbalance(sight.rank_times(current)) is None:
        return _no(sight, Reason.NO_TRAFFIC, "no sample: too few tokens in the window")
    return _weigh(_looked_back(sight))


def _ended(walk: Walk, current: Placement, now_seconds: float) -> Walk:
    if walk.target is None:
        return walk
    return walk.arrived(now_seconds) if walk.is_at(current) else walk.stopped()


def _go_on(sight: Sight) -> Decision:
    target = sight.walk.target
    assert target is not None, "the walk leads on"
    here, there = sight.best_split(sight.current), sight.best_split(target)
    if sight.gain(there, over=here) < -sight.chance:
        message = (
            f"the load has changed: the walk's target would now have imbalance "
            f"{sight.imbalance(there):.3f}, {sight.imbalance(here):.3f} can be had without moves"
        )
        ended = replace(sight, walk=sight.walk.given_up(sight.now_seconds))
        return _no(ended, Reason.TARGET_OUTDATED, message)
    return _step(sight, Reason.WALK_CONTINUES, "walk goes on")


def _looked_back(sight: Sight) -> Sight:
    """With what the last walk really brought, once its cool-down is over: the placement before it
    and the one in force, both under the present load."""
    walk, since = sight.walk, sight.walk.ended_seconds
    if walk.origin is None or since is None:
        return sight
    if sight.now_seconds - since < sight.policy.cooldown_seconds:
        return sight
    if walk.origin.slots_LRS.shape != sight.current.slots_LRS.shape:
        return replace(sight, walk=replace(walk, origin=None))
    return replace(sight, walk=walk.checked(sight.gain(sight.current, over=walk.origin)))


def _weigh(sight: Sight) -> Decision:
    """What balances for least, else what puts copies apart; now, later or only in words."""
    found = [sight.prospect(planned) for planned in _plans(sight)]
    chosen = _paying(sight, found)
    reason = Reason.ABOVE_TARGET
    if isinstance(chosen, Decision):
        apart = min(found, key=lambda one: one.together)
        if apart.together >= sight.together(sight.current):
            return chosen
        chosen, reason = apart, Reason.COPIES_TOGETHER
    told = chosen.told
    if reason is Reason.COPIES_TOGETHER:
        told = (
            f"{sight.together(sight.current)} experts have copies in fewer domains than "
            f"replicaSpread asks for, then {chosen.together}: {told}"
        )
    if sight.stall_millis > sight.policy.max_stall_millis:
        message = (
            f"{told}; a switch is expected to stall {sight.stall_millis:.0f} ms, "
            f"maxStallMillis is {sight.policy.max_stall_millis:g}"
        )
        return _no(sight, Reason.STALL_ABOVE_MAXIMUM, message, chosen)
    if sight.policy.mode is Mode.RECOMMEND:
        return _not_now(sight, Verdict.RECOMMENDED, reason, told, chosen)
    if (wait := _pause(sight)) is not None:
        return _not_now(sight, Verdict.DEFERRED, wait[0], f"{told}; {wait[1]}", chosen)
    return _begin(sight, chosen, reason, told)


def _plans(sight: Sight) -> Iterator[Planned]:
    """Other fractions only, then a few moves, then any number: as far as it takes to reach the
    aim."""
    for max_moves in (0, sight.policy.max_moves, None):
        goal = sight.policy.goal(max_moves, sight.capacity, sight.load_LE.shape[1])
        planned = plan(sight.load_LE, sight.capacity, goal, sight.current)
        yield planned
        if (planned.gap_L <= goal.aim).all() and not sight.together(planned.placement):
            return


def _paying(sight: Sight, found: Sequence[Prospect]) -> Prospect | Decision:
    """The plan that is worth most, the cheapest kind first; why not, when none is worth it."""
    most = max(found, key=lambda one: one.figures.gain)
    if most.planned.level is Level.KEPT or most.figures.gain < NO_GAIN:
        now = most.figures.imbalance_now
        message = f"no change of placement would balance better than imbalance {now:.3f}"
        return _no(sight, Reason.WITHIN_TARGET, message, most)
    if (why := _too_little(sight, most.figures)) is not None:
        return _no(sight, Reason.GAIN_BELOW_MINIMUM, why, most)
    worthy = [one for one in found if _too_little(sight, one.figures) is None]
    chosen = max(worthy, key=lambda one: _worth_seconds(sight, one))
    if _worth_seconds(sight, chosen) <= 0:
        return _no(sight, Reason.COST_EXCEEDS_GAIN, _cost(sight, chosen), chosen)
    return chosen


def _too_little(sight: Sight, figures: Figures) -> str | None:
    """Why a gain is not worth looking at, None when it is."""
    tells = (
        f"imbalance {figures.imbalance_now:.3f}, a plan would reach "
        f"{figures.imbalance_predicted:.3f}"
    )
    minimum = sight.policy.min_gain_percent
    if figures.gain < sight.policy.min_gain:
        return f"gain {figures.gain:.1%} is below minGainPercent {minimum:g} %: {tells}"
    if figures.gain <= sight.chance:
        return (
            f"gain {figures.gain:.1%} is no more than chance makes of so few tokens "
            f"({sight.chance:.1%}): {tells}"
        )
    return None


def _worth_seconds(sight: Sight, one: Prospect) -> float:
    return trigger.worth_seconds(one.figures.gain, one.effort, sight.policy, sight.stall_millis)


def _cost(sight: Sight, one: Prospect) -> str:
    policy = sight.policy
    lost = trigger.cost_seconds(one.effort, policy, sight.stall_millis)
    return (
        f"{one.told}: the walk takes {trigger.walk_seconds(one.effort, policy):.0f} s and loses "
        f"{lost:.1f} s of work, which the gain does not bring back in "
        f"{policy.horizon_seconds:.0f} s"
    )


def _pause(sight: Sight) -> tuple[Reason, str] | None:
    """Why it is too early for another walk, None when it is not."""
    walk = sight.walk
    if walk.ended_seconds is None:
        return None
    pause = trigger.pause_seconds(walk.setbacks, sight.policy)
    left = pause - (sight.now_seconds - walk.ended_seconds)
    if left <= 0:
        return None
    if walk.setbacks == 0:
        return Reason.COOLDOWN, f"cooldown {left:.0f} s more"
    brought = "less" if walk.realised is None else f"{walk.realised:.1%}"
    return Reason.BACKED_OFF, (
        f"the last walk brought {brought} of {walk.gain:.1%} promised, the {walk.setbacks}. in a "
        f"row: cooldown is {pause:.0f} s, {left:.0f} s more"
    )


def _begin(sight: Sight, chosen: Prospect, reason: Reason, message: str) -> Decision:
    promised = max(0.0, chosen.figures.gain - sight.chance)
    walk = sight.walk.toward(chosen.planned.placement, sight.load_LE, sight.current, promised)
    begun = _step(replace(sight, walk=walk), reason, message)
    return replace(
        begun,
        figures=chosen.figures,
        level=chosen.planned.level,
        walk=sight.walk if begun.wave is None else begun.walk,
    )


def _step(sight: Sight, reason: Reason, message: str) -> Decision:
    policy, num_slots = sight.policy, sight.current.slots_LRS.shape[2]
    limits = policy.limits(sight.capacity, num_slots)
    wave = sight.walk.next_wave(sight.current, limits, policy.split, sight.capacity.speeds_R)
    if wave is None:
        ended = replace(sight, walk=sight.walk.given_up(sight.now_seconds))
        full = f"{message}; no free slot to move through: raise experts.spareSlotsPerRank"
        return _no(ended, Reason.NO_FREE_SLOT, full)
    return Decision(
        Verdict.APPLIED,
        reason.value,
        message,
        wave=wave,
        target=sight.walk.target,
        walk=sight.walk,
    )


def _no(sight: Sight, reason: Reason, message: str, best: Prospect | None = None) -> Decision:
    """Nothing is done; figures of the best that was found."""
    return Decision(
        Verdict.SKIPPED,
        reason.value,
        message,
        figures=None if best is None else best.figures,
        walk=sight.walk,
        level=Level.KEPT if best is None else best.planned.level,
    )


def _not_now(
    sight: Sight, verdict: Verdict, reason: Reason, message: str, chosen: Prospect
) -> Decision:
    """What would be done, were it allowed or late enough."""
    planned = chosen.planned
    return Decision(
        verdict, reason.value, message,
        target=planned.placement, figures=chosen.figures, walk=sight.walk, level=planned.level,
    )  # fmt: skip
