"""Group the (token, choice) pairs of a batch by the slot that serves them.

Neighbours: `grouped_gemm` consumes the groups; the dispatcher sends the rows of each group.

Letters: T tokens, K choices a token, P pairs kept, S slots.
"""

from __future__ import annotations

import torch
from torch import Tensor


def sort_by_slot(slots_TK: Tensor, num_slots: int) -> tuple[Tensor, Tensor]:
    """Stable counting order of the flat pairs: (order [P] int64, offsets [S+1] int64).

    `order[offsets[s]:offsets[s+1]]` are the flat indices token·K + choice of the pairs in slot s,
    in ascending order. −1 ("not here") and every id outside 0 ≤ id < S is left out, so P may be
    less than T·K; the caller counts them where they are a fault.
    """
    flat = slots_TK.reshape(-1).to(torch.int64)
    # All strangers share one bin past the last slot, which the cut at offsets[S] removes.
    bins = torch.where((flat >= 0) & (flat < num_slots), flat, num_slots)
    order = torch.argsort(bins, stable=True)
    counts = torch.bincount(bins, minlength=num_slots + 1)
    offsets = torch.zeros(num_slots + 1, dtype=torch.int64, device=flat.device)
    torch.cumsum(counts[:num_slots], dim=0, out=offsets[1:])
    return order[: int(offsets[-1])], offsets
