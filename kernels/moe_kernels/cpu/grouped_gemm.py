"""The experts of one layer on the CPU.

Two passes, each shared by all threads: up (gate and up projections, biases, activation), then down.
A thread owns a slice of the output rows of every expert, so that no two write the same number and
one popular expert keeps all of them busy; between the passes they meet. Experts without rows are
not read. What a row goes through does not depend on its neighbours: see `product`.
Neighbours: `moe_kernels.grouped_gemm` is the contract; `permute` sorts the rows.

Letters: P rows, S slots, H hidden, I expert intermediate; SI and SH: matrices one below the other.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from moe_kernels.activation import SILU, Activation
from moe_kernels.cpu.activation import gate_rows, parameters
from moe_kernels.cpu.arrays import float32_array, stored_array
from moe_kernels.cpu.intrinsics import widened
from moe_kernels.cpu.jit import Array, Index, compiled, inner
from moe_kernels.cpu.linear import SMALL_PRODUCT
from moe_kernels.cpu.parts import meet, new_board, parts_for, take, take_next
from moe_kernels.cpu.product import multiply, round_rows
from moe_kernels.cpu.team import num_threads, together


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
    expert_rows(
        float32_array(rows_PH),
        bounds_S,
        stored_array(w13_SIH),
        stored_array(w2_SHI),
        stored_array(w13_SIH.new_empty(0) if b13_S2I is None else b13_S2I.flatten()),
        stored_array(w2_SHI.new_empty(0) if b2_SH is None else b2_SH.flatten()),
        *parameters(act),
        y_PH.numpy(),
        num_threads(),
    )
    return y_PH


@compiled
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
    threads: Index,
) -> None:
    """`expert_mlp` into `y_PH`, with up to so many threads; biases are empty where there are
    none."""
    if rows_PH.size * 2 * w2_SHI.shape[1] < SMALL_PRODUCT:
        threads = np.int64(1)
    num_owned = offsets[-1]
    y_PH[num_owned:] = 0.0
    x_PH = np.empty((num_owned, rows_PH.shape[1]), np.float32)
    both_P2I = np.empty((num_owned, 2 * w2_SHI.shape[1]), np.float32)
    inner_PI = np.empty((num_owned, w2_SHI.shape[1]), np.float32)
    together(
        _walk, threads, new_board(3), rows_PH, offsets, w13_SIH, w2_SHI, b13_SI, b2_SH, is_silu,
        limit, alpha, x_PH, both_P2I, inner_PI, y_PH, parts_for(threads),
    )  # fmt: skip


@inner
def _walk(
    board: Array, rows_PH: Array, offsets: Array, w13_SIH: Array, w2_SHI: Array, b13_SI: Array,
    b2_SH: Array, is_silu: bool, limit: float, alpha: float, x_PH: Array, both_P2I: Array,
    inner_PI: Array, y_PH: Array, parts: Index,
) -> None:  # fmt: skip
    """What each thread does, see `parts`."""
    for phase in range(3):
        part = take(board, phase)
        while part < parts:
            if phase == 0:
                _round_part(part, parts, rows_PH, w13_SIH, x_PH)
            elif phase == 1:
                up_part(
                    part, parts, x_PH, offsets, w13_SIH, b13_SI, is_silu, limit, alpha, both_P2I,
                    w2_SHI, inner_PI,
                )  # fmt: skip
            else:
                down_part(part, parts, inner_PI, offsets, w2_SHI, b2_SH, y_PH)
            part = take_next(board, phase)
        meet(board, phase, parts)


@compiled
def _round_part(part: Index, parts: Index, rows_PH: Array, w_SIH: Array, x_PH: Array) -> None:
    num_rows = x_PH.shape[0]
    round_rows(rows_PH, num_rows * part // parts, num_rows * (part + 1) // parts, w_SIH, x_PH)


@compiled
def up_part(
    part: Index,
    parts: Index,
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
    parts: Index,
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
