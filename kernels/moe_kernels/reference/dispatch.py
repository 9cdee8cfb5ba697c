"""Rows in transit with the library's indexing, rank by rank.

Neighbour: `moe_kernels.dispatch` is the contract.

Letters: t tokens, K choices, P pairs, H hidden, R ranks, N rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moe_kernels.bins import Bins, ForeignSlot, Unpacked
from moe_kernels.reference.permute import sort_by_slot


def pack(
    bins: Bins, x_tH: Tensor, physical_tK: Tensor, slots_per_rank: int, bin_R: Sequence[int]
) -> tuple[list[int], list[int]]:
    stored_tH = x_tH.to(bins.layout.dtype)
    rows_R, pairs_R = [], []
    for rank, number in enumerate(bin_R):
        at_tK = _rank_of(physical_tK, slots_per_rank) == rank
        slots_tK, room_tH = _parts(bins, number, len(x_tH))
        slots_tK.copy_(torch.where(at_tK, physical_tK % slots_per_rank, -1))
        rows_NH = stored_tH[at_tK.any(dim=1)]
        room_tH[: len(rows_NH)] = rows_NH
        rows_R.append(len(rows_NH))
        pairs_R.append(int(at_tK.sum()))
    return rows_R, pairs_R


def unpack(bins: Bins, sources: Sequence[tuple[int, int]], num_slots: int) -> Unpacked:
    layout, device = bins.layout, bins.memory.device
    rows = [torch.empty((0, layout.hidden), device=device)]
    slots = [torch.empty(0, dtype=torch.int64, device=device)]
    for number, num_tokens in sources:
        slots_tK, room_tH = _parts(bins, number, num_tokens)
        here_tK = slots_tK >= 0
        # Of each token with a row the row's number, of each pair then the row of its token.
        row_t = here_tK.any(dim=1).cumsum(dim=0) - 1
        row_P = row_t[:, None].expand_as(here_tK)[here_tK]
        rows.append(room_tH[row_P].to(torch.float32))
        slots.append(slots_tK[here_tK].to(torch.int64))
    slot_P = torch.cat(slots)
    order_P, offsets = sort_by_slot(slot_P, num_slots)
    if len(order_P) < len(slot_P):
        raise ForeignSlot(num_slots)
    pairs_Q = tuple(len(slot_p) for slot_p in slots[1:])
    return Unpacked(torch.cat(rows)[order_P], offsets, torch.argsort(order_P), pairs_Q)


def add_up(
    out_tH: Tensor,
    physical_tK: Tensor,
    weights_tK: Tensor,
    slots_per_rank: int,
    own_rank: int,
    own_PH: Tensor,
    own_row_P: Tensor,
    back_NH: Tensor,
    first_R: Sequence[int],
) -> None:
    rank_P = _rank_of(physical_tK, slots_per_rank).view(-1)
    y_PH = out_tH.new_zeros((rank_P.numel(), out_tH.shape[1]))
    for rank, first in enumerate(first_R):
        pairs = (rank_P == rank).nonzero().view(-1)
        came = own_PH[own_row_P] if rank == own_rank else back_NH[first : first + len(pairs)]
        y_PH[pairs] = came
    y_tKH = y_PH.view(*physical_tK.shape, out_tH.shape[1]) * weights_tK[:, :, None]
    # What goes nowhere adds nothing, whatever its weight is.
    nowhere_tK = (rank_P < 0) | (rank_P >= len(first_R))
    y_tKH[nowhere_tK.view(physical_tK.shape)] = 0.0
    out_tH.zero_()
    for y_tH in y_tKH.unbind(1):
        out_tH += y_tH


def _rank_of(physical_tK: Tensor, slots_per_rank: int) -> Tensor:
    # Rounded down, so that −1 is on rank −1.
    return torch.div(physical_tK, slots_per_rank, rounding_mode="floor")


def _parts(bins: Bins, number: int, num_tokens: int) -> tuple[Tensor, Tensor]:
    """(slots [t, K] int32, room for t rows of the stored dtype) of a bin."""
    layout = bins.layout
    header, rows = layout.header_bytes(num_tokens), num_tokens * layout.row_bytes
    memory = bins.memory[number]
    slots = memory[: num_tokens * layout.top_k * 4].view(torch.int32)
    room = memory[header : header + rows].view(layout.dtype)
    return slots.view(num_tokens, layout.top_k), room.view(num_tokens, layout.hidden)
