"""The pairs of a batch by slot: a counting sort, one pass to count and one to place.

One thread: a step has a few hundred pairs, less than a second thread's start.
Neighbour: `moe_kernels.permute` is the contract.

Letters: P pairs kept, S slots.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from moe_kernels.cpu.jit import Array, compiled, inner


def sort_by_slot(slots_TK: Tensor, num_slots: int) -> tuple[Tensor, Tensor]:
    flat = slots_TK.reshape(-1).to(torch.int64)
    order, offsets = place_pairs(flat.numpy(), num_slots)
    return torch.from_numpy(order), torch.from_numpy(offsets)


@compiled
def place_pairs(slots: Array, num_slots: int) -> tuple[Array, Array]:
    order, offsets = np.empty(slots.size, np.int64), np.empty(num_slots + 1, np.int64)
    sort_pairs(slots, order, offsets)
    return order[: offsets[-1]], offsets


@inner
def sort_pairs(slots: Array, order: Array, offsets: Array) -> None:
    """Fills all of `offsets` and as much of `order` as there are pairs with a slot."""
    num_slots = offsets.size - 1
    offsets[:] = 0
    for slot in slots:
        if 0 <= slot < num_slots:
            offsets[slot + 1] += 1
    for slot in range(num_slots):
        offsets[slot + 1] += offsets[slot]
    following = offsets[:-1].copy()
    for pair in range(slots.size):
        slot = slots[pair]
        if 0 <= slot < num_slots:
            order[following[slot]] = pair
            following[slot] += 1
