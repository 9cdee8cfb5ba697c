"""Group the (token, choice) pairs of a batch by the slot that serves them.

Neighbours: `grouped_gemm` consumes the groups; the dispatcher sends the rows of each group.

Letters: T tokens, K choices a token, P pairs kept, S slots.
"""

from __future__ import annotations

from torch import Tensor

from moe_kernels.implementation import implemented
from moe_kernels.reference import permute as reference


@implemented
def sort_by_slot(slots_TK: Tensor, num_slots: int) -> tuple[Tensor, Tensor]:
    """Stable counting order of the flat pairs: (order [P] int64, offsets [S+1] int64).

    `order[offsets[s]:offsets[s+1]]` are the flat indices token·K + choice of the pairs in slot s,
    in ascending order. −1 ("not here") and every id outside 0 ≤ id < S is left out, so P may be
    less than T·K; the caller counts them where they are a fault.
    """
    return reference.sort_by_slot(slots_TK, num_slots)
