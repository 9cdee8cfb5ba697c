"""How well experts are placed, for the deployment's status and for each ExpertPlacement's own.

Pure. The deployment shows its worst group. Measured figures come from tokens that slots received,
predicted ones from logical load; without tokens a figure is absent, never 0.
Neighbours: `balance` (the figures), `coverage` (the copies), `status` (writes both).
"""

from __future__ import annotations

import numpy as np

from moe_api.placement import ExpertPlacementStatus, MemberProgress, PlacementPhase
from moe_api.plan import GroupPlan
from moe_api.status import MAX_UNCOVERED, ExpertId, HotExpert, PlacementStatus
from moe_operator import plans
from moe_operator.balance import Balance
from moe_operator.coverage import CountsLE, expert_copies
from moe_operator.members import in_force
from moe_operator.nearby import dispatch
from moe_operator.plans import Placed
from moe_operator.rebalance import Rebalance
from moe_operator.report import Report
from moe_operator.texts import cut
from moe_placement.topology.borders import domains_at, near

DIGITS = 3


def placement_status(report: Report) -> PlacementStatus | None:
    """Of the group with the largest imbalance; None while no group has formed."""
    shown = [_group_figures(group) for group in report.groups]
    known = [figures for figures in shown if figures is not None]
    return max(known, key=lambda figures: figures.imbalance or 0.0, default=None)


def expert_placement_status(
    group: Rebalance, previous: ExpertPlacementStatus, announced: str | None
) -> ExpertPlacementStatus | None:
    """Status of the stored plan that was read in this pass; None when there is none.

    Args:
        announced: when this operator stored it; None = an operator before did.
    """
    stored = group.outcome.view.stored
    if stored is None:
        return None
    plan = stored.plan
    states = {m.member.id: m.worker for m in group.outcome.members}
    answered = [state for state in states.values() if state is not None]
    everyone = len(answered) == len(plan.members)
    applied = min((s.applied_epoch for s in answered), default=0) if everyone else 0
    staged = min((s.staged_epoch for s in answered), default=0) if everyone else 0
    trip = group.balance.trip if group.balance else None
    measured = group.balance.measured if group.balance and trip and trip.arrived else None
    newest = max(applied, previous.applied_epoch) == plan.epoch
    update: dict[str, object] = {
        "applied_epoch": max(applied, previous.applied_epoch),
        "staged_epoch": max(staged, previous.staged_epoch),
        "phase": _phase(group, newest=newest),
        "started_time": announced or previous.started_time,
        "members": [
            MemberProgress(
                id=member,
                generation=state.generation,
                applied_epoch=state.applied_epoch,
                staged_epoch=state.staged_epoch,
                moves_done=state.migration.moves_done if state.migration else 0,
                moves_total=state.migration.moves_total if state.migration else 0,
                bytes=state.migration.bytes if state.migration else 0,
                stall_millis=state.migration.stall_millis if state.migration else None,
                error=cut(state.migration.error) if state.migration else None,
            )
            for member, state in sorted(states.items())
            if state is not None
        ],
    }
    if trip is not None:
        figures = trip.figures
        update |= {
            "imbalance_before": None if figures is None else _rounded(figures.imbalance_now),
            "imbalance_predicted": (
                None if figures is None else _rounded(figures.imbalance_predicted)
            ),
            "imbalance_measured": None if measured is None else _rounded(measured.worst),
            "moves": trip.moves,
            "bytes": trip.bytes,
            "stall_millis": None if trip.stall_millis is None else round(trip.stall_millis, 1),
            "message": cut(trip.message),
        }
    return previous.model_copy(update=update)


def _group_figures(group: Rebalance) -> PlacementStatus | None:
    stored = group.outcome.view.stored
    if stored is None or not group.outcome.members:
        return None
    copies_LE, spread_LE = expert_copies(stored.plan, group.outcome.members)
    balance = group.balance
    measured = None if balance is None else balance.measured
    trip = None if balance is None else balance.trip
    states = [m.worker for m in group.outcome.members if m.worker is not None]
    current = plans.placed(stored.plan, states)
    blocks = None if balance is None else balance.imbalance_without_replication(current.slots_LRS)
    return PlacementStatus(
        imbalance=None if measured is None else _rounded(measured.worst),
        mean_imbalance=None if measured is None else _rounded(measured.mean),
        imbalance_without_replication=None if blocks is None else _rounded(blocks),
        predicted_imbalance=(
            None
            if trip is None or trip.figures is None
            else _rounded(trip.figures.imbalance_predicted)
        ),
        cross_domain_share=_crossing(stored.plan, current, balance),
        min_copies=int(copies_LE.min()),
        uncovered=[
            ExpertId(layer=layer, expert=expert)
            for layer, expert in np.argwhere(copies_LE == 0)[:MAX_UNCOVERED].tolist()
        ],
        hot_experts=[] if balance is None else _hot(balance, copies_LE, spread_LE),
    )


def _crossing(plan: GroupPlan, current: Placed, balance: Balance | None) -> float | None:
    """Share of tokens that leave their rank's domain of the narrowest level; None without levels or
    tokens."""
    domains = [member.domains for member in plan.members]
    num_levels = min(map(len, domains))
    if balance is None or balance.routed_RLE is None or num_levels == 0:
        return None
    sources = plan.sources if current.epoch == plan.epoch else None
    border_R = domains_at(domains, num_levels - 1)
    told = dispatch(current.placement, sources, balance.routed_RLE, near(domains), border_R)
    return None if told.crossing is None else _rounded(told.crossing)


def _hot(balance: Balance, copies_LE: CountsLE, spread_LE: CountsLE) -> list[HotExpert]:
    return [
        HotExpert(
            layer=hot.layer,
            expert=hot.expert,
            share=_rounded(hot.share),
            copies=int(copies_LE[hot.layer, hot.expert]),
            domains=int(spread_LE[hot.layer, hot.expert]),
        )
        for hot in balance.hot_experts()
    ]


def _phase(group: Rebalance, *, newest: bool) -> PlacementPhase:
    stored = group.outcome.view.stored
    assert stored is not None, "the caller has one"
    plan = stored.plan
    states = [m.worker for m in group.outcome.members]
    if group.aborted:
        return PlacementPhase.ABORTED
    if newest or all(state is not None and in_force(plan, state) for state in states):
        return PlacementPhase.APPLIED
    if all(state is not None and state.staged_epoch >= plan.epoch for state in states):
        return PlacementPhase.SWITCHING
    if any(state is not None and state.migration is not None for state in states):
        return PlacementPhase.COPYING
    return PlacementPhase.ANNOUNCED


def _rounded(value: float) -> float:
    return round(value, DIGITS)
