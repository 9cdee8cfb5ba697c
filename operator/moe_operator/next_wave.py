"""The next wave of a group, if there is to be one: away from ranks that go, toward balance, or the
same placement with other senders.

Pure: each function takes a `Step` and gives it back with what was decided. Neighbours: `rebalance`
reads loads and announces waves; `evacuation`, `moe_placement.decision.decide` and `nearby` decide;
`allowance` is what the spec allows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from moe_api.plan import GroupPlan
from moe_operator import allowance, evacuation, nearby, plans, records
from moe_operator.balance import Balance, Trip, peaks
from moe_operator.copy_counts import recount
from moe_operator.desired import Desired
from moe_operator.members import MemberView
from moe_operator.plans import Placed
from moe_operator.rules import GroupRules
from moe_placement import score
from moe_placement.decision.decide import Decision, Mode, Verdict, decide
from moe_placement.initial import InsufficientSlots
from moe_placement.placement import Placement

EVACUATION, COPY_LIMITS = "Evacuation", "CopyLimits"
NEAR_DISPATCH, NO_METRICS = "NearDispatch", "NoMetrics"
"""Reasons beside those of `moe_placement.decision.trigger`."""


@dataclass(frozen=True)
class Step:
    """What one pass goes by, and what it comes to."""

    wish: Desired
    rules: GroupRules
    members: Sequence[MemberView]
    plan: GroupPlan
    current: Placed
    balance: Balance
    leader_epoch: int
    now: float
    """Monotonic seconds."""
    started: str
    """The same as RFC 3339, to name a rebalance that begins now."""
    decision: Decision | None = None
    wave: GroupPlan | None = None

    @property
    def sources(self) -> Sequence[int] | None:
        """Of the plan in force."""
        return self.plan.sources if self.current.epoch == self.plan.epoch else None

    def preferred(self, placement: Placement) -> Sequence[int] | None:
        """Sources that a plan with this placement should name."""
        domains = [member.domains for member in self.plan.members]
        return nearby.preferred(placement, self.sources, self.balance.routed_RLE, domains)

    def toward(self, placement: Placement, sources: Sequence[int] | None) -> GroupPlan:
        """The plan of the next epoch."""
        limits, epoch = allowance.limits(self.wish), self.leader_epoch
        return plans.wave(self.plan, epoch, self.current, placement, limits, sources)


def evacuated(step: Step, leaving: Sequence[int]) -> Step:
    """Away from ranks that are about to go, whatever the mode of rebalancing is."""
    if not leaving:
        return step
    balance, members = step.balance, step.members
    most = allowance.wave_limits(step.wish, members)
    try:
        found = evacuation.evacuate(step.current.placement, leaving, balance.known_LE, most)
    except InsufficientSlots:  # `disruption.interrupted` tells
        return step
    if found is None:
        return _done(step, EVACUATION)
    ids = ", ".join(str(members[rank].member.id) for rank in leaving)
    message = f"member {ids} is about to go: {found.moves} experts move to others"
    return _must(step, EVACUATION, message, found.wave, found.moves)


def recounted(step: Step, leaving: Sequence[int]) -> Step:
    """Toward as many copies of each expert as asked for, whether or not that balances better."""
    balance, placement = step.balance, step.current.placement
    width = placement.slots_LRS.shape[2]
    allowed = allowance.policy(step.wish, step.members, width, leaving, step.rules.spread)
    if allowed.mode is not Mode.AUTO or balance.walk.leads_on(placement):
        return step
    most = allowance.wave_limits(step.wish, step.members)
    found = recount(
        placement, leaving, allowed.copies, allowed.serving_slots, balance.known_LE, most
    )
    if found is None:
        return _done(step, COPY_LIMITS)
    message = f"copies of experts are not as many as asked for: {found.moves} are to come"
    return _must(step, COPY_LIMITS, message, found.wave, found.moves)


def _must(step: Step, reason: str, message: str, placement: Placement | None, moves: int) -> Step:
    """A wave that asks for no gain; a rebalance under way is given up for it."""
    if placement is None:
        return step
    wave, trip, walk = step.toward(placement, None), step.balance.trip, step.balance.walk.stopped()
    if trip is None or trip.reason != reason or trip.arrived:
        trip = Trip(step.started, reason, None, moves, message, wave.generation, wave.epoch)
    balance = replace(step.balance, walk=walk, trip=replace(trip, newest_epoch=wave.epoch))
    decision = Decision(Verdict.APPLIED, reason, message, walk=walk)
    return replace(step, balance=balance, decision=decision, wave=wave)


def _done(step: Step, reason: str) -> Step:
    """Nothing is left to be done for this reason."""
    trip = step.balance.trip
    if trip is None or trip.reason != reason or trip.arrived:
        return step
    return replace(step, balance=replace(step.balance, trip=replace(trip, arrived=True)))


def decided(step: Step, leaving: Sequence[int]) -> Step:
    """Toward balance; no plan names ranks that are about to go."""
    balance, placement = step.balance, step.current.placement
    width = placement.slots_LRS.shape[2]
    spread = step.rules.spread
    allowed = allowance.policy(step.wish, step.members, width, leaving, spread)
    if balance.heard or balance.walk.leads_on(placement) or allowed.mode is Mode.OFF:
        stall = None if balance.trip is None else balance.trip.stall_millis
        decision = decide(balance.load_LE, placement, balance.walk, allowed, step.now, stall)
    else:
        message = "not every member reported its load"
        decision = Decision(Verdict.SKIPPED, NO_METRICS, message, walk=balance.walk)
    balance = replace(balance, walk=decision.walk)
    if decision.wave is None:
        return replace(step, balance=balance, decision=decision)
    wave, trip = step.toward(decision.wave, step.preferred(decision.wave)), balance.trip
    if decision.figures is not None:  # a walk begins
        trip = Trip(
            step.started,
            decision.reason,
            decision.figures,
            decision.figures.moves,
            records.message(decision),
            wave.generation,
            wave.epoch,
            peaks_before=_peaks(step.balance, placement),
        )
    elif trip is not None:
        trip = replace(trip, newest_epoch=wave.epoch)
    balance = replace(balance, trip=trip)
    return replace(step, balance=balance, decision=decision, wave=wave)


def sent_near(step: Step) -> Step:
    """The same placement, where ranks had better begin or end to send to near copies first."""
    placement, balance, allowed = step.current.placement, step.balance, step.wish.spec.rebalancing
    ended = balance.walk.ended_seconds
    resting = ended is not None and step.now - ended < allowed.cooldown_seconds
    if allowed.mode != "Auto" or resting or (balance.trip and balance.trip.is_measuring):
        return step
    sources = step.preferred(placement)
    if sources == step.sources:
        return step
    wave = step.toward(placement, sources)
    whom = "first go to copies in their own domain" if sources else "go to all copies alike"
    message = f"tokens {whom}, nothing moves"
    trip = Trip(
        step.started, NEAR_DISPATCH, None, 0, message, wave.generation, wave.epoch, arrived=True
    )
    walk = balance.walk.arrived(step.now)
    decision = Decision(Verdict.APPLIED, NEAR_DISPATCH, message, walk=walk)
    return replace(
        step, balance=replace(balance, trip=trip, walk=walk), decision=decision, wave=wave
    )


def _peaks(balance: Balance, placement: Placement) -> float | None:
    """As measured, else as the window's load makes them."""
    if balance.peaks is not None or balance.load_LE is None:
        return balance.peaks
    return peaks(score.rank_loads(placement.slots_LRS, placement.fractions_LRS, balance.load_LE))
