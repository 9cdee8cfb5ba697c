"""Carry out what was decided, in an order that a crash between any two steps cannot hurt.

A plan is stored before it is announced, a successor is created before the failed pod goes, a
deletion names the UID it means. Neighbours: `actions` (the values), `children` and `pod_manifest`
(the manifests), `cluster` and `workers` (the doors).
"""

from __future__ import annotations

import logging

from moe_api import names
from moe_api.plan import Fence, GroupPlan
from moe_api.worker import DrainRequest
from moe_operator import children
from moe_operator.actions import Action, CreatePod, DeleteGroup, DeletePod, Drain, StorePlan
from moe_operator.context import Context
from moe_operator.desired import Desired
from moe_operator.errors import AlreadyExists, Refused
from moe_operator.groups import GroupOutcome, listeners
from moe_operator.pod_manifest import Incarnation, pod_manifest
from moe_operator.pods import PodView
from moe_operator.timestamps import timestamp
from moe_operator.workers import PlanAnswer, Unreachable

logger = logging.getLogger(__name__)


def act(ctx: Context, wish: Desired, outcome: GroupOutcome, token: str) -> list[str]:
    """Do the actions of one group and announce its plan; returns what the API server refused."""
    refused: list[str] = []
    for action in outcome.actions:
        if isinstance(action, StorePlan):
            store(ctx, wish, outcome, action)
    if outcome.plan is not None:
        announce(ctx, wish, outcome, outcome.plan, token)
    for action in outcome.actions:
        if not isinstance(action, StorePlan):
            refused += _do(ctx, wish, action, token)
    return refused


def store(ctx: Context, wish: Desired, outcome: GroupOutcome, action: StorePlan) -> None:
    """Store the plan, provided that nobody stored another one since it was read.

    Raises:
        errors.Conflict: somebody did; the pass begins anew.
    """
    manifest = children.placement(wish.owner, action.plan)
    stored = outcome.view.stored
    if stored is not None:
        manifest["metadata"] |= {"uid": stored.uid, "resourceVersion": stored.resource_version}
    ctx.cluster.apply(manifest)
    announced: dict[int, str] = ctx.memory.of(wish.key, "announced", dict)
    announced[action.plan.group] = timestamp(ctx.clock)
    logger.info("plan stored: %s", action.why, extra=_where(wish, action.plan))


def announce(
    ctx: Context, wish: Desired, outcome: GroupOutcome, plan: GroupPlan, token: str
) -> None:
    """Put the plan to everyone who does not run it yet or has not heard of this leader."""
    heard: dict[str, Fence] = ctx.memory.of(wish.key, f"heard-{plan.group}", dict)
    waiting = {pod.uid: pod for pod in listeners(outcome.view, plan)}
    for pod in outcome.view.pods:
        member = any(m.uid == pod.uid for m in plan.members)
        if member and pod.address is not None and pod.end is None:
            if heard.get(pod.uid) != plan.fence:
                waiting[pod.uid] = pod
    targets = {uid: pod.address for uid, pod in waiting.items() if pod.address is not None}
    for uid, answer in ctx.workers.put_plans(targets, plan, token).items():
        _note(heard, waiting[uid], plan, answer, wish)
    for uid in set(heard) - {pod.uid for pod in outcome.view.pods}:
        del heard[uid]


def _note(
    heard: dict[str, Fence],
    pod: PodView,
    plan: GroupPlan,
    answer: PlanAnswer | Unreachable,
    wish: Desired,
) -> None:
    if isinstance(answer, PlanAnswer) and answer.accepted:
        heard[pod.uid] = plan.fence
    elif isinstance(answer, PlanAnswer):
        told = "%s refused the plan, in force there: %s"
        logger.warning(told, pod.name, dict(answer.in_force), extra=_where(wish, plan))
    else:
        told = "%s did not hear the plan: %s"
        logger.info(told, pod.name, answer.reason, extra=_where(wish, plan))


def _do(ctx: Context, wish: Desired, action: Action, token: str) -> list[str]:
    match action:
        case CreatePod():
            return _create(ctx, wish, action)
        case DeletePod():
            pod, grace = action.pod, action.grace_seconds
            if ctx.cluster.delete_pod(wish.owner.namespace, pod.name, pod.uid, grace):
                logger.info("pod %s deleted: %s", pod.name, action.why, extra=_of(wish, pod))
        case Drain():
            targets = {p.uid: p.address for p in action.pods if p.address is not None}
            request = DrainRequest(deadline_seconds=wish.spec.disruption.drain_seconds)
            ctx.workers.drain(targets, request, token)
        case DeleteGroup():
            _delete_group(ctx, wish, action.group)
        case StorePlan():
            raise AssertionError("plans are stored before")
    return []


def _create(ctx: Context, wish: Desired, action: CreatePod) -> list[str]:
    incarnation = Incarnation(
        action.group, action.member, ctx.random_suffix(), restarts=action.restarts
    )
    manifest = pod_manifest(
        wish.owner, wish.spec, ctx.settings.worker, incarnation, wish.token_secret
    )
    name = manifest["metadata"]["name"]
    where = {"namespace": wish.owner.namespace, "deployment": wish.owner.name,
             "group": action.group, "member": action.member}  # fmt: skip
    try:
        ctx.cluster.create_pod(manifest)
    except AlreadyExists:  # another suffix next time
        return []
    except Refused as error:  # a quota, an admission rule: the user has to know, and may change it
        logger.warning("pod %s refused: %s", name, error, extra=where)
        return [f"pod of member {action.member} of group {action.group} is refused: {error}"]
    logger.info("pod %s created: %s", name, action.why, extra=where)
    return []


def _delete_group(ctx: Context, wish: Desired, group: int) -> None:
    name = wish.group_name(group)
    for note in ("balance", "announced"):
        by_group: dict[int, object] = ctx.memory.of(wish.key, note, dict)
        by_group.pop(group, None)
    for kind in ("PodDisruptionBudget", names.PLACEMENT_KIND):
        found = ctx.cluster.get(kind, wish.owner.namespace, name)
        if found is not None:
            ctx.cluster.delete(kind, wish.owner.namespace, name, found["metadata"]["uid"])


def _where(wish: Desired, plan: GroupPlan) -> dict[str, object]:
    return {
        "namespace": wish.owner.namespace,
        "deployment": wish.owner.name,
        "group": plan.group,
        "generation": plan.generation,
        "epoch": plan.epoch,
    }


def _of(wish: Desired, pod: PodView) -> dict[str, object]:
    return {
        "namespace": wish.owner.namespace,
        "deployment": wish.owner.name,
        "group": pod.group,
        "member": pod.member,
    }
