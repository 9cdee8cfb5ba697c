"""GroupRules: what a spec asks of every group. GroupView: what a pass saw of one. Plain values.

Neighbours: `reconcile` builds both once a pass; `regroup`, `replacement` and `groups` use them.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from moe_api.plan import PlanLimits
from moe_api.worker import ModelShape
from moe_operator.members import MemberView, broke, in_force, judge
from moe_operator.plans import StoredPlan
from moe_operator.pods import PodView

Ages = Mapping[Hashable, float]


class Spread(NamedTuple):
    """Copies of an expert are wanted in several domains of a level."""

    level: int
    """Its place among the domains that members name, 0 = broadest."""
    min_domains: int


class Intent(StrEnum):
    """What is to become of a group as a whole."""

    KEEP = "Keep"
    """Wanted: form it, heal it, keep it."""
    ROLL = "Roll"
    """Wanted, but of an old template: end it, then form it anew."""
    WAIT = "Wait"
    """Wanted and of an old template, but not its turn: keep who is there, add nobody."""
    REFUSE = "Refuse"
    """The model or the spec cannot be served: no pod of the present template."""
    REMOVE = "Remove"
    """Not wanted any more."""


@dataclass(frozen=True)
class GroupRules:
    namespace: str
    deployment: str
    width: int
    template_hash: str
    leader_epoch: int
    model: ModelShape | None = None
    """None until a worker of the present template could read it."""
    slots_per_rank: int = 0
    """Serving and spare slots on each rank in each layer; 0 while there is no model."""
    spare_slots: int = 1
    min_copies: int = 1
    """Of each expert, where the slots allow it."""
    limits: PlanLimits = field(default_factory=PlanLimits)
    min_serving_ranks: int = 1
    max_restarts: int = 5
    retain_failed_pods: int = 0
    drain_seconds: int = 60
    warmup_grace_seconds: int = 600
    domains: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Per node name its topology domains, broad to narrow."""
    spread: Spread | None = None
    unready_nodes: Collection[str] = ()

    def domains_of(self, node: str | None) -> Sequence[str]:
        """Domains of a node; as many blanks for one that is not known (yet), since all members of a
        plan are compared level by level."""
        levels = len(next(iter(self.domains.values()), ()))
        return self.domains.get(node or "", [""] * levels)


@dataclass(frozen=True)
class GroupView:
    index: int
    pods: tuple[PodView, ...] = ()
    stored: StoredPlan | None = None

    def current(self, rules: GroupRules) -> list[PodView]:
        """Pods of the present template."""
        return [pod for pod in self.pods if pod.template_hash == rules.template_hash]

    def outdated(self, rules: GroupRules) -> list[PodView]:
        return [pod for pod in self.pods if pod.template_hash != rules.template_hash]

    def broken(self) -> bool:
        """Whether a member saw the stored plan's generation end."""
        if self.stored is None:
            return False
        plan = self.stored.plan
        return any(
            pod.state is not None and broke(plan, pod.state)
            for pod in self.pods
            if any(member.uid == pod.uid for member in plan.members)
        )

    def facts(self) -> set[Hashable]:
        """Everything whose age matters to a decision about this group."""
        facts: set[Hashable] = {("group", self.index)}
        for pod in self.pods:
            if pod.silence:
                facts.add(("silent", pod.uid))
            if pod.end is not None or pod.worker_failed:
                facts.add(("ended", pod.uid))
        if self.stored is not None:
            fence = (self.index, self.stored.plan.generation, self.stored.plan.epoch)
            if self.broken():
                facts.add(("broken", *fence[:2]))
            if not self.settled():
                facts.add(("unsettled", *fence))
            if self.all_prepared():
                facts.add(("prepared", *fence[:2]))
        return facts

    def running(self, rules: GroupRules) -> int:
        """Ready pods of the present template."""
        return sum(pod.active and pod.ready for pod in self.current(rules))

    def settled(self) -> bool:
        """Every member of the stored plan answered and runs it (or agreed to abandon its wave)."""
        if self.stored is None:
            return False
        plan, by_uid = self.stored.plan, {pod.uid: pod for pod in self.pods}
        states = [by_uid[m.uid].state if m.uid in by_uid else None for m in plan.members]
        return all(state is not None and in_force(plan, state) for state in states)

    def all_prepared(self) -> bool:
        """Every member of the stored plan has its weights, and none is in its generation yet."""
        if self.stored is None:
            return False
        plan, by_uid = self.stored.plan, {pod.uid: pod for pod in self.pods}
        states = [by_uid[m.uid].state if m.uid in by_uid else None for m in plan.members]
        return all(
            state is not None and state.generation < plan.generation <= state.prepared_generation
            for state in states
        )

    def members(self, rules: GroupRules, ages: Ages) -> list[MemberView]:
        """Members of the stored plan, judged."""
        if self.stored is None:
            return []
        plan = self.stored.plan
        silent = {pod.uid: ages.get(("silent", pod.uid), 0.0) for pod in self.pods}
        broken_seconds = ages.get(("broken", self.index, plan.generation), 0.0)
        return judge(plan, self.pods, rules.unready_nodes, silent, broken_seconds)
