"""The pairs of a batch by slot: a stable counting sort in two passes over blocks of PAIRS pairs.

    count: how many pairs of each slot a block has, int32 [blocks, S]
    place: a pair goes to its slot's offset + those of the slot in earlier blocks + those before it
           in its own block, found by comparing the block's pairs with each other
The sums over blocks and slots between the passes are torch's. Counting adds whole numbers, so the
order in which programs come does not matter. The caller's contract cuts the order to the pairs that
were kept: that one number is copied to the host.
Neighbour: `moe_kernels.permute` is the contract.

Letters: T tokens, K choices a token, P pairs, S slots, B blocks.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from moe_kernels.gpu.jit import SAFE, blocks, compiled_for_any

PAIRS = 64


def sort_by_slot(slots_TK: Tensor, num_slots: int) -> tuple[Tensor, Tensor]:
    flat = slots_TK.reshape(-1).to(torch.int64).contiguous()
    num_pairs, device = flat.numel(), flat.device
    num_blocks = blocks(num_pairs, PAIRS)
    counts_BS = torch.zeros((num_blocks, num_slots), dtype=torch.int32, device=device)
    offsets = torch.zeros(num_slots + 1, dtype=torch.int64, device=device)
    order = torch.empty(num_pairs, dtype=torch.int64, device=device)
    if not num_pairs:
        return order, offsets
    count_pairs[(num_blocks,)](flat, counts_BS, num_pairs, num_slots, PAIRS=PAIRS, **SAFE)
    until_BS = counts_BS.cumsum(0, dtype=torch.int64)
    torch.cumsum(until_BS[-1], 0, out=offsets[1:])
    begin_BS = until_BS - counts_BS + offsets[:-1]
    place_pairs[(num_blocks,)](flat, begin_BS, order, num_pairs, num_slots, PAIRS=PAIRS, **SAFE)
    return order[: int(offsets[-1])], offsets


@compiled_for_any("num_pairs", "num_slots")
def count_pairs(
    slots: tl.tensor,
    counts_BS: tl.tensor,
    num_pairs: tl.tensor,
    num_slots: tl.tensor,
    PAIRS: tl.constexpr,
) -> None:
    block = tl.program_id(0)
    pair = block * PAIRS + tl.arange(0, PAIRS)
    slot = tl.load(slots + pair, mask=pair < num_pairs, other=-1)
    is_kept = (slot >= 0) & (slot < num_slots)
    tl.atomic_add(counts_BS + block * num_slots + slot, 1, mask=is_kept, sem="relaxed")


@compiled_for_any("num_pairs", "num_slots")
def place_pairs(
    slots: tl.tensor,
    begin_BS: tl.tensor,
    order: tl.tensor,
    num_pairs: tl.tensor,
    num_slots: tl.tensor,
    PAIRS: tl.constexpr,
) -> None:
    block = tl.program_id(0)
    place = tl.arange(0, PAIRS)
    pair = block * PAIRS + place
    slot = tl.load(slots + pair, mask=pair < num_pairs, other=-1)
    others = tl.load(slots + block * PAIRS + place, mask=pair < num_pairs, other=-1)
    is_before = (others[None, :] == slot[:, None]) & (place[None, :] < place[:, None])
    before = tl.sum(is_before.to(tl.int32), 1)
    is_kept = (slot >= 0) & (slot < num_slots)
    begin = tl.load(begin_BS + block * num_slots + slot, mask=is_kept, other=0)
    tl.store(order + begin + before, pair.to(tl.int64), mask=is_kept)
