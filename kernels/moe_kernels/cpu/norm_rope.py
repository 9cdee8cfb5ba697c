"""RMS normalisation and rotary positions on the CPU.

Neighbours: `row_lanes` has a row's arithmetic; `moe_kernels.norm_rope` is the contract.

Letters: T tokens, H hidden, N heads, D head_dim, F rotated pairs of a head.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from moe_kernels.cpu.arrays import float32_array, stored_array
from moe_kernels.cpu.jit import Array, Index, compiled, inner
from moe_kernels.cpu.parts import meet, new_board, parts_for, take, take_next
from moe_kernels.cpu.row_lanes import norm_columns, turn_columns
from moe_kernels.cpu.team import num_threads, together

SMALL_WORK = 1 << 17
"""Elements below which a second thread costs more than it brings."""


def rms_norm(x_TH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    x = float32_array(x_TH)
    y_TH = torch.empty(x_TH.shape, dtype=torch.float32)
    hidden = x.shape[-1]
    threads = 1 if x.size < SMALL_WORK else num_threads()
    norm_rows(
        x.reshape(-1, hidden),
        stored_array(weight_H),
        np.float32(eps),
        y_TH.numpy().reshape(-1, hidden),
        threads,
    )
    return y_TH


def rope(x_TND: Tensor, cos_TF: Tensor, sin_TF: Tensor) -> Tensor:
    x = float32_array(x_TND)
    y_TND = torch.empty(x_TND.shape, dtype=torch.float32)
    threads = 1 if x.size < SMALL_WORK else num_threads()
    turn_rows(x, float32_array(cos_TF), float32_array(sin_TF), y_TND.numpy(), threads)
    return y_TND


@compiled
def norm_rows(x_TH: Array, weight_H: Array, eps: np.float32, y_TH: Array, threads: int) -> None:
    together(_norm, threads, new_board(1), x_TH, weight_H, eps, y_TH, parts_for(threads))


@inner
def _norm(
    board: Array, x_TH: Array, weight_H: Array, eps: np.float32, y_TH: Array, parts: Index
) -> None:
    """What each thread does, see `parts`."""
    part = take(board, 0)
    while part < parts:
        norm_part(part, parts, x_TH, weight_H, eps, y_TH)
        part = take_next(board, 0)
    meet(board, 0, parts)


@compiled
def norm_part(
    part: Index, parts: Index, x_TH: Array, weight_H: Array, eps: np.float32, y_TH: Array
) -> None:
    rows, hidden = x_TH.shape
    first, last = rows * part // parts, rows * (part + 1) // parts
    norm_columns(x_TH, first, last, np.int64(0), hidden, weight_H, eps, y_TH)


@compiled
def turn_rows(x_TND: Array, cos_TF: Array, sin_TF: Array, y_TND: Array, threads: int) -> None:
    together(_turn, threads, new_board(1), x_TND, cos_TF, sin_TF, y_TND, parts_for(threads))


@inner
def _turn(
    board: Array, x_TND: Array, cos_TF: Array, sin_TF: Array, y_TND: Array, parts: Index
) -> None:
    """What each thread does, see `parts`."""
    part = take(board, 0)
    while part < parts:
        _turn_part(part, parts, x_TND, cos_TF, sin_TF, y_TND)
        part = take_next(board, 0)
    meet(board, 0, parts)


@compiled
def _turn_part(
    part: Index, parts: Index, x_TND: Array, cos_TF: Array, sin_TF: Array, y_TND: Array
) -> None:
    tokens, heads, width = x_TND.shape
    first, last = tokens * part // parts, tokens * (part + 1) // parts
    x_TQ = x_TND.reshape((tokens, heads * width))
    turn_columns(x_TQ, first, last, np.int64(0), cos_TF, sin_TF, y_TND)
