"""ExpertPlacement as the API server stores it: one per EP group, written only by the operator.

Its spec is a `plan.GroupPlan`: code reads and writes that; the models here add the bounds and
sentences of the CRD, and a test holds both to the same fields. Neighbours: `plan`, `status`, `crd`.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from moe_api.block import (
    ATOMIC,
    BigCount,
    Block,
    CelRule,
    Count,
    ObservedBlock,
    Timestamp,
    list_map,
)
from moe_api.names import SCHEMA
from moe_api.status import MAX_RANKS, Line, Millis, Name, Ratio
from moe_api.topology import MAX_LEVELS

MAX_LAYERS = 1024
MAX_STORED_BYTES = 700_000
"""Largest plan the operator stores; etcd refuses objects of about 1.5 MB."""

Sequence1 = Annotated[int, Field(ge=1, le=9_007_199_254_740_991)]


class PlacementMember(Block):
    """One worker of the group; its place in the list is its rank."""

    id: Count
    """Member, the same for all incarnations."""
    pod: Name
    """Name of the pod."""
    uid: Annotated[str, Field(max_length=64)]
    """UID of the pod."""
    address: Annotated[str, Field(min_length=1, max_length=64)]
    """Address of the pod; ports are constants."""
    incarnation: Annotated[str, Field(max_length=128)]
    """Identity of the worker process."""
    domains: Annotated[
        list[Annotated[str, Field(max_length=253)]],
        Field(max_length=MAX_LEVELS, json_schema_extra=ATOMIC),
    ] = Field(default_factory=list)
    """Topology domains of its node, broad to narrow."""


class PlacementLayer(Block):
    """Where the experts of one layer are."""

    layer: Annotated[int, Field(ge=0, le=65_535)]
    """Layer of the model."""
    slots: Annotated[str, Field(max_length=131_072, pattern="^[-0-9,;]+$")]
    """Expert in each physical slot, rank by rank, as 0,3,7,-1;…; -1 is free."""
    fractions: Annotated[str, Field(max_length=131_072, pattern="^[A-Za-z0-9+/=]*$")] | None = None
    """Share of its expert's tokens for each slot, base64 of uint16; absent is an even split."""


LayerList = Annotated[
    list[PlacementLayer], Field(min_length=1, max_length=MAX_LAYERS, json_schema_extra=ATOMIC)
]


class PlacementLimits(Block):
    """How fast and how long weights may be copied."""

    max_bytes_per_second: Annotated[int, Field(ge=1, le=1_000_000_000_000)] = 200_000_000
    """Weight bytes a rank receives in a second while serving."""
    deadline_seconds: Annotated[int, Field(ge=1, le=86_400)] = 120
    """Time for one wave."""


class PreviousLayers(Block):
    """The placement in force until every member has applied the new one."""

    epoch: Sequence1
    """Its number."""
    layers: LayerList
    """Where the experts are."""


class ExpertPlacementSpec(Block):
    """Who is in an EP group (generation), and where its experts are (epoch)."""

    RULES = (
        CelRule(
            cel="self.leaderEpoch > oldSelf.leaderEpoch "
            "|| (self.leaderEpoch == oldSelf.leaderEpoch && (self.generation > oldSelf.generation "
            "|| (self.generation == oldSelf.generation && self.epoch >= oldSelf.epoch)))",
            holds=lambda spec: True,
            message="leaderEpoch, generation and epoch are older than what is stored: "
            "read the object again, another operator leads",
            explain="leaderEpoch %d, generation %d, epoch %d are older than the stored %d, %d, %d: "
            "read the object again, another operator leads",
            values=(
                "leaderEpoch",
                "generation",
                "epoch",
                "oldSelf.leaderEpoch",
                "oldSelf.generation",
                "oldSelf.epoch",
            ),
            uses_old=True,
        ),
    )

    schema_version: Annotated[int, Field(alias="schema", ge=1, le=1000)] = SCHEMA
    """Version of this document; a reader refuses a newer one."""
    namespace: Annotated[str, Field(max_length=63)]
    """Namespace of the MoEDeployment."""
    deployment: Annotated[str, Field(max_length=63)]
    """Name of the MoEDeployment."""
    group: Count
    """Number of the group in it."""
    leader_epoch: Sequence1
    """Number of the operator's leadership; a lower one is refused everywhere."""
    generation: Sequence1
    """Number of the membership."""
    epoch: Sequence1
    """Number of the placement."""
    members: Annotated[
        list[PlacementMember], Field(min_length=1, max_length=MAX_RANKS, json_schema_extra=ATOMIC)
    ]
    """The workers, in the order of their ranks."""
    layers: LayerList
    """Where the experts are, layer by layer."""
    sources: (
        Annotated[
            list[Annotated[int, Field(ge=0, le=65_535)]],
            Field(max_length=MAX_RANKS, json_schema_extra=ATOMIC),
        ]
        | None
    ) = None
    """Tokens that each rank brings, of 65535; given, ranks send to near copies first."""
    limits: PlacementLimits = PlacementLimits()
    """How fast and how long weights may be copied."""
    previous: PreviousLayers | None = None
    """What is in force until this placement is applied."""
    hash: Annotated[str, Field(max_length=128)] = ""
    """Hash of what the plan asks for."""


class PlacementPhase(StrEnum):
    """How far the newest epoch is."""

    ANNOUNCED = "Announced"
    COPYING = "Copying"
    SWITCHING = "Switching"
    APPLIED = "Applied"
    ABORTED = "Aborted"


class MemberProgress(ObservedBlock):
    """How far one member is."""

    id: Count
    """The member."""
    generation: BigCount = 0
    """Generation it is in."""
    applied_epoch: BigCount = 0
    """Epoch it routes by."""
    staged_epoch: BigCount = 0
    """Highest epoch whose weights it holds completely."""
    moves_done: Count = 0
    """Experts it has copied."""
    moves_total: Count = 0
    """Experts it has to copy."""
    bytes: BigCount = 0
    """Bytes it has copied."""
    stall_millis: Millis | None = None
    """Its longest pause at the switch."""
    error: Line | None = None
    """What went wrong on it."""


class ExpertPlacementStatus(ObservedBlock):
    """How far the members are with the plan, and what it brought."""

    applied_epoch: BigCount = 0
    """Highest epoch that every member routes by."""
    staged_epoch: BigCount = 0
    """Highest epoch whose weights every member holds."""
    phase: PlacementPhase = PlacementPhase.ANNOUNCED
    """How far the newest epoch is."""
    started_time: Timestamp | None = None
    """When the newest epoch was announced."""
    imbalance_before: Ratio | None = None
    """Imbalance of the worst layer before this rebalance."""
    imbalance_predicted: Ratio | None = None
    """Imbalance of the worst layer that the plan promised."""
    imbalance_measured: Ratio | None = None
    """Imbalance of the worst layer, from tokens that slots received under the plan."""
    moves: Count | None = None
    """Experts copied by this rebalance, over all its waves."""
    bytes: BigCount | None = None
    """Bytes copied by this rebalance."""
    stall_millis: Millis | None = None
    """Longest pause of any member at a switch of this rebalance."""
    message: Line = ""
    """The same for people."""
    members: Annotated[
        list[MemberProgress], Field(max_length=MAX_RANKS, json_schema_extra=list_map("id"))
    ] = Field(default_factory=list)
    """How far each member is."""
