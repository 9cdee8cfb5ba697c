"""How many ranks of a group must stay when pods are evicted: an integer, never too many for ever.

Pure. While a rank is missing none of the others may be evicted, and none of a cordoned node (what a
drain does first) while experts leave it; both end after the time that a replacement may take. Where
a loss stops the group, evictions wait until a cordon opens the way.
Neighbours: `children.disruption_budget` (the object), `reconcile` (applies it), `evacuation`.
"""

from __future__ import annotations

from collections.abc import Collection

from moe_api.plan import SlotsLRS
from moe_operator import evacuation, plans
from moe_operator.groups import GroupOutcome
from moe_operator.members import MemberState
from moe_operator.rules import Ages, GroupRules
from moe_placement.walk.membership import survives_rank_loss


def min_available(
    outcome: GroupOutcome,
    rules: GroupRules,
    cordoned: Collection[str],
    ages: Ages,
    *,
    evacuates: bool = False,
) -> int:
    """`minAvailable` of the group's PodDisruptionBudget.

    Args:
        evacuates: experts leave cordoned nodes before pods do.
    """
    serving = [m for m in outcome.members if m.state is MemberState.SERVING]
    count = len(serving)
    if outcome.plan is None or count == 0 or rules.width == 1:
        return 0
    missing = count < rules.width
    if missing and ages.get(("short", outcome.view.index), 0.0) < rules.warmup_grace_seconds:
        return count
    age = ages.get(("cordoned", outcome.view.index), 0.0)
    if evacuates and age < rules.warmup_grace_seconds and evacuating(outcome, cordoned):
        return count
    if _survives(outcome, rules, count):
        return count - 1
    on_cordoned = any(m.pod is not None and m.pod.node in cordoned for m in serving)
    return count - 1 if on_cordoned else count


def evacuating(outcome: GroupOutcome, cordoned: Collection[str]) -> bool:
    """Whether experts that only ranks of cordoned nodes hold have yet to arrive elsewhere, where
    there is room for them."""
    ranks, stored = evacuation.leaving(outcome.members, cordoned), outcome.view.stored
    if not ranks or stored is None:
        return False
    states = [m.worker for m in outcome.members if m.worker is not None]
    slots_LRS = plans.placed(stored.plan, states).slots_LRS
    return _has_room(slots_LRS, len(ranks)) and evacuation.stranded(slots_LRS, ranks) > 0


def interrupted(outcome: GroupOutcome, rules: GroupRules, cordoned: Collection[str]) -> str:
    """What a drain that has begun will do to a group that cannot lose a rank; empty if nothing."""
    serving = [m for m in outcome.members if m.state is MemberState.SERVING]
    at_risk = [m.pod.node for m in serving if m.pod is not None and m.pod.node in cordoned]
    if outcome.plan is None or not at_risk:
        return ""
    if _survives(outcome, rules, len(serving)) and _has_room(outcome.plan.slots(), len(at_risk)):
        return ""
    return f"draining node {at_risk[0]} interrupts the group: the others cannot hold every expert"


def _has_room(slots_LRS: SlotsLRS, num_leaving: int) -> bool:
    """Whether every expert finds a slot on the ranks that stay."""
    num_ranks, width = slots_LRS.shape[1:]
    return bool((num_ranks - num_leaving) * width >= plans.num_experts(slots_LRS))


def _survives(outcome: GroupOutcome, rules: GroupRules, count: int) -> bool:
    assert outcome.plan is not None, "a serving group has a plan"
    slots_LRS = outcome.plan.slots()
    enough = survives_rank_loss(slots_LRS[:, :count], plans.num_experts(slots_LRS))
    return enough and count - 1 >= rules.min_serving_ranks
