"""What to do with one group now: pods, plan and workers as seen, and the wish → actions.

Pure, and the same whatever led here: a pass that finds the group half-way (the operator was
restarted, a write failed) decides what is missing. Neighbours: `regroup` (who is in the plan),
`replacement` (which pods exist), `reconcile` (chooses the intent, carries out the actions).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from moe_api.plan import GroupPlan
from moe_api.worker import WorkerPhase
from moe_operator import plans
from moe_operator.actions import Action, DeleteGroup, DeletePod, Drain, StorePlan
from moe_operator.members import MemberState, MemberView, in_force
from moe_operator.pods import PodView
from moe_operator.regroup import Regrouping, regroup
from moe_operator.replacement import Pausing, PodPlan, fill
from moe_operator.rules import Ages, GroupRules, GroupView, Intent
from moe_placement.score import LoadLE


@dataclass(frozen=True)
class GroupOutcome:
    """What was decided about a group, and what status says of it."""

    view: GroupView
    intent: Intent
    members: tuple[MemberView, ...] = ()
    actions: tuple[Action, ...] = ()
    plan: GroupPlan | None = None
    """The plan that holds after this pass: stored, or to be stored."""
    regrouping: Regrouping = field(default_factory=Regrouping)
    pausing: tuple[Pausing, ...] = ()
    settled: bool = False
    """The plan is in force on every member and nothing else is under way."""

    @property
    def serving(self) -> int:
        return sum(m.state is MemberState.SERVING for m in self.members)


def decide_group(
    view: GroupView, rules: GroupRules, intent: Intent, ages: Ages, load_LE: LoadLE | None = None
) -> GroupOutcome:
    """Every step that may be taken now; taking them again does no harm.

    Args:
        load_LE: the group's load known last, None = unknown.

    Raises:
        plans.PlanTooLarge, moe_placement.initial.InsufficientSlots: from `regroup`.
    """
    members = view.members(rules, ages)
    ending = intent in (Intent.ROLL, Intent.REMOVE, Intent.REFUSE)
    regrouping = regroup(view, rules, members, ages, load_LE, ending=ending)
    pods = _pods(view, rules, members, intent, ages)
    stored = view.stored.plan if view.stored else None
    plan = regrouping.plan or stored
    if regrouping.plan is None and stored is not None and not ending:
        if stored.leader_epoch < rules.leader_epoch:
            plan = plans.raised(stored, rules.leader_epoch)
    actions = list(pods.actions)
    if plan is not None and plan != stored:
        # A plan first: survivors wait for it, a replacement takes its time anyway.
        actions.insert(0, StorePlan(plan, regrouping.why or "a new leader took over"))
    return GroupOutcome(
        view=view,
        intent=intent,
        members=tuple(members),
        actions=tuple(actions),
        plan=plan,
        regrouping=regrouping,
        pausing=pods.pausing,
        settled=not ending and regrouping.plan is None and view.settled(),
    )


def listeners(view: GroupView, plan: GroupPlan) -> list[PodView]:
    """Pods that have to hear this plan: its members that do not run it yet, and who left by it."""
    named = {member.uid for member in plan.members}
    return [
        pod
        for pod in view.pods
        if pod.address is not None
        and pod.end is None
        and (
            (pod.uid in named and (pod.state is None or not in_force(plan, pod.state)))
            or (pod.uid not in named and pod.state is not None and pod.state.generation > 0)
        )
    ]


def _pods(
    view: GroupView, rules: GroupRules, members: list[MemberView], intent: Intent, ages: Ages
) -> PodPlan:
    match intent:
        case Intent.WAIT:
            return PodPlan(())
        case Intent.REFUSE:
            return PodPlan(_delete_all(view.current(rules), "the spec cannot be served"))
        case Intent.REMOVE:
            return PodPlan(_remove(view, rules, ages))
        case Intent.ROLL | Intent.KEEP:
            outdated = view.outdated(rules)
            if outdated:
                # The old ones end first, so that a roll-out needs no room beside them.
                return PodPlan(_delete_all(outdated, "it is of an older template"))
            return fill(view, rules, members, ages)


def _remove(view: GroupView, rules: GroupRules, ages: Ages) -> tuple[Action, ...]:
    if not view.pods:
        return (DeleteGroup(view.index),)
    age = ages.get(("shrinking", view.index), 0.0)
    busy = [pod for pod in view.pods if pod.active and _busy(pod)]
    if busy and age < rules.drain_seconds:
        asked = tuple(p for p in busy if p.state and p.state.phase is not WorkerPhase.DRAINING)
        return (Drain(asked),) if asked else ()
    return _delete_all(view.pods, "the group is not wanted any more")


def _busy(pod: PodView) -> bool:
    """Serves, or has something to finish."""
    serving = pod.state is not None and pod.state.phase is WorkerPhase.SERVING
    return serving or not pod.idle


def _delete_all(pods: list[PodView] | tuple[PodView, ...], why: str) -> tuple[Action, ...]:
    return tuple(DeletePod(pod, None, why) for pod in pods if not pod.deleting)
