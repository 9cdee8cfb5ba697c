"""The operator's part for one local group, pure: what was seen → the plan that should be in force.

form when all wait → survivors at once when a rank is lost → everybody again when its replacement
waits → rebalance while all is quiet. Every plan is newer than the last; the shell puts it to who
does not run it yet, as often as it likes.

Neighbours: `group` observes and puts plans; the decisions are those of `moe_placement`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from moe_api.load import LoadReport
from moe_api.plan import (
    GroupPlan,
    LayerPlacement,
    Member,
    PlanLimits,
    PreviousPlacement,
    SlotsLRS,
    encode_layers,
)
from moe_api.worker import WorkerPhase, WorkerState
from moe_placement import score
from moe_placement.decision.decide import Decision, Policy, Walk, decide
from moe_placement.decision.window import LoadWindow, ServedSince
from moe_placement.initial import InsufficientSlots, contiguous
from moe_placement.placement import Placement
from moe_placement.resplit import fitting, resplit
from moe_placement.score import LoadLE
from moe_placement.walk import membership


@dataclass(frozen=True)
class Living:
    """A rank whose process lives, as found now; state and load are None when it gave no answer."""

    member: int
    incarnation: str
    address: str
    state: WorkerState | None
    load: LoadReport | None


@dataclass(frozen=True)
class Rules:
    num_ranks: int
    spare_slots: int
    """A rank has these beside the policy's serving slots."""
    interval_seconds: float
    window_seconds: float
    policy: Policy


class Director:
    """Its memory between looks; `look` is deterministic in what it is given."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self.plan: GroupPlan | None = None
        """Newest plan."""
        self.placement: Placement | None = None
        """In force, as far as all members have said."""
        self.applied_epoch = 0
        self.decision: Decision | None = None
        self.event = "waiting for the ranks"
        self._walk = Walk()
        self._window = LoadWindow(rules.window_seconds)
        self._served = ServedSince(0, 0)
        self._decided_seconds: float | None = None

    def look(self, living: Sequence[Living], now_seconds: float) -> GroupPlan | None:
        """The plan that every member should run now."""
        plan = self.plan
        if plan is None:
            self._form(living)
        elif lost := self._lost(plan, living):
            self._go_on_without(plan, lost, living)
        elif is_broken(plan, living):
            assert self.placement is not None, "a plan in force has a placement"
            self._renew(plan.members, self.placement, "the group is formed anew")
        elif newcomers := _waiting(plan, living):
            self._admit(plan, newcomers)
        else:
            self._watch(plan, living, now_seconds)
        return self.plan

    def measured_imbalance(self) -> float | None:
        """Of the tokens that slots really received since the epoch in force began."""
        loads = None if self.plan is None else self._served.rank_loads(self._ids(self.plan))
        found = None if loads is None else score.imbalance(loads)
        return None if found is None else found.worst

    def _form(self, living: Sequence[Living]) -> None:
        waiting = [rank for rank in living if _phase(rank) is WorkerPhase.WAITING]
        if len(waiting) < self._rules.num_ranks:
            return
        model = waiting[0].state.model if waiting[0].state else None
        assert model is not None, "a waiting worker has read its model"
        slots = self._rules.policy.serving_slots + self._rules.spare_slots
        placed = contiguous(model.layers, model.experts, len(waiting), slots)
        members = [_member(rank) for rank in sorted(waiting, key=lambda rank: rank.member)]
        self._renew(members, self._split(placed), f"{len(members)} ranks form the group")

    def _go_on_without(self, plan: GroupPlan, lost: set[int], living: Sequence[Living]) -> None:
        """Survivors at once when their slots hold every expert, else with the replacements."""
        assert self.placement is not None, "a plan in force has a placement"
        slots_LRS = self.placement.slots_LRS
        experts = int(slots_LRS.max()) + 1
        ranks = [rank for rank, member in enumerate(plan.members) if member.id not in lost]
        names = ", ".join(str(member) for member in sorted(lost))
        try:
            repaired = membership.repair(slots_LRS, ranks, experts, load_LE=self._load(slots_LRS))
        except InsufficientSlots as error:
            self.event = f"rank {names} is lost; waiting for its replacement: {error}"
            newcomers = _waiting(plan, living)
            if {rank.member for rank in newcomers} >= lost:
                self._admit(plan, newcomers)
            return
        members = [plan.members[rank] for rank in ranks]
        self._renew(members, self._split(repaired), f"rank {names} is lost, {len(members)} go on")

    def _admit(self, plan: GroupPlan, newcomers: Sequence[Living]) -> None:
        assert self.placement is not None, "a plan in force has a placement"
        slots_LRS = self.placement.slots_LRS
        came = {rank.member: _member(rank) for rank in newcomers}
        stayed = {m.id: rank for rank, m in enumerate(plan.members) if m.id not in came}
        ids = sorted({*came, *stayed})
        experts = int(slots_LRS.max()) + 1
        admitted = membership.admit(
            slots_LRS,
            [stayed.get(member) for member in ids],
            experts,
            self._rules.policy.serving_slots,
            load_LE=self._load(slots_LRS),
        )
        members = [came[i] if i in came else plan.members[stayed[i]] for i in ids]
        names = ", ".join(map(str, sorted(came)))
        self._renew(members, self._split(admitted), f"rank {names} joins")

    def _split(self, slots_LRS: SlotsLRS) -> Placement:
        """A placement made without planning shares tokens by the load known last."""
        return resplit(slots_LRS, self._load(slots_LRS))

    def _load(self, slots_LRS: SlotsLRS) -> LoadLE | None:
        return fitting(self._window.load(slots_LRS.shape[1]), slots_LRS)

    def _renew(self, members: Sequence[Member], placement: Placement, event: str) -> None:
        """A new generation."""
        generation = self.plan.generation + 1 if self.plan else 1
        self.plan = self._next(members, placement, generation, previous=None)
        self.placement, self.applied_epoch = placement, 0
        self._walk, self.event = self._walk.stopped(), event

    def _watch(self, plan: GroupPlan, living: Sequence[Living], now: float) -> None:
        states = [rank.state for rank in living if rank.state is not None]
        if len(states) < len(plan.members) or any(s.generation != plan.generation for s in states):
            return
        if all(state.applied_epoch == plan.epoch for state in states):
            if self.applied_epoch != plan.epoch:
                self._arrived(plan, now)
        elif any(state.abandoned_epoch == plan.epoch for state in states):
            if self._walk.target is not None:
                self._walk = self._walk.given_up(now)
                self.event = f"epoch {plan.epoch} was abandoned"
        else:
            return
        reports = [rank.load for rank in living if rank.load is not None]
        self._served = self._served.observe(reports)
        is_walking = self._walk.target is not None
        waited = self._decided_seconds is None or (
            now - self._decided_seconds >= self._rules.interval_seconds
        )
        if waited:
            self._decided_seconds = now
            self._window = self._window.observe(reports, now, self.placement)
        if waited or is_walking:
            self._rebalance(plan, states, now)

    def _arrived(self, plan: GroupPlan, now: float) -> None:
        self.placement = Placement(plan.slots(), plan.fractions())
        self.applied_epoch = plan.epoch
        self._served = ServedSince(plan.generation, plan.epoch)
        if self._walk.is_at(self.placement):
            self._walk = self._walk.arrived(now)

    def _rebalance(self, plan: GroupPlan, states: Sequence[WorkerState], now: float) -> None:
        assert self.placement is not None, "a plan in force has a placement"
        load_LE = self._window.load(len(plan.members))
        sizes = [state.model.bytes_per_expert for state in states if state.model is not None]
        policy = replace(self._rules.policy, bytes_per_expert=max(sizes, default=0))
        migrations = [state.migration for state in states if state.migration is not None]
        stalls = [m.stall_millis for m in migrations if m.stall_millis is not None]
        stall = max(stalls, default=None)
        decision = decide(load_LE, self.placement, self._walk, policy, now, stall)
        self.decision, self._walk = decision, decision.walk
        self.event = f"{decision.verdict.value}, {decision.reason}: {decision.message}"
        if decision.wave is not None:
            previous = PreviousPlacement(epoch=self.applied_epoch, layers=_encoded(self.placement))
            self.plan = self._next(plan.members, decision.wave, plan.generation, previous)

    def _next(
        self,
        members: Sequence[Member],
        placement: Placement,
        generation: int,
        previous: PreviousPlacement | None,
    ) -> GroupPlan:
        return GroupPlan(
            namespace="local",
            deployment="local",
            group=0,
            leader_epoch=1,
            generation=generation,
            epoch=self.plan.epoch + 1 if self.plan else 1,
            members=list(members),
            layers=_encoded(placement),
            limits=PlanLimits(),
            previous=previous,
        ).sealed()

    def _ids(self, plan: GroupPlan) -> list[int]:
        return [member.id for member in plan.members]

    def _lost(self, plan: GroupPlan, living: Sequence[Living]) -> set[int]:
        incarnations = {rank.incarnation for rank in living}
        return {m.id for m in plan.members if m.incarnation not in incarnations}


def _encoded(placement: Placement) -> list[LayerPlacement]:
    return encode_layers(placement.slots_LRS, placement.fractions_LRS)


def is_broken(plan: GroupPlan, living: Sequence[Living]) -> bool:
    """Whether every member that answers says that this generation is over."""
    incarnations = {member.incarnation for member in plan.members}
    states = [rank.state for rank in living if rank.state and rank.incarnation in incarnations]
    return bool(states) and all(
        state.phase is WorkerPhase.DISRUPTED and state.generation == plan.generation
        for state in states
    )


def hung(plan: GroupPlan | None, living: Sequence[Living]) -> list[int]:
    """Members whose process lives but answers nobody: neither us nor the others."""
    incarnations = {member.incarnation for member in plan.members} if plan else set()
    accused = {
        member
        for rank in living
        if rank.state is not None
        for member in (*rank.state.suspects, *rank.state.missing_members)
    }
    return [
        rank.member
        for rank in living
        if rank.state is None and rank.incarnation in incarnations and rank.member in accused
    ]


def in_force(plan: GroupPlan, state: WorkerState) -> bool:
    """Whether a member runs this plan, or its group has given the epoch up."""
    return state.generation == plan.generation and plan.epoch in (
        state.applied_epoch,
        state.abandoned_epoch,
    )


def _waiting(plan: GroupPlan, living: Sequence[Living]) -> list[Living]:
    """Ranks that wait for a plan that names them."""
    known: Mapping[int, str] = {member.id: member.incarnation for member in plan.members}
    return [
        rank
        for rank in living
        if _phase(rank) is WorkerPhase.WAITING and known.get(rank.member) != rank.incarnation
    ]


def _phase(rank: Living) -> WorkerPhase | None:
    return rank.state.phase if rank.state is not None else None


def _member(rank: Living) -> Member:
    return Member(
        id=rank.member,
        pod=f"local-{rank.member}",
        uid=rank.incarnation,
        address=rank.address,
        incarnation=rank.incarnation,
    )
