"""A whole plan for engines that split an expert's tokens evenly among its copies.

With even shares the numbers of copies decide how well the copies pack, so both are searched
together: numbers of copies (`full_even_counts`) are dealt onto ranks (`full_even_deal`) and
levelled by swaps (`full_even_exchange`); layers that are not level by then try other numbers. Ranks
of two slots hold pairs, for which the numbers can be found without dealing (`full_even_pairs`).
What is uneven after that is left to single actions (`step_even_search`), and where experts are few,
to the exact search (`exact_even`).

Shapes: L layers, E logical experts, R ranks, S slots a rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moe_api.plan import SlotsLRS
from moe_placement.bound import BoundL, GapL, gap, lower_bound
from moe_placement.capacity import SlotsR, SpeedsR
from moe_placement.copy_limits import CopyLimits
from moe_placement.even import exact_even
from moe_placement.even.full_even_counts import capped, caps, finest, within
from moe_placement.even.full_even_deal import deal
from moe_placement.even.full_even_exchange import TokensLRS, exchange
from moe_placement.even.full_even_heap import least_heap
from moe_placement.even.full_even_pairs import folded, refined
from moe_placement.even.step_even_search import Effort, search
from moe_placement.placement import CopiesLE, copies
from moe_placement.score import LoadLE

AIM = 0.002
"""Gap at which swapping ends."""
LEVEL = 0.005
"""Gap at which a layer tries no other numbers of copies."""
UNEVEN = 0.01
"""Gap above which even less promising numbers are tried, and single actions."""
HALF = 0.5
"""Copies above half a rank's worth leave gaps that are hard to fill."""
EFFORT = Effort(moves_cost=(1.0, 1.0), max_work=1_500_000, patience=25, max_detours=8)
"""Of single actions; nothing has to move yet."""
LEAST_ROUNDS = 20
"""Fewer are not worth beginning."""

IndexN = npt.NDArray[np.int64]


def plan(load_LE: LoadLE, slots_R: SlotsR, speeds_R: SpeedsR, limits: CopyLimits) -> SlotsLRS:
    """Copies and places of all experts, int32 [L, R, S] with S = max(slots_R).

    Free slots are left where they pack better than copies. Layers without load hold the fewest
    copies. Ties go to the lowest expert, then the lowest rank.

    Args:
        load_LE: finite, not negative.
        slots_R: together at least as many as there are experts.
        limits: min_copies counts as far as the slots allow.
    """
    width = int(slots_R.max())
    problem = _Problem.of(load_LE, slots_R, speeds_R, limits)
    best = _Best.none(problem)
    _search_exactly(best)
    if problem.pairs:
        _try_pairs(best)
    else:
        _try_counts(best)
    _act(best)
    missing = width - best.slots_LRS.shape[2]
    return np.pad(best.slots_LRS, ((0, 0), (0, 0), (0, missing)), constant_values=-1)


@dataclass(frozen=True, eq=False)
class _Problem:
    load_LE: LoadLE
    slots_R: SlotsR
    """At most as many as there are experts."""
    speeds_R: SpeedsR
    limits: CopyLimits
    bound_L: BoundL
    most: int

    @classmethod
    def of(
        cls, load_LE: LoadLE, slots_R: SlotsR, speeds_R: SpeedsR, limits: CopyLimits
    ) -> _Problem:
        slots_R = np.minimum(slots_R, load_LE.shape[1])
        limits = limits.within_reach(load_LE.shape[1], slots_R)
        bound_L = lower_bound(load_LE, slots_R, speeds_R, limits.max_copies, limits.min_copies)
        most = limits.most(int((slots_R > 0).sum()))
        return cls(load_LE, slots_R, speeds_R, limits, bound_L, most)

    @property
    def alike(self) -> bool:
        """All ranks have as many slots and are as fast."""
        same = (self.slots_R == self.slots_R[0]) & (self.speeds_R == self.speeds_R[0])
        return bool(same.all())

    @property
    def pairs(self) -> bool:
        """All ranks are alike and have two slots."""
        return self.alike and int(self.slots_R[0]) == 2

    @property
    def unit_L(self) -> BoundL:
        """Load of an average rank at the bound."""
        return self.bound_L * float(self.speeds_R.mean())


@dataclass(eq=False)
class _Best:
    """The best placement of each layer so far."""

    problem: _Problem
    slots_LRS: SlotsLRS
    gap_L: GapL
    """To the bound; 0 where the plan is proven to be the best there is."""

    @classmethod
    def none(cls, problem: _Problem) -> _Best:
        shape = (len(problem.load_LE), len(problem.slots_R), int(problem.slots_R.max()))
        return cls(problem, np.full(shape, -1, dtype=np.int32), np.full(shape[0], np.inf))

    def offer(self, layer_N: IndexN, counts_NE: CopiesLE, *, in_rounds: bool = True) -> None:
        """Tries these numbers of copies in some layers."""
        if not len(layer_N):
            return
        of = self.problem
        load_NE = of.load_LE[layer_N]
        slots_NRS = deal(
            load_NE, counts_NE, of.slots_R, of.speeds_R, of.limits, in_rounds=in_rounds
        )
        self.keep(layer_N, slots_NRS)
        uneven_N = self.gap_L[layer_N] > AIM
        if of.pairs or not uneven_N.any():  # dealt pairs are the best there are
            return
        layer_N, slots_NRS = layer_N[uneven_N], slots_NRS[uneven_N]
        token_NRS = _tokens(load_NE[uneven_N], slots_NRS)
        level_N = of.bound_L[layer_N]
        if of.alike:
            copies_NC = -np.sort(-token_NRS.reshape(len(layer_N), -1), axis=1)
            heap_N = least_heap(copies_NC, len(of.slots_R), int(of.slots_R[0]))
            level_N = np.maximum(level_N, heap_N / of.speeds_R[0])
        exchange(slots_NRS, token_NRS, of.slots_R, of.speeds_R, level_N, AIM)
        self.keep(layer_N, slots_NRS)

    def keep(self, layer_N: IndexN, slots_NRS: SlotsLRS) -> None:
        """Takes over what is better."""
        of = self.problem
        load_NR = _tokens(of.load_LE[layer_N], slots_NRS).sum(axis=2)
        gap_N = gap(load_NR, of.speeds_R, of.bound_L[layer_N])
        better_N = gap_N < self.gap_L[layer_N]
        self.gap_L[layer_N[better_N]] = gap_N[better_N]
        self.slots_LRS[layer_N[better_N]] = slots_NRS[better_N]


def _search_exactly(best: _Best) -> None:
    """Where experts are few."""
    of = best.problem
    if of.load_LE.shape[1] > exact_even.MAX_EXPERTS:
        return
    counts_LE = finest(of.load_LE, of.slots_R, of.limits)
    best.offer(np.arange(len(of.load_LE)), counts_LE, in_rounds=False)
    uneven_N = np.flatnonzero(best.gap_L > AIM)
    exact = exact_even.plan(
        of.load_LE[uneven_N], of.slots_R, of.speeds_R, of.limits, best.slots_LRS[uneven_N]
    )
    best.keep(uneven_N, exact.slots_LRS)
    best.gap_L[uneven_N[exact.proven_L]] = 0.0


def _try_counts(best: _Best) -> None:
    """The finest numbers first where they leave no copy above half a rank's worth, else last."""
    of = best.problem
    counts_LE = finest(of.load_LE, of.slots_R, of.limits)
    coarse_L = (of.load_LE / counts_LE).max(axis=1) > HALF * of.unit_L
    first_N = np.flatnonzero(~coarse_L & (best.gap_L > 0))
    best.offer(first_N, counts_LE[first_N], in_rounds=False)
    for cap_L, promising in caps(of.load_LE, of.unit_L, of.slots_R):
        uneven_N = np.flatnonzero(best.gap_L > (LEVEL if promising else UNEVEN))
        if not len(uneven_N):
            continue
        cap_N = (cap_L * of.unit_L)[uneven_N]
        capped_NE = capped(of.load_LE[uneven_N], cap_N, of.limits.min_copies, of.most)
        fits_N = within(capped_NE, of.slots_R)
        best.offer(uneven_N[fits_N], capped_NE[fits_N])
    rest_N = np.flatnonzero(coarse_L & (best.gap_L > 0))
    best.offer(rest_N, counts_LE[rest_N], in_rounds=False)


def _try_pairs(best: _Best) -> None:
    of, num_ranks = best.problem, len(best.problem.slots_R)
    open_N = np.flatnonzero(best.gap_L > 0)
    if not len(open_N):
        return
    load_NE, unit_N = of.load_LE[open_N], of.unit_L[open_N]
    counts_NE = finest(load_NE, of.slots_R, of.limits)
    peak_N = folded(load_NE, counts_NE, num_ranks)
    for cap_N, _ in caps(load_NE, unit_N, of.slots_R):
        capped_NE = capped(load_NE, cap_N * unit_N, of.limits.min_copies, of.most)
        capped_peak_N = folded(load_NE, capped_NE, num_ranks)
        better_N = capped_peak_N < peak_N
        peak_N[better_N], counts_NE[better_N] = capped_peak_N[better_N], capped_NE[better_N]
    fewest = of.limits.min_copies
    best.offer(open_N, refined(load_NE, counts_NE, num_ranks, unit_N, fewest, of.most))


def _act(best: _Best) -> None:
    """Single actions in the layers that are uneven still."""
    of = best.problem
    uneven_N = np.flatnonzero(best.gap_L > UNEVEN)
    places = len(uneven_N) * best.slots_LRS.shape[1] * best.slots_LRS.shape[2] ** 2
    if not places or EFFORT.max_work < LEAST_ROUNDS * places:
        return
    trail = search(
        of.load_LE[uneven_N], best.slots_LRS[uneven_N], of.slots_R, of.speeds_R, of.limits,
        of.bound_L[uneven_N] * (1 + LEVEL), EFFORT,
    )  # fmt: skip
    best.keep(uneven_N, trail.followed(trail.best()))


def _tokens(load_LE: LoadLE, slots_LRS: SlotsLRS) -> TokensLRS:
    """Load of each slot with an even split, 0 where free."""
    share_LE = load_LE / np.maximum(copies(slots_LRS, load_LE.shape[1]), 1)
    share_LF = np.pad(share_LE, ((0, 0), (0, 1)))  # −1 takes the last
    return np.asarray(share_LF[np.arange(len(slots_LRS))[:, None, None], slots_LRS])
