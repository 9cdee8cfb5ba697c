"""The status of a deployment: put together from the report of a pass, written when it changed.

`deployment_status` is pure; `write` compares, keeps to one write a second, and applies.
Figures that moved by less than STEADY stay as they were, so that noise is no change.
Neighbours: `conditions`, `group_status`, `placement_status`, `decisions` (the parts).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from moe_api import names
from moe_api.conditions import Condition, ConditionType, Reason, in_order, make_condition
from moe_api.status import (
    Decision,
    Failure,
    ModelStatus,
    MoEDeploymentStatus,
    PlacementStatus,
)
from moe_operator import children, plans
from moe_operator.conditions import truths
from moe_operator.context import Context, Key
from moe_operator.decisions import recorded
from moe_operator.desired import Desired, Unreadable
from moe_operator.group_status import group_status, total_counts
from moe_operator.groups import GroupOutcome
from moe_operator.members import MemberState
from moe_operator.placement_status import placement_status
from moe_operator.report import Report, Truth
from moe_placement.walk.membership import survives_rank_loss

STEADY = 0.01
"""A figure has to move by this much to be written again."""
WRITE_SECONDS = 1.0
"""At most one write per object in this time."""


def deployment_status(
    report: Report,
    failures: Mapping[int, Failure | None],
    decided: Iterable[Decision],
    now: str,
) -> MoEDeploymentStatus:
    """What the deployment's status should say after this pass.

    Args:
        failures: per group the newest lost worker.
        decided: rebalancing decisions made or completed in this pass.
        now: RFC 3339, for conditions that change.
    """
    wish, previous = report.wish, report.wish.previous
    existing = [o for o in report.outcomes if o.view.pods or o.view.stored]
    groups = [group_status(report, o, failures.get(o.view.index)) for o in report.outcomes]
    ready = [o for o in report.wanted if report.ready(o)]
    return MoEDeploymentStatus(
        observed_generation=wish.generation,
        replicas=len(existing),
        ready_replicas=len(ready),
        updated_replicas=sum(_updated(report, o) for o in report.wanted),
        selector=children.scale_selector(wish.owner.name),
        url=children.service_url(wish.owner.namespace, wish.owner.name),
        ready=f"{len(ready)}/{wish.spec.replicas}",
        survives_rank_loss=_survives(report),
        model=_model(report, previous),
        ranks=total_counts(groups),
        groups=groups,
        placement=_steady(placement_status(report), previous.placement),
        decisions=recorded(previous.decisions, decided),
        conditions=_conditions(truths(report), wish.generation, now, previous),
    )


def unreadable_status(found: Unreadable, now: str) -> MoEDeploymentStatus:
    """Of a deployment whose spec cannot be read: what was known stays, the verdict is told."""
    message = found.acceptance.message
    told = {
        ConditionType.ACCEPTED: Truth("False", found.acceptance.reason, message),
        ConditionType.READY: Truth("False", Reason.INVALID_SPEC, message),
        ConditionType.PROGRESSING: Truth(
            "False",
            Reason.COMPLETE,
            "nothing is done, lost ranks stay lost: the spec is unreadable",
        ),
    }
    kept = [
        condition
        for condition in found.previous.conditions
        if condition.type not in {kind.value for kind in told}
    ]
    judged = [
        make_condition(
            kind, *truth, generation=found.generation, now=now, previous=found.previous.conditions
        )
        for kind, truth in told.items()
    ]
    return found.previous.model_copy(
        update={
            "observed_generation": found.generation,
            "selector": children.scale_selector(found.owner.name),
            "conditions": in_order([*kept, *judged]),
        }
    )


class LastWrite:
    """When this object's status was written last; kept in the memory of the key."""

    def __init__(self) -> None:
        self.at_seconds: float | None = None


def write(ctx: Context, found: Desired | Unreadable, status: MoEDeploymentStatus) -> float | None:
    """Write the status if it changed. Returns seconds to wait when it is too early for a write.

    Raises:
        errors.Conflict: the object changed since it was read; the pass begins anew.
    """
    wire = status.to_wire()
    if wire == (found.manifest.get("status") or {}):
        return None
    last = ctx.memory.of(Key(found.owner.namespace, found.owner.name), "status", LastWrite)
    now = ctx.clock.monotonic()
    if last.at_seconds is not None and now - last.at_seconds < WRITE_SECONDS:
        return WRITE_SECONDS - (now - last.at_seconds)
    ctx.cluster.apply_status(
        names.DEPLOYMENT_KIND,
        found.owner.namespace,
        found.owner.name,
        wire,
        resource_version=found.resource_version,
    )
    last.at_seconds = now
    return None


def _conditions(
    told: Mapping[ConditionType, Truth], generation: int, now: str, previous: MoEDeploymentStatus
) -> list[Condition]:
    return in_order(
        [
            make_condition(
                kind, *truth, generation=generation, now=now, previous=previous.conditions
            )
            for kind, truth in told.items()
        ]
    )


def _updated(report: Report, outcome: GroupOutcome) -> bool:
    current = {pod.member for pod in outcome.view.current(report.rules) if pod.active}
    return len(current) >= report.rules.width and not outcome.view.outdated(report.rules)


def _survives(report: Report) -> bool | None:
    """Over all groups that serve; None when none does."""
    answers = []
    for outcome in report.wanted:
        serving = sum(m.state is MemberState.SERVING for m in outcome.members)
        if outcome.plan is not None and serving:
            slots_LRS = outcome.plan.slots()
            enough = survives_rank_loss(slots_LRS[:, :serving], plans.num_experts(slots_LRS))
            answers.append(enough and serving - 1 >= report.rules.min_serving_ranks)
    return all(answers) if answers else None


def _model(report: Report, previous: MoEDeploymentStatus) -> ModelStatus | None:
    shape = report.model
    if shape is None:
        return previous.model if report.acceptance.accepted else None
    return ModelStatus(
        layers=shape.layers,
        experts=shape.experts,
        top_k=shape.top_k,
        bytes_per_expert=shape.bytes_per_expert,
        kv_bytes_per_token=shape.kv_bytes_per_token,
    )


def _steady(new: PlacementStatus | None, old: PlacementStatus | None) -> PlacementStatus | None:
    """`new`, with the old value of each figure that hardly moved."""
    if new is None or old is None:
        return new
    figures = (
        "imbalance",
        "mean_imbalance",
        "imbalance_without_replication",
        "cross_domain_share",
    )
    kept: dict[str, Any] = {
        name: getattr(old, name)
        for name in figures
        if _close(getattr(new, name), getattr(old, name))
    }
    same = [(h.layer, h.expert, h.copies) for h in new.hot_experts] == [
        (h.layer, h.expert, h.copies) for h in old.hot_experts
    ]
    if same and all(
        _close(a.share, b.share) for a, b in zip(new.hot_experts, old.hot_experts, strict=True)
    ):
        kept["hot_experts"] = old.hot_experts
    return new.model_copy(update=kept)


def _close(new: float | None, old: float | None) -> bool:
    return new is not None and old is not None and abs(new - old) < STEADY
