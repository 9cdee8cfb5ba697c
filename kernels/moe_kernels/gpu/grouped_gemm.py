"""The experts of one layer: two passes over tiles of one expert's rows each.

    up:   inner[P, I] = act(x · w1ᵀ + b1, x · w3ᵀ + b3), rounded to w2's dtype
    down: y[P, H] = inner · w2ᵀ + b2
Rows lie sorted by slot. Which tiles there are is known on the device alone, so the grid has as many
as there can be, each program finds its own in the offsets, and those past the last end at once: no
copy to the host. A slot's rows are cut into tiles of their own, never padded in memory. Rows that
belong to no slot are zeroed before. Tile and order along the inputs are `linear`'s: a row has the
same bits alone, crowded, and in another slot.
Neighbours: `moe_kernels.grouped_gemm` is the contract; `permute` sorts the rows.

Letters: P rows, S slots, H hidden, I expert intermediate.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from moe_kernels.activation import SILU, Activation
from moe_kernels.gpu.activation import gate_up, parameters
from moe_kernels.gpu.jit import (
    SAFE,
    blocks,
    compiled,
    compiled_for_any,
    padded,
)
from moe_kernels.gpu.linear import ROWS, STAGES, WARPS, add_products, tile_depth
from moe_kernels.gpu.numbers import rounded, widened

COLUMNS = 64
LEAST_SLOTS = 64
"""Of a program's search: fewer slots compile no other kernel."""


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
    num_slots, _, intermediate = w2_SHI.shape
    y_PH = torch.zeros((num_rows, hidden), dtype=torch.float32, device=rows_PH.device)
    if not num_rows:
        return y_PH
    x_PH = rows_PH.to(w13_S2IH.dtype).contiguous()
    inner_PI = torch.empty((num_rows, intermediate), dtype=w2_SHI.dtype, device=rows_PH.device)
    w13_S2IH, w2_SHI, offsets = w13_S2IH.contiguous(), w2_SHI.contiguous(), offsets.contiguous()
    tiles = blocks(num_rows, ROWS) + min(num_slots, num_rows)
    shape = {"ROWS": ROWS, "COLUMNS": COLUMNS, "SLOTS": padded(num_slots, LEAST_SLOTS)}
    how = {"num_warps": WARPS, "num_stages": STAGES, **SAFE}
    up_tiles[(tiles, blocks(intermediate, COLUMNS))](
        x_PH, offsets, w13_S2IH, inner_PI if b13_S2I is None else b13_S2I.contiguous(), inner_PI,
        num_slots, hidden, intermediate, *parameters(act),
        BIAS=b13_S2I is not None, DEPTH=tile_depth(w13_S2IH.dtype), **shape, **how,
    )  # fmt: skip
    down_tiles[(tiles, blocks(hidden, COLUMNS))](
        inner_PI, offsets, w2_SHI, y_PH if b2_SH is None else b2_SH.contiguous(), y_PH,
        num_slots, hidden, intermediate,
        BIAS=b2_SH is not None, DEPTH=tile_depth(w2_SHI.dtype), **shape, **how,
    )  # fmt: skip
    return y_PH


@compiled
def find_tile(
    offsets: tl.tensor,
    tile: tl.tensor,
    num_slots: tl.tensor,
    ROWS: tl.constexpr,
    SLOTS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Slot, first row and end of the slot's rows; a slot of `num_slots` where there is no tile."""
    index = tl.arange(0, SLOTS)
    first = tl.load(offsets + index, mask=index < num_slots, other=0)
    end = tl.load(offsets + index + 1, mask=index < num_slots, other=0)
    tiles = (end - first + (ROWS - 1)) // ROWS
    until = tl.cumsum(tiles, 0)
    slot = tl.sum(((until <= tile) & (index < num_slots)).to(tl.int32), 0)
    is_mine = index == slot
    before = tl.sum(tl.where(is_mine, until - tiles, 0), 0)
    start = tl.sum(tl.where(is_mine, first, 0), 0) + (tile - before) * ROWS
    return slot, start, tl.sum(tl.where(is_mine, end, 0), 0)


@compiled_for_any("num_slots")
def up_tiles(
    x_PH: tl.tensor,
    offsets: tl.tensor,
    w13_S2IH: tl.tensor,
    b13_S2I: tl.tensor,
    inner_PI: tl.tensor,
    num_slots: tl.tensor,
    hidden: tl.tensor,
    intermediate: tl.tensor,
    IS_SILU: tl.constexpr,
    limit: tl.tensor,
    alpha: tl.tensor,
    BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    SLOTS: tl.constexpr,
) -> None:
    slot, start, end = find_tile(offsets, tl.program_id(0), num_slots, ROWS, SLOTS)
    if slot < num_slots:
        row = start + tl.arange(0, ROWS)
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        has_row, has_column = row < end, column < intermediate
        w1 = w13_S2IH + slot.to(tl.int64) * 2 * intermediate * hidden
        w3 = w1 + intermediate.to(tl.int64) * hidden
        none = tl.zeros((ROWS, COLUMNS), tl.float32)
        gate = add_products(none, x_PH, row, has_row, w1, column, has_column, hidden, DEPTH)
        up = add_products(none, x_PH, row, has_row, w3, column, has_column, hidden, DEPTH)
        if BIAS:
            bias = b13_S2I + slot * 2 * intermediate
            gate += widened(tl.load(bias + column, mask=has_column, other=0.0))[None, :]
            up += widened(tl.load(bias + intermediate + column, mask=has_column, other=0.0))[
                None, :
            ]
        inner = rounded(gate_up(gate, up, IS_SILU, limit, alpha), inner_PI.dtype.element_ty)
        at = row.to(tl.int64)[:, None] * intermediate + column[None, :]
        tl.store(inner_PI + at, inner, mask=has_row[:, None] & has_column[None, :])


@compiled_for_any("num_slots")
def down_tiles(
    inner_PI: tl.tensor,
    offsets: tl.tensor,
    w2_SHI: tl.tensor,
    b2_SH: tl.tensor,
    y_PH: tl.tensor,
    num_slots: tl.tensor,
    hidden: tl.tensor,
    intermediate: tl.tensor,
    BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    SLOTS: tl.constexpr,
) -> None:
    slot, start, end = find_tile(offsets, tl.program_id(0), num_slots, ROWS, SLOTS)
    if slot < num_slots:
        row = start + tl.arange(0, ROWS)
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        has_row, has_column = row < end, column < hidden
        w2 = w2_SHI + slot.to(tl.int64) * hidden * intermediate
        y = tl.zeros((ROWS, COLUMNS), tl.float32)
        y = add_products(y, inner_PI, row, has_row, w2, column, has_column, intermediate, DEPTH)
        if BIAS:
            y += widened(tl.load(b2_SH + slot * hidden + column, mask=has_column, other=0.0))[
                None, :
            ]
        at = row.to(tl.int64)[:, None] * hidden + column[None, :]
        tl.store(y_PH + at, y, mask=has_row[:, None] & has_column[None, :])
