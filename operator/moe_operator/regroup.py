"""The next membership of a group: form it, go on without the lost, admit newcomers, let leavers go.

Pure. A fault needs no permission and waits for nobody; a planned change waits until the present
plan is in force everywhere. Who stays keeps its slots (`moe_placement.walk.membership`), copies
share tokens by the load known last. One plan is under way at a time; a newer one replaces it, so a
newcomer that dies takes nothing down with it.
Neighbours: `rules` (what is given), `plans` (builds the documents), `groups` (asks here).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from moe_api.plan import GroupPlan, Member
from moe_api.worker import WorkerPhase
from moe_operator import plans
from moe_operator.copy_counts import counted
from moe_operator.members import MemberState, MemberView
from moe_operator.pods import PodView
from moe_operator.rules import Ages, GroupRules, GroupView
from moe_placement import initial
from moe_placement.copy_limits import CopyLimits
from moe_placement.resplit import fitting, resplit
from moe_placement.score import LoadLE
from moe_placement.walk import membership

MEET_SECONDS = 60.0
"""Members that all have their weights and have not met after this long get a new generation."""


@dataclass(frozen=True)
class Regrouping:
    """A plan to store, or why there is none although one is needed."""

    plan: GroupPlan | None = None
    why: str = ""
    short: bool = False
    """The ranks that are left cannot serve: they wait for a replacement."""


def regroup(
    view: GroupView,
    rules: GroupRules,
    members: list[MemberView],
    ages: Ages,
    load_LE: LoadLE | None = None,
    *,
    ending: bool,
) -> Regrouping:
    """What the membership should be next.

    Args:
        load_LE: the group's load known last, by which copies share their tokens; None = unknown.
        ending: the group goes away as a whole: heal it for the requests it still has, admit nobody.

    Raises:
        plans.PlanTooLarge, initial.InsufficientSlots: no plan of this width can be made.
    """
    alive = [m for m in members if m.state is not MemberState.LOST]
    if not alive:
        return Regrouping() if ending else _form(view, rules)
    assert view.stored is not None, "members come from a stored plan"
    lost = [m for m in members if m.state is MemberState.LOST]
    leavers = [] if ending else [m for m in alive if _may_leave(m)]
    staying = [m for m in alive if m not in leavers]
    newcomers = [] if ending else _newcomers(view, rules, staying)
    fault = _fault(view, alive, lost, ages)
    if fault:
        for kept in (staying, alive):
            if _can_serve(view.stored.plan, rules, len(kept) + len(newcomers)):
                return _next(view, rules, alive, kept, newcomers, load_LE, fault)
        return Regrouping(why=fault, short=True)
    if (leavers or newcomers) and view.settled():
        if _can_serve(view.stored.plan, rules, len(staying) + len(newcomers)):
            why = _planned(leavers, newcomers)
            return _next(view, rules, alive, staying, newcomers, load_LE, why)
    return Regrouping()


def _form(view: GroupView, rules: GroupRules) -> Regrouping:
    """The first plan, once all wanted workers wait: contiguous blocks and the copies asked for, no
    load is known."""
    ready = {pod.member: pod for pod in _candidates(view, rules)}
    if rules.model is None or len(ready) < rules.width:
        return Regrouping()
    pods = [ready[member] for member in range(rules.width)]
    blocks = initial.contiguous(
        rules.model.layers, rules.model.experts, rules.width, rules.slots_per_rank
    )
    slots = counted(blocks, CopyLimits(rules.min_copies), rules.slots_per_rank - rules.spare_slots)
    plan = plans.first(
        rules.namespace,
        rules.deployment,
        view.index,
        rules.leader_epoch,
        _numbers_used(view),
        [_member(pod, rules) for pod in pods],
        resplit(slots, None),
        rules.limits,
    )
    return Regrouping(plan, f"{rules.width} workers wait: the group forms")


def _next(
    view: GroupView,
    rules: GroupRules,
    alive: list[MemberView],
    kept: list[MemberView],
    newcomers: list[PodView],
    load_LE: LoadLE | None,
    why: str,
) -> Regrouping:
    assert view.stored is not None, "members come from a stored plan"
    plan = view.stored.plan
    states = [m.worker for m in alive if m.worker is not None]
    slots_LRS = plans.placed(plan, states).slots_LRS
    rows: list[int | None] = [m.rank for m in kept]
    slots = membership.admit(
        slots_LRS,
        rows + [None] * len(newcomers),
        plans.num_experts(slots_LRS),
        slots_LRS.shape[2] - rules.spare_slots,
        load_LE=fitting(load_LE, slots_LRS),
        min_copies=rules.min_copies,
    )
    members = [_again(m, rules) for m in kept] + [_member(pod, rules) for pod in newcomers]
    after = _numbers_used(view)
    placement = resplit(slots, load_LE)
    next_plan = plans.regrouped(plan, rules.leader_epoch, after, members, placement, rules.limits)
    return Regrouping(next_plan, why)


def _can_serve(plan: GroupPlan, rules: GroupRules, num_ranks: int) -> bool:
    """Whether a generation of this many ranks may serve and every expert finds room in it."""
    slots_LRS = plan.slots()
    room = num_ranks * slots_LRS.shape[2]
    return num_ranks >= rules.min_serving_ranks and room >= plans.num_experts(slots_LRS)


def _fault(view: GroupView, alive: list[MemberView], lost: list[MemberView], ages: Ages) -> str:
    """Why the present generation cannot go on; empty when it can."""
    assert view.stored is not None
    plan = view.stored.plan
    if lost:
        return "; ".join(f"member {m.member.id} is lost: {m.evidence}" for m in lost)
    ahead = [m.member.id for m in alive if m.worker and m.worker.generation > plan.generation]
    if ahead:  # the stored plan is an older one, restored from somewhere
        return f"members {ahead} are in a later generation than the stored {plan.generation}"
    unaware = [m for m in alive if m.state is MemberState.SERVING]
    if view.broken() and not unaware:
        return f"generation {plan.generation} broke and every member answers: they meet again"
    waiting = ages.get(("prepared", view.index, plan.generation), 0.0)
    if waiting >= MEET_SECONDS:
        return f"members of generation {plan.generation} did not meet in {waiting:.0f} s"
    return ""


def _may_leave(member: MemberView) -> bool:
    """It admits nothing any more and has nothing left to finish."""
    return (
        member.leaving
        and member.pod is not None
        and member.pod.idle
        and member.worker is not None
        and member.worker.phase is WorkerPhase.DRAINING
    )


def _newcomers(view: GroupView, rules: GroupRules, staying: Iterable[MemberView]) -> list[PodView]:
    taken = {m.member.id for m in staying}
    named = {m.member.uid for m in staying}
    return [
        pod for pod in _candidates(view, rules) if pod.member not in taken and pod.uid not in named
    ]


def _candidates(view: GroupView, rules: GroupRules) -> list[PodView]:
    """Workers that a plan may name, one a member, by member id."""
    free = [pod for pod in view.current(rules) if _is_free(pod, view)]
    newest = {pod.member: pod for pod in sorted(free, key=_age_order)}
    return [newest[member] for member in sorted(newest) if member < rules.width]


def _is_free(pod: PodView, view: GroupView) -> bool:
    if pod.can_join:
        return True
    # The stored plan was deleted: who serves goes on serving, under a newer plan.
    orphan = view.stored is None and pod.active and pod.address is not None
    phases = (WorkerPhase.SERVING, WorkerPhase.DISRUPTED, WorkerPhase.JOINING)
    return orphan and pod.state is not None and pod.state.phase in phases


def _numbers_used(view: GroupView) -> tuple[int, int]:
    """Highest generation and epoch that anyone here has seen; new numbers lie above."""
    states = [pod.state for pod in view.pods if pod.state is not None]
    generations = [max(s.generation, s.prepared_generation) for s in states]
    epochs = [max(s.applied_epoch, s.staged_epoch, s.abandoned_epoch) for s in states]
    if view.stored is not None:
        generations.append(view.stored.plan.generation)
        epochs.append(view.stored.plan.epoch)
    return max(generations, default=0), max(epochs, default=0)


def _member(pod: PodView, rules: GroupRules) -> Member:
    return plans.member_of(pod, rules.domains_of(pod.node))


def _again(member: MemberView, rules: GroupRules) -> Member:
    """A member that stays, with the domains that its node has now."""
    node = member.pod.node if member.pod is not None else None
    return member.member.model_copy(update={"domains": list(rules.domains_of(node))})


def _planned(leavers: list[MemberView], newcomers: list[PodView]) -> str:
    parts = [f"member {m.member.id} has drained" for m in leavers]
    parts += [f"member {pod.member} joins" for pod in newcomers]
    return ", ".join(parts)


def _age_order(pod: PodView) -> tuple[str, str]:
    return (pod.created, pod.name)
