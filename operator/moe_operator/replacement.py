"""Which pods a group should have: create what is missing, replace what failed, remove the rest.

Pure. A replacement carries in an annotation how many incarnations failed in a row before it, and a
failed pod stays until its successor exists: so the count outlives the operator. The pause before
the n-th replacement doubles; a member that served for longer than the warm-up begins again at one.
Neighbours: `rules` (what is given), `groups` (asks here), `act` (does it).
"""

from __future__ import annotations

from dataclasses import dataclass

from moe_operator.actions import Action, CreatePod, DeletePod
from moe_operator.members import MemberState, MemberView
from moe_operator.pods import PodView
from moe_operator.rules import Ages, GroupRules, GroupView

FIRST_PAUSE_SECONDS = 10.0
MAX_PAUSE_SECONDS = 300.0
KILL_GRACE_SECONDS = 1
"""For a worker that hangs: nothing to drain, and no two that claim one member."""


@dataclass(frozen=True)
class Pausing:
    """A failed member whose replacement waits, or will not come."""

    member: int
    restarts: int
    """Replacements it has had."""
    seconds_left: float | None
    """None = no more replacements: `maxRestarts` is reached."""


@dataclass(frozen=True)
class PodPlan:
    actions: tuple[Action, ...]
    pausing: tuple[Pausing, ...] = ()


def pause_seconds(restarts: int) -> float:
    """Pause before replacement number `restarts`: none, 10 s, 20 s, … 300 s."""
    if restarts <= 1:
        return 0.0
    return float(min(FIRST_PAUSE_SECONDS * 2.0 ** min(restarts - 2, 16), MAX_PAUSE_SECONDS))


def fill(view: GroupView, rules: GroupRules, members: list[MemberView], ages: Ages) -> PodPlan:
    """Actions that bring one live pod of the present template to every member."""
    actions: list[Action] = []
    pausing: list[Pausing] = []
    pods = view.current(rules)
    lost = {m.member.uid: m for m in members if m.state is MemberState.LOST}
    named = {m.member.uid for m in members if m.state is not MemberState.LOST}
    for member in range(rules.width):
        mine = sorted((p for p in pods if p.member == member), key=_age_order)
        fit = [p for p in mine if p.active and not p.worker_failed and p.uid not in lost]
        if fit:
            actions += _surplus(fit, mine, named, lost)
            continue
        actions_one, waits = _replace(view.index, member, mine, lost, rules, ages)
        actions += actions_one
        pausing += waits
    actions += _extra(view, rules)
    actions += _prune(view, rules)
    return PodPlan(tuple(actions), tuple(pausing))


def _surplus(
    fit: list[PodView], mine: list[PodView], named: set[str], lost: dict[str, MemberView]
) -> list[Action]:
    """One live pod a member: the one in the plan, else the newest. And whoever it replaced goes."""
    keeper = next((p for p in fit if p.uid in named), fit[-1])
    actions: list[Action] = [
        DeletePod(p, None, f"member {p.member} has pod {keeper.name}") for p in fit if p != keeper
    ]
    for pod in mine:
        if pod.active and pod not in fit:
            why = lost[pod.uid].evidence if pod.uid in lost else "its worker failed"
            actions.append(DeletePod(pod, KILL_GRACE_SECONDS, why))
    return actions


def _replace(
    group: int,
    member: int,
    mine: list[PodView],
    lost: dict[str, MemberView],
    rules: GroupRules,
    ages: Ages,
) -> tuple[list[Action], list[Pausing]]:
    """A pod for a member that has none, when its pause is over; then the one that failed goes."""
    if not mine:
        return [CreatePod(group, member, 0, "it has no pod")], []
    last = mine[-1]
    failed = _failed(last, lost, rules)
    restarts = last.restarts
    if failed:
        restarts = 1 if _served_long(last, rules) else last.restarts + 1
        age = max(ages.get(("ended", last.uid), 0.0), ages.get(("silent", last.uid), 0.0))
        left = pause_seconds(restarts) - age
        if restarts > rules.max_restarts:
            return [], [Pausing(member, last.restarts, None)]
        if left > 0:
            return [], [Pausing(member, last.restarts, left)]
    actions: list[Action] = [CreatePod(group, member, restarts, f"replaces {last.name}")]
    for pod in mine:
        if pod.active:
            why = lost[pod.uid].evidence if pod.uid in lost else "its worker failed"
            actions.append(DeletePod(pod, KILL_GRACE_SECONDS, why))
    return actions, []


def _failed(pod: PodView, lost: dict[str, MemberView], rules: GroupRules) -> bool:
    """Whether the worker itself is to blame; a pod that was deleted or lost its node is not."""
    if pod.end is not None:
        return pod.end.failed and not pod.deleting
    if pod.deleting or pod.node in rules.unready_nodes:
        return False
    return pod.worker_failed or pod.uid in lost


def _served_long(pod: PodView, rules: GroupRules) -> bool:
    ran = pod.end.ran_seconds if pod.end is not None else None
    return ran is not None and ran > rules.warmup_grace_seconds


def _extra(view: GroupView, rules: GroupRules) -> list[Action]:
    return [
        DeletePod(pod, None, f"the group has {rules.width} members")
        for pod in view.current(rules)
        if pod.member >= rules.width and not pod.deleting
    ]


def _prune(view: GroupView, rules: GroupRules) -> list[Action]:
    """Ended pods that have a successor go, but for the newest failed ones that are to be kept."""
    current = view.current(rules)
    ended = [
        pod
        for pod in sorted(current, key=_age_order, reverse=True)
        if pod.end is not None
        and not pod.deleting
        and any(_age_order(p) > _age_order(pod) for p in current if p.member == pod.member)
    ]
    kept = [pod for pod in ended if pod.end is not None and pod.end.failed]
    kept = kept[: rules.retain_failed_pods]
    return [DeletePod(pod, None, "it ended and was replaced") for pod in ended if pod not in kept]


def _age_order(pod: PodView) -> tuple[str, str]:
    return (pod.created, pod.name)
