"""Matrix products by the library, over tiles of one shape.

A library product picks its algorithm by the number of rows, so a row's last bits change with its
batch. Here every product runs over tiles of TILE_ROWS rows, zero-padded, one call of the same shape
per tile: a row's result depends on neither its place in a tile nor on what shares it. Where nobody
needs that (`invariance`) all rows are one tile.
Neighbours: `moe_kernels.linear` is the contract; `grouped_gemm` does the same per expert.

Letters: T rows, P rows padded to whole tiles, H inputs, O outputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_kernels import invariance

TILE_ROWS = 16
FEWEST_OUTPUTS = 16
"""With fewer than 12, a row's last bits were seen to depend on its place in the tile."""
_ALIGNMENT_BYTES = 64


def linear(x_TH: Tensor, w_OH: Tensor) -> Tensor:
    num_rows = x_TH.shape[0]
    x_PH = rounded_rows(x_TH, num_tiles(num_rows) * TILE_ROWS, w_OH.dtype)
    y_PO = x_TH.new_empty((x_PH.shape[0], w_OH.shape[0]))
    multiply_tiles(x_PH, w_OH, y_PO)
    return y_PO[:num_rows]


def multiply_tiles(x_PH: Tensor, w_OH: Tensor, y_PO: Tensor) -> None:
    """y = x · wᵀ over whole tiles of rows; `x_PH` is rounded and widened already."""
    outputs = w_OH.shape[0]
    w_HO = widened(w_OH).t()
    if outputs < FEWEST_OUTPUTS:
        w_HO = torch.nn.functional.pad(w_HO, (0, FEWEST_OUTPUTS - outputs))
    num_rows = x_PH.shape[0]
    tile_rows = TILE_ROWS if invariance.required() else max(num_rows, 1)
    for start in range(0, num_rows, tile_rows):
        tile = slice(start, start + tile_rows)
        if outputs < FEWEST_OUTPUTS:
            y_PO[tile] = torch.mm(x_PH[tile], w_HO)[:, :outputs]
        else:
            torch.mm(x_PH[tile], w_HO, out=y_PO[tile])


def num_tiles(num_rows: int) -> int:
    return -(-num_rows // TILE_ROWS)


def widened(w: Tensor) -> Tensor:
    """The same numbers as float32, contiguous and aligned: a library may choose by address."""
    wide = w.to(torch.float32).contiguous()
    return wide if wide.data_ptr() % _ALIGNMENT_BYTES == 0 else wide.clone()


def rounded_rows(x_TH: Tensor, num_rows: int, dtype: torch.dtype) -> Tensor:
    """`x_TH` rounded to `dtype` and widened again, in a fresh buffer with zero rows to the end."""
    padded = x_TH.new_zeros((num_rows, x_TH.shape[1]))
    padded[: x_TH.shape[0]] = x_TH if dtype == torch.float32 else x_TH.to(dtype)
    return padded
