"""Rebalancing, the shell: read loads, ask `moe_placement.decide`, store and announce the next wave.

One epoch is under way at a time. While it is, this only watches: the members switch, or agree to
abandon it, and say so. Between two waves of a walk the next follows at once; otherwise loads are
read every interval. Neighbours: `balance` (the state), `plans` (the documents), `status`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from moe_api.load import LoadReport
from moe_api.plan import GroupPlan, PlanLimits
from moe_api.status import Decision as DecisionStatus
from moe_api.worker import WorkerState
from moe_operator import plans
from moe_operator.act import announce, store
from moe_operator.actions import StorePlan
from moe_operator.balance import Balance, Trip, peaks
from moe_operator.context import Context
from moe_operator.desired import Desired
from moe_operator.groups import GroupOutcome
from moe_operator.members import MemberState
from moe_operator.plans import Placed
from moe_operator.rules import Ages
from moe_operator.texts import cut
from moe_operator.timestamps import timestamp
from moe_placement import migration, score
from moe_placement.decide import Decision, Mode, Policy, Verdict, Walk, decide
from moe_placement.placement import Placement
from moe_placement.score import LoadLE

_WORDS: dict[Verdict, Literal["Applied", "Recommended", "Skipped", "Deferred", "Aborted"]] = {
    Verdict.APPLIED: "Applied",
    Verdict.RECOMMENDED: "Recommended",
    Verdict.SKIPPED: "Skipped",
    Verdict.DEFERRED: "Deferred",
    Verdict.ABORTED: "Aborted",
}
STALLED_SECONDS = 30.0
"""Beyond a wave's deadline: by then its members should have agreed to abandon it."""


@dataclass(frozen=True)
class Rebalance:
    """What a pass found or did about one group's balance."""

    outcome: GroupOutcome
    """With the wave's plan, if one was announced."""
    balance: Balance | None = None
    decision: Decision | None = None
    """Made in this pass."""
    records: tuple[DecisionStatus, ...] = ()
    """What is to be written down: decisions of this pass, and what became known of earlier ones."""
    wave_seconds: float | None = None
    """Age of the wave under way; None = none is."""
    stalled: bool = False
    aborted: bool = False
    """The newest wave was abandoned and none has followed."""


def rebalance(
    ctx: Context, wish: Desired, outcome: GroupOutcome, ages: Ages, token: str
) -> Rebalance:
    """One step for one group; `ages` as in `rules`."""
    plan = outcome.plan
    if plan is None or plan != _stored(outcome):
        return Rebalance(outcome)
    notes: dict[int, Balance] = ctx.memory.of(wish.key, "balance", dict)
    now = ctx.clock.monotonic()
    window_seconds = wish.spec.rebalancing.window_seconds
    balance = notes.get(plan.group)
    if balance is None or balance.window.window_seconds != window_seconds:
        balance = Balance.begin(window_seconds, plan, now)
    states = [m.worker for m in outcome.members if m.worker is not None]
    if not outcome.settled or len(states) < len(plan.members):
        notes[plan.group] = balance
        return _watch(outcome, balance, plan, ages, wish.spec.rebalancing.deadline_seconds)
    current = plans.placed(plan, states)
    balance = balance.under(plan, current.epoch, now)
    balance, aborted = _arrive(ctx, wish, balance, plan, current, states)
    decision = None
    if _ready(outcome) and (_walking(balance, current) or _due(balance, wish, now)):
        if _due(balance, wish, now):
            balance = balance.read(_loads(ctx, outcome, token), [m.id for m in plan.members], now)
        decision, balance, wave = _decide(ctx, wish, balance, plan, current, now)
        if wave is not None:
            outcome = replace(outcome, plan=wave, settled=False)
            store(ctx, wish, outcome, StorePlan(wave, decision.message))
            announce(ctx, wish, outcome, wave, token)
        ctx.metrics.rebalance.labels(verdict=decision.verdict.value).inc()
    notes[plan.group] = balance
    trip = _trip_record(wish, balance, plan.group)
    refusal = _refusal_record(ctx, wish, decision, plan.group)
    records = tuple(r for r in (trip, aborted, refusal) if r is not None)
    gave_up = current.epoch < plan.epoch and outcome.plan == plan
    return Rebalance(outcome, balance, decision, records, aborted=gave_up)


def known_loads(ctx: Context, wish: Desired) -> dict[int, LoadLE]:
    """Per group the load known last; groups of which none is known are left out."""
    notes: dict[int, Balance] = ctx.memory.of(wish.key, "balance", dict)
    return {group: note.known_LE for group, note in notes.items() if note.known_LE is not None}


def policy(wish: Desired, slots_per_rank: int) -> Policy:
    rebalancing = wish.spec.rebalancing
    return Policy(
        mode=Mode(rebalancing.mode),
        serving_slots=slots_per_rank - wish.spec.experts.spare_slots_per_rank,
        min_gain_percent=rebalancing.min_gain_percent,
        cooldown_seconds=rebalancing.cooldown_seconds,
        max_moves_per_round=rebalancing.budget.max_moves_per_round,
    )


def limits(wish: Desired) -> PlanLimits:
    return PlanLimits(
        max_bytes_per_second=wish.spec.rebalancing.budget.max_bytes_per_second,
        deadline_seconds=wish.spec.rebalancing.deadline_seconds,
    )


def _stored(outcome: GroupOutcome) -> GroupPlan | None:
    return outcome.view.stored.plan if outcome.view.stored else None


def _watch(
    outcome: GroupOutcome, balance: Balance, plan: GroupPlan, ages: Ages, deadline_seconds: float
) -> Rebalance:
    """A plan is under way: nothing to do but to see whether it takes too long."""
    if plan.previous is None:
        return Rebalance(outcome, balance)
    age = ages.get(("unsettled", plan.group, plan.generation, plan.epoch), 0.0)
    stalled = age > deadline_seconds + STALLED_SECONDS
    return Rebalance(outcome, balance, wave_seconds=age, stalled=stalled)


def _arrive(
    ctx: Context,
    wish: Desired,
    balance: Balance,
    plan: GroupPlan,
    current: Placed,
    states: Sequence[WorkerState],
) -> tuple[Balance, DecisionStatus | None]:
    """Take note of a wave that was switched, or abandoned by all."""
    now = ctx.clock.monotonic()
    if current.epoch < plan.epoch:
        if balance.aborted_epoch >= plan.epoch:
            return balance, None
        errors = [s.migration.error for s in states if s.migration and s.migration.error]
        record = DecisionStatus(
            time=timestamp(ctx.clock),
            group=wish.group_name(plan.group),
            verdict="Aborted",
            reason="WaveAbandoned",
            message=cut(
                f"epoch {plan.epoch} was abandoned, epoch {current.epoch} stays in force"
                + (f": {errors[0]}" if errors else "")
            ),
        )
        # The next interval plans from what is in force.
        ended = replace(
            balance, walk=Walk(None, now), trip=None, aborted_epoch=plan.epoch, read_at=now
        )
        return ended, record
    if balance.trip is not None and current.epoch == balance.trip.newest_epoch:
        balance = replace(balance, trip=balance.trip.switched(current.epoch, states))
    target = balance.walk.target_LRS
    if target is not None and migration.reached(current.slots_LRS, target):
        trip = None if balance.trip is None else replace(balance.trip, arrived=True)
        balance = replace(balance, walk=Walk(None, now), trip=trip)
    return balance, None


def _ready(outcome: GroupOutcome) -> bool:
    return all(m.state is MemberState.SERVING for m in outcome.members)


def _walking(balance: Balance, current: Placed) -> bool:
    target = balance.walk.target_LRS
    return target is not None and target.shape == current.slots_LRS.shape


def _due(balance: Balance, wish: Desired, now: float) -> bool:
    interval = wish.spec.rebalancing.interval_seconds
    return balance.read_at is None or now - balance.read_at >= interval


def _loads(ctx: Context, outcome: GroupOutcome, token: str) -> list[LoadReport]:
    targets = {m.member.id: m.member.address for m in outcome.members}
    answers = ctx.workers.loads(targets, token).values()
    num_layers = 0 if outcome.plan is None else len(outcome.plan.layers)
    reports = [answer for answer in answers if isinstance(answer, LoadReport)]
    return [report for report in reports if len(report.routed) == num_layers]


def _decide(
    ctx: Context, wish: Desired, balance: Balance, plan: GroupPlan, current: Placed, now: float
) -> tuple[Decision, Balance, GroupPlan | None]:
    placement = current.placement
    allowed = policy(wish, current.slots_LRS.shape[2])
    if allowed.mode is not Mode.AUTO:
        balance = replace(balance, walk=Walk(None, balance.walk.ended_seconds))
    walking = balance.walk.target_LRS is not None
    if balance.heard or walking or allowed.mode is Mode.OFF:
        decision = decide(
            balance.load_LE,
            placement.slots_LRS,
            placement.fractions_LRS,
            balance.walk,
            allowed,
            now,
        )
    else:
        decision = Decision(Verdict.SKIPPED, "NoMetrics", "not every member reported its load")
    if decision.wave_LRS is None:
        if balance.walk.target_LRS is not None:  # a walk that cannot go on is over
            balance = replace(balance, walk=Walk(None, now))
        return decision, balance, None
    arriving = Placement.even(decision.wave_LRS)
    wave = plans.wave(plan, ctx.leader_epoch, current, arriving, limits(wish))
    trip = balance.trip
    if decision.figures is not None:  # a walk begins
        before = balance.peaks
        if before is None and balance.load_LE is not None:
            before = peaks(
                score.rank_loads(placement.slots_LRS, placement.fractions_LRS, balance.load_LE)
            )
        trip = Trip(
            timestamp(ctx.clock),
            decision.figures,
            decision.message,
            plan.generation,
            wave.epoch,
            before,
        )
    elif trip is not None:
        trip = replace(trip, newest_epoch=wave.epoch)
    walk = Walk(decision.target_LRS, balance.walk.ended_seconds)
    return decision, replace(balance, walk=walk, trip=trip), wave


def _refusal_record(
    ctx: Context, wish: Desired, decision: Decision | None, group: int
) -> DecisionStatus | None:
    """How a decision against a rebalance is written down."""
    if decision is None or decision.verdict is Verdict.APPLIED:
        return None
    figures = decision.figures
    return DecisionStatus(
        time=timestamp(ctx.clock),
        group=wish.group_name(group),
        verdict=_WORDS[decision.verdict],
        reason=decision.reason,
        predicted_gain=None if figures is None else round(figures.gain, 4),
        moves=None if figures is None else figures.moves,
        message=cut(decision.message),
    )


def _trip_record(wish: Desired, balance: Balance, group: int) -> DecisionStatus | None:
    """The decision of the trip under way or made last, with all that is known of it by now."""
    trip = balance.trip
    if trip is None:
        return None
    gain, stall = trip.measured_gain, trip.stall_millis
    return DecisionStatus(
        time=trip.started,
        group=wish.group_name(group),
        verdict="Applied",
        reason="AboveTarget",
        predicted_gain=round(trip.figures.gain, 4),
        moves=trip.figures.moves,
        bytes=trip.bytes or None,
        measured_gain=None if gain is None else round(gain, 3),
        measured_stall_millis=None if stall is None else round(stall, 1),
        message=cut(trip.message),
    )
