"""Conditions: the typed truths in a MoEDeployment's status, and the reasons each may carry.

The operator decides them in pure functions and writes them with the status; users wait for them
(`kubectl wait --for=condition=Ready`). Neighbour: `status` holds the list.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field

from moe_api.block import BigCount, ObservedBlock, Timestamp

ConditionStatus = Literal["True", "False", "Unknown"]
MAX_MESSAGE = 1024


class ConditionType(StrEnum):
    READY = "Ready"
    ACCEPTED = "Accepted"
    SPEC_HONOURED = "SpecHonoured"
    PROGRESSING = "Progressing"
    """True while something is under way."""
    EXPERTS_COVERED = "ExpertsCovered"
    BALANCED = "Balanced"
    REBALANCING = "Rebalancing"
    """True while weights are on the move."""
    DEGRADED = "Degraded"
    """True is bad."""
    METRICS_AVAILABLE = "MetricsAvailable"
    SCALING_ACTIVE = "ScalingActive"
    TOPOLOGY_SATISFIED = "TopologySatisfied"


class Reason(StrEnum):
    """Every reason of every type; `REASONS` says which belong together."""

    ABORTED = "Aborted"
    ABOVE_TARGET = "AboveTarget"
    ALL_GROUPS_SERVING = "AllGroupsServing"
    AT_LIMIT = "AtLimit"
    COMPLETE = "Complete"
    CONFLICTING_SCALER = "ConflictingScaler"
    COPYING = "Copying"
    DEADLINE_EXCEEDED = "DeadlineExceeded"
    DEFERRED = "Deferred"
    DISABLED = "Disabled"
    EXTERNAL = "External"
    FAILURE_MODE_UNSUPPORTED = "FailureModeUnsupported"
    FIELDS_IGNORED = "FieldsIgnored"
    FOUND = "Found"
    FULLY_COVERED = "FullyCovered"
    GAIN_BELOW_MINIMUM = "GainBelowMinimum"
    GROUPS_NOT_READY = "GroupsNotReady"
    HEALTHY = "Healthy"
    IDLE = "Idle"
    INCOMPLETE = "Incomplete"
    INSUFFICIENT_SLOTS = "InsufficientSlots"
    INVALID_SPEC = "InvalidSpec"
    KV_CACHE_UNUSABLE = "KvCacheUnusable"
    LEVEL_LABEL_MISSING = "LevelLabelMissing"
    MAX_RESTARTS_REACHED = "MaxRestartsReached"
    MISSING = "Missing"
    MODEL_HAS_NO_EXPERTS = "ModelHasNoExperts"
    MODEL_SOURCE_UNSUPPORTED = "ModelSourceUnsupported"
    MODEL_UNREADABLE = "ModelUnreadable"
    NO_CAPACITY = "NoCapacity"
    NO_METRICS = "NoMetrics"
    NO_TRAFFIC = "NoTraffic"
    NODE_UNHEALTHY = "NodeUnhealthy"
    NOT_IMPLEMENTED = "NotImplemented"
    PACKED = "Packed"
    PAUSED = "Paused"
    PREFERRED_NOT_MET = "PreferredNotMet"
    PROMETHEUS = "Prometheus"
    QUERY_ERROR = "QueryError"
    RANK_LOST = "RankLost"
    REQUIRED_NOT_MET = "RequiredNotMet"
    RESIZING = "Resizing"
    RESTART_BACKOFF = "RestartBackoff"
    ROLLING_OUT = "RollingOut"
    SCALE_FAILED = "ScaleFailed"
    SCALED_TO_ZERO = "ScaledToZero"
    SCALING_DOWN = "ScalingDown"
    SCALING_UP = "ScalingUp"
    SERVING_WITH_SURVIVORS = "ServingWithSurvivors"
    SINGLE_COPY = "SingleCopy"
    SINGLE_DOMAIN = "SingleDomain"
    STALE = "Stale"
    STALLED = "Stalled"
    SWITCHING = "Switching"
    UNCOVERED = "Uncovered"
    VALID = "Valid"
    WAITING_FOR_MODEL = "WaitingForModel"
    WITHIN_TARGET = "WithinTarget"


REASONS: dict[ConditionType, tuple[Reason, ...]] = {
    ConditionType.READY: (
        Reason.ALL_GROUPS_SERVING,
        Reason.SCALED_TO_ZERO,
        Reason.GROUPS_NOT_READY,
        Reason.NO_CAPACITY,
        Reason.PAUSED,
        Reason.INVALID_SPEC,
        Reason.WAITING_FOR_MODEL,
    ),
    ConditionType.ACCEPTED: (
        Reason.VALID,
        Reason.INVALID_SPEC,
        Reason.MODEL_HAS_NO_EXPERTS,
        Reason.INSUFFICIENT_SLOTS,
        Reason.MODEL_UNREADABLE,
        Reason.KV_CACHE_UNUSABLE,
        Reason.MODEL_SOURCE_UNSUPPORTED,
        Reason.FAILURE_MODE_UNSUPPORTED,
    ),
    ConditionType.SPEC_HONOURED: (Reason.COMPLETE, Reason.FIELDS_IGNORED),
    ConditionType.PROGRESSING: (
        Reason.ROLLING_OUT,
        Reason.SCALING_UP,
        Reason.SCALING_DOWN,
        Reason.RESIZING,
        Reason.COMPLETE,
        Reason.DEADLINE_EXCEEDED,
    ),
    ConditionType.EXPERTS_COVERED: (
        Reason.FULLY_COVERED,
        Reason.SINGLE_COPY,
        Reason.SINGLE_DOMAIN,
        Reason.UNCOVERED,
    ),
    ConditionType.BALANCED: (
        Reason.WITHIN_TARGET,
        Reason.ABOVE_TARGET,
        Reason.GAIN_BELOW_MINIMUM,
        Reason.NO_TRAFFIC,
        Reason.NO_METRICS,
    ),
    ConditionType.REBALANCING: (
        Reason.IDLE,
        Reason.COPYING,
        Reason.SWITCHING,
        Reason.DEFERRED,
        Reason.STALLED,
        Reason.ABORTED,
    ),
    ConditionType.DEGRADED: (
        Reason.HEALTHY,
        Reason.RANK_LOST,
        Reason.INSUFFICIENT_SLOTS,
        Reason.SCALE_FAILED,
        Reason.NODE_UNHEALTHY,
        Reason.SERVING_WITH_SURVIVORS,
        Reason.RESTART_BACKOFF,
        Reason.MAX_RESTARTS_REACHED,
    ),
    ConditionType.METRICS_AVAILABLE: (
        Reason.FOUND,
        Reason.MISSING,
        Reason.STALE,
        Reason.QUERY_ERROR,
        Reason.INCOMPLETE,
    ),
    ConditionType.SCALING_ACTIVE: (
        Reason.PROMETHEUS,
        Reason.EXTERNAL,
        Reason.DISABLED,
        Reason.CONFLICTING_SCALER,
        Reason.AT_LIMIT,
        Reason.NOT_IMPLEMENTED,
    ),
    ConditionType.TOPOLOGY_SATISFIED: (
        Reason.PACKED,
        Reason.PREFERRED_NOT_MET,
        Reason.REQUIRED_NOT_MET,
        Reason.LEVEL_LABEL_MISSING,
    ),
}


class Condition(ObservedBlock):
    """One truth about the deployment, as Kubernetes writes them."""

    type: Annotated[str, Field(min_length=1, max_length=63)]
    """What is said, e.g. Ready."""
    status: ConditionStatus
    """Whether it holds."""
    reason: Annotated[str, Field(min_length=1, max_length=63)]
    """Why, in one machine-readable word."""
    message: Annotated[str, Field(max_length=MAX_MESSAGE)] = ""
    """Why, for people."""
    observed_generation: BigCount | None = None
    """Generation of the spec it was judged by."""
    last_transition_time: Timestamp
    """When status last changed."""


def make_condition(
    kind: ConditionType,
    status: ConditionStatus,
    reason: Reason,
    message: str,
    *,
    generation: int,
    now: str,
    previous: Iterable[Condition] = (),
) -> Condition:
    """A condition that keeps its transition time when its status did not change.

    Args:
        now: RFC 3339 time, used when the status changed or the condition is new.
        previous: the conditions in the status that is about to be replaced.
    """
    assert reason in REASONS[kind], f"{kind} has no reason {reason}"
    same = find(previous, kind)
    kept = same is not None and same.status == status
    return Condition(
        type=kind.value,
        status=status,
        reason=reason.value,
        message=_cut(message),
        observed_generation=generation,
        last_transition_time=same.last_transition_time if kept and same is not None else now,
    )


def find(conditions: Iterable[Condition], kind: ConditionType) -> Condition | None:
    return next((condition for condition in conditions if condition.type == kind.value), None)


def in_order(conditions: Sequence[Condition]) -> list[Condition]:
    """Sorted as in `ConditionType`, so that equal truths are equal lists."""
    order = {kind.value: index for index, kind in enumerate(ConditionType)}
    return sorted(conditions, key=lambda c: (order.get(c.type, len(order)), c.type))


def _cut(message: str) -> str:
    return message if len(message) <= MAX_MESSAGE else f"{message[: MAX_MESSAGE - 1]}…"
