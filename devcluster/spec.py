"""What a cluster shall be: its nodes with their labels and pretended GPUs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from devcluster.errors import Unsupported
from devcluster.instance import MAX_NODES

ZONE = "topology.kubernetes.io/zone"
RACK = "example.com/rack"
GPU = "nvidia.com/gpu"
NODES_PER_RACK = 2
RACKS_PER_ZONE = 2


@dataclass(frozen=True)
class NodeSpec:
    """One node; `gpus` are advertised as nvidia.com/gpu and do not exist."""

    name: str
    labels: Mapping[str, str] = field(default_factory=dict)
    gpus: int = 0


@dataclass(frozen=True)
class ClusterSpec:
    """No nodes means the control plane alone: no root needed, and no pod ever runs."""

    nodes: tuple[NodeSpec, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {"nodes": [dataclasses.asdict(node) for node in self.nodes]}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> ClusterSpec:
        return cls(tuple(NodeSpec(**node) for node in document["nodes"]))


def control_plane_only() -> ClusterSpec:
    return ClusterSpec()


def with_nodes(
    count: int = 3, *, gpus: int = 0, labels: Mapping[str, Mapping[str, str]] | None = None
) -> ClusterSpec:
    """`count` nodes node1, node2, …, two in a rack and two racks in a zone.

    `labels` maps a node's name to labels that are added to these. Raises Unsupported for a count
    out of range or an unknown node's name.
    """
    if not 1 <= count <= MAX_NODES:
        raise Unsupported(f"{count} nodes: use 1 to {MAX_NODES}")
    added = labels or {}
    names = [f"node{number}" for number in range(1, count + 1)]
    unknown = sorted(set(added) - set(names))
    if unknown:
        raise Unsupported(f"labels for {', '.join(unknown)}: the nodes are {', '.join(names)}")
    return ClusterSpec(
        tuple(
            NodeSpec(name, {**_place(index), **added.get(name, {})}, gpus)
            for index, name in enumerate(names)
        )
    )


def parse_labels(texts: Sequence[str]) -> dict[str, dict[str, str]]:
    """Parse "NODE:key=value" texts; raises Unsupported naming a text of another form."""
    labels: dict[str, dict[str, str]] = {}
    for text in texts:
        node, colon, pair = text.partition(":")
        key, equals, value = pair.partition("=")
        if not (node and colon and key and equals):
            raise Unsupported(f"label {text!r}: write NODE:key=value, as node1:example.com/rack=r1")
        labels.setdefault(node, {})[key] = value
    return labels


def _place(index: int) -> dict[str, str]:
    rack = index // NODES_PER_RACK
    zone = rack // RACKS_PER_ZONE
    return {ZONE: f"zone-{zone + 1}", RACK: f"rack-{rack + 1}"}
