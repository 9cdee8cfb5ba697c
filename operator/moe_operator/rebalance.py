"""Rebalancing, the shell: read loads, ask for the next wave, store and announce it.

One epoch is under way at a time. While it is, this only watches: the members switch, or agree to
abandon it, and say so. Between two waves of a walk the next follows at once; otherwise loads are
read every interval. Experts on ranks that are about to go come first; where nothing is to be moved,
ranks may come to send to near copies first.
Neighbours: `next_wave` (decides), `balance` (the state), `records` (what status is told).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from moe_api.load import LoadReport
from moe_api.plan import GroupPlan
from moe_api.status import Decision as DecisionStatus
from moe_api.worker import WorkerState
from moe_operator import evacuation, plans, records
from moe_operator.act import announce, store
from moe_operator.actions import StorePlan
from moe_operator.balance import Balance
from moe_operator.context import Context
from moe_operator.desired import Desired
from moe_operator.groups import GroupOutcome
from moe_operator.members import MemberState
from moe_operator.next_wave import Step, decided, evacuated, recounted, sent_near
from moe_operator.plans import Placed
from moe_operator.rules import Ages, GroupRules
from moe_operator.timestamps import timestamp
from moe_placement.decision.decide import Decision
from moe_placement.score import LoadLE

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


@dataclass(frozen=True)
class Given:
    """What a pass goes by, the same for all groups."""

    wish: Desired
    rules: GroupRules
    ages: Ages
    token: str
    """Of the control API."""
    cordoned: Collection[str] = ()
    """Nodes by name."""


def rebalance(ctx: Context, given: Given, outcome: GroupOutcome) -> Rebalance:
    """One step for one group."""
    wish, plan = given.wish, outcome.plan
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
        return _watch(outcome, balance, plan, given.ages, wish.spec.rebalancing.deadline_seconds)
    current = plans.placed(plan, states)
    balance = balance.under(plan, current.epoch, now)
    balance, aborted = _arrive(ctx, wish, balance, plan, current, states)
    started = timestamp(ctx.clock)
    step = Step(
        wish, given.rules, outcome.members, plan, current, balance, ctx.leader_epoch, now, started
    )
    if _ready(outcome):
        leaving = _leaving(given, outcome)
        step = evacuated(step, leaving)
        if step.wave is None:
            step = recounted(step, leaving)
        if step.wave is None:
            step = _look(ctx, outcome, step, leaving, given.token)
    if step.wave is not None:
        assert step.decision is not None, "every wave is decided on"
        outcome = replace(outcome, plan=step.wave, settled=False)
        store(ctx, wish, outcome, StorePlan(step.wave, step.decision.message))
        announce(ctx, wish, outcome, step.wave, given.token)
    if step.decision is not None:
        ctx.metrics.rebalance.labels(verdict=step.decision.verdict.value).inc()
    notes[plan.group] = step.balance
    name = wish.group_name(plan.group)
    told = (
        records.rebalanced(step.balance.trip, name),
        aborted,
        records.refusal(step.decision, name, started),
    )
    gave_up = current.epoch < plan.epoch and outcome.plan == plan
    found = tuple(record for record in told if record is not None)
    return Rebalance(outcome, step.balance, step.decision, found, aborted=gave_up)


def known_loads(ctx: Context, wish: Desired) -> dict[int, LoadLE]:
    """Per group the load known last; groups of which none is known are left out."""
    notes: dict[int, Balance] = ctx.memory.of(wish.key, "balance", dict)
    return {group: note.known_LE for group, note in notes.items() if note.known_LE is not None}


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
        name = wish.group_name(plan.group)
        told = records.abandoned(plan.epoch, current.epoch, states, name, timestamp(ctx.clock))
        # The next interval plans from what is in force.
        walk = balance.walk.given_up(now)
        ended = replace(balance, walk=walk, trip=None, aborted_epoch=plan.epoch, read_at=now)
        return ended, told
    if balance.trip is not None and current.epoch == balance.trip.newest_epoch:
        balance = replace(balance, trip=balance.trip.switched(current.epoch, states))
    if balance.walk.is_at(current.placement):
        trip = None if balance.trip is None else replace(balance.trip, arrived=True)
        balance = replace(balance, walk=balance.walk.arrived(now), trip=trip)
    return balance, None


def _leaving(given: Given, outcome: GroupOutcome) -> tuple[int, ...]:
    """Ranks whose experts are to go elsewhere."""
    if not given.wish.spec.disruption.evacuate_on_cordon:
        return ()
    return evacuation.leaving(outcome.members, given.cordoned)


def _look(
    ctx: Context, outcome: GroupOutcome, step: Step, leaving: Sequence[int], token: str
) -> Step:
    """Read loads when it is time, decide about moves, then about whom ranks send to."""
    due = _due(step.balance, step.wish, step.now)
    if due:
        ids = [member.id for member in step.plan.members]
        reports = _loads(ctx, outcome, token)
        read = step.balance.read(reports, ids, step.now, step.current.placement)
        step = replace(step, balance=read)
    elif not step.balance.walk.leads_on(step.current.placement):
        return step
    step = decided(step, leaving)
    return sent_near(step) if due and step.wave is None else step


def _ready(outcome: GroupOutcome) -> bool:
    return all(m.state is MemberState.SERVING for m in outcome.members)


def _due(balance: Balance, wish: Desired, now: float) -> bool:
    interval = wish.spec.rebalancing.interval_seconds
    return balance.read_at is None or now - balance.read_at >= interval


def _loads(ctx: Context, outcome: GroupOutcome, token: str) -> list[LoadReport]:
    targets = {m.member.id: m.member.address for m in outcome.members}
    answers = ctx.workers.loads(targets, token).values()
    num_layers = 0 if outcome.plan is None else len(outcome.plan.layers)
    reports = [answer for answer in answers if isinstance(answer, LoadReport)]
    return [report for report in reports if len(report.routed) == num_layers]
