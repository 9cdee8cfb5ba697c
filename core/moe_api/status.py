"""Status of a MoEDeployment: what the operator observed and decided. Written by the operator alone.

Status is an output: all of it can be rebuilt from pods, ExpertPlacement objects and workers. The
CRD's schema is generated from these models, so no field is pruned. Neighbours: `conditions`,
`placement`.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field

from moe_api.block import ATOMIC, BigCount, Count, ObservedBlock, Timestamp, list_map
from moe_api.conditions import Condition

MAX_GROUPS, MAX_DECISIONS, MAX_HOT_EXPERTS, MAX_UNCOVERED, MAX_RANKS = 64, 10, 10, 64, 1024

Name = Annotated[str, Field(max_length=253)]
Line = Annotated[str, Field(max_length=1024)]
Ratio = Annotated[float, Field(ge=0, le=1e9)]
Share = Annotated[float, Field(ge=0, le=1)]
Gain = Annotated[float, Field(ge=-1e9, le=1)]
Millis = Annotated[float, Field(ge=0, le=1e12)]


class GroupPhase(StrEnum):
    """What a group does as a whole."""

    STARTING = "Starting"
    """Not enough workers wait yet."""
    JOINING = "Joining"
    """A plan is out, its members load and meet."""
    SERVING = "Serving"
    DEGRADED = "Degraded"
    """Survivors serve, a member is missing."""
    DISRUPTED = "Disrupted"
    """Nothing is served until a member comes back."""
    DRAINING = "Draining"


class ModelStatus(ObservedBlock):
    """What the model's own files say."""

    layers: Count
    """Layers with experts."""
    experts: Count
    """Experts in each of them."""
    top_k: Count
    """Experts each token chooses."""
    bytes_per_expert: BigCount
    """Bytes of one expert's weights."""
    kv_bytes_per_token: BigCount
    """Bytes of stored keys and values for one token."""


class RankCounts(ObservedBlock):
    """Ranks by what they do."""

    desired: Count = 0
    """Ranks wanted."""
    serving: Count = 0
    """Ranks that serve."""
    joining: Count = 0
    """Ranks that start, load or join."""
    leaving: Count = 0
    """Ranks that drain."""
    lost: Count = 0
    """Ranks whose worker is gone and not yet replaced."""
    summary: Annotated[str, Field(max_length=32)] = "0/0"
    """Serving and desired ranks, e.g. 4/4."""


class Failure(ObservedBlock):
    """Evidence of a lost worker."""

    time: Timestamp
    """When the loss was noticed."""
    member: Count
    """Member whose worker was lost."""
    pod: Name = ""
    """Name of its pod."""
    uid: Annotated[str, Field(max_length=64)] = ""
    """UID of its pod."""
    reason: Annotated[str, Field(max_length=128)] = ""
    """Cause in one word, e.g. OOMKilled, PodDeleted, Unreachable."""
    exit_code: Annotated[int, Field(ge=-2_147_483_648, le=2_147_483_647)] | None = None
    """Exit code of the worker's container."""
    last_state: Annotated[str, Field(max_length=64)] = ""
    """Last phase the worker reported."""
    log: Annotated[str, Field(max_length=4096)] = ""
    """Last lines of its log."""


class Restarts(ObservedBlock):
    """How often a member was replaced after a failure."""

    member: Count
    """The member."""
    count: Count
    """Replacements since it last served for long enough."""
    last_time: Timestamp | None = None
    """When the last one was made."""


class GroupStatus(ObservedBlock):
    """One expert-parallel group."""

    name: Name
    """Name of the group's ExpertPlacement."""
    generation: BigCount = 0
    """Number of its present membership."""
    epoch: BigCount = 0
    """Number of its placement in force."""
    phase: GroupPhase = GroupPhase.STARTING
    """What the group does as a whole."""
    ranks: RankCounts = RankCounts()
    """Its ranks by what they do."""
    last_failure: Failure | None = None
    """Evidence of the last lost worker."""
    restarts: Annotated[
        list[Restarts], Field(max_length=MAX_RANKS, json_schema_extra=list_map("member"))
    ] = Field(default_factory=list)
    """Members that were replaced after a failure."""


class ExpertId(ObservedBlock):
    """One expert."""

    layer: Count
    """Layer of the model."""
    expert: Count
    """Expert in that layer."""


class HotExpert(ExpertId):
    """An expert with much of its layer's load."""

    share: Share
    """Share of its layer's tokens."""
    copies: Count
    """Slots that hold it."""
    domains: Count
    """Domains of the narrowest level over which the copies are spread."""


class PlacementStatus(ObservedBlock):
    """How well experts are placed for the load; figures without load are absent."""

    imbalance: Ratio | None = None
    """Largest rank load divided by the mean, in the worst layer; 1 is perfect."""
    mean_imbalance: Ratio | None = None
    """The same as a mean over layers, weighted by tokens."""
    imbalance_without_replication: Ratio | None = None
    """Imbalance that this load would have with one copy of each expert, in blocks."""
    predicted_imbalance: Ratio | None = None
    """Imbalance under the plan decided last, computed before it was carried out."""
    cross_domain_share: Share | None = None
    """Share of tokens that leave their rank's domain."""
    min_copies: Count | None = None
    """Fewest copies that any expert has."""
    uncovered: Annotated[
        list[ExpertId], Field(max_length=MAX_UNCOVERED, json_schema_extra=ATOMIC)
    ] = Field(default_factory=list)
    """Experts that no serving rank holds."""
    hot_experts: Annotated[
        list[HotExpert], Field(max_length=MAX_HOT_EXPERTS, json_schema_extra=ATOMIC)
    ] = Field(default_factory=list)
    """Experts with the most load, hottest first."""


class Decision(ObservedBlock):
    """One answer to the question whether to move experts, with its reason."""

    time: Timestamp
    """When it was decided first; kept when the same is only decided again."""
    since: Timestamp | None = None
    """When the count was brought up to date last; once a minute."""
    count: Count = 1
    """How many times in a row this verdict and reason were given."""
    group: Name
    """The group."""
    verdict: Literal["Applied", "Recommended", "Skipped", "Deferred", "Aborted"]
    """What came of it."""
    reason: Annotated[str, Field(max_length=63)]
    """Why, in one machine-readable word, e.g. GainBelowMinimum."""
    predicted_gain: Gain | None = None
    """Predicted fall of the summed largest rank loads, as a share."""
    moves: Count | None = None
    """Experts to copy."""
    bytes: BigCount | None = None
    """Bytes to copy."""
    waves: Count | None = None
    """Epochs on the way, each switched by all ranks at once."""
    measured_gain: Gain | None = None
    """Fall that was measured afterwards."""
    measured_stall_millis: Millis | None = None
    """Longest pause at the switch that was measured."""
    message: Line = ""
    """The same for people."""


class MetricStatus(ObservedBlock):
    """One series that scaling looks at."""

    name: Annotated[str, Field(max_length=63)]
    """Name in the spec."""
    value: Annotated[float, Field(ge=-1e300, le=1e300)] | None = None
    """Value read last."""
    target: Annotated[float, Field(ge=0, le=1e300)] | None = None
    """Value that the present units should carry."""
    age_seconds: Annotated[float, Field(ge=0, le=1e9)] | None = None
    """Age of the value."""


class AutoscalingStatus(ObservedBlock):
    """What scaling wants."""

    desired: Count | None = None
    """Units wanted."""
    limited_by: Annotated[str, Field(max_length=63)] | None = None
    """What kept it from wanting more or fewer units."""
    metrics: Annotated[
        list[MetricStatus], Field(max_length=8, json_schema_extra=list_map("name"))
    ] = Field(default_factory=list)
    """Series it looked at."""


class MoEDeploymentStatus(ObservedBlock):
    """What the operator observed and decided."""

    observed_generation: BigCount = 0
    """Generation of the spec that this status is about."""
    replicas: Count = 0
    """Groups that exist."""
    ready_replicas: Count = 0
    """Groups of which every wanted rank serves."""
    updated_replicas: Count = 0
    """Groups whose pods were all made from the present spec."""
    selector: Annotated[str, Field(max_length=1024)] = ""
    """Label selector that finds exactly one pod of each group."""
    url: Annotated[str, Field(max_length=2048)] | None = None
    """Address of the OpenAI API inside the cluster."""
    ready: Annotated[str, Field(max_length=32)] = "0/0"
    """Ready and wanted groups, e.g. 1/1."""
    survives_rank_loss: bool | None = None
    """Whether the remaining slots would still hold every expert if any one rank were lost."""
    model: ModelStatus | None = None
    """What the model's own files say."""
    ranks: RankCounts = RankCounts()
    """Ranks of all groups by what they do."""
    groups: Annotated[
        list[GroupStatus], Field(max_length=MAX_GROUPS, json_schema_extra=list_map("name"))
    ] = Field(default_factory=list)
    """The groups."""
    placement: PlacementStatus | None = None
    """How well experts are placed for the load, in the worst group."""
    decisions: Annotated[
        list[Decision], Field(max_length=MAX_DECISIONS, json_schema_extra=ATOMIC)
    ] = Field(default_factory=list)
    """Decisions about rebalancing, newest first."""
    autoscaling: AutoscalingStatus | None = None
    """What scaling wants."""
    conditions: Annotated[
        list[Condition], Field(max_length=16, json_schema_extra=list_map("type"))
    ] = Field(default_factory=list)
    """The typed truths about this deployment."""
