"""How many ranks of a group must stay when pods are evicted: an integer, never too many for ever.

Pure. While a rank is missing none of the others may be evicted, until the time that a replacement
may take has passed. Where a loss stops the group, evictions wait, but a cordoned node (what a drain
does first) opens the way, since nothing moves a rank away beforehand in this version.
Neighbours: `children.disruption_budget` (the object), `reconcile` (applies it).
"""

from __future__ import annotations

from collections.abc import Collection

from moe_operator import plans
from moe_operator.groups import GroupOutcome
from moe_operator.members import MemberState
from moe_operator.rules import Ages, GroupRules
from moe_placement.membership import survives_rank_loss


def min_available(
    outcome: GroupOutcome, rules: GroupRules, cordoned: Collection[str], ages: Ages
) -> int:
    """`minAvailable` of the group's PodDisruptionBudget."""
    serving = [m for m in outcome.members if m.state is MemberState.SERVING]
    count = len(serving)
    if outcome.plan is None or count == 0 or rules.width == 1:
        return 0
    missing = count < rules.width
    if missing and ages.get(("short", outcome.view.index), 0.0) < rules.warmup_grace_seconds:
        return count
    if _survives(outcome, rules, count):
        return count - 1
    on_cordoned = any(m.pod is not None and m.pod.node in cordoned for m in serving)
    return count - 1 if on_cordoned else count


def interrupted(outcome: GroupOutcome, rules: GroupRules, cordoned: Collection[str]) -> str:
    """What a drain that has begun will do to a group that cannot lose a rank; empty if nothing."""
    serving = [m for m in outcome.members if m.state is MemberState.SERVING]
    at_risk = [m.pod.node for m in serving if m.pod is not None and m.pod.node in cordoned]
    if outcome.plan is None or not at_risk or _survives(outcome, rules, len(serving)):
        return ""
    return f"draining node {at_risk[0]} interrupts the group: the others cannot hold every expert"


def _survives(outcome: GroupOutcome, rules: GroupRules, count: int) -> bool:
    assert outcome.plan is not None, "a serving group has a plan"
    slots_LRS = outcome.plan.slots()
    enough = survives_rank_loss(slots_LRS[:, :count], plans.num_experts(slots_LRS))
    return enough and count - 1 >= rules.min_serving_ranks
