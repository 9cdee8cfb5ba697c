"""PodView: what one pass knows about a worker pod, from the API object and the worker's answer.

Neighbours: `observe` fills them, `members` and `groups` judge them. A pod is one incarnation of a
member: its UID is its identity, its name only an address in the API.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moe_api.names import (
    API_GROUP,
    LABEL_GROUP,
    LABEL_MEMBER,
    LABEL_SCALE_UNIT,
    LABEL_TEMPLATE_HASH,
    WORKER_CONTAINER,
)
from moe_api.worker import WorkerPhase, WorkerState

ANNOTATION_RESTARTS = f"{API_GROUP}/restarts"
"""On our own pods: how many incarnations of the member failed in a row before this one."""


@dataclass(frozen=True)
class PodEnd:
    """How the worker container of a finished pod ended."""

    exit_code: int | None
    reason: str
    message: str
    ran_seconds: float | None
    """By the node's own clock; None when it never ran."""
    failed: bool


@dataclass(frozen=True)
class PodView:
    name: str
    uid: str
    group: int
    member: int
    template_hash: str
    created: str
    """RFC 3339, as the API server wrote it; orders incarnations together with the name."""
    restarts: int = 0
    node: str | None = None
    address: str | None = None
    ready: bool = False
    deleting: bool = False
    scale_unit: bool = False
    end: PodEnd | None = None
    waiting: str = ""
    """Why the pod does not run yet: unschedulable, image cannot be pulled, …"""
    last_words: str = ""
    """Last lines of the log of a failed incarnation."""
    state: WorkerState | None = None
    """The worker's own answer in this pass; None when it did not answer or was not asked."""
    silence: str = ""
    """Why there is no answer, where the worker was asked."""

    @property
    def active(self) -> bool:
        """Runs or will run: neither ended nor on its way out."""
        return self.end is None and not self.deleting

    @property
    def worker_failed(self) -> bool:
        """The process lives and says that it cannot serve."""
        return self.state is not None and self.state.phase is WorkerPhase.FAILED

    @property
    def can_join(self) -> bool:
        """Waits for a plan that names it."""
        return (
            self.active
            and self.address is not None
            and self.state is not None
            and self.state.phase is WorkerPhase.WAITING
            and self.state.model is not None
        )

    @property
    def idle(self) -> bool:
        """Nothing of its own to finish: no answer counts as nothing."""
        return self.state is None or (
            self.state.requests_running == 0 and self.state.requests_waiting == 0
        )


def pod_view(pod: Mapping[str, Any]) -> PodView | None:
    """The pod as this operator sees it; None for one without our group and member labels."""
    metadata, status = pod["metadata"], pod.get("status") or {}
    labels = metadata.get("labels") or {}
    group, member = _number(labels.get(LABEL_GROUP)), _number(labels.get(LABEL_MEMBER))
    if group is None or member is None:
        return None
    annotations = metadata.get("annotations") or {}
    return PodView(
        name=metadata["name"],
        uid=metadata["uid"],
        group=group,
        member=member,
        template_hash=labels.get(LABEL_TEMPLATE_HASH, ""),
        created=metadata.get("creationTimestamp") or "",
        restarts=_number(annotations.get(ANNOTATION_RESTARTS)) or 0,
        node=(pod.get("spec") or {}).get("nodeName"),
        address=status.get("podIP") or None,
        ready=_condition(status, "Ready").get("status") == "True",
        deleting=metadata.get("deletionTimestamp") is not None,
        scale_unit=labels.get(LABEL_SCALE_UNIT) == "true",
        end=_end(status),
        waiting=_waiting(status),
    )


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() else None


def _condition(status: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    for condition in status.get("conditions") or ():
        if condition.get("type") == kind:
            return dict(condition)
    return {}


def _container(status: Mapping[str, Any]) -> Mapping[str, Any]:
    for container in status.get("containerStatuses") or ():
        if container.get("name") == WORKER_CONTAINER:
            return dict(container.get("state") or {})
    return {}


def _end(status: Mapping[str, Any]) -> PodEnd | None:
    phase = status.get("phase")
    if phase not in ("Failed", "Succeeded"):
        return None
    ended = _container(status).get("terminated") or {}
    return PodEnd(
        exit_code=ended.get("exitCode"),
        reason=status.get("reason") or ended.get("reason") or str(phase),
        message=(status.get("message") or ended.get("message") or "").strip(),
        ran_seconds=_seconds_between(ended.get("startedAt"), ended.get("finishedAt")),
        failed=phase == "Failed",
    )


def _waiting(status: Mapping[str, Any]) -> str:
    scheduled = _condition(status, "PodScheduled")
    if scheduled.get("status") == "False":
        return _line(scheduled, "Unscheduled")
    waiting = _container(status).get("waiting") or {}
    if waiting.get("reason"):
        return _line(waiting, "Waiting")
    return ""


def _line(what: Mapping[str, Any], otherwise: str) -> str:
    return f"{what.get('reason', otherwise)}: {what.get('message', '')}".rstrip(": ")


def _seconds_between(start: str | None, end: str | None) -> float | None:
    if not start or not end:
        return None
    began, finished = (
        datetime.datetime.fromisoformat(text.replace("Z", "+00:00")) for text in (start, end)
    )
    return (finished - began).total_seconds()
