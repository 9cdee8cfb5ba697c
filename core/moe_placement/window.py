"""Cumulative counters of workers → the load of the last seconds. Pure: reports and time come in.

A report's counters only grow within an incarnation; a new incarnation begins again at zero, and
what it counted counts in full. Warm-up never enters (workers do not count it). No report or too
few tokens is "no sample" (None), which is not the same as no load.

Neighbours: `decide` takes the load, `score.imbalance` turns measured rank loads into the figure
shown.

Shapes: L MoE layers, E logical experts, R ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from moe_api.load import LoadReport
from moe_placement.score import LoadLE, RankLoadsLR

MAX_SAMPLES = 4096
"""Bound on remembered intervals, whatever the window and the interval are."""
MAX_NOISE = 0.10
NOISE_FACTOR = 1.8
"""Imbalance of a perfectly balanced group of R ranks reads about 1 + 1.8·√(R/T) with T assignments
(measured: largest of R Poisson counts)."""


@dataclass(frozen=True)
class _Sample:
    at_seconds: float
    routed_LE: LoadLE


@dataclass(frozen=True)
class LoadWindow:
    """What was routed in the last `window_seconds`, over all members."""

    window_seconds: float
    samples: tuple[_Sample, ...] = ()
    last: Mapping[int, tuple[str, LoadLE]] = field(default_factory=dict)
    """Per member: (incarnation, cumulative routed) of its newest report."""

    def observe(self, reports: Sequence[LoadReport], now_seconds: float) -> LoadWindow:
        """The window after reading `reports` at `now_seconds` (the reader's clock, monotonic).

        The first report of a member in this window's life is the baseline and adds nothing.
        """
        last = dict(self.last)
        added: LoadLE | None = None
        for report in reports:
            routed = np.asarray(report.routed, dtype=np.float64)
            before = last.get(report.member)
            last[report.member] = (report.incarnation, routed)
            if before is None:
                continue
            delta = routed - before[1] if before[0] == report.incarnation else routed
            added = delta if added is None else added + delta
        kept = [s for s in self.samples if now_seconds - s.at_seconds < self.window_seconds]
        if added is not None:
            kept.append(_Sample(now_seconds, added))
        return replace(self, samples=tuple(kept[-MAX_SAMPLES:]), last=last)

    def load(self, num_ranks: int) -> LoadLE | None:
        """Tokens per logical expert in the window [L, E], or None when there is no sample."""
        if not self.samples:
            return None
        total = np.sum([s.routed_LE for s in self.samples], axis=0)
        return total if enough_tokens(total, num_ranks) else None


@dataclass(frozen=True)
class ServedSince:
    """Tokens that ranks really received since a plan came into force (measured, not predicted)."""

    generation: int
    epoch: int
    baseline: Mapping[int, tuple[str, RankLoadsLR]] = field(default_factory=dict)
    latest: Mapping[int, tuple[str, RankLoadsLR]] = field(default_factory=dict)
    """Per member: (incarnation, served summed over its slots [L])."""

    def observe(self, reports: Sequence[LoadReport]) -> ServedSince:
        """Take the reports that speak of this plan; the first of each incarnation is the
        baseline."""
        baseline, latest = dict(self.baseline), dict(self.latest)
        for report in reports:
            if (report.generation, report.epoch) != (self.generation, self.epoch):
                continue
            served_L = np.asarray(report.served, dtype=np.float64).sum(axis=1)
            entry = (report.incarnation, served_L)
            if baseline.get(report.member, ("",))[0] != report.incarnation:
                baseline[report.member] = entry
            latest[report.member] = entry
        return replace(self, baseline=baseline, latest=latest)

    def rank_loads(self, member_ids: Sequence[int]) -> RankLoadsLR | None:
        """Measured tokens [L, R] in plan order; None until every member reported and the tokens are
        enough."""
        if any(member not in self.latest for member in member_ids) or not member_ids:
            return None
        columns = [self.latest[m][1] - self.baseline[m][1] for m in member_ids]
        loads = np.stack(columns, axis=1)
        return loads if enough_tokens(loads, len(member_ids)) else None


def enough_tokens(counts: npt.NDArray[np.float64], num_ranks: int) -> bool:
    """Whether the busiest layer counted enough tokens [L, ...] for the noise to stay under
    MAX_NOISE."""
    assignments = float(counts.reshape(counts.shape[0], -1).sum(axis=1).max())
    return assignments >= num_ranks * (NOISE_FACTOR / MAX_NOISE) ** 2
