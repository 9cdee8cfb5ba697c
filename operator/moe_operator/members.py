"""Members of a plan judged by pods, nodes and workers: who serves, drains, is lost, and why.

Pure. A pod's death ends that incarnation, not the member: identity is the UID in the plan. One
unanswered call is a fact, not a loss; it takes a second witness (a survivor's suspicion, a node
that is not ready) or time.
Neighbours: `pods` gives the views, `groups` decides what follows.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from moe_api.plan import GroupPlan, Member
from moe_api.worker import WorkerPhase, WorkerState
from moe_operator.pods import PodView

SILENT_SECONDS = 5.0
"""Silence for this long is believed with a weak second witness: its pod is on its way out, the
group broke for whatever reason, or others wait for it."""
UNAWARE_SECONDS = 15.0
"""A member that still says Serving this long after its group broke runs no loop any more."""


class MemberState(StrEnum):
    STARTING = "Starting"
    JOINING = "Joining"
    SERVING = "Serving"
    DRAINING = "Draining"
    LOST = "Lost"


@dataclass(frozen=True)
class MemberView:
    rank: int
    member: Member
    pod: PodView | None
    state: MemberState
    evidence: str = ""
    """Why it is lost."""

    @property
    def worker(self) -> WorkerState | None:
        return self.pod.state if self.pod else None

    @property
    def leaving(self) -> bool:
        return self.state is MemberState.DRAINING


def judge(
    plan: GroupPlan,
    pods: Sequence[PodView],
    unready_nodes: Collection[str],
    silent_seconds: Mapping[str, float],
    broken_seconds: float,
) -> list[MemberView]:
    """Every member of the plan, in rank order.

    Args:
        silent_seconds: per pod UID, for how long the worker has not answered.
        broken_seconds: for how long the plan's generation has been known broken (0 = it is not).
    """
    by_uid = {pod.uid: pod for pod in pods}
    answers = {
        member.id: by_uid[member.uid].state
        for member in plan.members
        if member.uid in by_uid and by_uid[member.uid].state is not None
    }
    return [
        _judge_one(
            rank,
            member,
            by_uid.get(member.uid),
            unready_nodes,
            silent_seconds.get(member.uid, 0.0),
            others=[s for id_, s in answers.items() if s is not None and id_ != member.id],
            broken_seconds=broken_seconds,
        )
        for rank, member in enumerate(plan.members)
    ]


def broke(plan: GroupPlan, state: WorkerState) -> bool:
    """Whether this worker saw the plan's generation end.

    Members that have not come yet are no such sign: whoever waits for them tries again by itself.
    """
    return state.phase is WorkerPhase.DISRUPTED and state.generation >= plan.generation


def in_force(plan: GroupPlan, state: WorkerState) -> bool:
    """Whether this worker runs the plan: its generation, and its epoch unless it was abandoned."""
    return state.generation == plan.generation and (
        state.applied_epoch == plan.epoch or state.abandoned_epoch >= plan.epoch
    )


def _judge_one(
    rank: int,
    member: Member,
    pod: PodView | None,
    unready_nodes: Collection[str],
    silent_seconds: float,
    *,
    others: Sequence[WorkerState],
    broken_seconds: float,
) -> MemberView:
    evidence = _loss(member, pod, unready_nodes, silent_seconds, others, broken_seconds)
    if evidence:
        return MemberView(rank, member, pod, MemberState.LOST, evidence)
    assert pod is not None, "a member without a pod is lost"
    return MemberView(rank, member, pod, _alive_state(pod))


def _loss(
    member: Member,
    pod: PodView | None,
    unready_nodes: Collection[str],
    silent_seconds: float,
    others: Sequence[WorkerState],
    broken_seconds: float,
) -> str:
    if pod is None:
        return f"pod {member.pod} is gone"
    if pod.end is not None:
        return f"pod {pod.name} ended: {describe_end(pod)}"
    if pod.state is None:
        witness = _witness(member, pod, unready_nodes, silent_seconds, others)
        return f"{witness} and it does not answer: {pod.silence}" if witness else ""
    if pod.state.incarnation != member.incarnation:
        return f"its process began anew in pod {pod.name}"
    if pod.state.phase is WorkerPhase.FAILED:
        return f"its worker failed: {pod.state.last_error or pod.state.error_reason}"
    if broken_seconds >= UNAWARE_SECONDS and pod.state.phase is WorkerPhase.SERVING:
        return f"its group broke {broken_seconds:.0f} s ago and it has not noticed"
    return ""


def _alive_state(pod: PodView) -> MemberState:
    state = pod.state
    if pod.deleting or (state is not None and state.phase is WorkerPhase.DRAINING):
        return MemberState.DRAINING
    if state is None:
        # The kubelet's readiness probe is a second witness that it serves.
        return MemberState.SERVING if pod.ready else MemberState.JOINING
    # Also in the generation before: it serves on until all can switch.
    serving = state.phase is WorkerPhase.SERVING
    return MemberState.SERVING if serving else MemberState.JOINING


def _witness(
    member: Member,
    pod: PodView,
    unready_nodes: Collection[str],
    silent_seconds: float,
    others: Sequence[WorkerState],
) -> str:
    """Who or what else says that a silent member is lost; empty when nobody does."""
    if any(member.id in other.suspects for other in others):
        return "a survivor suspects it"
    if pod.node in unready_nodes:
        return f"node {pod.node} is not ready"
    if silent_seconds < SILENT_SECONDS:
        return ""
    if pod.deleting:
        return f"pod {pod.name} is being deleted"
    if any(member.id in other.missing_members for other in others):
        return "others wait for it"
    if any(other.phase is WorkerPhase.DISRUPTED for other in others):
        return "its group broke"
    return ""


def describe_end(pod: PodView) -> str:
    """One line for people: reason, exit code, message."""
    if pod.end is None:
        return ""
    code = "" if pod.end.exit_code is None else f", exit code {pod.end.exit_code}"
    # Of a traceback the last line says what happened; the whole is kept as evidence.
    words = pod.end.message.strip().splitlines() if pod.end.message else []
    message = f": {words[-1]}" if words else ""
    return f"{pod.end.reason}{code}{message}"
