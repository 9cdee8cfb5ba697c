"""RMS normalisation and rotary positions.

norm: a program takes as many rows as fill about SIZE elements, each row whole in registers: its sum
of squares is one reduction whose tree depends on the width alone. Division and root are IEEE's.
rope: a program takes rows (token, head) and turns pairs (i, i + F); nothing is summed, and no
product is contracted with a sum, so the bits are the reference's.
Both read and write each number once and are bound by that.
Neighbour: `moe_kernels.norm_rope` is the contract.

Letters: T tokens, H hidden, N heads, D head_dim, F rotated pairs of a head.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from moe_kernels.gpu.jit import SAFE, blocks, compiled_for_any, padded
from moe_kernels.gpu.numbers import widened

SIZE = 4096


def rms_norm(x_TH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    x_TH, hidden = x_TH.contiguous(), x_TH.shape[-1]
    y_TH = torch.empty_like(x_TH)
    if x_TH.numel():
        num_rows, width = x_TH.numel() // hidden, padded(hidden)
        rows = max(1, SIZE // width)
        norm_rows[(blocks(num_rows, rows),)](
            x_TH, weight_H.contiguous(), y_TH, num_rows, hidden, float(eps),
            ROWS=rows, WIDTH=width, num_warps=4 if width <= SIZE else 8, **SAFE,
        )  # fmt: skip
    return y_TH


@compiled_for_any("num_rows", "eps")
def norm_rows(
    x_TH: tl.tensor,
    weight_H: tl.tensor,
    y_TH: tl.tensor,
    num_rows: tl.tensor,
    hidden: tl.tensor,
    eps: tl.tensor,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    mask = (row < num_rows)[:, None] & (column < hidden)[None, :]
    at = row.to(tl.int64)[:, None] * hidden + column[None, :]
    x = tl.load(x_TH + at, mask=mask, other=0.0)
    weight = widened(tl.load(weight_H + column, mask=column < hidden, other=0.0))
    mean = tl.div_rn(tl.sum(x * x, 1), hidden.to(tl.float32))
    y = tl.div_rn(x, tl.sqrt_rn(mean + eps)[:, None]) * weight[None, :]
    tl.store(y_TH + at, y, mask=mask)


def rope(x_TND: Tensor, cos_TF: Tensor, sin_TF: Tensor) -> Tensor:
    x_TND = x_TND.contiguous()
    y_TND = torch.empty_like(x_TND)
    if x_TND.numel():
        num_tokens, heads, dim = x_TND.shape
        width = padded(dim)
        rows = max(1, SIZE // width)
        turn_rows[(blocks(num_tokens * heads, rows),)](
            x_TND, cos_TF.contiguous(), sin_TF.contiguous(), y_TND, num_tokens * heads,
            HEADS=heads, DIM=dim, HALF=cos_TF.shape[-1], ROWS=rows, WIDTH=width,
            num_warps=4, **SAFE,
        )  # fmt: skip
    return y_TND


@compiled_for_any("num_rows")
def turn_rows(
    x_RD: tl.tensor,
    cos_TF: tl.tensor,
    sin_TF: tl.tensor,
    y_RD: tl.tensor,
    num_rows: tl.tensor,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    i = tl.arange(0, WIDTH)[None, :]
    mask = (row < num_rows) & (i < DIM)
    is_turned = mask & (i < 2 * HALF)
    is_low = i < HALF
    pair = tl.where(is_low, i, i - HALF)
    other = tl.where(is_low, i + HALF, i - HALF)
    angle = row // HEADS * HALF + pair
    cos = tl.load(cos_TF + angle, mask=is_turned, other=1.0)
    sin = tl.load(sin_TF + angle, mask=is_turned, other=0.0)
    x = tl.load(x_RD + row * DIM + i, mask=mask, other=0.0)
    # Its partner is in the same row, which the cache has by now.
    partner = tl.load(x_RD + row * DIM + other, mask=is_turned, other=0.0)
    turned = x * cos + tl.where(is_low, -partner, partner) * sin
    tl.store(y_RD + row * DIM + i, tl.where(is_turned, turned, x), mask=mask)
