"""What a pass may do to the world, as values: `groups` decides them, `act` carries them out."""

from __future__ import annotations

from dataclasses import dataclass

from moe_api.plan import GroupPlan
from moe_operator.pods import PodView


@dataclass(frozen=True)
class CreatePod:
    group: int
    member: int
    restarts: int
    why: str


@dataclass(frozen=True)
class DeletePod:
    pod: PodView
    grace_seconds: int | None
    """None = the pod's own grace, in which it drains."""
    why: str


@dataclass(frozen=True)
class Drain:
    """Ask these workers to stop admission and finish."""

    pods: tuple[PodView, ...]


@dataclass(frozen=True)
class StorePlan:
    """Store the plan; it is announced in the same pass, after it was stored."""

    plan: GroupPlan
    why: str


@dataclass(frozen=True)
class DeleteGroup:
    """The group has no pods any more and is not wanted: remove its plan and its budget."""

    group: int


Action = CreatePod | DeletePod | Drain | StorePlan | DeleteGroup
