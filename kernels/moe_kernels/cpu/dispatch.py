"""Rows in transit: one pass over the choices each, copying rows as it meets them.

One thread: rows move at the speed of memory, and a step has a few hundred of them.
Neighbours: `moe_kernels.dispatch` is the contract and says what a bin looks like; `grouped_gemm`
takes the rows as `unpack_rows` leaves them.

Letters: t tokens, K choices, P pairs, H hidden, R ranks, S slots, Q sources, N rows that came back;
BI and BW: bins as int32 and as stored numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from moe_kernels.bins import Bins, ForeignSlot, Unpacked
from moe_kernels.cpu.arrays import float32_array, stored_array
from moe_kernels.cpu.jit import Array, compiled
from moe_kernels.cpu.product import narrow_row, widen_row


def pack(
    bins: Bins, x_tH: Tensor, physical_tK: Tensor, slots_per_rank: int, bin_R: Sequence[int]
) -> tuple[list[int], list[int]]:
    header_BI, room_BW = arrays_of(bins)
    counts_2R = np.zeros((2, len(bin_R)), np.int64)
    pack_rows(
        float32_array(x_tH),
        physical_tK.contiguous().numpy(),
        slots_per_rank,
        np.array(bin_R, np.int64),
        header_BI,
        room_BW,
        first_row(bins, len(x_tH)),
        counts_2R,
    )
    rows_R, pairs_R = counts_2R.tolist()
    return rows_R, pairs_R


def unpack(bins: Bins, sources: Sequence[tuple[int, int]], num_slots: int) -> Unpacked:
    header_BI, room_BW = arrays_of(bins)
    layout = bins.layout
    rows_PH, offsets, row_P, pairs_Q, is_valid = unpack_rows(
        header_BI, room_BW, source_lines(bins, sources), layout.top_k, layout.hidden, num_slots
    )
    if not is_valid:
        raise ForeignSlot(num_slots)
    return Unpacked(
        torch.from_numpy(rows_PH),
        torch.from_numpy(offsets),
        torch.from_numpy(row_P),
        tuple(pairs_Q.tolist()),
    )


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
    assert out_tH.is_contiguous(), "rows that are written in place"
    add_rows(
        out_tH.numpy(),
        physical_tK.contiguous().numpy(),
        float32_array(weights_tK),
        slots_per_rank,
        own_rank,
        float32_array(own_PH),
        own_row_P.contiguous().numpy(),
        float32_array(back_NH),
        np.array(first_R, np.int64),
    )


@compiled
def pack_rows(
    x_tH: Array,
    physical_tK: Array,
    slots_per_rank: int,
    bin_R: Array,
    header_BI: Array,
    room_BW: Array,
    first: int,
    counts_2R: Array,
) -> None:
    """`x_tH` float32; `first`: see `first_row`. Adds rows and pairs to `counts_2R`."""
    num_tokens, top_k = physical_tK.shape
    hidden, num_ranks = x_tH.shape[1], bin_R.size
    rows_R, pairs_R = counts_2R[0], counts_2R[1]
    newest_R = np.full(num_ranks, -1, np.int64)
    for rank in range(num_ranks):
        header_BI[bin_R[rank], : num_tokens * top_k] = -1
    for token in range(num_tokens):
        for choice in range(top_k):
            physical = physical_tK[token, choice]
            if physical < 0 or physical >= num_ranks * slots_per_rank:
                continue
            rank = physical // slots_per_rank
            number = bin_R[rank]
            header_BI[number, token * top_k + choice] = physical - rank * slots_per_rank
            pairs_R[rank] += 1
            if newest_R[rank] != token:
                newest_R[rank] = token
                start = first + rows_R[rank] * hidden
                narrow_row(x_tH[token], room_BW[number, start : start + hidden])
                rows_R[rank] += 1


@compiled
def unpack_rows(
    header_BI: Array,
    room_BW: Array,
    bin_tokens_first_Q3: Array,
    top_k: int,
    hidden: int,
    num_slots: int,
) -> tuple[Array, Array, Array, Array, bool]:
    """Two passes over the headers: count, then place. False: a slot past the last."""
    num_sources = bin_tokens_first_Q3.shape[0]
    offsets = np.zeros(num_slots + 1, np.int64)
    pairs_Q = np.zeros(num_sources, np.int64)
    is_valid = True
    for source in range(num_sources):
        header = header_BI[bin_tokens_first_Q3[source, 0]]
        for pair in range(bin_tokens_first_Q3[source, 1] * top_k):
            slot = header[pair]
            if slot >= num_slots:
                is_valid = False
            elif slot >= 0:
                offsets[slot + 1] += 1
                pairs_Q[source] += 1
    for slot in range(num_slots):
        offsets[slot + 1] += offsets[slot]
    rows_PH = np.empty((offsets[-1], hidden), np.float32)
    row_P = np.empty(offsets[-1], np.int64)
    if is_valid:
        following = offsets[:-1].copy()
        done = 0
        for source in range(num_sources):
            number = bin_tokens_first_Q3[source, 0]
            # Where the row of the next token begins, if it has one.
            start = bin_tokens_first_Q3[source, 2]
            for token in range(bin_tokens_first_Q3[source, 1]):
                has_row = False
                for pair in range(token * top_k, (token + 1) * top_k):
                    slot = header_BI[number, pair]
                    if slot >= 0:
                        row = following[slot]
                        following[slot] += 1
                        row_P[done] = row
                        done += 1
                        has_row = True
                        widen_row(room_BW[number, start : start + hidden], rows_PH[row])
                if has_row:
                    start += hidden
    return rows_PH, offsets, row_P, pairs_Q, is_valid


@compiled
def add_rows(
    out_tH: Array,
    physical_tK: Array,
    weights_tK: Array,
    slots_per_rank: int,
    own_rank: int,
    own_PH: Array,
    own_row_P: Array,
    back_NH: Array,
    first_R: Array,
) -> None:
    num_tokens, top_k = physical_tK.shape
    next_R = first_R.copy()
    next_own = 0
    out_tH[:] = 0.0
    for token in range(num_tokens):
        for choice in range(top_k):
            physical = physical_tK[token, choice]
            if physical < 0 or physical >= first_R.size * slots_per_rank:
                continue
            rank = physical // slots_per_rank
            weight = weights_tK[token, choice]
            if rank == own_rank:
                _add_row(weight, own_PH[own_row_P[next_own]], out_tH[token])
                next_own += 1
            else:
                _add_row(weight, back_NH[next_R[rank]], out_tH[token])
                next_R[rank] += 1


@compiled
def _add_row(weight: np.float32, row: Array, total: Array) -> None:
    for column in range(total.size):
        total[column] += weight * row[column]


def arrays_of(bins: Bins) -> tuple[Array, Array]:
    """The same memory as int32 and as stored numbers, made once."""
    return bins.derived.get("cpu", partial(_arrays, bins))


def source_lines(bins: Bins, sources: Sequence[tuple[int, int]]) -> Array:
    """Bin, tokens and where rows begin of each source, as `unpack_rows` takes them."""
    lines = [(number, tokens, first_row(bins, tokens)) for number, tokens in sources]
    return np.array(lines, np.int64).reshape(-1, 3)


def first_row(bins: Bins, num_tokens: int) -> int:
    """Where the rows of so many tokens begin in a bin, in stored numbers."""
    return bins.layout.header_bytes(num_tokens) // bins.layout.dtype.itemsize


def _arrays(bins: Bins) -> tuple[Array, Array]:
    header_BI: Array = bins.memory.view(torch.int32).numpy()
    return header_BI, stored_array(bins.memory.view(bins.layout.dtype))
