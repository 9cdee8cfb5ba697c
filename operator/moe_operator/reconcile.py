"""One pass over one MoEDeployment: the same ladder for create, update, restart and resync.

Level-triggered: everything is decided from what is there now, and every step may run twice.
Neighbours: `main` calls `reconcile` through the work queue; each rung is a module of its own.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

from moe_api import names
from moe_api.deployment import physical_slots_per_rank
from moe_api.placement import ExpertPlacementStatus
from moe_api.status import Failure
from moe_api.worker import ModelShape
from moe_operator import children, status
from moe_operator.acceptance import Acceptance, judge_model
from moe_operator.act import act
from moe_operator.ages import Ages as SeenAges
from moe_operator.allowance import limits
from moe_operator.api_key_secret import api_key_problems
from moe_operator.apply import apply_child, remove_child
from moe_operator.context import Context, Key
from moe_operator.control_token import control_token
from moe_operator.decisions import Repeats
from moe_operator.desired import Desired, Unreadable, desired
from moe_operator.disruption import interrupted, min_available
from moe_operator.evidence import Loss, gather
from moe_operator.groups import GroupOutcome, decide_group
from moe_operator.members import MemberState
from moe_operator.news import news
from moe_operator.observe import Observation, observe, spread_of
from moe_operator.placement_status import expert_placement_status
from moe_operator.plans import PlanTooLarge
from moe_operator.rebalance import Given, Rebalance, known_loads, rebalance
from moe_operator.report import Report
from moe_operator.rollout import intents
from moe_operator.rules import Ages, GroupRules, Intent
from moe_operator.timestamps import timestamp
from moe_operator.worker_config import worker_config
from moe_operator.workqueue import Result
from moe_placement.initial import InsufficientSlots
from moe_placement.score import LoadLE

MOVING_SECONDS = 0.5
"""Time to the next look while something is under way."""
STEADY_SECONDS = 2.0
"""The same while all is well: a hanging worker shows only when somebody asks."""


def reconcile(ctx: Context, key: Key) -> Result:
    """Bring the deployment `key` a step nearer to what it should be, and tell how it is.

    Raises:
        errors.OperatorError: of the cluster; the queue runs the pass again.
    """
    wish = read(ctx, key)
    if wish is None:
        return Result()
    if isinstance(wish, Unreadable):
        return Result(status.write(ctx, wish, status.unreadable_status(wish, timestamp(ctx.clock))))
    token = control_token(ctx, wish)
    seen = observe(ctx, wish.owner, token)
    model, acceptance = judge(wish, seen)
    rules = group_rules(ctx, wish, seen, model)
    ages = _see(ctx, wish, seen, rules)
    outcomes, problems = decide(wish, seen, rules, acceptance, ages, known_loads(ctx, wish))
    groups = [Rebalance(outcome) for outcome in outcomes]
    if token is None:
        problems.append(_no_token(wish))
    elif not wish.spec.paused:
        apply_children(ctx, wish, seen, rules, outcomes, ages)
        for outcome in outcomes:
            problems += act(ctx, wish, outcome, token)
        given = Given(wish, rules, ages, token, seen.cordoned_nodes)
        groups = [rebalance(ctx, given, outcome) for outcome in outcomes]
    problems += api_key_problems(ctx, wish)
    report = Report(wish, acceptance, seen, model, rules, ages, groups, problems)
    too_early = tell(ctx, report)
    return Result(next_look(report, too_early))


def read(ctx: Context, key: Key) -> Desired | Unreadable | None:
    """The deployment as it is now; None when it is gone or going: its children go by themselves."""
    manifest = ctx.cluster.get_deployment(key.namespace, key.name)
    if manifest is None or "deletionTimestamp" in manifest["metadata"]:
        _forget(ctx, key)
        return None
    uid = manifest["metadata"]["uid"]
    if ctx.memory.of(key, "uid", lambda: uid) != uid:  # another object of the same name
        ctx.memory.forget(key)
    return desired(manifest, ctx.settings.worker)


def judge(wish: Desired, seen: Observation) -> tuple[ModelShape | None, Acceptance]:
    """What workers of the present template read of the model, and whether all can be served."""
    if not wish.acceptance.accepted:
        return None, wish.acceptance
    pods = [pod for pod in seen.pods if pod.template_hash == wish.template_hash]
    shapes = [pod.state.model for pod in pods if pod.state is not None and pod.state.model]
    model = shapes[0] if shapes else None
    previous = wish.previous.conditions
    return model, judge_model(wish.spec, pods, model, wish.generation, previous)


def group_rules(
    ctx: Context, wish: Desired, seen: Observation, model: ModelShape | None
) -> GroupRules:
    spec, width = wish.spec, wish.spec.parallelism.expert
    slots = 0 if model is None else physical_slots_per_rank(spec.experts, model.experts, width)
    return GroupRules(
        namespace=wish.owner.namespace,
        deployment=wish.owner.name,
        width=width,
        template_hash=wish.template_hash,
        leader_epoch=ctx.leader_epoch,
        model=model,
        slots_per_rank=slots,
        spare_slots=spec.experts.spare_slots_per_rank,
        min_copies=spec.experts.min_replicas,
        limits=limits(wish),
        min_serving_ranks=spec.failure_policy.min_serving_ranks,
        max_restarts=spec.failure_policy.max_restarts,
        retain_failed_pods=spec.failure_policy.retain_failed_pods,
        drain_seconds=spec.disruption.drain_seconds,
        warmup_grace_seconds=spec.failure_policy.warmup_grace_seconds,
        domains=seen.domains(spec.topology),
        spread=spread_of(spec.topology, seen.levels(spec.topology)),
        unready_nodes=seen.unready_nodes,
    )


def decide(
    wish: Desired,
    seen: Observation,
    rules: GroupRules,
    acceptance: Acceptance,
    ages: Ages,
    loads: Mapping[int, LoadLE],
) -> tuple[list[GroupOutcome], list[str]]:
    """What to do with each group, and what cannot be done, in words for people."""
    serving = {
        index: _serves(seen, index, rules, ages)
        for index in sorted(set(seen.groups) | set(range(wish.spec.replicas)))
    }
    outdated = {index: bool(seen.group(index).outdated(rules)) for index in serving}
    outcomes, problems = [], []
    for index, intent in intents(wish.spec.replicas, serving, outdated, acceptance).items():
        view = seen.group(index)
        try:
            outcomes.append(decide_group(view, rules, intent, ages, loads.get(index)))
        except (PlanTooLarge, InsufficientSlots) as error:
            outcomes.append(GroupOutcome(view, intent, tuple(view.members(rules, ages))))
            problems.append(f"group {wish.group_name(index)}: {error}")
    return outcomes, problems


def apply_children(
    ctx: Context,
    wish: Desired,
    seen: Observation,
    rules: GroupRules,
    outcomes: Sequence[GroupOutcome],
    ages: Ages,
) -> None:
    """Config before the pods that mount it, budgets as the groups are now."""
    owner, key = wish.owner, wish.key
    if wish.acceptance.accepted:
        apply_child(ctx, key, children.config_map(owner, worker_config(owner.name, wish.spec)))
        apply_child(ctx, key, children.service(owner))
    cordoned = seen.cordoned_nodes
    for outcome in outcomes:
        group = outcome.view.index
        if outcome.intent is Intent.REMOVE:
            continue
        if wish.spec.disruption.pdb == "None" or not (outcome.view.pods or outcome.actions):
            remove_child(ctx, key, "PodDisruptionBudget", wish.group_name(group))
        else:
            evacuates = wish.spec.disruption.evacuate_on_cordon
            available = min_available(outcome, rules, cordoned, ages, evacuates=evacuates)
            apply_child(ctx, key, children.disruption_budget(owner, group, available))


def tell(ctx: Context, report: Report) -> float | None:
    """Write what changed in status, and the events of it. Returns seconds until a write may be."""
    wish, now = report.wish, timestamp(ctx.clock)
    failures: dict[int, Failure | None] = {}
    losses: list[Loss] = []
    for outcome in report.outcomes:
        failure, new = gather(ctx, wish, outcome, now)
        failures[outcome.view.index] = failure
        losses += new
    decided = ctx.memory.of(wish.key, "repeats", Repeats).due(
        wish.previous.decisions,
        [record for group in report.groups for record in group.records],
        ctx.clock.monotonic(),
    )
    told = status.deployment_status(report, failures, decided, now)
    too_early = status.write(ctx, wish, told)
    if too_early is None:
        for item in news(wish.previous, told, losses):
            ctx.events.record(wish.manifest, item.severity, item.reason, item.note)
    _tell_interruptions(ctx, report)
    _tell_placements(ctx, report)
    _export(ctx, report)
    return too_early


def next_look(report: Report, too_early: float | None) -> float | None:
    """Seconds until this deployment should be looked at without an event."""
    if too_early is not None:
        return too_early
    if not report.outcomes or (not report.acceptance.accepted and not report.seen.pods):
        return None
    moving = report.problems or any(
        not outcome.settled or outcome.actions or not report.ready(outcome)
        for outcome in report.outcomes
    )
    return MOVING_SECONDS if moving else STEADY_SECONDS


def _see(ctx: Context, wish: Desired, seen: Observation, rules: GroupRules) -> Ages:
    facts: set[Hashable] = set()
    for index in set(seen.groups) | set(range(wish.spec.replicas)):
        view = seen.group(index)
        facts |= view.facts()
        if view.running(rules) < rules.width:
            facts.add(("short", index))
        if index >= wish.spec.replicas:
            facts.add(("shrinking", index))
        if any(pod.node in seen.cordoned_nodes for pod in view.pods):
            facts.add(("cordoned", index))
    return ctx.memory.of(wish.key, "ages", SeenAges).see(facts, ctx.clock.monotonic())


def _forget(ctx: Context, key: Key) -> None:
    """The object is gone: also no series of it may stay."""
    ctx.memory.forget(key)
    ctx.metrics.deployment_imbalance.remove(str(key))
    stalled: set[str] = ctx.memory.of("operator", "stalled", set)
    stalled.discard(str(key))


def _serves(seen: Observation, index: int, rules: GroupRules, ages: Ages) -> bool:
    members = seen.group(index).members(rules, ages)
    return bool(members) and all(m.state is MemberState.SERVING for m in members)


def _no_token(wish: Desired) -> str:
    name, key = wish.token_secret
    if wish.spec.paused:
        return "there is no control token yet and spec.paused is true"
    return (
        f"spec.security.controlTokenSecretRef: secret {name} has no key {key}: create it, "
        "or remove the reference"
    )


def _tell_placements(ctx: Context, report: Report) -> None:
    announced: Mapping[int, str] = ctx.memory.of(report.wish.key, "announced", dict)
    for group in report.groups:
        stored = group.outcome.view.stored
        if stored is None or group.outcome.plan != stored.plan:
            continue  # what was just stored is told by the next pass
        previous = ExpertPlacementStatus.model_validate(stored.status)
        told = expert_placement_status(group, previous, announced.get(stored.plan.group))
        if told is not None and told.to_wire() != stored.status:
            ctx.cluster.apply_status(
                names.PLACEMENT_KIND,
                report.wish.owner.namespace,
                stored.name,
                told.to_wire(),
                resource_version=stored.resource_version,
            )


def _tell_interruptions(ctx: Context, report: Report) -> None:
    """Once for each pod on a cordoned node whose eviction stops its group."""
    told: dict[int, str] = ctx.memory.of(report.wish.key, "interruptions", dict)
    for outcome in report.wanted:
        group = outcome.view.index
        note = interrupted(outcome, report.rules, report.seen.cordoned_nodes)
        if note and told.get(group) != note:
            name = report.wish.group_name(group)
            ctx.events.record(report.wish.manifest, "Warning", "DrainStarted", f"{name}: {note}")
        told[group] = note


def _export(ctx: Context, report: Report) -> None:
    key = str(report.wish.key)
    measured = [g.balance.measured.worst for g in report.groups if g.balance and g.balance.measured]
    if measured:
        ctx.metrics.deployment_imbalance.labels(deployment=key).set(max(measured))
    stalled: set[str] = ctx.memory.of("operator", "stalled", set)
    if any(group.stalled for group in report.groups):
        stalled.add(key)
    else:
        stalled.discard(key)
    ctx.metrics.rebalance_stalled.set(bool(stalled))
