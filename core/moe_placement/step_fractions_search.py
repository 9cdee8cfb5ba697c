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
from moe_placement import bottleneck, opening, overflow
from moe_placement.capacity import SlotsR, SpeedsR
from moe_placement.copy_limits import CopyLimits
from moe_placement.overflow import NOTHING
from moe_placement.residual import Residual
from moe_placement.score import LoadLE

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Rules:
    slots_R: SlotsR
    speeds_R: SpeedsR
    copies: CopyLimits


def search(
    load_LE: LoadLE, slots_LRS: SlotsLRS, target_L: Floats, rules: Rules, max_moves: int | None
) -> tuple[SlotsLRS, int]:
    """Slots with which, where it can be had, no rank's load ÷ speed exceeds its layer's target, and
    the moves made.

    Args:
        slots_LRS: every expert has a slot; not changed.
        target_L: > 0 for layers with load.
    """
    out_LRS = slots_LRS.copy()
    unit_LE = load_LE / np.where(target_L > 0, target_L, 1.0)[:, None]
    search = _Search(unit_LE, slots_LRS, rules)
    left = np.inf if max_moves is None else max_moves
    moves = 0
    while True:
        search.close_done(out_LRS)
        if not search.open_layers:
            return out_LRS, moves
        moves += search.round(left - moves)


class _Search:
    def __init__(self, unit_LE: LoadLE, slots_LRS: SlotsLRS, rules: Rules) -> None:
        self.unit_LE, self.rules = unit_LE, rules
        self.layer_O = np.arange(len(slots_LRS))
        self.residual = _settled(unit_LE, slots_LRS, None, rules.speeds_R)
        self.banned_ORS = np.zeros(slots_LRS.shape, dtype=np.bool_)
        self.careful_O = np.zeros(len(slots_LRS), dtype=np.bool_)
        self.fresh_O = np.ones(len(slots_LRS), dtype=np.bool_)
        self.given_up_O = np.zeros(len(slots_LRS), dtype=np.bool_)

    @property
    def open_layers(self) -> int:
        return len(self.layer_O)

    def close_done(self, out_LRS: SlotsLRS) -> None:
        done_O = (self.residual.stuck_L() <= 0) | self.given_up_O
        if not done_O.any():
            return
        out_LRS[self.layer_O[done_O]] = self.residual.slots_LRS[done_O]
        keep_O = ~done_O
        self.layer_O = self.layer_O[keep_O]
        self.banned_ORS, self.careful_O = self.banned_ORS[keep_O], self.careful_O[keep_O]
        self.fresh_O, self.given_up_O = self.fresh_O[keep_O], self.given_up_O[keep_O]
        self.residual = Residual(
            self.unit_LE[self.layer_O],
            self.residual.slots_LRS[keep_O],
            self.residual.token_LRS[keep_O],
            self.rules.speeds_R,
        )

    def round(self, max_moves: float) -> int:
        """Tries openings for every layer; the moves that are kept."""
        residual, rules = self.residual, self.rules
        absorb = residual.absorb()
        offers = opening.offers(residual, absorb, rules.slots_R, rules.copies)
        found = opening.choose(
            residual, bottleneck.find(residual), offers, rules.copies, self.banned_ORS
        )
        found = _affordable(found, max_moves)
        first = np.zeros(len(found), dtype=np.bool_)
        first[np.unique(found.layer_M, return_index=True)[1]] = True
        found = found.only(first | ~self.careful_O[found.layer_M])
        tried_O = np.zeros(self.open_layers, dtype=np.bool_)
        tried_O[found.layer_M] = True
        self._rest(~tried_O)
        if not len(found):
            return 0
        return self._try(found, tried_O, absorb.by_rank_N)

    def _rest(self, idle_O: Flags) -> None:
        """Layers without an opening look again with tokens split afresh, then give up."""
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
            self.fresh_O[again_O] = True

    def _try(self, found: opening.Openings, tried_O: Flags, by_rank_N: Floats) -> int:
        residual = self.residual
        before_ORS, before_token_ORS = residual.slots_LRS, residual.token_LRS.copy()
        stuck_O = residual.stuck_L()
        after_ORS = before_ORS.copy()
        at = (found.layer_M, found.rank_M, found.slot_M)
        after_ORS[at] = found.expert_M
        token_ORS = _handed_over(residual, after_ORS, by_rank_N)
        residual.place(after_ORS, token_ORS)
        residual.settle()

        worse_O = tried_O & (residual.stuck_L() > stuck_O - NOTHING)
        idle_M = residual.token_LRS[at] <= NOTHING
        kept_M = ~worse_O[found.layer_M] & ~idle_M
        undo_ORS = np.zeros(after_ORS.shape, dtype=np.bool_)
        undo_ORS[at] = idle_M
        undo_ORS |= worse_O[:, None, None]
        alone_M = np.bincount(found.layer_M, minlength=self.open_layers)[found.layer_M] == 1
        failed_M = worse_O[found.layer_M] & alone_M
        self.banned_ORS[tuple(index[failed_M] for index in at)] = True
        better_O = tried_O & ~worse_O
        self.banned_ORS[better_O] = False
        self.fresh_O[better_O] = False
        self.careful_O |= worse_O
        self.careful_O[found.layer_M[alone_M & kept_M]] = False
        if undo_ORS.any():
            token_ORS = residual.token_LRS
            token_ORS[worse_O] = before_token_ORS[worse_O]
            residual.place(np.where(undo_ORS, before_ORS, after_ORS), token_ORS)
        return int(kept_M.sum())


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
