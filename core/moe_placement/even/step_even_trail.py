"""The trail of a search: what each action changed, and which part of it is worth its moves.

A search may end in a dead end or take a detour for nothing, and a budget may end earlier than the
search. The trail says for each layer how far to follow: to the target, else to the least peak, and
with a budget only as far as the moves that relieve most allow. Neighbours: `step_even_search`
leaves it, `step_even` follows it.

Shapes: L layers, T rounds of the search + 1 (0 = the start), N slots that one round changed.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from moe_api.plan import SlotsLRS

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

LEAST_GAIN = 0.005
"""Less than this share of the target is not worth a move, unless it reaches the target."""


@dataclass(eq=False)
class Trail:
    start_LRS: SlotsLRS
    peaks_TL: list[Floats] = field(default_factory=list)
    """Largest level of each layer after so many rounds; inf in layers that are done."""
    moves_TL: list[Ints] = field(default_factory=list)
    """Weights received since the start."""
    writes: list[tuple[int, Ints, Ints, Ints, Ints]] = field(default_factory=list)
    """(round, layer, rank, slot, expert) of slots, in the order they were written."""

    def followed(self, rounds_L: Ints) -> SlotsLRS:
        """The placement after so many rounds of each layer."""
        out_LRS = self.start_LRS.copy()
        for turn, layer_N, rank_N, slot_N, expert_N in self.writes:
            of_N = rounds_L[layer_N] >= turn
            out_LRS[layer_N[of_N], rank_N[of_N], slot_N[of_N]] = expert_N[of_N]
        return out_LRS

    def best(self) -> Ints:
        """Rounds to follow in each layer, int64 [L]: the first that reach the target or, where none
        does, come close to the least peak."""
        peaks_TL = np.stack(self.peaks_TL)
        least_L = peaks_TL.min(axis=0)
        enough_L = np.where(least_L <= 1.0, 1.0, least_L + LEAST_GAIN)
        return np.asarray((peaks_TL <= enough_L).argmax(axis=0))

    def within(self, max_moves: int, weight_L: Floats) -> Ints:
        """The same with at most `max_moves` moves of all layers together, spent where a move lowers
        peak × weight most."""
        best_L = self.best()
        peaks_TL, moves_TL = np.stack(self.peaks_TL), np.stack(self.moves_TL)
        if moves_TL[best_L, np.arange(len(best_L))].sum() <= max_moves:
            return best_L
        rounds_L = np.zeros(len(best_L), dtype=np.int64)
        left = max_moves
        queue: list[tuple[float, int, int]] = []

        def offer(layer: int) -> None:
            now, last = int(rounds_L[layer]), int(best_L[layer])
            gain_T = (peaks_TL[now, layer] - peaks_TL[now + 1 : last + 1, layer]) * weight_L[layer]
            cost_T = moves_TL[now + 1 : last + 1, layer] - moves_TL[now, layer]
            useful_T = (gain_T > 0) & (cost_T <= left)
            if useful_T.any():
                rate_T = np.where(useful_T, gain_T / np.maximum(cost_T, 0.5), -np.inf)
                further = int(rate_T.argmax())
                heapq.heappush(queue, (-float(rate_T[further]), layer, now + 1 + further))

        for layer in range(len(best_L)):
            offer(layer)
        while queue:
            _, layer, further = heapq.heappop(queue)
            cost = int(moves_TL[further, layer] - moves_TL[rounds_L[layer], layer])
            if cost <= left:
                left -= cost
                rounds_L[layer] = further
            offer(layer)
        return rounds_L
