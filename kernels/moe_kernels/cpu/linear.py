"""Matrix product on the CPU: threads share the output rows, see `product` for the rest.

Neighbour: `moe_kernels.linear` is the contract.

Letters: T rows, H inputs, O outputs.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from moe_kernels.cpu.arrays import float32_array, stored_array
from moe_kernels.cpu.jit import Array, Index, compiled, inner
from moe_kernels.cpu.parts import meet, new_board, parts_for, take, take_next
from moe_kernels.cpu.product import multiply, round_rows
from moe_kernels.cpu.team import num_threads, together

SMALL_PRODUCT = 1 << 18
"""Multiplications below which a second thread costs more than it brings."""
FEW_ROWS = 8


def linear(x_TH: Tensor, w_OH: Tensor) -> Tensor:
    num_rows, num_outputs = x_TH.shape[0], w_OH.shape[0]
    y_TO = torch.empty((num_rows, num_outputs), dtype=torch.float32)
    threads = num_threads() if num_rows * w_OH.numel() >= SMALL_PRODUCT else 1
    linear_product(float32_array(x_TH), stored_array(w_OH), y_TO.numpy(), threads)
    return y_TO


@compiled
def linear_product(x_TH: Array, w_OH: Array, y_TO: Array, threads: int) -> None:
    rounded_TH = np.empty(x_TH.shape, np.float32)
    together(_walk, threads, new_board(2), x_TH, w_OH, rounded_TH, y_TO, threads)


@inner
def _walk(
    board: Array, x_TH: Array, w_OH: Array, rounded_TH: Array, y_TO: Array, threads: int
) -> None:
    """What each thread does, see `parts`."""
    parts = np.int64(1) if x_TH.shape[0] < FEW_ROWS else parts_for(threads)
    part = take(board, 0)
    while part < parts:
        _round_part(part, parts, x_TH, w_OH, rounded_TH)
        part = take_next(board, 0)
    meet(board, 0, parts)
    parts = parts_for(threads)
    part = take(board, 1)
    while part < parts:
        _multiply_part(part, parts, rounded_TH, w_OH, y_TO)
        part = take_next(board, 1)
    meet(board, 1, parts)


@compiled
def _round_part(part: Index, parts: Index, x_TH: Array, w_OH: Array, rounded_TH: Array) -> None:
    num_rows = x_TH.shape[0]
    first, last = num_rows * part // parts, num_rows * (part + 1) // parts
    round_rows(x_TH, first, last, w_OH, rounded_TH)


@compiled
def _multiply_part(part: Index, parts: Index, x_TH: Array, w_OH: Array, y_TO: Array) -> None:
    num_outputs = w_OH.shape[0]
    start, end = num_outputs * part // parts, num_outputs * (part + 1) // parts
    zero = np.int64(0)
    multiply(w_OH, zero, start, end, x_TH, zero, x_TH.shape[0], y_TO)
