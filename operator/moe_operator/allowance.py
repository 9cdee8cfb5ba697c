"""What a spec allows rebalancing to do, in the words of `moe_placement`: policy, limits.

Pure. Neighbours: `rebalance` and `reconcile` (which plans carry the limits).
"""

from __future__ import annotations

from collections.abc import Sequence

from moe_api.plan import PlanLimits
from moe_api.worker import ModelShape
from moe_operator.desired import Desired
from moe_operator.members import MemberView
from moe_operator.rules import Spread
from moe_placement.copy_limits import CopyLimits
from moe_placement.decision.decide import Mode, Policy
from moe_placement.topology.borders import domains_at, near
from moe_placement.walk.waves import Limits


def policy(
    wish: Desired,
    members: Sequence[MemberView],
    slots_per_rank: int,
    leaving: Sequence[int] = (),
    spread: Spread | None = None,
) -> Policy:
    """For decisions about a group.

    Domains have one use: copies apart where `topology.replicaSpread` asks for it, else tokens near.

    Args:
        slots_per_rank: serving and spare ones.
        leaving: ranks that are about to go.
    """
    spec, rebalancing, budget = wish.spec, wish.spec.rebalancing, wish.spec.rebalancing.budget
    size = bytes_per_expert(members)
    named = [m.member.domains for m in members]
    domains_R = near(named) if spread is None else domains_at(named, spread.level)
    return Policy(
        mode=Mode(rebalancing.mode),
        serving_slots=slots_per_rank - spec.experts.spare_slots_per_rank,
        min_gain_percent=rebalancing.min_gain_percent,
        cooldown_seconds=rebalancing.cooldown_seconds,
        max_moves_per_round=budget.max_moves_per_round,
        copies=CopyLimits(spec.experts.min_replicas, spec.experts.max_replicas),
        bytes_per_expert=size,
        max_bytes_per_second=budget.max_bytes_per_second,
        max_stall_millis=budget.max_stall_millis,
        deadline_seconds=rebalancing.deadline_seconds,
        domains=tuple(domains_R.tolist()),
        near=spread is None and bool(domains_R.any()),
        num_groups=expert_groups(members),
        spread_domains=1 if spread is None else spread.min_domains,
        draining=tuple(leaving),
    )


def limits(wish: Desired) -> PlanLimits:
    return PlanLimits(
        max_bytes_per_second=wish.spec.rebalancing.budget.max_bytes_per_second,
        deadline_seconds=wish.spec.rebalancing.deadline_seconds,
    )


def wave_limits(wish: Desired, members: Sequence[MemberView]) -> Limits:
    """Of a wave that is no rebalance: as many moves as a round may have, as many bytes as a rank
    may receive in half of its deadline."""
    rebalancing = wish.spec.rebalancing
    size = bytes_per_expert(members)
    most = rebalancing.budget.max_bytes_per_second * rebalancing.deadline_seconds // 2
    return Limits(
        max_moves=rebalancing.budget.max_moves_per_round,
        bytes_per_expert=size,
        max_rank_bytes=max(most, size),
    )


def bytes_per_expert(members: Sequence[MemberView]) -> int:
    """As workers read it of their model; 1 while none can tell."""
    model = _model(members)
    return 1 if model is None else model.bytes_per_expert


def expert_groups(members: Sequence[MemberView]) -> int | None:
    """That the model's router limits a token to; None without such a rule, or while none can
    tell."""
    model = _model(members)
    return None if model is None else model.expert_groups


def _model(members: Sequence[MemberView]) -> ModelShape | None:
    known = (m.worker.model for m in members if m.worker is not None)
    return next((model for model in known if model is not None), None)
