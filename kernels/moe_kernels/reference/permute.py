"""The pairs of a batch by slot, with torch's stable sort.

Neighbour: `moe_kernels.permute` is the contract.

Letters: T tokens, K choices a token, P pairs kept, S slots.
"""

from __future__ import annotations

import torch
from torch import Tensor


def sort_by_slot(slots_TK: Tensor, num_slots: int) -> tuple[Tensor, Tensor]:
    flat = slots_TK.reshape(-1).to(torch.int64)
    # All strangers share one bin past the last slot, which the cut at offsets[S] removes.
    bins = torch.where((flat >= 0) & (flat < num_slots), flat, num_slots)
    order = torch.argsort(bins, stable=True)
    counts = torch.bincount(bins, minlength=num_slots + 1)
    offsets = torch.zeros(num_slots + 1, dtype=torch.int64, device=flat.device)
    torch.cumsum(counts[:num_slots], dim=0, out=offsets[1:])
    return order[: int(offsets[-1])], offsets
