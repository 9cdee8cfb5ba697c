"""Forecast: which experts the next tokens choose, from those of the past. Per layer and expert.

Two averages: a slow one, steady because it counts many tokens, and a fast one. While the load stays
the same the slow one is the forecast. When the split in force fits the newest tokens much worse
than it should by the forecast, the layer's load has changed: both averages begin again with them.

Neighbours: `window` feeds it with counters, `replay` with recorded windows.

Shapes: L MoE layers, E logical experts, R ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt

from moe_placement.placement import Placement
from moe_placement.score import LoadLE, rank_loads

FAST_WINDOWS, SLOW_WINDOWS = 1.5, 10.0
"""Age at which a token counts 1/e."""
CHANGE_FACTOR = 3.0
"""A change is a largest rank load this many times √(R/T) over its forecast, in units of the mean:
T assignments on R equally loaded ranks make about 1.8 to 2.2 of that by chance."""


@dataclass(frozen=True, eq=False)
class Forecast:
    fast_LE: LoadLE
    slow_LE: LoadLE
    """Tokens, older ones counted less."""

    @classmethod
    def begin(cls, counts_LE: LoadLE) -> Self:
        return cls(counts_LE.copy(), counts_LE.copy())

    def after(
        self, counts_LE: LoadLE, windows: float, in_force: Placement | None = None
    ) -> Forecast:
        """The forecast once `counts_LE` more tokens were counted in so many windows' time.

        Args:
            in_force: what they were served by; absent = changes are not looked for.
        """
        fast_LE = self.fast_LE * np.exp(-windows / FAST_WINDOWS) + counts_LE
        slow_LE = self.slow_LE * np.exp(-windows / SLOW_WINDOWS) + counts_LE
        if in_force is not None:
            changed_L1 = self.changed(counts_LE, in_force)[:, None]
            fast_LE = np.where(changed_L1, counts_LE, fast_LE)
            slow_LE = np.where(changed_L1, counts_LE, slow_LE)
        return Forecast(fast_LE, slow_LE)

    def changed(self, counts_LE: LoadLE, in_force: Placement) -> npt.NDArray[np.bool_]:
        """Layers [L] whose newest tokens this forecast does not explain."""
        num_ranks = in_force.slots_LRS.shape[1]
        tokens_L = counts_LE.sum(axis=1)
        counted_L = (tokens_L > 0) & (self.slow_LE.sum(axis=1) > 0)
        excess_L = _peaks(in_force, counts_LE) - _peaks(in_force, self.slow_LE)
        chance_L = CHANGE_FACTOR * np.sqrt(num_ranks / np.where(counted_L, tokens_L, 1.0))
        return np.asarray(counted_L & (excess_L > chance_L))

    def shares_LE(self, steady: bool) -> LoadLE:
        """Part of a layer's tokens that choose each expert; 0 in a layer without tokens.

        Args:
            steady: from the slow average, where changes were looked for all the time.
        """
        tokens_LE = self.slow_LE if steady else self.fast_LE
        total_L1 = tokens_LE.sum(axis=1, keepdims=True)
        return np.asarray(tokens_LE / np.where(total_L1 > 0, total_L1, 1.0))


def _peaks(placement: Placement, load_LE: LoadLE) -> npt.NDArray[np.float64]:
    """Largest rank load of each layer in units of the mean; 0 without load."""
    loads_LR = rank_loads(placement.slots_LRS, placement.fractions_LRS, load_LE)
    mean_L = loads_LR.mean(axis=1)
    return np.asarray(loads_LR.max(axis=1) / np.where(mean_L > 0, mean_L, 1.0))
