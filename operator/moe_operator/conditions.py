"""The truths about a deployment, one function each: report → (status, reason, message).

Pure. A message names the first child that is to blame and what to do. Neighbours: `report` (what
is judged), `coverage` (the experts), `moe_api.conditions` (the reasons), `status` (writes them).
"""

from __future__ import annotations

from collections.abc import Sequence

from moe_api.conditions import ConditionType, Reason, find
from moe_api.plan import GroupPlan
from moe_operator.coverage import covered
from moe_operator.groups import GroupOutcome
from moe_operator.members import MemberState, describe_end
from moe_operator.pods import PodView
from moe_operator.rebalance import Rebalance
from moe_operator.report import Report, Truth
from moe_operator.rules import Intent


def truths(report: Report) -> dict[ConditionType, Truth]:
    """Every condition that this version keeps."""
    return {
        ConditionType.ACCEPTED: _accepted(report),
        ConditionType.SPEC_HONOURED: spec_honoured(report.wish.ignored),
        ConditionType.READY: _ready(report),
        ConditionType.PROGRESSING: _progressing(report),
        ConditionType.EXPERTS_COVERED: covered(report),
        ConditionType.BALANCED: _balanced(report),
        ConditionType.REBALANCING: _rebalancing(report),
        ConditionType.DEGRADED: _degraded(report),
        ConditionType.TOPOLOGY_SATISFIED: _topology(report),
        ConditionType.SCALING_ACTIVE: scaling_active(report.wish.scaling_mode),
    }


def spec_honoured(ignored: Sequence[str]) -> Truth:
    if not ignored:
        return Truth("True", Reason.COMPLETE, "every field that was set is acted on")
    fields = ", ".join(f"spec.{path}" for path in ignored)
    return Truth(
        "False", Reason.FIELDS_IGNORED, f"not acted on by this version, remove them: {fields}"
    )


def scaling_active(mode: str) -> Truth:
    match mode:
        case "External":
            return Truth("True", Reason.EXTERNAL, "somebody else writes /scale")
        case "Prometheus":
            return Truth(
                "False",
                Reason.NOT_IMPLEMENTED,
                "spec.autoscaling.mode Prometheus is not implemented by this version: "
                "use External with an HPA or KEDA, or None",
            )
        case _:
            return Truth("False", Reason.DISABLED, "spec.autoscaling.mode is None")


def _accepted(report: Report) -> Truth:
    verdict = report.acceptance
    return Truth("True" if verdict.accepted else "False", verdict.reason, verdict.message)


def _ready(report: Report) -> Truth:
    wish = report.wish
    if wish.spec.replicas == 0:
        return Truth("True", Reason.SCALED_TO_ZERO, "spec.replicas is 0")
    waiting = [outcome for outcome in report.wanted if not report.ready(outcome)]
    if not waiting:
        count = len(report.wanted)
        return Truth("True", Reason.ALL_GROUPS_SERVING, f"all ranks of {count} group(s) serve")
    if not report.acceptance.accepted:
        return Truth("False", Reason.INVALID_SPEC, report.acceptance.message)
    message = _first_failing(report, waiting[0])
    if wish.spec.paused:
        return Truth("False", Reason.PAUSED, f"spec.paused is true, and {message}")
    if report.problems:
        quota = "quota" in report.problems[0]
        reason = Reason.NO_CAPACITY if quota else Reason.GROUPS_NOT_READY
        return Truth("False", reason, report.problems[0])
    stuck = [pod for o in waiting for pod in o.view.pods if pod.waiting.startswith("Unschedulable")]
    if stuck:
        return Truth("False", Reason.NO_CAPACITY, f"pod {stuck[0].name}: {stuck[0].waiting}")
    if report.model is None:
        return Truth("False", Reason.WAITING_FOR_MODEL, message)
    return Truth("False", Reason.GROUPS_NOT_READY, message)


def _first_failing(report: Report, outcome: GroupOutcome) -> str:
    name = report.wish.group_name(outcome.view.index)
    for member in outcome.members:
        if member.state is MemberState.LOST:
            return f"group {name}: member {member.member.id} is lost: {member.evidence}"
    for pod in sorted(outcome.view.pods, key=_blame):
        told = _not_serving(pod)
        if told:
            return f"group {name}: pod {pod.name}: {told}"
    missing = report.rules.width - len({pod.member for pod in outcome.view.pods if pod.active})
    return f"group {name}: {missing} of {report.rules.width} pods are not there yet"


def _blame(pod: PodView) -> int:
    """Order in which pods are named: what failed, what cannot start, what takes its time."""
    if pod.end is not None or pod.worker_failed:
        return 0
    if pod.waiting or pod.silence:
        return 1
    return 2 if pod.state is None or pod.deleting else 3


def _not_serving(pod: PodView) -> str:
    if pod.end is not None:
        return f"ended: {describe_end(pod)}"
    if pod.deleting:
        return "is being deleted"
    if pod.waiting:
        return pod.waiting
    if pod.silence:
        return f"does not answer: {pod.silence}"
    if pod.state is None:
        return "has not started yet"
    if pod.state.phase == "Serving":
        return ""
    error = f": {pod.state.last_error}" if pod.state.last_error else ""
    warm_up = pod.state.warm_up
    compiling = (
        ""
        if warm_up is None
        else (
            f", its kernels are compiled or loaded: {warm_up.done} of {warm_up.total} are ready, "
            f"{warm_up.step} is under way"
        )
    )
    return f"its worker is {pod.state.phase.value}{compiling}{error}"


def _progressing(report: Report) -> Truth:
    before = find(report.wish.previous.conditions, ConditionType.PROGRESSING)
    going = [o for o in report.outcomes if o.intent is Intent.REMOVE and o.view.pods]
    waiting = [o for o in report.wanted if not report.ready(o)]
    outdated = [p for o in report.wanted for p in o.view.outdated(report.rules)]
    if not report.acceptance.accepted:
        return Truth("False", Reason.COMPLETE, "nothing is done: the spec is not accepted")
    if outdated:
        return Truth("True", Reason.ROLLING_OUT, _roll_message(report, outdated))
    forming = [o for o in waiting if all(m.state is MemberState.LOST for m in o.members)]
    joining = [o for o in waiting if _not_yet_serving(o)]
    if forming or joining:
        first = (forming or joining)[0]
        age = report.ages.get(("short", first.view.index), 0.0)
        if age > report.rules.warmup_grace_seconds:
            message = f"{_first_failing(report, first)}, for longer than "
            message += f"failurePolicy.warmupGraceSeconds {report.rules.warmup_grace_seconds}"
            return Truth("False", Reason.DEADLINE_EXCEEDED, message)
        rolling = before is not None and before.reason == Reason.ROLLING_OUT.value
        reason = Reason.ROLLING_OUT if rolling else Reason.SCALING_UP
        return Truth("True", reason, _first_failing(report, first))
    if going:
        return Truth("True", Reason.SCALING_DOWN, f"{len(going)} group(s) drain and go")
    return Truth("False", Reason.COMPLETE, "nothing is under way")


def _not_yet_serving(outcome: GroupOutcome) -> bool:
    """A first plan that is not in force anywhere yet."""
    return outcome.plan is not None and all(
        m.worker is not None and m.worker.generation == 0 for m in outcome.members
    )


def _roll_message(report: Report, outdated: list[PodView]) -> str:
    message = f"{len(outdated)} pod(s) of an older template are being replaced, group by group"
    before = 1 + max(pod.member for pod in outdated)
    if before != report.rules.width:
        message += (
            f"; parallelism.expert changes from {before} to {report.rules.width}, "
            "which starts each group anew"
        )
    return message


def _balanced(report: Report) -> Truth:
    if report.wish.spec.rebalancing.mode == "Off":
        return Truth("Unknown", Reason.NO_METRICS, "spec.rebalancing.mode is Off: not judged")
    found = [_balanced_group(group) for group in report.groups]
    for status in ("False", "True", "Unknown"):
        for truth in found:
            if truth is not None and truth.status == status:
                return truth
    before = find(report.wish.previous.conditions, ConditionType.BALANCED)
    if before is not None and report.wish.spec.replicas > 0:
        return Truth(before.status, Reason(before.reason), before.message)
    return Truth("Unknown", Reason.NO_TRAFFIC, "no load has been looked at yet")


def _balanced_group(group: Rebalance) -> Truth | None:
    decision = group.decision
    if decision is None:
        return None
    match decision.reason:
        case "WithinTarget":
            return Truth("True", Reason.WITHIN_TARGET, decision.message)
        case "GainBelowMinimum":
            return Truth("True", Reason.GAIN_BELOW_MINIMUM, decision.message)
        case "NoTraffic":
            return Truth("Unknown", Reason.NO_TRAFFIC, decision.message)
        case "NoMetrics":
            return Truth("Unknown", Reason.NO_METRICS, decision.message)
        case "WalkContinues" | "Evacuation" | "CopyLimits" | "NearDispatch":
            return None
        case _:
            return Truth("False", Reason.ABOVE_TARGET, decision.message)


def _rebalancing(report: Report) -> Truth:
    for group in report.groups:
        plan = group.outcome.plan
        if group.wave_seconds is None or plan is None:
            continue
        where = f"group {group.outcome.view.index}, epoch {plan.epoch}"
        if group.stalled:
            message = f"{where}: neither switched nor abandoned in time: {_laggard(group)}"
            return Truth("True", Reason.STALLED, message)
        return Truth("True", Reason.SWITCHING if _staged(group, plan) else Reason.COPYING, where)
    for group in report.groups:
        if group.outcome.plan is not None and group.outcome.plan != _stored(group):
            if group.outcome.plan.previous is not None:
                epoch = group.outcome.plan.epoch
                return Truth("True", Reason.COPYING, f"epoch {epoch} is announced")
    aborted = next((group for group in report.groups if group.aborted), None)
    if aborted is not None and aborted.outcome.plan is not None:
        message = f"epoch {aborted.outcome.plan.epoch} was abandoned, the one before is in force"
        return Truth("False", Reason.ABORTED, message)
    deferred = [
        g.decision for g in report.groups if g.decision and g.decision.verdict == "Deferred"
    ]
    if deferred:
        return Truth("False", Reason.DEFERRED, deferred[0].message)
    return Truth("False", Reason.IDLE, "no weights are on the move")


def _stored(group: Rebalance) -> GroupPlan | None:
    stored = group.outcome.view.stored
    return None if stored is None else stored.plan


def _staged(group: Rebalance, plan: GroupPlan) -> bool:
    states = [m.worker for m in group.outcome.members]
    return all(state is not None and state.staged_epoch >= plan.epoch for state in states)


def _laggard(group: Rebalance) -> str:
    plan = group.outcome.plan
    for member in group.outcome.members:
        state = member.worker
        if state is None:
            return f"member {member.member.id} does not answer"
        if plan is not None and state.staged_epoch < plan.epoch:
            error = state.migration.error if state.migration else None
            return f"member {member.member.id} has not all weights" + (
                f": {error}" if error else ""
            )
    return "all members have their weights"


def _degraded(report: Report) -> Truth:
    for outcome in report.wanted:
        truth = _degraded_group(report, outcome)
        if truth is not None:
            return truth
    return Truth("False", Reason.HEALTHY, "no rank is missing that has served")


def _degraded_group(report: Report, outcome: GroupOutcome) -> Truth | None:
    name = report.wish.group_name(outcome.view.index)
    gone = next((p for p in outcome.pausing if p.seconds_left is None), None)
    if gone is not None:
        return Truth(
            "True",
            Reason.MAX_RESTARTS_REACHED,
            f"group {name}: member {gone.member} failed {gone.restarts + 1} times in a row: "
            "look at its last failure, then change the spec or delete its failed pod",
        )
    lost = [m for m in outcome.members if m.state is MemberState.LOST]
    alive = [m for m in outcome.members if m.state is not MemberState.LOST]
    if outcome.regrouping.short:
        return Truth(
            "True",
            Reason.INSUFFICIENT_SLOTS,
            f"group {name}: {len(alive)} survivors cannot serve all experts, they wait for a "
            f"replacement: {outcome.regrouping.why}",
        )
    if outcome.pausing:
        pause = outcome.pausing[0]
        message = f"group {name}: member {pause.member} failed {pause.restarts + 1} times in a row"
        return Truth("True", Reason.RESTART_BACKOFF, f"{message}, its replacement waits")
    if lost and alive:
        on_node = any(m.pod is not None and m.pod.node in report.rules.unready_nodes for m in lost)
        reason = Reason.NODE_UNHEALTHY if on_node else Reason.RANK_LOST
        return Truth("True", reason, f"group {name}: {lost[0].evidence}")
    formed = alive and outcome.intent in (Intent.KEEP, Intent.WAIT)
    if formed and len(alive) < report.rules.width:
        count = f"{len(alive)} of {report.rules.width} ranks"
        return Truth("True", Reason.SERVING_WITH_SURVIVORS, f"group {name}: {count} serve on")
    return None


def _topology(report: Report) -> Truth:
    found = report.seen.levels(report.wish.spec.topology)
    if found.missing:
        level = found.missing[0]
        return Truth(
            "False",
            Reason.LEVEL_LABEL_MISSING,
            f"no node has label {level.node_label} of spec.topology.levels[{level.name}]: "
            "label the nodes or remove the level",
        )
    levels = ", ".join(level.name for level in found.in_use) or "none"
    if "topology.pack" in report.wish.ignored:
        return Truth(
            "Unknown",
            Reason.PREFERRED_NOT_MET,
            "spec.topology.pack is not acted on by this version: workers are wherever the "
            "scheduler put them, use spec.worker.podTemplate.spec.affinity",
        )
    return Truth("True", Reason.PACKED, f"no packing is asked for; levels in use: {levels}")
