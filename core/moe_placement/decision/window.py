"""Cumulative counters of workers → the load to plan for. Pure: reports and time come in.

A report's counters only grow within an incarnation; a new incarnation begins again at zero, and
what it counted counts in full. Warm-up never enters (workers do not count it). No report or too
few tokens is "no sample" (None), which is not the same as no load.

Neighbours: `forecast` averages, `decide` takes the load, `score.imbalance` turns measured rank
loads into the figure shown.

Shapes: L MoE layers, E logical experts, R ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from moe_api.load import LoadReport
from moe_placement.decision.forecast import Forecast
from moe_placement.placement import Placement
from moe_placement.score import LoadLE, RankLoadsLR

MAX_SAMPLES = 64
"""Bound on remembered parts of the window, however often it is read."""
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
    """What was routed in the last `window_seconds`, over all members, and what is to be expected
    from that and from what was routed before."""

    window_seconds: float
    samples: tuple[_Sample, ...] = ()
    last: Mapping[int, tuple[str, LoadLE]] = field(default_factory=dict)
    """Per member: (incarnation, cumulative routed) of its newest report."""
    forecast: Forecast | None = None
    fed_seconds: float = 0.0
    """When the forecast was fed last, or the window began."""
    unfed_LE: LoadLE | None = None
    """Counted since: too few tokens to tell a change of load from chance."""
    steady: bool = True
    """Whether changes of load were always looked for."""

    def observe(
        self, reports: Sequence[LoadReport], now_seconds: float, in_force: Placement | None = None
    ) -> LoadWindow:
        """The window after reading `reports` at `now_seconds` (the reader's clock, monotonic).

        The first report of a member in this window's life is the baseline and adds nothing.

        Args:
            in_force: the placement that served; absent = a change of load is not looked for, and
            the forecast follows the fast average instead.
        """
        shapes = {(len(r.routed), len(r.routed[0])) for r in reports if r.routed}
        if self.forecast is not None and shapes - {self.forecast.slow_LE.shape}:
            return LoadWindow(self.window_seconds).observe(reports, now_seconds)  # another model
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
        if added is None:
            fed = self.fed_seconds if self.last else now_seconds
            return replace(self, samples=tuple(kept), last=last, fed_seconds=fed)
        if kept and now_seconds - kept[-1].at_seconds < self.window_seconds / MAX_SAMPLES:
            kept[-1] = replace(kept[-1], routed_LE=kept[-1].routed_LE + added)
        else:
            kept.append(_Sample(now_seconds, added))
        out = replace(self, samples=tuple(kept[-MAX_SAMPLES:]), last=last)
        return out._fed(added, now_seconds, in_force, len(reports))

    def load(self, num_ranks: int) -> LoadLE | None:
        """Tokens per logical expert to plan for [L, E], as many a layer as the window counted; None
        when there is no sample."""
        if not self.samples or self.forecast is None:
            return None
        total = np.sum([s.routed_LE for s in self.samples], axis=0)
        if not enough_tokens(total, num_ranks):
            return None
        known = self.forecast if self.unfed_LE is None else self.forecast.after(self.unfed_LE, 0.0)
        return np.asarray(known.shares_LE(self.steady) * total.sum(axis=1, keepdims=True))

    def _fed(
        self, added: LoadLE, now_seconds: float, in_force: Placement | None, num_ranks: int
    ) -> LoadWindow:
        """Hands the forecast what was counted, as soon as it is enough or a window has passed."""
        counted = added if self.unfed_LE is None else self.unfed_LE + added
        windows = (now_seconds - self.fed_seconds) / self.window_seconds
        telling = enough_tokens(counted, num_ranks)
        if self.forecast is None:
            forecast = Forecast.begin(counted)
        elif telling or windows >= 1:
            forecast = self.forecast.after(counted, windows, in_force if telling else None)
        else:
            return replace(self, unfed_LE=counted)
        return replace(
            self,
            forecast=forecast,
            fed_seconds=now_seconds,
            unfed_LE=None,
            steady=self.steady and in_force is not None,
        )


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


def noise(load_LE: LoadLE, num_ranks: int) -> float:
    """Imbalance above 1 that a perfectly balanced group would read from so many tokens, in a layer
    that has as many as the mean of those that have any; 0 without tokens."""
    tokens_L = load_LE.sum(axis=1)
    busy_L = tokens_L > 0
    return (
        NOISE_FACTOR * float(np.sqrt(num_ranks / tokens_L[busy_L].mean())) if busy_L.any() else 0.0
    )
