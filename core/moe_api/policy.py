"""What the operator does with a running deployment: rebalance, heal, drain, scale. Never rolls a
pod.

Neighbours: `workload` and `serving` (what rolls the pods), `topology`; `deployment` joins them.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from moe_api.block import Block, CelRule, SecretKeyRef, list_map
from moe_api.workload import MAX_RANKS


class Budget(Block):
    """What a rebalance may cost."""

    max_bytes_per_second: Annotated[int, Field(ge=1_000_000, le=1_000_000_000_000)] = 200_000_000
    """Weight bytes a rank receives in a second while serving."""
    max_moves_per_round: Annotated[int, Field(ge=1, le=100_000)] = 64
    """Experts copied in one wave, all ranks and layers together."""
    max_stall_millis: Annotated[int, Field(ge=1, le=10_000)] = 20
    """Longest predicted pause at a switch that is still worth it."""


class Rebalancing(Block):
    """When experts are moved to where the load is."""

    mode: Literal["Off", "Recommend", "Auto"] = "Auto"
    """Off never plans, Recommend only writes the decision to status, Auto also carries it out.
    Write "Off" in quotes: YAML reads a bare one as false."""
    interval_seconds: Annotated[int, Field(ge=1, le=3600)] = 30
    """Time between two looks at the load."""
    window_seconds: Annotated[int, Field(ge=2, le=86_400)] = 120
    """Time over which load is averaged."""
    cooldown_seconds: Annotated[int, Field(ge=0, le=86_400)] = 60
    """Shortest time between the end of one rebalance and the begin of the next."""
    min_gain_percent: Annotated[float, Field(ge=0, le=100)] = 5.0
    """Predicted fall of the summed largest rank loads below which nothing is moved."""
    budget: Budget = Budget()
    """What a rebalance may cost."""
    deadline_seconds: Annotated[int, Field(ge=5, le=3600)] = 120
    """Time for one wave, after which it is abandoned and the last complete plan stays."""


class FailurePolicy(Block):
    """What happens when a worker is lost."""

    mode: Literal["Elastic", "RecreateGroup"] = "Elastic"
    """Elastic lets the survivors serve on, RecreateGroup starts the whole group again."""
    min_serving_ranks: Annotated[int, Field(ge=1, le=MAX_RANKS)] = 1
    """Fewest ranks that go on serving without the others."""
    on_uncovered_expert: Literal["Refuse", "Reroute"] = "Refuse"
    """Refuse requests while an expert has no copy, or send its tokens to the next-best expert."""
    warmup_grace_seconds: Annotated[int, Field(ge=10, le=86_400)] = 600
    """Time a worker may take to load; start and progress deadlines derive from it."""
    max_restarts: Annotated[int, Field(ge=0, le=100)] = 5
    """Replacements of a failing member, with growing pauses, before the operator gives up on it."""
    retain_failed_pods: Annotated[int, Field(ge=0, le=10)] = 0
    """Failed pods kept for inspection."""


class Disruption(Block):
    """How planned interruptions go."""

    drain_seconds: Annotated[int, Field(ge=0, le=3600)] = 60
    """Time a leaving worker has to finish its requests."""
    pdb: Literal["GroupAware", "None"] = "GroupAware"
    """GroupAware makes a disruption budget for each group that never blocks for ever."""
    evacuate_on_cordon: bool = True
    """Move experts away from a node once it is cordoned, before its workers may be evicted."""


class Metric(Block):
    """One series to scale by."""

    name: Annotated[
        str, Field(min_length=1, max_length=63, pattern="^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")
    ]
    """Name in status."""
    query: Annotated[str, Field(min_length=1, max_length=4096)]
    """PromQL that yields one number."""
    target_per_unit: Annotated[float, Field(gt=0, le=1e15)]
    """Value that one unit, a group or a rank, should carry."""


class Prometheus(Block):
    """Where series are read."""

    url: Annotated[str, Field(min_length=1, max_length=2048, pattern="^https?://.+")]
    """Base address of the Prometheus API."""
    bearer_token_secret_ref: SecretKeyRef | None = None
    """Token sent with each query."""
    ca_secret_ref: SecretKeyRef | None = None
    """Certificate authority that the server's certificate is checked against."""


class Stabilization(Block):
    """How long a wish to scale must last."""

    up_seconds: Annotated[int, Field(ge=0, le=3600)] = 0
    """Time the load must ask for more before units are added."""
    down_seconds: Annotated[int, Field(ge=0, le=3600)] = 300
    """Time the load must ask for less before units are removed."""


class Autoscaling(Block):
    """Who decides how many groups or ranks there are."""

    RULES = (
        CelRule(
            cel="!has(self.max) || self.min <= self.max",
            holds=lambda scaling: scaling.max is None or scaling.min <= scaling.max,
            message="autoscaling.min is more than autoscaling.max: lower min or raise max",
            explain="autoscaling.min %d is more than autoscaling.max %d: lower min or raise max",
            values=("min", "max"),
        ),
        CelRule(
            cel="self.mode != 'Prometheus' || (size(self.metrics) > 0 && has(self.prometheus))",
            holds=lambda scaling: (
                scaling.mode != "Prometheus"
                or (len(scaling.metrics) > 0 and scaling.prometheus is not None)
            ),
            message="autoscaling.mode Prometheus needs autoscaling.metrics and "
            "autoscaling.prometheus.url: give both, or set mode to None or External",
            explain="autoscaling.mode %s needs autoscaling.metrics and "
            "autoscaling.prometheus.url: give both, or set mode to None or External",
            values=("mode",),
        ),
        CelRule(
            cel="self.mode != 'Prometheus' || has(self.max)",
            holds=lambda scaling: scaling.mode != "Prometheus" or scaling.max is not None,
            message="autoscaling.mode Prometheus has no upper bound: set autoscaling.max",
            explain="autoscaling.mode %s has no upper bound: set autoscaling.max",
            values=("mode",),
        ),
    )

    mode: Literal["None", "Prometheus", "External"] = "None"
    """None keeps replicas, Prometheus has the operator decide, External is for HPA or KEDA."""
    target: Literal["Groups", "ExpertWidth"] = "Groups"
    """What is scaled: the number of groups, or the ranks in each."""
    min: Annotated[int, Field(ge=0, le=MAX_RANKS)] = 1
    """Fewest units."""
    max: Annotated[int, Field(ge=1, le=MAX_RANKS)] | None = None
    """Most units."""
    metrics: Annotated[list[Metric], Field(max_length=8, json_schema_extra=list_map("name"))] = (
        Field(default_factory=list)
    )
    """Series to scale by; the one that asks for most decides."""
    prometheus: Prometheus | None = None
    """Where series are read."""
    stabilization: Stabilization = Stabilization()
    """How long a wish to scale must last."""
    max_step: Annotated[int, Field(ge=1, le=64)] = 1
    """Units added or removed at once."""


class Security(Block):
    """Who may talk to the workers."""

    network_policy: bool = True
    """Let only the operator reach control ports and only the group's pods reach each other."""
    control_token_secret_ref: SecretKeyRef | None = None
    """Token of the control API; when absent, the operator makes one."""
