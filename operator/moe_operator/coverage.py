"""Where every expert is: its live copies and their domains; the condition `ExpertsCovered`.

Pure. Counted on the placement in force, over members that are not lost.
Neighbours: `report` (what is judged), `conditions` and `status` (ask here).

Shapes: L MoE layers, E logical experts, R ranks, S physical slots a rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from moe_api.conditions import Reason
from moe_api.plan import GroupPlan
from moe_operator import plans
from moe_operator.groups import GroupOutcome
from moe_operator.members import MemberState, MemberView
from moe_operator.report import Report, Truth

CountsLE = npt.NDArray[np.int64]
_COVERAGE = (Reason.UNCOVERED, Reason.SINGLE_COPY, Reason.SINGLE_DOMAIN, Reason.FULLY_COVERED)


def covered(report: Report) -> Truth:
    formed = [o for o in report.wanted if o.plan is not None and o.members]
    if report.wish.spec.replicas == 0:
        return Truth("Unknown", Reason.UNCOVERED, "there is no group: spec.replicas is 0")
    if not formed:
        return Truth("False", Reason.UNCOVERED, "no group has formed yet")
    worst: Truth | None = None
    for outcome in formed:
        truth = _covered_in(report, outcome)
        if worst is None or _COVERAGE.index(truth.reason) < _COVERAGE.index(worst.reason):
            worst = truth
    assert worst is not None, "there is a formed group"
    return worst


def _covered_in(report: Report, outcome: GroupOutcome) -> Truth:
    name = report.wish.group_name(outcome.view.index)
    stored = outcome.view.stored
    plan = stored.plan if stored is not None else outcome.plan
    assert plan is not None, "only formed groups are asked"
    copies_LE, spread_LE = expert_copies(plan, outcome.members)
    holes = np.argwhere(copies_LE == 0)
    if len(holes):
        layer, expert = holes[0].tolist()
        return Truth(
            "False",
            Reason.UNCOVERED,
            f"group {name}: {len(holes)} experts have no rank, first expert {expert} of layer "
            f"{layer}",
        )
    if (copies_LE == 1).any():
        single = int((copies_LE == 1).sum())
        return Truth("True", Reason.SINGLE_COPY, f"group {name}: {single} experts have one copy")
    if (spread_LE == 1).any() and spread_LE.max() > 0:
        return Truth("True", Reason.SINGLE_DOMAIN, f"group {name}: some experts are in one domain")
    return Truth("True", Reason.FULLY_COVERED, f"group {name}: every expert has copies")


def expert_copies(plan: GroupPlan, members: Sequence[MemberView]) -> tuple[CountsLE, CountsLE]:
    """Copies of each expert on members that are not lost, and over how many domains of the
    narrowest level they spread (0 without domains); both int64 [L, E]."""
    states = [m.worker for m in members if m.worker is not None]
    slots_LRS = plans.placed(plan, states).slots_LRS
    num_layers, num_experts = slots_LRS.shape[0], plans.num_experts(slots_LRS)
    copies = np.zeros((num_layers, num_experts), dtype=np.int64)
    domains: dict[str, CountsLE] = {}
    for member in members:
        if member.state is MemberState.LOST:
            continue
        held = np.zeros_like(copies)
        for layer in range(num_layers):
            row = slots_LRS[layer, member.rank]
            held[layer, row[row >= 0]] = 1
        copies += held
        if member.member.domains:
            domain = member.member.domains[-1]
            domains[domain] = np.maximum(domains.get(domain, 0), held)
    return copies, sum(domains.values(), np.zeros_like(copies))
