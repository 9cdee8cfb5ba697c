"""MoEDeployment: what a user asks for. The spec's root, the choice between either-or fields, and
parsing.

Parse at the door (`parse`), then trust. Neighbours: the blocks in `workload`, `serving`,
`topology` and `policy`; `honoured` (what this version acts on); `pod_template` (keys an overlay
may not set); `status`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, ValidationError

from moe_api import names
from moe_api.block import Block, CelRule
from moe_api.pod_template import pod_template_faults
from moe_api.policy import Autoscaling, Disruption, FailurePolicy, Rebalancing, Security
from moe_api.serving import Api, Experts, KvCache, Router, Scheduler
from moe_api.topology import Topology
from moe_api.workload import Model, Parallelism, Worker

DEFAULT_REDUNDANT_SLOTS_PER_RANK = 1
DEFAULT_MEMORY_FRACTION = 0.85
DNS_LABEL = "^[a-z]([-a-z0-9]*[a-z0-9])?$"


class InvalidSpec(ValueError):
    """A manifest that cannot be served; one line with field, value and way out."""


class MoEDeploymentSpec(Block):
    """What is to be served, and how."""

    RULES = (
        CelRule(
            cel="!has(self.experts.maxReplicas) "
            "|| self.experts.maxReplicas <= self.parallelism.expert",
            holds=lambda spec: (
                spec.experts.max_replicas is None
                or spec.experts.max_replicas <= spec.parallelism.expert
            ),
            message="experts.maxReplicas is more than parallelism.expert, the number of ranks: "
            "lower maxReplicas, or leave it out for one copy on each rank",
            explain="experts.maxReplicas %d is more than parallelism.expert %d, the ranks: "
            "lower maxReplicas, or leave it out for one copy on each rank",
            values=("experts.maxReplicas", "parallelism.expert"),
        ),
        CelRule(
            cel="self.experts.minReplicas <= self.parallelism.expert",
            holds=lambda spec: spec.experts.min_replicas <= spec.parallelism.expert,
            message="experts.minReplicas is more than parallelism.expert, the number of ranks: "
            "lower minReplicas or raise parallelism.expert",
            explain="experts.minReplicas %d is more than parallelism.expert %d, the ranks: "
            "lower minReplicas or raise parallelism.expert",
            values=("experts.minReplicas", "parallelism.expert"),
        ),
        CelRule(
            cel="self.failurePolicy.minServingRanks <= self.parallelism.expert",
            holds=lambda spec: spec.failure_policy.min_serving_ranks <= spec.parallelism.expert,
            message="failurePolicy.minServingRanks is more than parallelism.expert: "
            "lower minServingRanks or raise parallelism.expert",
            explain="failurePolicy.minServingRanks %d is more than parallelism.expert %d: "
            "lower minServingRanks or raise parallelism.expert",
            values=("failurePolicy.minServingRanks", "parallelism.expert"),
        ),
    )

    replicas: Annotated[int, Field(ge=0, le=64)] = 1
    """Number of expert-parallel groups, each a whole copy of the model."""
    paused: bool = False
    """Freeze what the operator does; running workers go on serving."""
    model: Model
    """Which model to serve."""
    parallelism: Parallelism = Parallelism()
    """How many workers share one copy of the model."""
    worker: Worker = Worker()
    """The worker pods."""
    experts: Experts = Experts()
    """Room for experts and their copies."""
    router: Router = Router()
    """How tokens choose experts."""
    topology: Topology = Topology()
    """Which nodes are near to each other, and what is wanted of it."""
    rebalancing: Rebalancing = Rebalancing()
    """When experts are moved to where the load is."""
    kv_cache: KvCache = KvCache()
    """The cache of keys and values."""
    scheduler: Scheduler = Scheduler()
    """What a rank runs at once."""
    api: Api = Api()
    """Limits of the public API."""
    failure_policy: FailurePolicy = FailurePolicy()
    """What happens when a worker is lost."""
    disruption: Disruption = Disruption()
    """How planned interruptions go."""
    autoscaling: Autoscaling = Autoscaling()
    """Who decides how many groups or ranks there are."""
    security: Security = Security()
    """Who may talk to the workers."""


def slots_per_rank(experts: Experts, num_experts: int, num_ranks: int) -> int:
    """Serving slots a rank and layer: as given, or ceil(experts / ranks) + redundant ones."""
    if experts.slots_per_rank is not None:
        return experts.slots_per_rank
    redundant = experts.redundant_slots_per_rank
    if redundant is None:
        redundant = DEFAULT_REDUNDANT_SLOTS_PER_RANK
    return -(-num_experts // num_ranks) + redundant


def physical_slots_per_rank(experts: Experts, num_experts: int, num_ranks: int) -> int:
    """All slots a rank and layer: serving and spare ones."""
    return slots_per_rank(experts, num_experts, num_ranks) + experts.spare_slots_per_rank


def max_replicas(experts: Experts, num_ranks: int) -> int:
    """Most copies of an expert: as given, else one on each rank."""
    return num_ranks if experts.max_replicas is None else experts.max_replicas


def memory_fraction(kv_cache: KvCache) -> float | None:
    """Share of memory for blocks; None when their number is given instead."""
    if kv_cache.blocks is not None:
        return None
    return DEFAULT_MEMORY_FRACTION if kv_cache.memory_fraction is None else kv_cache.memory_fraction


def parse(manifest: Mapping[str, Any]) -> MoEDeploymentSpec:
    """Check a whole MoEDeployment object and give its spec.

    The API server has refused most of what is refused here; what is left to this function are
    overlays, which no schema sees into, and objects stored under an older schema.

    Raises:
        InvalidSpec: one line with field, value and way out.
    """
    metadata = manifest.get("metadata")
    check_name(str(metadata.get("name", "")) if isinstance(metadata, Mapping) else "")
    try:
        spec = MoEDeploymentSpec.model_validate(manifest.get("spec") or {})
    except ValidationError as error:
        raise InvalidSpec(_first_fault(error)) from error
    faults = pod_template_faults(spec.worker.pod_template)
    if faults:
        raise InvalidSpec(faults[0])
    return spec


def check_name(name: str) -> None:
    """Refuse a name that a Service or a label could not carry.

    Raises:
        InvalidSpec: with the limit.
    """
    if len(name) > names.MAX_DEPLOYMENT_NAME:
        raise InvalidSpec(
            f"metadata.name {name} has {len(name)} characters: "
            f"use at most {names.MAX_DEPLOYMENT_NAME}"
        )
    if re.match(DNS_LABEL, name) is None:
        raise InvalidSpec(
            f"metadata.name {name} is not a DNS-1035 label: "
            "use a-z, 0-9 and '-', begin with a letter, end with a letter or digit"
        )


def _first_fault(error: ValidationError) -> str:
    fault = error.errors()[0]
    path = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in fault["loc"])
    match fault["type"]:
        case "extra_forbidden":
            return f"spec{path} is not a field of this version: remove it or check its spelling"
        case "missing":
            return f"spec{path} is missing: set it"
        case "value_error":
            return f"spec.{fault['ctx']['error']}"
        case _:
            reason = fault["msg"][:1].lower() + fault["msg"][1:]
            return f"spec{path} is {fault['input']!r}: {reason}"
