"""Balance: what one group's load looks like and which rebalance is under way.

Pure state, a new value with each step. `rebalance` keeps one per group in the losable memory and
feeds it, `status` shows it. Losing it costs a window of load and the measured half of a decision.

Shapes: L MoE layers, E logical experts, R ranks, S physical slots a rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from moe_api.load import LoadReport
from moe_api.plan import GroupPlan, SlotsLRS, even_fractions
from moe_api.worker import WorkerState
from moe_operator.origins import Origins, RoutedRLE
from moe_placement import initial, score
from moe_placement.decision.decide import Figures, Walk
from moe_placement.decision.window import LoadWindow, ServedSince, enough_tokens
from moe_placement.placement import Placement
from moe_placement.score import Imbalance, LoadLE, RankLoadsLR

MAX_HOT_EXPERTS = 10


@dataclass(frozen=True)
class Hot:
    layer: int
    expert: int
    share: float


@dataclass(frozen=True)
class Trip:
    """One rebalance from its decision to what was measured of it: a walk of one or more epochs."""

    started: str
    """RFC 3339; names the decision in status."""
    reason: str
    figures: Figures | None
    """What the plan promises; None where no load is known."""
    moves: int
    """Experts that some rank has to receive on the whole way."""
    message: str
    generation: int
    newest_epoch: int
    """Of the wave announced last."""
    peaks_before: float | None = None
    """Mean over layers of the largest rank's share, before."""
    bytes_by_epoch: tuple[tuple[int, int], ...] = ()
    stall_millis: float | None = None
    arrived: bool = False
    """The target is reached; what follows is measuring."""
    measured_gain: float | None = None
    measured: bool = False
    """The measured gain is final."""

    @property
    def is_measuring(self) -> bool:
        """What it brought is still to be counted."""
        return self.arrived and not self.measured and bool(self.peaks_before)

    @property
    def bytes(self) -> int:
        return sum(size for _, size in self.bytes_by_epoch)

    def switched(self, epoch: int, states: Sequence[WorkerState]) -> Trip:
        """The wave `epoch` is in force: add up what its migration cost."""
        if any(known == epoch for known, _ in self.bytes_by_epoch):
            return self
        moved = [s.migration for s in states if s.migration and s.migration.epoch == epoch]
        stalls = [m.stall_millis for m in moved if m.stall_millis is not None]
        worst = max(
            [*stalls, *([] if self.stall_millis is None else [self.stall_millis])], default=None
        )
        return replace(
            self,
            bytes_by_epoch=(*self.bytes_by_epoch, (epoch, sum(m.bytes for m in moved))),
            stall_millis=worst,
        )


@dataclass(frozen=True)
class Balance:
    window: LoadWindow
    served: ServedSince
    served_since: float
    """Monotonic seconds; when the served counters were last taken as the baseline."""
    read_at: float | None = None
    """When load was last asked for."""
    heard: bool = False
    """Whether every member answered then."""
    load_LE: LoadLE | None = None
    """Load of the window; None = no sample."""
    origins: Origins = field(default_factory=Origins)
    """Who sends tokens, counted over about a window."""
    routed_RLE: RoutedRLE | None = None
    """The same as counted last, in plan order; None = too few."""
    known_LE: LoadLE | None = None
    """The last sample there was, however old."""
    measured: Imbalance | None = None
    """From tokens that slots received under the plan in force; None = too few."""
    peaks: float | None = None
    """Mean over layers of the largest rank's share, measured likewise."""
    walk: Walk = field(default_factory=Walk)
    trip: Trip | None = None
    aborted_epoch: int = 0
    """Newest epoch that was seen abandoned."""

    @classmethod
    def begin(cls, window_seconds: float, plan: GroupPlan, now: float) -> Balance:
        return cls(
            LoadWindow(window_seconds), ServedSince(plan.generation, plan.epoch), served_since=now
        )

    def under(self, plan: GroupPlan, epoch: int, now: float) -> Balance:
        """The same under the plan in force: another epoch is measured anew, another membership ends
        a walk."""
        if (self.served.generation, self.served.epoch) == (plan.generation, epoch):
            return self
        out = replace(
            self,
            served=ServedSince(plan.generation, epoch),
            served_since=now,
            measured=None,
            peaks=None,
        )
        if plan.generation != self.served.generation:
            out = replace(out, walk=self.walk.stopped(), trip=None, routed_RLE=None)
        return out

    def read(
        self,
        reports: Sequence[LoadReport],
        member_ids: Sequence[int],
        now: float,
        in_force: Placement | None = None,
    ) -> Balance:
        """Take in the reports of one look; without a report of every member there is no sample."""
        if len(reports) < len(member_ids):
            return replace(self, read_at=now, heard=False, load_LE=None)
        window = self.window.observe(reports, now, in_force)
        served, origins = self.served.observe(reports), self.origins.observe(reports)
        loads, load_LE = served.rank_loads(member_ids), window.load(len(member_ids))
        routed_RLE = origins.routed(member_ids)
        old = now - self.served_since >= self.window.window_seconds
        out = replace(
            self,
            read_at=now,
            heard=True,
            window=window,
            load_LE=load_LE,
            known_LE=self.known_LE if load_LE is None else load_LE,
            served=replace(served, baseline=served.latest) if old else served,
            origins=origins.renewed() if old else origins,
            served_since=now if old else self.served_since,
        )
        if loads is not None:
            out = replace(out, measured=score.imbalance(loads), peaks=peaks(loads))
        elif old:
            out = replace(out, measured=None, peaks=None)
        if routed_RLE is not None and enough_tokens(routed_RLE.sum(axis=0), len(member_ids)):
            out = replace(out, routed_RLE=routed_RLE)
        elif old:
            out = replace(out, routed_RLE=None)
        return out._measured_gain(final=old)

    def _measured_gain(self, final: bool) -> Balance:
        """Measure what the trip brought, until a whole window was counted after it."""
        trip = self.trip
        if trip is None or not trip.is_measuring or self.peaks is None:
            return self
        assert trip.peaks_before, "else there is nothing to measure"
        gain = (trip.peaks_before - self.peaks) / trip.peaks_before
        return replace(self, trip=replace(trip, measured_gain=gain, measured=final))

    def hot_experts(self) -> list[Hot]:
        """Experts with the largest share of their layer's load, hottest first."""
        if self.load_LE is None:
            return []
        totals = self.load_LE.sum(axis=1, keepdims=True)
        shares = np.divide(self.load_LE, totals, out=np.zeros_like(self.load_LE), where=totals > 0)
        order = np.argsort(-shares, axis=None, kind="stable")[:MAX_HOT_EXPERTS]
        places = [divmod(int(flat), shares.shape[1]) for flat in order]
        return [Hot(layer, expert, float(shares[layer, expert])) for layer, expert in places]

    def imbalance_without_replication(self, slots_LRS: SlotsLRS) -> float | None:
        """Of the window's load on contiguous blocks, one copy of each expert."""
        if self.load_LE is None:
            return None
        layers, ranks, width = slots_LRS.shape
        blocks = initial.contiguous(layers, self.load_LE.shape[1], ranks, width)
        found = score.imbalance(score.rank_loads(blocks, even_fractions(blocks), self.load_LE))
        return None if found is None else found.worst


def peaks(loads_LR: RankLoadsLR) -> float | None:
    """Mean over layers of the largest rank's share of the layer's tokens; None without tokens."""
    totals = loads_LR.sum(axis=1)
    busy = totals > 0
    if not busy.any():
        return None
    return float((loads_LR[busy].max(axis=1) / totals[busy]).mean())
