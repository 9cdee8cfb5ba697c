"""The experts of one layer by the library: a slot's rows are padded to whole tiles of their own.

Neighbours: `moe_kernels.grouped_gemm` is the contract; `linear` explains the tiles.

Letters: P rows, S slots, H hidden, I expert intermediate, Q rows padded to whole tiles per slot.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from moe_kernels.activation import SILU, Activation
from moe_kernels.reference.activation import gated
from moe_kernels.reference.linear import TILE_ROWS, multiply_tiles, num_tiles, rounded_rows


def expert_mlp(
    rows_PH: Tensor,
    offsets: Tensor,
    w13_S2IH: Tensor,
    w2_SHI: Tensor,
    *,
    act: Activation = SILU,
    b13_S2I: Tensor | None = None,
    b2_SH: Tensor | None = None,
) -> Tensor:
    num_rows, hidden = rows_PH.shape
    dtype = w13_S2IH.dtype
    groups, place_P, num_padded = _tile_groups(offsets)
    y_PH = rows_PH.new_zeros((num_rows, hidden))
    if not groups:
        return y_PH

    num_owned = place_P.shape[0]
    x_QH = rows_PH.new_zeros((num_padded, hidden))
    x_QH[place_P] = rounded_rows(rows_PH[:num_owned], num_owned, dtype)
    both_Q2I = _per_slot(x_QH, groups, w13_S2IH)
    _add_biases(both_Q2I, groups, b13_S2I)
    inner_QI = gated(both_Q2I, act)
    y_QH = _per_slot(rounded_rows(inner_QI, num_padded, w2_SHI.dtype), groups, w2_SHI)
    _add_biases(y_QH, groups, b2_SH)
    y_PH[:num_owned] = y_QH[place_P]
    return y_PH


def _tile_groups(offsets: Tensor) -> tuple[list[tuple[int, int, int]], Tensor, int]:
    """Slots with rows as (slot, first padded row, end), each row's padded place, padded rows."""
    groups: list[tuple[int, int, int]] = []
    shifts: list[int] = []
    counts: list[int] = []
    padded = 0
    for slot, (start, end) in enumerate(pairwise(offsets.tolist())):
        if end == start:
            continue
        stop = padded + num_tiles(end - start) * TILE_ROWS
        groups.append((slot, padded, stop))
        shifts.append(padded - start)
        counts.append(end - start)
        padded = stop
    shift_P = np.repeat(np.array(shifts, dtype=np.int64), np.array(counts, dtype=np.int64))
    place_P = np.arange(len(shift_P)) + shift_P
    return groups, torch.from_numpy(place_P).to(offsets.device), padded


def _per_slot(x_QH: Tensor, groups: list[tuple[int, int, int]], w_SOH: Tensor) -> Tensor:
    y_QO = x_QH.new_empty((x_QH.shape[0], w_SOH.shape[1]))
    for slot, begin, stop in groups:
        multiply_tiles(x_QH[begin:stop], w_SOH[slot], y_QO[begin:stop])
    return y_QO


def _add_biases(y_QO: Tensor, groups: list[tuple[int, int, int]], bias_SO: Tensor | None) -> None:
    if bias_SO is None:
        return
    for slot, begin, stop in groups:
        y_QO[begin:stop] += bias_SO[slot].to(torch.float32)
