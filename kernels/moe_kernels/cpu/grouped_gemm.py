"""The experts of one layer on the CPU.

Two passes, each shared by all threads: up (gate and up projections, biases, activation), then down.
A thread owns a slice of the output rows of every expert, so that no two write the same number and
one popular expert keeps all of them busy; between the passes they meet. Experts without rows are
not read. What a row goes through does not depend on its neighbours: see `product`.
Neighbours: `moe_kernels.grouped_gemm` is the contract; `permute` sorts the rows.

Letters: P rows, S slots, H hidden, I expert intermediate; SI and SH: matrices one below the other.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import prange
from torch import Tensor

from moe_kernels.activation import SILU, Activation
from moe_kernels.cpu.activation import gate_rows, parameters
from moe_kernels.cpu.arrays import float32_array, stored_array
from moe_kernels.cpu.intrinsics import widened
from moe_kernels.cpu.jit import Array, Index, compiled, num_threads, parallel
from moe_kernels.cpu.linear import SMALL_PRODUCT
from moe_kernels.cpu.product import multiply, round_rows


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
    y_PH = torch.empty((num_rows, hidden), dtype=torch.float32)
    bounds_S = offsets.contiguous().numpy()
    assert 0 <= bounds_S[-1] <= num_rows, "the groups end where the rows do, or before"
    w13_SIH, w2_SHI = w13_S2IH.flatten(0, 1), w2_SHI.flatten(0, 1)
    small = num_rows * hidden * w13_S2IH.shape[1] < SMALL_PRODUCT
    expert_rows(
        float32_array(rows_PH),
        bounds_S,
        stored_array(w13_SIH),
        stored_array(w2_SHI),
        stored_array(w13_SIH.new_empty(0) if b13_S2I is None else b13_S2I.flatten()),
        stored_array(w2_SHI.new_empty(0) if b2_SH is None else b2_SH.flatten()),
        *parameters(act),
        y_PH.numpy(),
        1 if small else num_threads(),
    )
    return y_PH


@parallel
def expert_rows(
    rows_PH: Array,
    offsets: Array,
    w13_SIH: Array,
    w2_SHI: Array,
    b13_SI: Array,
    b2_SH: Array,
    is_silu: bool,
    limit: float,
    alpha: float,
    y_PH: Array,
    threads: int,
) -> None:
    """`expert_mlp` into `y_PH`; biases are empty where there are none."""
    # As variables: of literals numba would compile everything once more.
    zero = np.int64(0)
    one: Any = np.int64(1)
    num_owned = offsets[-1]
    y_PH[num_owned:] = 0.0
    x_PH = np.empty((num_owned, rows_PH.shape[1]), np.float32)
    both_P2I = np.empty((num_owned, 2 * w2_SHI.shape[1]), np.float32)
    inner_PI = np.empty((num_owned, w2_SHI.shape[1]), np.float32)
    if threads == 1:
        _round_part(zero, one, rows_PH, w13_SIH, x_PH)
        up_part(
            zero, one, x_PH, offsets, w13_SIH, b13_SI, is_silu, limit, alpha, both_P2I, w2_SHI,
            inner_PI,
        )  # fmt: skip
        down_part(zero, one, inner_PI, offsets, w2_SHI, b2_SH, y_PH)
        return
    for part in prange(threads):
        _round_part(np.int64(part), threads, rows_PH, w13_SIH, x_PH)
    for part in prange(threads):
        up_part(
            np.int64(part), threads, x_PH, offsets, w13_SIH, b13_SI,
            is_silu, limit, alpha, both_P2I, w2_SHI, inner_PI,
        )  # fmt: skip
    for part in prange(threads):
        down_part(np.int64(part), threads, inner_PI, offsets, w2_SHI, b2_SH, y_PH)


@compiled
def _round_part(part: Index, parts: int, rows_PH: Array, w_SIH: Array, x_PH: Array) -> None:
    num_rows = x_PH.shape[0]
    round_rows(rows_PH, num_rows * part // parts, num_rows * (part + 1) // parts, w_SIH, x_PH)


@compiled
def up_part(
    part: Index,
    parts: int,
    x_PH: Array,
    offsets: Array,
    w13_SIH: Array,
    b13_SI: Array,
    is_silu: bool,
    limit: float,
    alpha: float,
    both_P2I: Array,
    w2_SHI: Array,
    inner_PI: Array,
) -> None:
    """This part's columns of `inner_PI`, rounded to what w2 stores."""
    zero, intermediate = np.int64(0), inner_PI.shape[1]
    start, end = intermediate * part // parts, intermediate * (part + 1) // parts
    for slot in range(offsets.size - 1):
        first, last = offsets[slot], offsets[slot + 1]
        if first == last:
            continue
        base = slot * 2 * intermediate
        for half in (zero, intermediate):
            multiply(w13_SIH, base, half + start, half + end, x_PH, first, last, both_P2I)
            if b13_SI.size > 0:
                _add_bias(b13_SI, base, half + start, half + end, first, last, both_P2I)
        gate_rows(both_P2I, first, last, start, end, is_silu, limit, alpha, inner_PI)
        mine = inner_PI[:, start:end]
        round_rows(mine, first, last, w2_SHI, mine)


@compiled
def down_part(
    part: Index,
    parts: int,
    inner_PI: Array,
    offsets: Array,
    w2_SHI: Array,
    b2_SH: Array,
    y_PH: Array,
) -> None:
    """This part's columns of `y_PH`."""
    hidden = y_PH.shape[1]
    start, end = hidden * part // parts, hidden * (part + 1) // parts
    for slot in range(offsets.size - 1):
        first, last = offsets[slot], offsets[slot + 1]
        if first == last:
            continue
        multiply(w2_SHI, slot * hidden, start, end, inner_PI, first, last, y_PH)
        if b2_SH.size > 0:
            _add_bias(b2_SH, slot * hidden, start, end, first, last, y_PH)


@compiled
def _add_bias(
    bias_SO: Array, base: Index, start: Index, end: Index, first: Index, last: Index, y_PO: Array
) -> None:
    for row in range(first, last):
        for column in range(start, end):
            y_PO[row, column] += widened(bias_SO[base + column])
