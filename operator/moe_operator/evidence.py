"""Evidence of lost workers: reason, exit code and last words, kept in status after the pod.

`losses` is pure; `gather` reads the log of each loss once. Neighbours: `members` (who is lost and
why), `group_status` (shows the newest).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from moe_api.status import Failure
from moe_operator.context import Context
from moe_operator.desired import Desired
from moe_operator.groups import GroupOutcome
from moe_operator.members import MemberState
from moe_operator.pods import PodView
from moe_operator.rules import Intent
from moe_operator.texts import cut

LOG_LINES = 20
MAX_LOG_CHARACTERS = 4096


@dataclass(frozen=True)
class Loss:
    group: int
    member: int
    pod_name: str
    uid: str
    pod: PodView | None
    why: str


def losses(outcome: GroupOutcome, known: Collection[str]) -> list[Loss]:
    """Workers that were lost without our doing, by pod UIDs not in `known`."""
    if outcome.intent not in (Intent.KEEP, Intent.WAIT):
        return []
    group = outcome.view.index
    survivors = any(m.state is not MemberState.LOST for m in outcome.members)
    found = {
        m.member.uid: Loss(group, m.member.id, m.member.pod, m.member.uid, m.pod, m.evidence)
        for m in outcome.members
        # Of a group that ended as a whole only the pods that failed are evidence.
        if m.state is MemberState.LOST and survivors
    }
    for pod in outcome.view.pods:
        if (pod.end is not None and pod.end.failed) or pod.worker_failed:
            found.setdefault(
                pod.uid, Loss(group, pod.member, pod.name, pod.uid, pod, "its worker failed")
            )
    return [loss for uid, loss in found.items() if uid not in known]


def gather(
    ctx: Context, wish: Desired, outcome: GroupOutcome, now: str
) -> tuple[Failure | None, list[Loss]]:
    """The newest failure of the group with its log, and the losses that are new in this pass."""
    before = {status.name: status.last_failure for status in wish.previous.groups}
    previous = before.get(wish.group_name(outcome.view.index))
    known: dict[str, bool] = ctx.memory.of(wish.key, f"losses-{outcome.view.index}", dict)
    if previous is not None:
        known[previous.uid] = True
    new = losses(outcome, known)
    present = {pod.uid for pod in outcome.view.pods} | {m.member.uid for m in outcome.members}
    for uid in set(known) - present - {previous.uid if previous else ""}:
        del known[uid]
    known |= {loss.uid: True for loss in new}
    if not new:
        return previous, []
    newest = new[-1]
    log = None
    if newest.pod is not None:
        log = ctx.cluster.pod_log_tail(wish.owner.namespace, newest.pod_name, LOG_LINES)
    return _failure(newest, log or "", now), new


def _failure(loss: Loss, log: str, now: str) -> Failure:
    pod = loss.pod
    end = None if pod is None else pod.end
    state = None if pod is None else pod.state
    return Failure(
        time=now,
        member=loss.member,
        pod=loss.pod_name,
        uid=loss.uid,
        reason=cut(_reason(pod), 128),
        exit_code=None if end is None else end.exit_code,
        last_state="" if state is None else state.phase.value,
        log=log[-MAX_LOG_CHARACTERS:],
    )


def _reason(pod: PodView | None) -> str:
    """Cause in one word."""
    if pod is None:
        return "PodDeleted"
    if pod.end is not None:
        return pod.end.reason
    if pod.state is None:
        return "Unreachable"
    return pod.state.error_reason or "WorkerFailed"
