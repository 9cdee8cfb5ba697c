"""One group in the status: what its ranks do, how often they were replaced, the last loss of one.

Pure. Neighbours: `report` (what is shown), `status` (puts it together), `evidence` (the losses).
"""

from __future__ import annotations

from moe_api.status import Failure, GroupPhase, GroupStatus, RankCounts, Restarts
from moe_api.worker import WorkerPhase
from moe_operator import plans
from moe_operator.groups import GroupOutcome
from moe_operator.members import MemberState
from moe_operator.report import Report
from moe_operator.rules import Intent


def group_status(
    report: Report, outcome: GroupOutcome, last_failure: Failure | None
) -> GroupStatus:
    plan = outcome.plan
    states = [m.worker for m in outcome.members if m.worker is not None]
    stored = outcome.view.stored
    epoch = 0 if plan is None else plan.epoch
    if stored is not None and states:
        epoch = plans.placed(stored.plan, states).epoch
    return GroupStatus(
        name=report.wish.group_name(outcome.view.index),
        generation=0 if plan is None else plan.generation,
        epoch=epoch,
        phase=_phase(report, outcome),
        ranks=rank_counts(report, outcome),
        last_failure=last_failure,
        restarts=_restarts(outcome),
    )


def rank_counts(report: Report, outcome: GroupOutcome) -> RankCounts:
    """A rank counts once: as its member in the plan, else as the pod that is to become it."""
    wanted = outcome.intent is not Intent.REMOVE
    width = report.rules.width
    states = {m.member.id: m.state for m in outcome.members if m.state is not MemberState.LOST}
    active = {pod.member for pod in outcome.view.pods if pod.active}
    serving = sum(state is MemberState.SERVING for state in states.values())
    leaving = sum(state is MemberState.DRAINING for state in states.values())
    joining = sum(state is MemberState.JOINING for state in states.values())
    joining += len(active - set(states))
    known = set(states) | active
    lost = sum(m.state is MemberState.LOST and m.member.id not in known for m in outcome.members)
    formed = bool(states)
    desired = width if wanted else 0
    return RankCounts(
        desired=desired,
        serving=serving,
        joining=joining,
        leaving=leaving,
        lost=lost if formed and wanted else 0,
        summary=f"{serving}/{desired}",
    )


def total_counts(groups: list[GroupStatus]) -> RankCounts:
    """Over all groups."""
    ranks = [group.ranks for group in groups]
    serving, desired = sum(r.serving for r in ranks), sum(r.desired for r in ranks)
    return RankCounts(
        desired=desired,
        serving=serving,
        joining=sum(r.joining for r in ranks),
        leaving=sum(r.leaving for r in ranks),
        lost=sum(r.lost for r in ranks),
        summary=f"{serving}/{desired}",
    )


def _phase(report: Report, outcome: GroupOutcome) -> GroupPhase:
    alive = [m for m in outcome.members if m.state is not MemberState.LOST]
    if outcome.intent in (Intent.REMOVE, Intent.ROLL) and outcome.view.pods:
        return GroupPhase.DRAINING
    if report.ready(outcome):
        return GroupPhase.SERVING
    if not alive:
        return GroupPhase.STARTING
    if any(m.state is MemberState.SERVING for m in alive):
        return GroupPhase.DEGRADED
    disrupted = any(m.worker and m.worker.phase is WorkerPhase.DISRUPTED for m in alive)
    if disrupted or outcome.regrouping.short:
        return GroupPhase.DISRUPTED
    return GroupPhase.JOINING


def _restarts(outcome: GroupOutcome) -> list[Restarts]:
    """From the newest pod of each member, which carries the count."""
    newest = {pod.member: pod for pod in sorted(outcome.view.pods, key=lambda p: p.created)}
    return [
        Restarts(member=member, count=pod.restarts, last_time=pod.created or None)
        for member, pod in sorted(newest.items())
        if pod.restarts > 0
    ]
