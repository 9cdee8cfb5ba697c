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

SILENT_LEAVER_SECONDS = 5.0
"""A pod on its way out that has not answered for this long is gone."""
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
            suspected=_suspected(
                member, [s for id_, s in answers.items() if s is not None and id_ != member.id]
            ),
            broken_seconds=broken_seconds,
        )
        for rank, member in enumerate(plan.members)
    ]


def broke(plan: GroupPlan, state: WorkerState) -> bool:
    """Whether this worker saw the plan's generation end, or fail to begin."""
    ended = state.phase is WorkerPhase.DISRUPTED and state.generation >= plan.generation
    not_begun = bool(state.missing_members) and state.prepared_generation >= plan.generation
    return ended or (not_begun and state.generation < plan.generation)


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
    suspected: bool,
    broken_seconds: float,
) -> MemberView:
    evidence = _loss(member, pod, unready_nodes, silent_seconds, suspected, broken_seconds)
    if evidence:
        return MemberView(rank, member, pod, MemberState.LOST, evidence)
    assert pod is not None, "a member without a pod is lost"
    return MemberView(rank, member, pod, _alive_state(pod))


def _loss(
    member: Member,
    pod: PodView | None,
    unready_nodes: Collection[str],
    silent_seconds: float,
    suspected: bool,
    broken_seconds: float,
) -> str:
    if pod is None:
        return f"pod {member.pod} is gone"
    if pod.end is not None:
        return f"pod {pod.name} ended: {describe_end(pod)}"
    if pod.state is None:
        if suspected:
            return f"a survivor suspects it and it does not answer: {pod.silence}"
        if pod.node in unready_nodes:
            return f"node {pod.node} is not ready and it does not answer: {pod.silence}"
        if pod.deleting and silent_seconds >= SILENT_LEAVER_SECONDS:
            return f"pod {pod.name} is being deleted and does not answer: {pod.silence}"
        return ""
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


def _suspected(member: Member, others: Sequence[WorkerState]) -> bool:
    return any(
        other.phase is WorkerPhase.DISRUPTED
        or member.id in other.suspects
        or member.id in other.missing_members
        for other in others
    )


def describe_end(pod: PodView) -> str:
    """One line for people: reason, exit code, message."""
    if pod.end is None:
        return ""
    code = "" if pod.end.exit_code is None else f", exit code {pod.end.exit_code}"
    message = f": {pod.end.message}" if pod.end.message else ""
    return f"{pod.end.reason}{code}{message}"
