"""Matrix product on the CPU: threads share the output rows, see `product` for the rest.

Neighbour: `moe_kernels.linear` is the contract.

Letters: T rows, H inputs, O outputs.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import prange
from torch import Tensor

from moe_kernels.cpu.arrays import float32_array, stored_array
from moe_kernels.cpu.jit import Array, Index, compiled, num_threads, parallel
from moe_kernels.cpu.product import multiply, round_rows

SMALL_PRODUCT = 1 << 18
"""Multiplications below which a second thread costs more than it brings."""
FEW_ROWS = 8


def linear(x_TH: Tensor, w_OH: Tensor) -> Tensor:
    num_rows, num_outputs = x_TH.shape[0], w_OH.shape[0]
    y_TO = torch.empty((num_rows, num_outputs), dtype=torch.float32)
    threads = num_threads() if num_rows * w_OH.numel() >= SMALL_PRODUCT else 1
    linear_product(float32_array(x_TH), stored_array(w_OH), y_TO.numpy(), threads)
    return y_TO


@parallel
def linear_product(x_TH: Array, w_OH: Array, y_TO: Array, threads: int) -> None:
    # As variables: of literals numba would compile everything once more.
    zero = np.int64(0)
    one: Any = np.int64(1)
    num_rows = x_TH.shape[0]
    rounded_TH = np.empty(x_TH.shape, np.float32)
    if threads == 1 or num_rows < FEW_ROWS:
        _round_part(zero, one, x_TH, w_OH, rounded_TH)
    else:
        for part in prange(threads):
            _round_part(np.int64(part), threads, x_TH, w_OH, rounded_TH)
    if threads == 1:
        _multiply_part(zero, one, rounded_TH, w_OH, y_TO)
    else:
        for part in prange(threads):
            _multiply_part(np.int64(part), threads, rounded_TH, w_OH, y_TO)


@compiled
def _round_part(part: Index, parts: int, x_TH: Array, w_OH: Array, rounded_TH: Array) -> None:
    num_rows = x_TH.shape[0]
    first, last = num_rows * part // parts, num_rows * (part + 1) // parts
    round_rows(x_TH, first, last, w_OH, rounded_TH)


@compiled
def _multiply_part(part: Index, parts: int, x_TH: Array, w_OH: Array, y_TO: Array) -> None:
    num_outputs = w_OH.shape[0]
    start, end = num_outputs * part // parts, num_outputs * (part + 1) // parts
    zero = np.int64(0)
    multiply(w_OH, zero, start, end, x_TH, zero, x_TH.shape[0], y_TO)
