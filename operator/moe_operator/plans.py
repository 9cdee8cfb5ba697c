"""Group plans: read what is stored, build the next one. Every plan of the operator is made here.

Pure. A plan's number only grows: a new membership is generation + 1, a new placement epoch + 1,
and an epoch that was abandoned is never used again. Placements come from `moe_placement`.
Neighbours: `groups` decides memberships, `rebalance` waves; `children.placement` stores them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moe_api.document import DocumentError
from moe_api.placement import MAX_STORED_BYTES
from moe_api.plan import (
    GroupPlan,
    LayerPlacement,
    Member,
    PlanLimits,
    PreviousPlacement,
    SlotsLRS,
    decode_fractions,
    decode_slots,
    encode_layers,
)
from moe_api.worker import WorkerState
from moe_operator.pods import PodView
from moe_placement.placement import Placement


class PlanTooLarge(ValueError):
    """The group is too wide for its plan to be stored; the message has the numbers."""


@dataclass(frozen=True)
class StoredPlan:
    """An ExpertPlacement object as read."""

    name: str
    uid: str
    resource_version: str
    plan: GroupPlan
    status: Mapping[str, Any]


def stored_plan(manifest: Mapping[str, Any]) -> StoredPlan:
    """Raises DocumentError: the stored content is not a plan this version reads."""
    metadata = manifest["metadata"]
    try:
        plan = GroupPlan.model_validate(manifest["spec"])
    except ValueError as error:
        raise DocumentError(
            f"ExpertPlacement {metadata['namespace']}/{metadata['name']}: {error}"
        ) from error
    return StoredPlan(
        name=metadata["name"],
        uid=metadata["uid"],
        resource_version=metadata["resourceVersion"],
        plan=plan,
        status=manifest.get("status") or {},
    )


@dataclass(frozen=True)
class Placed:
    """The placement that a group really runs."""

    epoch: int
    placement: Placement

    @property
    def slots_LRS(self) -> SlotsLRS:
        return self.placement.slots_LRS


def placed(plan: GroupPlan, states: Iterable[WorkerState]) -> Placed:
    """What is in force: the plan's own placement, or the previous one while its wave is under way.

    When only some members had switched as the group broke, the newer one counts: they hold it.
    """
    applied = max((s.applied_epoch for s in states if s.generation == plan.generation), default=0)
    if plan.previous is not None and applied < plan.epoch:
        layers = plan.previous.layers
        slots = decode_slots(layers, num_ranks=len(plan.members))
        return Placed(plan.previous.epoch, Placement(slots, decode_fractions(layers, slots)))
    return Placed(plan.epoch, Placement(plan.slots(), plan.fractions()))


def num_experts(slots_LRS: SlotsLRS) -> int:
    """Experts of a complete placement: each has a slot, so the highest id tells."""
    return int(slots_LRS.max()) + 1


def member_of(pod: PodView, domains: Sequence[str]) -> Member:
    """The pod's present incarnation as a member of a plan."""
    assert pod.state is not None, f"{pod.name} did not answer"
    assert pod.address is not None, f"{pod.name} has no address"
    return Member(
        id=pod.member,
        pod=pod.name,
        uid=pod.uid,
        address=pod.address,
        incarnation=pod.state.incarnation,
        domains=list(domains),
    )


def first(
    namespace: str,
    deployment: str,
    group: int,
    leader_epoch: int,
    after: tuple[int, int],
    members: Sequence[Member],
    placement: Placement,
    limits: PlanLimits,
) -> GroupPlan:
    """The plan of a group that forms anew; numbers go on after those of the past, (generation,
    epoch)."""
    plan = GroupPlan(
        namespace=namespace,
        deployment=deployment,
        group=group,
        leader_epoch=leader_epoch,
        generation=after[0] + 1,
        epoch=after[1] + 1,
        members=list(members),
        layers=_encoded(placement),
        limits=limits,
    )
    return _checked(plan)


def regrouped(
    plan: GroupPlan,
    leader_epoch: int,
    after: tuple[int, int],
    members: Sequence[Member],
    placement: Placement,
    limits: PlanLimits,
) -> GroupPlan:
    """The next generation; numbers go on `after` (generation, epoch) of all that anyone has seen.

    It names no previous placement: members load what they lack.
    """
    update = {
        "leader_epoch": leader_epoch,
        "generation": after[0] + 1,
        "epoch": after[1] + 1,
        "members": list(members),
        "layers": _encoded(placement),
        "sources": None,
        "limits": limits,
        "previous": None,
    }
    return _checked(plan.model_copy(update=update))


def wave(
    plan: GroupPlan,
    leader_epoch: int,
    current: Placed,
    placement: Placement,
    limits: PlanLimits,
    sources: Sequence[int] | None = None,
) -> GroupPlan:
    """The next epoch of the same generation; what is in force stays named until it is switched.

    Args:
        sources: as in `GroupPlan`; None = ranks do not send to near copies first.
    """
    previous = PreviousPlacement(epoch=current.epoch, layers=_encoded(current.placement))
    update = {
        "leader_epoch": leader_epoch,
        "epoch": plan.epoch + 1,
        "layers": _encoded(placement),
        "sources": None if sources is None else list(sources),
        "limits": limits,
        "previous": previous,
    }
    return _checked(plan.model_copy(update=update))


def raised(plan: GroupPlan, leader_epoch: int) -> GroupPlan:
    """The same plan under this leader: it only raises the fence against the one before."""
    return plan.model_copy(update={"leader_epoch": leader_epoch}).sealed()


def _encoded(placement: Placement) -> list[LayerPlacement]:
    return encode_layers(placement.slots_LRS, placement.fractions_LRS)


def _checked(plan: GroupPlan) -> GroupPlan:
    sealed = plan.sealed()
    size = len(sealed.to_json())
    if size > MAX_STORED_BYTES:
        raise PlanTooLarge(
            f"the plan of group {plan.group} has {size} bytes, at most {MAX_STORED_BYTES} can be "
            f"stored: {len(plan.members)} ranks × {len(plan.layers)} layers are too many, "
            "lower parallelism.expert or experts.slotsPerRank"
        )
    return sealed
