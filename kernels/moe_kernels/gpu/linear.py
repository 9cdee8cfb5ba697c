"""Matrix product x · wᵀ on the tensor cores, one tile shape for one row and for thousands.

A program computes a tile y[ROWS, COLUMNS] and walks along the inputs in steps of DEPTH, in order:
    x [T, H] rounded to w's dtype, w [O, H], y [T, O] float32.
The tile has 64 rows even where a step has one: that is the tensor cores' instruction on Hopper, and
another tile would add up in another order. A decode step reads each weight once and is bound by
that; the idle rows cost arithmetic that the memory would have waited for. Programs of one slice of
weights follow each other, so that a long prompt finds the slice in the L2 cache.
float32 weights go without tensor cores, whose TF32 drops bits.
Neighbours: `moe_kernels.linear` is the contract; `grouped_gemm` is the same per expert.

Letters: T rows, H inputs, O outputs.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from moe_kernels.gpu.jit import SAFE, blocks, compiled, compiled_for_any, dot

ROWS = 64
WARPS, STAGES = 4, 4


def linear(x_TH: Tensor, w_OH: Tensor) -> Tensor:
    x_TH, w_OH = x_TH.to(w_OH.dtype).contiguous(), w_OH.contiguous()
    (num_rows, inputs), outputs = x_TH.shape, w_OH.shape[0]
    y_TO = torch.empty((num_rows, outputs), dtype=torch.float32, device=x_TH.device)
    if num_rows:
        columns = tile_columns(outputs)
        grid = (blocks(num_rows, ROWS), blocks(outputs, columns))
        multiply[grid](
            x_TH, w_OH, y_TO, num_rows, inputs, outputs,
            ROWS=ROWS, COLUMNS=columns, DEPTH=tile_depth(w_OH.dtype),
            num_warps=WARPS, num_stages=STAGES, **SAFE,
        )  # fmt: skip
    return y_TO


def tile_columns(outputs: int) -> int:
    """Of a tile: few outputs in narrow tiles, so that all processors read weights."""
    return 128 if outputs >= 1 << 15 else 64 if outputs >= 1 << 13 else 32


def tile_depth(dtype: torch.dtype) -> int:
    return 32 if dtype == torch.float32 else 64


@compiled_for_any("num_rows")
def multiply(
    x_TH: tl.tensor,
    w_OH: tl.tensor,
    y_TO: tl.tensor,
    num_rows: tl.tensor,
    inputs: tl.tensor,
    outputs: tl.tensor,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
) -> None:
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    sums = add_products(
        sums, x_TH, row, row < num_rows, w_OH, column, column < outputs, inputs, DEPTH
    )
    at = row.to(tl.int64)[:, None] * outputs + column[None, :]
    tl.store(y_TO + at, sums, mask=(row < num_rows)[:, None] & (column < outputs)[None, :])


@compiled
def add_products(
    sums: tl.tensor,
    x: tl.tensor,
    row: tl.tensor,
    has_row: tl.tensor,
    w: tl.tensor,
    column: tl.tensor,
    has_column: tl.tensor,
    inputs: tl.tensor,
    DEPTH: tl.constexpr,
) -> tl.tensor:
    """sums[i, j] + x[row i] · w[column j]; rows and columns that there are not are zero."""
    deep = tl.arange(0, DEPTH)
    x_at = x + row.to(tl.int64)[:, None] * inputs + deep[None, :]
    w_at = w + column.to(tl.int64)[None, :] * inputs + deep[:, None]
    for start in range(0, inputs, DEPTH):
        has_input = start + deep < inputs
        x_tile = tl.load(x_at + start, mask=has_row[:, None] & has_input[None, :], other=0.0)
        w_tile = tl.load(w_at + start, mask=has_input[:, None] & has_column[None, :], other=0.0)
        sums = dot(x_tile, w_tile, sums)
    return sums
