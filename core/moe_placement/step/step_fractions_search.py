"""The rounds of `step_fractions`: open the bottlenecks of all layers until none is left.

A round finds what is stuck, gives it outlets, lets the tokens settle and keeps, layer by layer,
what helped. A layer in which nothing helps any more is looked at afresh, then tries pairs of
transfers, then takes a few steps at any price (kicks) in the hope that the way goes on; it ends
with the best it had. Every layer is searched for itself: neither the others nor their number
change what it gets, unless they share a budget. Neighbours: `bottleneck`, `opening`, `exchange`
(what is tried), `residual` (what it brings).

Shapes: L layers, E logical experts, R ranks, S physical slots a rank; of the layers still open: O;
M changed slots.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from moe_api.plan import SlotsLRS
from moe_placement.capacity import SlotsR, SpeedsR
from moe_placement.copy_limits import CopyLimits
from moe_placement.score import LoadLE
from moe_placement.step import bottleneck, exchange, opening
from moe_placement.step.opening import Openings, joined
from moe_placement.step.overflow import NOTHING
from moe_placement.step.residual import Residual

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

MAX_FAILURES = 12
"""Changes that fail in a layer, one after another, before others are not tried either."""
MAX_KICKS = 6
"""Steps at any price, one after another, without getting better than before the first."""


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
    """Slots with which, where it can be had, no rank's load ÷ speed exceeds its layer's target; of
    layers where it can't, those with the least beyond it.

    Args:
        slots_LRS: every expert has a slot; not changed.
        target_L: > 0 for layers with load.
    """
    num_layers = len(slots_LRS)
    found = Found(
        slots_LRS.copy(), np.zeros(num_layers, dtype=np.int64), np.zeros(num_layers, dtype=np.bool_)
    )
    unit_LE = load_LE / np.where(target_L > 0, target_L, 1.0)[:, None]
    search = _Search(unit_LE, slots_LRS, rules)
    while search.close(found):
        spent = int(found.moves_L.sum() + search.memory.moves_O.sum())
        search.round(np.inf if max_moves is None else max_moves - spent)
    return found


@dataclass(eq=False)
class _Memory:
    """What is known of each open layer besides its placement."""

    layer_O: Ints
    banned_ORS: Flags
    """Slots that are left alone until the layer has got better."""
    allowed_O: Ints
    """Changes at a time: fewer when several together were too much."""
    fresh_O: Flags
    """Nothing has changed since tokens were split afresh."""
    given_up_O: Flags
    failures_O: Ints
    kicks_O: Ints
    moves_O: Ints
    best_stuck_O: Floats
    best_moves_O: Ints
    best_ORS: SlotsLRS

    @classmethod
    def of(cls, residual: Residual) -> _Memory:
        num_layers = residual.num_layers
        none, no = np.zeros(num_layers, dtype=np.int64), np.zeros(num_layers, dtype=np.bool_)
        return cls(
            layer_O=np.arange(num_layers),
            banned_ORS=np.zeros(residual.slots_LRS.shape, dtype=np.bool_),
            allowed_O=np.full(num_layers, opening.MAX_TURNS),
            fresh_O=~no,
            given_up_O=no,
            failures_O=none,
            kicks_O=none.copy(),
            moves_O=none.copy(),
            best_stuck_O=residual.stuck_L(),
            best_moves_O=none.copy(),
            best_ORS=residual.slots_LRS,
        )

    def only(self, keep_O: Flags) -> _Memory:
        return _Memory(**{f.name: getattr(self, f.name)[keep_O] for f in fields(self)})


class _Search:
    def __init__(self, unit_LE: LoadLE, slots_LRS: SlotsLRS, rules: Rules) -> None:
        self.rules = rules
        self.residual = Residual.even(unit_LE, slots_LRS, rules.speeds_R)
        self.memory = _Memory.of(self.residual)

    def close(self, found: Found) -> bool:
        """Takes out layers that are at the target or given up; whether any is left."""
        memory, residual = self.memory, self.residual
        reached_O = residual.stuck_L() <= 0
        done_O = reached_O | memory.given_up_O
        if done_O.any():
            layers, reached = memory.layer_O[done_O], reached_O[done_O]
            slots_ORS, best_ORS = residual.slots_LRS[done_O], memory.best_ORS[done_O]
            found.slots_LRS[layers] = np.where(reached[:, None, None], slots_ORS, best_ORS)
            found.moves_L[layers] = np.where(
                reached, memory.moves_O[done_O], memory.best_moves_O[done_O]
            )
            found.reached_L[layers] = reached
            self.memory = memory.only(~done_O)
            self.residual = Residual(
                residual.load_LE[~done_O],
                residual.slots_LRS[~done_O],
                residual.token_LRS[~done_O],
                self.rules.speeds_R,
            )
        return len(self.memory.layer_O) > 0

    def round(self, max_moves: float) -> None:
        """Changes something in every layer, or ends it."""
        residual, memory, rules = self.residual, self.memory, self.rules
        absorb, pressure = residual.absorb(), bottleneck.press(residual)
        offers = opening.offers(residual, absorb, rules.slots_R, rules.copies)
        bottlenecks = bottleneck.find(residual, pressure)
        single = opening.choose(residual, bottlenecks, offers, rules.copies, memory.banned_ORS)
        single = _affordable(self._careful(single), max_moves)
        double = kicks = joined([])
        rest_O = ~self._named(single) & memory.fresh_O
        if rest_O.any() and max_moves - len(single) >= 2:
            there = bottlenecks.only(rest_O[bottlenecks.layer_B])
            double = exchange.detours(residual, there, offers, rules.copies, memory.banned_ORS)
            rest_O &= ~self._named(double)
            swaps = exchange.swaps(residual, pressure, rest_O, offers, memory.banned_ORS)
            double = _affordable_pairs(joined([double, swaps]), max_moves - len(single))
            rest_O &= ~self._named(double) & (memory.kicks_O < MAX_KICKS)
        if rest_O.any() and max_moves - len(single) - len(double) >= 2 * rest_O.sum():
            there = bottlenecks.only(rest_O[bottlenecks.layer_B])
            kicks = opening.choose(
                residual, there, offers, rules.copies, memory.banned_ORS, at_any_price=True
            )
            rest_O &= ~self._named(kicks)
            swaps = exchange.swaps(
                residual, pressure, rest_O, offers, memory.banned_ORS, at_any_price=True
            )
            kicks = joined([kicks, swaps])
        idle_O = ~self._named(joined([single, double, kicks]))
        memory.given_up_O |= idle_O & memory.fresh_O
        self._refresh(idle_O & ~memory.fresh_O)
        if not idle_O.all():
            self._try(single, double, kicks, absorb.by_rank_N)

    def _named(self, found: Openings) -> Flags:
        named_O = np.zeros(len(self.memory.layer_O), dtype=np.bool_)
        named_O[found.layer_M] = True
        return named_O

    def _careful(self, found: Openings) -> Openings:
        """The first of each layer, as many as allowed."""
        order_M = np.argsort(found.layer_M, kind="stable")
        start_M = np.searchsorted(found.layer_M[order_M], found.layer_M[order_M])
        nth_M = np.empty(len(found), dtype=np.int64)
        nth_M[order_M] = np.arange(len(found)) - start_M
        return found.only(nth_M < self.memory.allowed_O[found.layer_M])

    def _refresh(self, again_O: Flags) -> None:
        """Splits tokens afresh, so that the end does not depend on the way there."""
        if not again_O.any():
            return
        residual, memory = self.residual, self.memory
        slots_ORS, token_ORS = residual.slots_LRS, residual.token_LRS
        load_OE = residual.load_LE[again_O]
        fresh = Residual.even(load_OE, slots_ORS[again_O], self.rules.speeds_R)
        token_ORS[again_O] = fresh.token_LRS
        residual.place(slots_ORS, token_ORS)
        memory.banned_ORS[again_O & (memory.kicks_O == 0)] = False
        memory.allowed_O[again_O], memory.failures_O[again_O] = opening.MAX_TURNS, 0
        memory.fresh_O[again_O] = True

    def _try(self, single: Openings, double: Openings, kicks: Openings, by_rank_N: Floats) -> None:
        """Makes the changes; layer by layer keeps them if less is stuck then, and kicks in any
        case. Single copies that serve nothing afterwards are taken back."""
        residual, memory, found = self.residual, self.memory, joined([single, double, kicks])
        tried_O, kicked_O = self._named(found), self._named(kicks)
        before_ORS, before_token_ORS = residual.slots_LRS, residual.token_LRS.copy()
        stuck_O = residual.stuck_L()
        at = (found.layer_M, found.rank_M, found.slot_M)
        after_ORS = before_ORS.copy()
        after_ORS[at] = found.expert_M
        residual.change(after_ORS, by_rank_N)
        residual.settle()

        worse_O = tried_O & ~kicked_O & (residual.stuck_L() > stuck_O - NOTHING)
        idle_M = (np.arange(len(found)) < len(single)) & (residual.token_LRS[at] <= NOTHING)
        undo_ORS = np.zeros(after_ORS.shape, dtype=np.bool_)
        undo_ORS[at] = idle_M
        undo_ORS |= worse_O[:, None, None]
        if undo_ORS.any():
            token_ORS = residual.token_LRS
            token_ORS[worse_O] = before_token_ORS[worse_O]
            residual.place(np.where(undo_ORS, before_ORS, after_ORS), token_ORS)
        kept_M = ~worse_O[found.layer_M] & ~idle_M
        memory.moves_O += np.bincount(found.layer_M[kept_M], minlength=len(tried_O))
        memory.kicks_O += kicked_O
        memory.fresh_O &= ~tried_O | worse_O
        self._ban(found, len(single), worse_O, kicked_O)
        self._record(tried_O & ~worse_O)

    def _ban(self, found: Openings, num_single: int, worse_O: Flags, kicked_O: Flags) -> None:
        """What failed is left alone, and so is what was kicked."""
        memory = self.memory
        num_O = np.bincount(found.layer_M, minlength=len(worse_O))
        alone_M = (np.arange(len(found)) >= num_single) | (num_O[found.layer_M] == 1)
        out_M = (worse_O[found.layer_M] & alone_M) | kicked_O[found.layer_M]
        memory.banned_ORS[found.layer_M[out_M], found.rank_M[out_M], found.slot_M[out_M]] = True
        memory.failures_O = np.where(worse_O, memory.failures_O + 1, 0)
        memory.banned_ORS[memory.failures_O >= MAX_FAILURES] = True
        fewer_O = np.maximum(1, np.minimum(memory.allowed_O, num_O) // 4)
        more_O = np.minimum(2 * memory.allowed_O, opening.MAX_TURNS)
        memory.allowed_O = np.where(worse_O, fewer_O, np.where(num_O > 0, more_O, memory.allowed_O))

    def _record(self, changed_O: Flags) -> None:
        """Layers that are better than ever before may try everything again."""
        memory, stuck_O = self.memory, self.residual.stuck_L()
        better_O = changed_O & (stuck_O < memory.best_stuck_O - NOTHING)
        memory.best_stuck_O = np.where(better_O, stuck_O, memory.best_stuck_O)
        memory.best_moves_O = np.where(better_O, memory.moves_O, memory.best_moves_O)
        memory.best_ORS = np.where(
            better_O[:, None, None], self.residual.slots_LRS, memory.best_ORS
        )
        memory.kicks_O[better_O] = 0
        memory.banned_ORS[better_O] = False


def _affordable(found: Openings, max_moves: float) -> Openings:
    """Those that bring most, if not all can be had."""
    if len(found) <= max_moves:
        return found
    order = np.argsort(-found.relief_M, kind="stable")[: int(max_moves)]
    return found.only(np.isin(np.arange(len(found)), order))


def _affordable_pairs(found: Openings, max_moves: float) -> Openings:
    """The first layers' exchanges, as many as can be had."""
    layers = np.unique(found.layer_M)[: int(min(max_moves, len(found)) // 2)]
    return found.only(np.isin(found.layer_M, layers))
