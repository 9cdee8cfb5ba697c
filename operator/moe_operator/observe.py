"""One look at the world: everything a pass decides by is read here, once, and then not asked again.

A worker that does not answer is part of what was seen. Neighbours: `reconcile` calls this first;
`pods`, `plans` and `rules` say what the parts mean.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from moe_api.topology import LevelsFound, Topology, domains_of, find_levels
from moe_api.worker import WorkerState
from moe_operator.context import Context, Key
from moe_operator.errors import Refused
from moe_operator.plans import StoredPlan, stored_plan
from moe_operator.pod_manifest import Owner
from moe_operator.pods import PodView, pod_view
from moe_operator.rules import GroupView, Spread

NODES_SECONDS = 5.0
"""How old the list of nodes may be; a lost node reaches us by its pods and workers first."""
FORBIDDEN = 403
T = TypeVar("T")


@dataclass(frozen=True)
class NodeView:
    name: str
    labels: Mapping[str, str]
    ready: bool
    cordoned: bool


@dataclass(frozen=True)
class Observation:
    groups: Mapping[int, GroupView]
    """Every group of which a pod or a plan exists."""
    nodes: Mapping[str, NodeView]

    def group(self, index: int) -> GroupView:
        return self.groups.get(index, GroupView(index))

    @property
    def pods(self) -> list[PodView]:
        return [pod for view in self.groups.values() for pod in view.pods]

    @property
    def unready_nodes(self) -> frozenset[str]:
        """Nodes that are not ready, and those that pods name and that are gone. Empty when nodes
        may not be listed (an operator for some namespaces only)."""
        if not self.nodes:
            return frozenset()
        named = {pod.node for pod in self.pods if pod.node is not None}
        ready = {node.name for node in self.nodes.values() if node.ready}
        return frozenset(named | set(self.nodes)) - ready

    @property
    def cordoned_nodes(self) -> frozenset[str]:
        return frozenset(node.name for node in self.nodes.values() if node.cordoned)

    def levels(self, topology: Topology) -> LevelsFound:
        return find_levels(topology, [node.labels for node in self.nodes.values()])

    def domains(self, topology: Topology) -> dict[str, list[str]]:
        """Per node its domains, one for each level in use."""
        in_use = self.levels(topology).in_use
        return {node.name: domains_of(in_use, node.labels) for node in self.nodes.values()}


def spread_of(topology: Topology, found: LevelsFound) -> Spread | None:
    """`topology.replicaSpread`, while any node carries its level's label."""
    wanted, names = topology.replica_spread, [level.name for level in found.in_use]
    if wanted is None or wanted.level not in names:
        return None
    return Spread(names.index(wanted.level), wanted.min_domains)


class Recent:
    """A value that may be a little old; one per thing, kept in the memory of a key."""

    def __init__(self) -> None:
        self._value: Any = None
        self._read_at: float | None = None

    def expire(self) -> None:
        """Read anew next time."""
        self._read_at = None

    def get(self, now_seconds: float, max_age_seconds: float, read: Callable[[], T]) -> T:
        if self._read_at is None or now_seconds - self._read_at >= max_age_seconds:
            self._value = read()
            self._read_at = now_seconds
        value: T = self._value
        return value


def observe(ctx: Context, owner: Owner, token: str | None) -> Observation:
    """Pods, plans, nodes and every worker's own word.

    Args:
        token: of the control API; None = there is none yet, so no worker is asked.
    """
    key = Key(owner.namespace, owner.name)
    listed = [
        pod_view(pod)
        for pod in ctx.cluster.list_pods(owner.namespace, owner.name)
        if _owned(pod, owner)
    ]
    pods = _ask_workers(ctx, [pod for pod in listed if pod is not None], token)
    plans = [
        stored_plan(manifest)
        for manifest in ctx.cluster.list_placements(owner.namespace, owner.name)
        if _owned(manifest, owner)
    ]
    nodes = ctx.memory.of(key, "nodes", Recent).get(
        ctx.clock.monotonic(), NODES_SECONDS, lambda: _nodes(ctx)
    )
    return Observation(_by_group(pods, plans), nodes)


def _owned(manifest: Mapping[str, Any], owner: Owner) -> bool:
    """Ours by owner reference: a label alone makes nothing ours."""
    references = manifest["metadata"].get("ownerReferences") or ()
    return any(reference.get("uid") == owner.uid for reference in references)


def _ask_workers(ctx: Context, pods: list[PodView], token: str | None) -> list[PodView]:
    if token is None:
        return pods
    targets = {p.uid: p.address for p in pods if p.address is not None and p.end is None}
    answers = ctx.workers.states(targets, token)
    return [_with_answer(pod, answers) for pod in pods]


def _with_answer(pod: PodView, answers: Mapping[str, Any]) -> PodView:
    answer = answers.get(pod.uid)
    if answer is None:
        return pod
    if isinstance(answer, WorkerState):
        return replace(pod, state=answer)
    return replace(pod, silence=answer.reason)


def _nodes(ctx: Context) -> dict[str, NodeView]:
    try:
        listed = ctx.cluster.list_nodes()
    except Refused as error:
        if error.status != FORBIDDEN:
            raise
        return {}
    return {
        node["name"]: NodeView(
            node["name"], node["labels"], node["ready"], cordoned=node["unschedulable"]
        )
        for node in listed
    }


def _by_group(pods: list[PodView], plans: list[StoredPlan]) -> dict[int, GroupView]:
    stored = {plan.plan.group: plan for plan in plans}
    indices = sorted({pod.group for pod in pods} | set(stored))
    return {
        index: GroupView(
            index,
            tuple(sorted((p for p in pods if p.group == index), key=lambda p: (p.member, p.name))),
            stored.get(index),
        )
        for index in indices
    }
