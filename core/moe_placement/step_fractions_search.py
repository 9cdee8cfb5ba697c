"""The rounds of `step_fractions`: open the bottlenecks of all layers until none is left.

A round settles what can flow, finds what is stuck, gives it outlets and keeps, layer by layer, what
helped. Every layer is searched for itself, so that neither the others nor their number change what
it gets. Neighbours: `bottleneck`, `opening` (what is tried first), `residual` (what it brings).

Shapes: L layers, E logical experts, R ranks, S physical slots a rank; of the layers still open: O;
M changed slots.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moe_api.plan import SlotsLRS, even_fractions
from moe_placement import bottleneck, exchange, opening, overflow
from moe_placement.capacity import SlotsR, SpeedsR
from moe_placement.copy_limits import CopyLimits
from moe_placement.overflow import NOTHING
from moe_placement.residual import Residual
from moe_placement.score import LoadLE

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

MAX_FAILURES = 12
"""Changes that fail in a layer, one after another, before others are not tried either."""


@dataclass(frozen=True, eq=False)
class Rules:
    slots_R: SlotsR
    speeds_R: SpeedsR
    copies: CopyLimits


@dataclass(frozen=True, eq=False)
class Found:
    slots_LRS: SlotsLRS
    moves_L: Ints
    reached_L: Flags
    """Whether some split keeps every rank within the target."""


def search(
    load_LE: LoadLE, slots_LRS: SlotsLRS, target_L: Floats, rules: Rules, max_moves: int | None
) -> Found:
    """Slots with which, where it can be had, no rank's load ÷ speed exceeds its layer's target.

    Args:
        slots_LRS: every expert has a slot; not changed.
        target_L: > 0 for layers with load.
    """
    out_LRS = slots_LRS.copy()
    unit_LE = load_LE / np.where(target_L > 0, target_L, 1.0)[:, None]
    search = _Search(unit_LE, slots_LRS, rules)
    moves_L = np.zeros(len(slots_LRS), dtype=np.int64)
    reached_L = np.zeros(len(slots_LRS), dtype=np.bool_)
    while True:
        layers_O, reached_O = search.close_done(out_LRS)
        reached_L[layers_O] = reached_O
        if not search.open_layers:
            return Found(out_LRS, moves_L, reached_L)
        left = np.inf if max_moves is None else max_moves - int(moves_L.sum())
        open_O = search.layer_O
        moves_L[open_O] += search.round(left)


class _Search:
    def __init__(self, unit_LE: LoadLE, slots_LRS: SlotsLRS, rules: Rules) -> None:
        self.unit_LE, self.rules = unit_LE, rules
        self.layer_O = np.arange(len(slots_LRS))
        self.residual = _settled(unit_LE, slots_LRS, None, rules.speeds_R)
        self.banned_ORS = np.zeros(slots_LRS.shape, dtype=np.bool_)
        self.careful_O = np.zeros(len(slots_LRS), dtype=np.bool_)
        self.fresh_O = np.ones(len(slots_LRS), dtype=np.bool_)
        self.given_up_O = np.zeros(len(slots_LRS), dtype=np.bool_)
        self.failures_O = np.zeros(len(slots_LRS), dtype=np.int64)

    @property
    def open_layers(self) -> int:
        return len(self.layer_O)

    def close_done(self, out_LRS: SlotsLRS) -> tuple[Ints, Flags]:
        """Takes layers out that are at the target or given up: which, and whether at the target."""
        reached_O = self.residual.stuck_L() <= 0
        done_O = reached_O | self.given_up_O
        closed = self.layer_O[done_O], reached_O[done_O]
        if not done_O.any():
            return closed
        out_LRS[self.layer_O[done_O]] = self.residual.slots_LRS[done_O]
        keep_O = ~done_O
        self.layer_O = self.layer_O[keep_O]
        self.banned_ORS, self.careful_O = self.banned_ORS[keep_O], self.careful_O[keep_O]
        self.fresh_O, self.given_up_O = self.fresh_O[keep_O], self.given_up_O[keep_O]
        self.failures_O = self.failures_O[keep_O]
        self.residual = Residual(
            self.unit_LE[self.layer_O],
            self.residual.slots_LRS[keep_O],
            self.residual.token_LRS[keep_O],
            self.rules.speeds_R,
        )
        return closed

    def round(self, max_moves: float) -> Ints:
        """Tries a change in every layer; the moves that are kept, by open layer."""
        residual, rules = self.residual, self.rules
        absorb, pressure = residual.absorb(), bottleneck.press(residual)
        offers = opening.offers(residual, absorb, rules.slots_R, rules.copies)
        bottlenecks = bottleneck.find(residual, pressure)
        single = opening.choose(residual, bottlenecks, offers, rules.copies, self.banned_ORS)
        single = self._careful(_affordable(single, max_moves))
        idle_O = ~self._named(single)
        double = opening.joined([])
        if (idle_O & self.fresh_O).any() and max_moves - len(single) >= 2:
            at_rest = bottlenecks.only((idle_O & self.fresh_O)[bottlenecks.layer_B])
            double = exchange.detours(residual, at_rest, offers, rules.copies, self.banned_ORS)
            at_rest_O = idle_O & self.fresh_O & ~self._named(double)
            if at_rest_O.any():
                swaps = exchange.swaps(residual, pressure, at_rest_O, offers, self.banned_ORS)
                double = opening.joined([double, swaps])
            double = _affordable_pairs(double, max_moves - len(single))
        self._rest(idle_O & ~self._named(double))
        found = opening.joined([single, double])
        if not len(found):
            return np.zeros(self.open_layers, dtype=np.int64)
        return self._try(found, len(single), absorb.by_rank_N)

    def _named(self, found: opening.Openings) -> Flags:
        named_O = np.zeros(self.open_layers, dtype=np.bool_)
        named_O[found.layer_M] = True
        return named_O

    def _careful(self, found: opening.Openings) -> opening.Openings:
        """One at a time in layers where several together were too much."""
        first_M = np.zeros(len(found), dtype=np.bool_)
        first_M[np.unique(found.layer_M, return_index=True)[1]] = True
        return found.only(first_M | ~self.careful_O[found.layer_M])

    def _rest(self, idle_O: Flags) -> None:
        """Layers without a change look again with tokens split afresh, then give up."""
        self.given_up_O |= idle_O & self.fresh_O
        again_O = idle_O & ~self.fresh_O
        if again_O.any():
            slots_LRS, token_LRS = self.residual.slots_LRS, self.residual.token_LRS
            fresh = _settled(
                self.residual.load_LE[again_O], slots_LRS[again_O], None, self.rules.speeds_R
            )
            token_LRS[again_O] = fresh.token_LRS
            self.residual.place(slots_LRS, token_LRS)
            self.banned_ORS[again_O] = False
            self.careful_O[again_O] = False
            self.failures_O[again_O] = 0
            self.fresh_O[again_O] = True

    def _try(self, found: opening.Openings, num_single: int, by_rank_N: Floats) -> Ints:
        """Makes the changes; layer by layer keeps them if less is stuck then. Single copies that
        serve nothing afterwards are taken back in any case."""
        residual, tried_O = self.residual, self._named(found)
        before_ORS, before_token_ORS = residual.slots_LRS, residual.token_LRS.copy()
        stuck_O = residual.stuck_L()
        after_ORS = before_ORS.copy()
        at = (found.layer_M, found.rank_M, found.slot_M)
        after_ORS[at] = found.expert_M
        residual.place(after_ORS, _handed_over(residual, after_ORS, by_rank_N))
        residual.settle()

        worse_O = tried_O & (residual.stuck_L() > stuck_O - NOTHING)
        single_M = np.arange(len(found)) < num_single
        idle_M = single_M & (residual.token_LRS[at] <= NOTHING)
        undo_ORS = np.zeros(after_ORS.shape, dtype=np.bool_)
        undo_ORS[at] = idle_M
        undo_ORS |= worse_O[:, None, None]
        self._learn(found, single_M, tried_O, worse_O)
        if undo_ORS.any():
            token_ORS = residual.token_LRS
            token_ORS[worse_O] = before_token_ORS[worse_O]
            residual.place(np.where(undo_ORS, before_ORS, after_ORS), token_ORS)
        kept_M = ~worse_O[found.layer_M] & ~idle_M
        return np.bincount(found.layer_M[kept_M], minlength=self.open_layers)

    def _learn(
        self, found: opening.Openings, single_M: Flags, tried_O: Flags, worse_O: Flags
    ) -> None:
        """What failed is not tried again until something else helped."""
        better_O = tried_O & ~worse_O
        num_O = np.bincount(found.layer_M, minlength=self.open_layers)
        alone_M = ~single_M | (num_O == 1)[found.layer_M]
        failed_M = worse_O[found.layer_M] & alone_M
        self.banned_ORS[better_O] = False
        self.banned_ORS[found.layer_M[failed_M], found.rank_M[failed_M], found.slot_M[failed_M]] = (
            True
        )
        self.failures_O += worse_O
        self.failures_O[better_O] = 0
        self.banned_ORS[self.failures_O >= MAX_FAILURES] = True
        self.fresh_O[better_O] = False
        self.careful_O |= worse_O
        self.careful_O[found.layer_M[alone_M & ~worse_O[found.layer_M]]] = False


def _settled(
    unit_LE: LoadLE, slots_LRS: SlotsLRS, token_LRS: Floats | None, speeds_R: SpeedsR
) -> Residual:
    """Tokens split evenly, then settled."""
    if token_LRS is None:
        layers = np.arange(len(slots_LRS))[:, None, None]
        token_LRS = np.where(slots_LRS >= 0, unit_LE[layers, np.maximum(slots_LRS, 0)], 0.0)
        token_LRS = token_LRS * even_fractions(slots_LRS)
    residual = Residual(unit_LE, slots_LRS, token_LRS, speeds_R)
    residual.settle()
    return residual


def _affordable(found: opening.Openings, max_moves: float) -> opening.Openings:
    """Those that bring most, if not all can be had."""
    if len(found) <= max_moves:
        return found
    order = np.argsort(-found.relief_M, kind="stable")[: int(max_moves)]
    return found.only(np.isin(np.arange(len(found)), order))


def _affordable_pairs(found: opening.Openings, max_moves: float) -> opening.Openings:
    """The first layers' exchanges, as many as can be had."""
    layers = np.unique(found.layer_M)[: int(min(max_moves, len(found)) // 2)]
    return found.only(np.isin(found.layer_M, layers))


def _handed_over(residual: Residual, after_LRS: SlotsLRS, by_rank_N: Floats) -> Floats:
    """Tokens after a change of slots: what changed slots served goes to the expert's other copies,
    by the room behind them."""
    before_LRS, token_LRS = residual.slots_LRS, residual.token_LRS.copy()
    changed = np.nonzero(before_LRS != after_LRS)
    layer_M, expert_M = changed[0], before_LRS[changed].astype(np.int64)
    size = residual.copies_F.size
    held_M = expert_M >= 0
    given_F = overflow.sum_by(
        layer_M[held_M] * residual.num_experts + expert_M[held_M],
        token_LRS[changed][held_M],
        size,
    )
    token_LRS[changed] = 0.0
    weight_S = np.full(before_LRS.size, NOTHING)
    weight_S[residual.edges.slot_N] += by_rank_N
    slot_M = np.flatnonzero(after_LRS.reshape(-1) >= 0)
    expert_M = after_LRS.reshape(-1)[slot_M].astype(np.int64)
    expert_M += slot_M // after_LRS[0].size * residual.num_experts
    taking = given_F[expert_M] > 0
    slot_M, expert_M = slot_M[taking], expert_M[taking]
    weight_M = weight_S[slot_M]
    all_F = overflow.sum_by(expert_M, weight_M, size)
    token_LRS.reshape(-1)[slot_M] += given_F[expert_M] * weight_M / all_F[expert_M]
    return token_LRS
