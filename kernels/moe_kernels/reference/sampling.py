"""Draws from sorted weights in numpy, row by row.

Neighbour: `moe_kernels.sampling` is the contract, and has the arithmetic that is shared.

Letters: B sequences, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from moe_kernels.sampling import (
    ONE,
    Cut,
    NonFiniteLogits,
    Row,
    as_rows,
    exponential,
    place,
    share,
    steepness,
    uniform,
    unusable_rows,
)


def sample(
    logits_BV: Tensor, cuts_B: Sequence[Cut], seeds_B: Sequence[int], positions_B: Sequence[int]
) -> list[int]:
    logits = as_rows(logits_BV)
    unusable = unusable_rows(logits)
    if unusable:
        raise NonFiniteLogits(unusable)
    tokens: list[int] = logits.argmax(axis=1).tolist()
    for row, cut in enumerate(cuts_B):
        if cut.temperature > 0.0:
            tokens[row] = _draw(logits[row], cut, uniform(seeds_B[row], positions_B[row]))
    return tokens


def _draw(logits_V: Row, cut: Cut, u: float) -> int:
    with np.errstate(over="ignore"):  # a distance may be infinite: its weight is 0
        distances_V = (logits_V.max() - logits_V) * steepness(cut.temperature)
    weights_V = (exponential(-distances_V) * np.float32(ONE)).astype(np.int64)
    kept = np.argsort(distances_V, kind="stable")[: cut.top_k or None]
    if cut.top_p < 1.0:
        sums = np.cumsum(weights_V[kept])
        kept = kept[: np.searchsorted(sums, share(cut.top_p, int(sums[-1])), side="left") + 1]
    kept = np.sort(kept)
    kept = kept[weights_V[kept] >= share(cut.min_p, ONE)]
    sums = np.cumsum(weights_V[kept])
    return int(kept[np.searchsorted(sums, place(u, int(sums[-1])), side="right")])
