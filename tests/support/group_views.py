"""Small worlds for the operator's pure decisions: workers, pods and plans of one group, by hand.

A group of `width` members serves 2 layers × 6 experts; each change of a world is one `replace`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from moe_api.plan import GroupPlan, PlanLimits, SlotsLRS
from moe_api.worker import ModelShape, WorkerPhase, WorkerState
from moe_operator import plans
from moe_operator.groups import GroupOutcome, decide_group
from moe_operator.plans import StoredPlan
from moe_operator.pods import PodEnd, PodView
from moe_operator.rules import Ages, GroupRules, GroupView, Intent
from moe_placement import initial
from moe_placement.placement import Placement
from moe_placement.score import LoadLE

HASH = "new0000000"
OLD_HASH = "old0000000"
SHAPE = ModelShape(layers=2, experts=6, top_k=2, bytes_per_expert=1000, kv_bytes_per_token=10)


def rules(width: int = 3, slots_per_rank: int = 3, **changes: Any) -> GroupRules:
    """Three slots a rank hold six experts also on two of three ranks."""
    base = GroupRules(
        namespace="ns",
        deployment="d",
        width=width,
        template_hash=HASH,
        leader_epoch=1,
        model=SHAPE,
        slots_per_rank=slots_per_rank,
    )
    return replace(base, **changes)


def worker(
    uid: str,
    member: int,
    phase: WorkerPhase = WorkerPhase.SERVING,
    generation: int = 1,
    epoch: int = 1,
    **changes: Any,
) -> WorkerState:
    state = WorkerState(
        incarnation=uid,
        member=member,
        phase=phase,
        model=SHAPE,
        generation=generation,
        applied_epoch=epoch,
        staged_epoch=epoch,
        prepared_generation=generation,
    )
    return state.model_copy(update=changes)


def waiting(uid: str, member: int) -> WorkerState:
    return worker(uid, member, WorkerPhase.WAITING, generation=0, epoch=0)


def pod(member: int, state: WorkerState | None = None, uid: str = "", **changes: Any) -> PodView:
    uid = uid or (state.incarnation if state else f"u{member}")
    base = PodView(
        name=f"d-g0-m{member}-{uid}",
        uid=uid,
        group=0,
        member=member,
        template_hash=HASH,
        created="2026-01-01T00:00:00Z",
        node=f"node{member}",
        address=f"10.0.0.{member + 2}",
        ready=state is not None and state.phase is WorkerPhase.SERVING,
        state=state,
    )
    return replace(base, **changes)


def ended(member: int, uid: str, *, failed: bool = True, **changes: Any) -> PodView:
    end = PodEnd(1 if failed else 0, "Error" if failed else "Completed", "boom", 5.0, failed)
    return pod(member, uid=uid, end=end, **changes)


def silent(view: PodView, why: str = "ConnectTimeout") -> PodView:
    return replace(view, state=None, silence=why)


def plan_of(
    pods: Iterable[PodView], generation: int = 1, epoch: int = 1, slots: SlotsLRS | None = None
) -> GroupPlan:
    """The plan that names these pods in this order, contiguous blocks unless `slots` is given."""
    listed = list(pods)
    if slots is None:
        slots = initial.contiguous(SHAPE.layers, SHAPE.experts, len(listed), 3)
    members = [plans.member_of(p if p.state else replace(p, state=waiting(p.uid, p.member)), ())
               for p in listed]  # fmt: skip
    after, placement = (generation - 1, epoch - 1), Placement.even(slots)
    return plans.first("ns", "d", 0, 1, after, members, placement, PlanLimits())


def stored(plan: GroupPlan) -> StoredPlan:
    return StoredPlan("d-g0", "xp-uid", "7", plan, {})


def serving_group(width: int = 3) -> GroupView:
    """Formed, and in force everywhere."""
    pods = tuple(pod(m, worker(f"u{m}", m)) for m in range(width))
    return GroupView(0, pods, stored(plan_of(pods)))


def with_pods(view: GroupView, *changed: PodView, gone: Iterable[int] = ()) -> GroupView:
    """The view with some pods replaced by uid (or added), and members' pods removed."""
    removed = set(gone)
    by_uid = {p.uid: p for p in view.pods if p.member not in removed}
    by_uid |= {p.uid: p for p in changed}
    return replace(view, pods=tuple(by_uid.values()))


def decided(
    view: GroupView,
    given: GroupRules | None = None,
    intent: Intent = Intent.KEEP,
    ages: Ages | None = None,
    load_LE: LoadLE | None = None,
) -> GroupOutcome:
    return decide_group(view, given or rules(), intent, ages or {}, load_LE)


def rows(plan: GroupPlan) -> list[list[int]]:
    """Slots of layer 0, rank by rank."""
    first: list[list[int]] = np.asarray(plan.slots())[0].tolist()
    return first
