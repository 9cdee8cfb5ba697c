"""The door for plans: which are taken, which are known already, which are refused.

(leader epoch, generation, epoch) are compared in this order and only grow. The same generation and
epoch under a higher leader epoch only raise the fence. An epoch that the group agreed to abandon
stays abandoned, also for a worker that hears of it late. Pure: the engine keeps the `Door`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from moe_api.plan import Fence, GroupPlan

NO_FENCE = Fence(0, 0, 0)
"""Before any plan."""


class Verdict(StrEnum):
    TAKEN = "taken"
    KNOWN = "known"
    REFUSED = "refused"


@dataclass(frozen=True)
class PlanAnswer:
    """What became of a plan; `in_force` is the highest fence taken here."""

    verdict: Verdict
    in_force: Fence
    reason: str

    @property
    def refused(self) -> bool:
        return self.verdict is Verdict.REFUSED


@dataclass(frozen=True)
class Door:
    fence: Fence = NO_FENCE
    content: str = ""
    """Content hash of the plan that was taken last."""
    abandoned: tuple[int, int] = (0, 0)
    """Generation, and the highest epoch of it that the group abandoned."""

    def abandon(self, generation: int, epoch: int) -> Door:
        return replace(self, abandoned=max(self.abandoned, (generation, epoch)))


def judge(door: Door, plan: GroupPlan) -> tuple[Door, PlanAnswer]:
    """The door after a plan came to it, and the answer."""
    content = plan.content_hash()
    same_numbers = (plan.generation, plan.epoch) == (door.fence.generation, door.fence.epoch)
    if same_numbers and plan.leader_epoch >= door.fence.leader_epoch:
        raised = replace(door, fence=plan.fence)
        if content == door.content:
            return raised, PlanAnswer(Verdict.KNOWN, raised.fence, "this plan is known")
        reason = f"another plan was taken as generation {plan.generation}, epoch {plan.epoch}"
        return raised, _refused(raised, reason)
    if plan.fence < door.fence:
        return door, _refused(door, f"{_text(plan.fence)} is older than {_text(door.fence)}")
    generation, epoch = door.abandoned
    if plan.generation == generation and plan.epoch <= epoch:
        return door, _refused(door, f"epoch {plan.epoch} was abandoned by the group")
    taken = replace(door, fence=plan.fence, content=content)
    return taken, PlanAnswer(Verdict.TAKEN, taken.fence, "newer")


def names(plan: GroupPlan, member: int, incarnation: str) -> int | None:
    """Rank of this very process in a plan, None when the plan is without it."""
    rank = plan.rank_of(member)
    if rank is None or plan.members[rank].incarnation != incarnation:
        return None
    return rank


def names_another(plan: GroupPlan, member: int, incarnation: str) -> str | None:
    """The incarnation that a plan names in this member's place, None when it is this one."""
    rank = plan.rank_of(member)
    if rank is None or plan.members[rank].incarnation == incarnation:
        return None
    return plan.members[rank].incarnation


def _refused(door: Door, reason: str) -> PlanAnswer:
    return PlanAnswer(Verdict.REFUSED, door.fence, reason)


def _text(fence: Fence) -> str:
    return f"leader {fence.leader_epoch}, generation {fence.generation}, epoch {fence.epoch}"
