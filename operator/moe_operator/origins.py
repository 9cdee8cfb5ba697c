"""Origins: which ranks' requests bring which tokens, counted over about a window.

Balance asks only how many tokens choose an expert; who sends them decides what crosses between
domains. Pure state, a new value with each step. Neighbours: `balance` keeps it, `nearby` asks it.

Shapes: L MoE layers, E logical experts, R ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from moe_api.load import LoadReport
from moe_placement.score import LoadLE

RoutedRLE = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Origins:
    baseline: Mapping[int, tuple[str, LoadLE]] = field(default_factory=dict)
    latest: Mapping[int, tuple[str, LoadLE]] = field(default_factory=dict)
    """Per member: (incarnation, tokens of its own requests by expert, cumulative)."""

    def observe(self, reports: Sequence[LoadReport]) -> Origins:
        """Take in reports; the first of each incarnation is its baseline."""
        baseline, latest = dict(self.baseline), dict(self.latest)
        for report in reports:
            entry = (report.incarnation, np.asarray(report.routed, dtype=np.float64))
            if baseline.get(report.member, ("",))[0] != report.incarnation:
                baseline[report.member] = entry
            latest[report.member] = entry
        return Origins(baseline, latest)

    def renewed(self) -> Origins:
        """Count from now on."""
        return replace(self, baseline=self.latest)

    def routed(self, member_ids: Sequence[int]) -> RoutedRLE | None:
        """Tokens [R, L, E] in plan order; None until every member reported."""
        if not member_ids or any(member not in self.latest for member in member_ids):
            return None
        return np.stack([self.latest[m][1] - self.baseline[m][1] for m in member_ids])
