"""What this version acts on: every field of the spec is honoured, or reported when it is set.

A field that nothing acts on yet is never ignored silently: `ignored_fields` feeds the condition
`SpecHonoured`, and `honoured` gives the spec that the operator acts on instead. Whoever makes a
field work moves it here. Neighbours: `deployment` (the spec), `crd` (marks the others in the CRD).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from moe_api.block import Block
from moe_api.deployment import MoEDeploymentSpec

HONOURED = frozenset(
    {
        "replicas",
        "paused",
        "model.uri",
        "model.servedName",
        "model.dtype",
        "model.maxModelLen",
        "parallelism.expert",
        "worker.batchInvariant",
        "worker.kernels",
        "worker.image",
        "worker.resources.limits",
        "worker.resources.requests",
        "worker.accelerator",
        "worker.podTemplate",
        "worker.env",
        "experts.slotsPerRank",
        "experts.redundantSlotsPerRank",
        "experts.spareSlotsPerRank",
        "experts.minReplicas",
        "experts.maxReplicas",
        "topology.levels",
        "topology.replicaSpread",
        "rebalancing.mode",
        "rebalancing.intervalSeconds",
        "rebalancing.windowSeconds",
        "rebalancing.cooldownSeconds",
        "rebalancing.minGainPercent",
        "rebalancing.budget.maxBytesPerSecond",
        "rebalancing.budget.maxMovesPerRound",
        "rebalancing.budget.maxStallMillis",
        "rebalancing.deadlineSeconds",
        "kvCache.dtype",
        "kvCache.encoding",
        "kvCache.keyScaling",
        "kvCache.scalesFile",
        "kvCache.blockSize",
        "kvCache.memoryFraction",
        "kvCache.blocks",
        "kvCache.prefixCaching",
        "scheduler.maxRunning",
        "scheduler.maxBatchedTokens",
        "scheduler.maxQueued",
        "api.keySecretRef",
        "api.maxBodyBytes",
        "api.maxChoices",
        "api.maxStopStrings",
        "failurePolicy.minServingRanks",
        "failurePolicy.warmupGraceSeconds",
        "failurePolicy.maxRestarts",
        "failurePolicy.retainFailedPods",
        "disruption.drainSeconds",
        "disruption.pdb",
        "disruption.evacuateOnCordon",
        "security.controlTokenSecretRef",
    }
)
"""Fields honoured with every value that the schema allows."""

HONOURED_VALUES: dict[str, tuple[Any, ...]] = {
    "security.networkPolicy": (False,),
    "autoscaling.mode": ("External",),
}
"""Fields of which only some values, besides the default, do what they say. The switches that are on
by default and not built yet are honoured when off."""


def ignored_fields(spec: MoEDeploymentSpec) -> list[str]:
    """Wire paths of fields set to other than their default that this version does not act on."""
    return [path for path, value, default in _leaves(spec) if _is_ignored(path, value, default)]


def honoured(spec: MoEDeploymentSpec) -> MoEDeploymentSpec:
    """The spec this version acts on: ignored fields put back to their defaults."""
    wire = spec.to_wire()
    for path, value, default in _leaves(spec):
        if _is_ignored(path, value, default):
            *parents, last = path.split(".")
            block = wire
            for parent in parents:
                block = block[parent]
            if default is None:
                block.pop(last, None)
            else:
                block[last] = _to_wire(default)
    return MoEDeploymentSpec.model_validate(wire)


def is_honoured(path: str) -> bool:
    """Whether any value but the default of the field at this wire path has an effect."""
    return path in HONOURED or path in HONOURED_VALUES


def spec_fields(block: type[Block] = MoEDeploymentSpec, below: str = "") -> Iterator[str]:
    """Wire paths of all fields. Blocks with a default are walked into; lists, maps and blocks that
    may be absent count as one field."""
    for name, field in block.model_fields.items():
        path = f"{below}{field.alias or name}"
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, Block):
            yield from spec_fields(inner, f"{path}.")
        else:
            yield path


def _is_ignored(path: str, value: Any, default: Any) -> bool:
    if value == default or path in HONOURED:
        return False
    return value not in HONOURED_VALUES.get(path, ())


def _leaves(block: Block, below: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(wire path, value, default) of each field, as `spec_fields` counts them."""
    for name, field in type(block).model_fields.items():
        path, value = f"{below}{field.alias or name}", getattr(block, name)
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, Block):
            yield from _leaves(value, f"{path}.")
        else:
            yield path, value, field.get_default(call_default_factory=True)


def _to_wire(value: Any) -> Any:
    return value.to_wire() if isinstance(value, Block) else value
