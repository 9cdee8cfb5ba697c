"""Report: everything a pass found, decided and did, as the status is written from it.

Neighbours: `reconcile` fills it; `conditions`, `coverage`, `group_status`, `status` read it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from moe_api.conditions import ConditionStatus, Reason
from moe_api.worker import ModelShape
from moe_operator.acceptance import Acceptance
from moe_operator.desired import Desired
from moe_operator.groups import GroupOutcome
from moe_operator.members import MemberState
from moe_operator.observe import Observation
from moe_operator.rebalance import Rebalance
from moe_operator.rules import Ages, GroupRules, Intent


class Truth(NamedTuple):
    """What a condition says."""

    status: ConditionStatus
    reason: Reason
    message: str


@dataclass(frozen=True)
class Report:
    wish: Desired
    acceptance: Acceptance
    """Also by what workers read of the model."""
    seen: Observation
    model: ModelShape | None
    rules: GroupRules
    ages: Ages
    groups: Sequence[Rebalance]
    """Wanted and existing groups, by index."""
    problems: Sequence[str] = ()
    """What could not be done, in words for people."""

    @property
    def outcomes(self) -> list[GroupOutcome]:
        return [group.outcome for group in self.groups]

    @property
    def wanted(self) -> list[GroupOutcome]:
        return [o for o in self.outcomes if o.view.index < self.wish.spec.replicas]

    def ready(self, outcome: GroupOutcome) -> bool:
        """Whether every wanted rank of the group serves."""
        width = self.rules.width
        members = [m for m in outcome.members if m.state is MemberState.SERVING]
        return outcome.intent is not Intent.REMOVE and len(members) == width
