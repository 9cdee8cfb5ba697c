"""Manifests that tests share: a small MoEDeployment, a full one, and pairs for each CEL rule.

Pure; used by unit tests (parsing) and by tests against an API server alike.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from moe_api import names
from moe_api.block import Block, CelRule
from moe_api.deployment import MoEDeploymentSpec
from moe_api.openapi import Schema
from moe_api.plan import GroupPlan, LayerPlacement, Member
from moe_api.policy import Autoscaling
from moe_api.serving import Experts, KvCache, Offload, Scheduler
from moe_api.topology import Topology
from moe_api.workload import EnvSource, EnvVar, Model

MODEL = {"uri": "file:///models/tiny-moe"}


def moe_deployment(
    name: str = "tiny", spec: Mapping[str, Any] | None = None, namespace: str | None = None
) -> dict[str, Any]:
    """A MoEDeployment of the tiny model; blocks of `spec` are merged over it."""
    metadata = {"name": name} | ({"namespace": namespace} if namespace else {})
    return {
        "apiVersion": names.API_GROUP_VERSION,
        "kind": names.DEPLOYMENT_KIND,
        "metadata": metadata,
        "spec": merged({"model": MODEL}, spec or {}),
    }


def expert_placement(name: str, plan: GroupPlan, namespace: str | None = None) -> dict[str, Any]:
    """The object that stores a plan."""
    metadata = {"name": name} | ({"namespace": namespace} if namespace else {})
    return {
        "apiVersion": names.API_GROUP_VERSION,
        "kind": names.PLACEMENT_KIND,
        "metadata": metadata,
        "spec": plan.to_wire(),
    }


def group_plan(
    *,
    num_layers: int = 2,
    num_ranks: int = 2,
    slots_per_rank: int = 3,
    num_experts: int = 4,
    leader_epoch: int = 1,
    generation: int = 1,
    epoch: int = 1,
) -> GroupPlan:
    """A plan with every slot filled, experts in turn."""
    row = [slot % num_experts for slot in range(num_ranks * slots_per_rank)]
    ranks = (row[r * slots_per_rank : (r + 1) * slots_per_rank] for r in range(num_ranks))
    slots = ";".join(",".join(str(expert) for expert in rank) for rank in ranks)
    return GroupPlan(
        namespace="default",
        deployment="tiny",
        group=0,
        leader_epoch=leader_epoch,
        generation=generation,
        epoch=epoch,
        members=[
            Member(
                id=rank,
                pod=f"tiny-g0-m{rank}-abcde",
                uid=f"00000000-0000-0000-0000-{rank:012d}",
                address=f"10.0.0.{rank + 1}",
                incarnation=f"incarnation-{rank}",
                domains=["zone-a", f"node-{rank}"],
            )
            for rank in range(num_ranks)
        ],
        layers=[LayerPlacement(layer=layer, slots=slots) for layer in range(num_layers)],
    ).sealed()


def every_field_spec() -> dict[str, Any]:
    """A valid spec that sets each field to other than its default, either-or fields one way."""
    secret = {"name": "secret", "key": "key"}
    return {
        "replicas": 2,
        "paused": True,
        "model": {
            "uri": "hf://org/model",
            "revision": "main",
            "servedName": "served",
            "dtype": "bfloat16",
            "maxModelLen": 4096,
            "tokenSecretRef": secret,
        },
        "parallelism": {"expert": 4},
        "worker": {
            "batchInvariant": False,
            "kernels": "reference",
            "image": "example.org/worker:1",
            "resources": {
                "limits": {"memory": "2Gi", "cpu": 2},
                "requests": {"memory": "1Gi", "cpu": "500m"},
            },
            "accelerator": {"resource": "example.org/npu", "count": 2},
            "podTemplate": {
                "metadata": {"labels": {"team": "serving"}},
                "spec": {"nodeSelector": {"pool": "gpu"}, "tolerations": [{"operator": "Exists"}]},
            },
            "env": [
                {"name": "LITERAL", "value": "1"},
                {
                    "name": "FROM_SECRET",
                    "valueFrom": {"secretKeyRef": secret | {"optional": True}},
                },
                {"name": "FROM_CONFIG", "valueFrom": {"configMapKeyRef": secret}},
            ],
        },
        "experts": {
            "slotsPerRank": 5,
            "spareSlotsPerRank": 2,
            "minReplicas": 2,
            "maxReplicas": 3,
            "offload": {"enabled": True, "deviceSlotsPerLayer": 4, "prefetch": False},
        },
        "router": {
            "capacityFactor": 1.25,
            "overflow": ["Drop"],
            "biasBalancing": {"enabled": True, "rate": 0.01, "maxBias": 0.5},
        },
        "topology": {
            "levels": [
                {"name": "rack", "nodeLabel": "example.org/rack"},
                {"name": "clique", "nodeLabel": "nvidia.com/gpu.clique"},
            ],
            "pack": {"level": "rack", "mode": "Required"},
            "replicaSpread": {"level": "clique", "minDomains": 3},
        },
        "rebalancing": {
            "mode": "Recommend",
            "intervalSeconds": 10,
            "windowSeconds": 60,
            "cooldownSeconds": 5,
            "minGainPercent": 2.5,
            "budget": {
                "maxBytesPerSecond": 5_000_000_000,
                "maxMovesPerRound": 8,
                "maxStallMillis": 5,
            },
            "deadlineSeconds": 30,
        },
        "kvCache": {
            "dtype": "k8v4",
            "encoding": "FourOverSix",
            "keyScaling": "Center",
            "scalesFile": "scales.json",
            "blockSize": 32,
            "memoryFraction": 0.5,
            "prefixCaching": False,
        },
        "scheduler": {"maxRunning": 32, "maxBatchedTokens": 512, "maxQueued": 0},
        "api": {
            "keySecretRef": secret,
            "maxBodyBytes": 65536,
            "maxStopStrings": 4,
            "maxChoices": 1,
        },
        "failurePolicy": {
            "mode": "RecreateGroup",
            "minServingRanks": 3,
            "onUncoveredExpert": "Reroute",
            "warmupGraceSeconds": 60,
            "maxRestarts": 1,
            "retainFailedPods": 2,
        },
        "disruption": {"drainSeconds": 5, "pdb": "None", "evacuateOnCordon": False},
        "autoscaling": {
            "mode": "Prometheus",
            "target": "ExpertWidth",
            "min": 2,
            "max": 8,
            "metrics": [{"name": "waiting", "query": "sum(x)", "targetPerUnit": 4.5}],
            "prometheus": {
                "url": "http://prometheus:9090",
                "bearerTokenSecretRef": secret,
                "caSecretRef": secret,
            },
            "stabilization": {"upSeconds": 30, "downSeconds": 600},
            "maxStep": 2,
        },
        "security": {"networkPolicy": False, "controlTokenSecretRef": secret},
    }


@dataclass(frozen=True)
class RuleCase:
    """A spec that a rule lets pass and one that it refuses, with what the message must name."""

    rule: CelRule
    accepted: dict[str, Any]
    refused: dict[str, Any]
    named: tuple[str, ...]
    """Field, value and way out."""


RULE_CASES = (
    RuleCase(
        Model.RULES[0],
        {"model": {"uri": "pvc://claim/folder"}},
        {"model": {"uri": "gs://bucket/model"}},
        ("model.uri", "gs://bucket/model", "write file:///path, pvc://claim/path"),
    ),
    RuleCase(
        Model.RULES[1],
        {"model": {"uri": "file:///models/a..b"}},
        {"model": {"uri": "file:///models/../etc"}},
        ("model.uri", "file:///models/../etc", "without it"),
    ),
    RuleCase(
        EnvVar.RULES[0],
        {"worker": {"env": [{"name": "A", "value": "1"}]}},
        {
            "worker": {
                "env": [
                    {
                        "name": "A",
                        "value": "1",
                        "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}},
                    }
                ]
            }
        },
        ("worker.env A", "remove one"),
    ),
    RuleCase(
        EnvVar.RULES[1],
        {"worker": {"env": [{"name": "AMOE_X", "value": "1"}]}},
        {"worker": {"env": [{"name": "MOE_GROUP", "value": "1"}]}},
        ("worker.env MOE_GROUP", "choose another name"),
    ),
    RuleCase(
        EnvSource.RULES[0],
        {
            "worker": {
                "env": [{"name": "A", "valueFrom": {"configMapKeyRef": {"name": "s", "key": "k"}}}]
            }
        },
        {"worker": {"env": [{"name": "A", "valueFrom": {}}]}},
        ("worker.env[].valueFrom", "secretKeyRef", "keep one"),
    ),
    RuleCase(
        Offload.RULES[0],
        {"experts": {"offload": {"enabled": True, "deviceSlotsPerLayer": 4}}},
        {"experts": {"offload": {"enabled": True}}},
        ("experts.offload.enabled", "true", "set experts.offload.deviceSlotsPerLayer"),
    ),
    RuleCase(
        Experts.RULES[0],
        {"experts": {"redundantSlotsPerRank": 0}},
        {"experts": {"slotsPerRank": 6, "redundantSlotsPerRank": 2}},
        ("experts.slotsPerRank 6", "experts.redundantSlotsPerRank 2", "remove one"),
    ),
    RuleCase(
        Experts.RULES[1],
        {"parallelism": {"expert": 4}, "experts": {"minReplicas": 2, "maxReplicas": 2}},
        {"parallelism": {"expert": 4}, "experts": {"minReplicas": 3, "maxReplicas": 2}},
        ("experts.minReplicas 3", "experts.maxReplicas 2", "lower minReplicas"),
    ),
    RuleCase(
        KvCache.RULES[0],
        {"kvCache": {"blocks": 100}},
        {"kvCache": {"memoryFraction": 0.5, "blocks": 100}},
        ("kvCache.memoryFraction 0.5", "kvCache.blocks 100", "remove one"),
    ),
    RuleCase(
        KvCache.RULES[1],
        {"kvCache": {"dtype": "k8v4", "encoding": "FourOverSix"}},
        {"kvCache": {"dtype": "mxfp4", "encoding": "FourOverSix"}},
        ("kvCache.encoding FourOverSix", "kvCache.dtype mxfp4", "set dtype nvfp4 or k8v4"),
    ),
    RuleCase(
        KvCache.RULES[2],
        {"kvCache": {"keyScaling": "Center", "scalesFile": "scales.json"}},
        {"kvCache": {"keyScaling": "Center"}},
        ("kvCache.keyScaling is Center", "set scalesFile"),
    ),
    RuleCase(
        KvCache.RULES[3],
        {"kvCache": {"dtype": "mxfp4", "keyScaling": "Channel", "scalesFile": "a/scales.json"}},
        {"kvCache": {"dtype": "bf16", "scalesFile": "scales.json"}},
        ("kvCache.scalesFile", "dtype bf16 and keyScaling None", "remove it"),
    ),
    RuleCase(
        KvCache.RULES[4],
        {"kvCache": {"scalesFile": "a..b/scales.json"}},
        {"kvCache": {"scalesFile": "a/../../scales.json"}},
        ("kvCache.scalesFile a/../../scales.json", "without '..'"),
    ),
    RuleCase(
        Scheduler.RULES[0],
        {"scheduler": {"maxRunning": 16, "maxBatchedTokens": 16}},
        {"scheduler": {"maxRunning": 17, "maxBatchedTokens": 16}},
        ("scheduler.maxBatchedTokens 16", "scheduler.maxRunning 17", "raise maxBatchedTokens"),
    ),
    RuleCase(
        Topology.RULES[0],
        {"topology": {"pack": {"level": "zone"}}},
        {"topology": {"levels": [{"name": "rack", "nodeLabel": "r"}], "pack": {"level": "zone"}}},
        ("topology.pack.level zone", "add it to topology.levels"),
    ),
    RuleCase(
        Topology.RULES[1],
        {
            "topology": {
                "levels": [{"name": "rack", "nodeLabel": "r"}],
                "replicaSpread": {"level": "rack"},
            }
        },
        {"topology": {"replicaSpread": {"level": "rack"}}},
        ("topology.replicaSpread.level rack", "add it to topology.levels"),
    ),
    RuleCase(
        Autoscaling.RULES[0],
        {"autoscaling": {"mode": "External", "min": 2, "max": 2}},
        {"autoscaling": {"mode": "External", "min": 3, "max": 2}},
        ("autoscaling.min 3", "autoscaling.max 2", "raise max"),
    ),
    RuleCase(
        Autoscaling.RULES[1],
        {
            "autoscaling": {
                "mode": "Prometheus",
                "max": 2,
                "metrics": [{"name": "m", "query": "q", "targetPerUnit": 1}],
                "prometheus": {"url": "https://prometheus"},
            }
        },
        {"autoscaling": {"mode": "Prometheus", "max": 2}},
        ("autoscaling.mode Prometheus", "autoscaling.metrics", "set mode to None or External"),
    ),
    RuleCase(
        Autoscaling.RULES[2],
        {
            "autoscaling": {
                "mode": "Prometheus",
                "max": 1,
                "metrics": [{"name": "m", "query": "q", "targetPerUnit": 1}],
                "prometheus": {"url": "https://prometheus"},
            }
        },
        {
            "autoscaling": {
                "mode": "Prometheus",
                "metrics": [{"name": "m", "query": "q", "targetPerUnit": 1}],
                "prometheus": {"url": "https://prometheus"},
            }
        },
        ("autoscaling.mode Prometheus", "set autoscaling.max"),
    ),
    RuleCase(
        MoEDeploymentSpec.RULES[0],
        {"parallelism": {"expert": 3}, "experts": {"maxReplicas": 3}},
        {"parallelism": {"expert": 3}, "experts": {"maxReplicas": 4}},
        ("experts.maxReplicas 4", "parallelism.expert 3", "lower maxReplicas"),
    ),
    RuleCase(
        MoEDeploymentSpec.RULES[1],
        {"parallelism": {"expert": 2}, "experts": {"minReplicas": 2}},
        {"parallelism": {"expert": 2}, "experts": {"minReplicas": 3}},
        ("experts.minReplicas 3", "parallelism.expert 2", "raise parallelism.expert"),
    ),
    RuleCase(
        MoEDeploymentSpec.RULES[2],
        {"parallelism": {"expert": 2}, "failurePolicy": {"minServingRanks": 2}},
        {"failurePolicy": {"minServingRanks": 2}},
        ("failurePolicy.minServingRanks 2", "parallelism.expert 1", "raise parallelism.expert"),
    ),
)
"""One for each rule between fields; rules about names and plans have tests of their own."""


def all_rules(block: type[Block] = Block) -> Iterator[CelRule]:
    """Rules of every block there is, transition rules left out."""
    yield from (rule for rule in block.__dict__.get("RULES", ()) if not rule.uses_old)
    for below in block.__subclasses__():
        yield from all_rules(below)


def sample(schema: Schema) -> Any:
    """A value that fits a structural schema and sets every field there is."""
    if "enum" in schema:
        return schema["enum"][-1]
    match schema["type"]:
        case "object":
            return {name: sample(field) for name, field in schema["properties"].items()}
        case "array":
            return [sample(schema["items"])]
        case "integer":
            return min(schema["maximum"], max(schema["minimum"], 7))
        case "number":
            return min(schema["maximum"], 1.375)
        case "boolean":
            return True
        case "string" if schema.get("format") == "date-time":
            return "2026-11-29T21:00:00Z"
        case _:
            return "text"[: schema["maxLength"]]


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with the maps of `over` merged in; lists and values are replaced."""
    out: dict[str, Any] = copy.deepcopy(dict(base))
    for key, value in over.items():
        inner = out.get(key)
        if isinstance(value, Mapping) and isinstance(inner, Mapping):
            out[key] = merged(inner, value)
        else:
            out[key] = copy.deepcopy(value)
    return out
