"""Both ends of a model on the CPU, one compiled call each.

Neighbours: `moe_kernels.head` is the contract; `norm_rope` and `linear` are the parts.

Letters: T tokens, H hidden, V vocabulary, B rows that are sampled.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from moe_kernels.cpu.arrays import float32_array, stored_array
from moe_kernels.cpu.intrinsics import widened
from moe_kernels.cpu.jit import Array, Index, compiled, inner
from moe_kernels.cpu.linear import SMALL_PRODUCT
from moe_kernels.cpu.norm_rope import norm_part
from moe_kernels.cpu.parts import meet, new_board, parts_for, take, take_next
from moe_kernels.cpu.product import multiply, round_rows
from moe_kernels.cpu.team import num_threads, together
from moe_kernels.head import Embedding, Head

FEW_ROWS = 8


class HeadOperands(NamedTuple):
    norm_H: Array
    """Widened: one type of kernel less, and the same numbers."""
    eps: np.float32
    rows_VH: Array
    divisor: np.float32


def embed(ids_T: Tensor, embedding: Embedding) -> Tensor:
    rows_VH = stored_rows(embedding)
    x_TH = torch.empty((ids_T.shape[0], rows_VH.shape[1]))
    multiplier = np.float32(embedding.multiplier)
    if not widen_rows(ids_T.contiguous().numpy(), rows_VH, multiplier, x_TH.numpy()):
        raise IndexError(f"token ids {ids_T.tolist()[:20]}: must be 0 to {len(rows_VH) - 1}")
    return x_TH


def head_logits(x_TH: Tensor, rows_B: Tensor, head: Head) -> Tensor:
    operands = head_operands(head)
    logits_BV = torch.empty((rows_B.shape[0], len(operands.rows_VH)))
    rows = rows_B.contiguous().numpy()
    if not head_rows(float32_array(x_TH), rows, *operands, logits_BV.numpy(), num_threads()):
        raise IndexError(f"rows {rows_B.tolist()[:20]}: must be 0 to {x_TH.shape[0] - 1}")
    return logits_BV


def stored_rows(embedding: Embedding) -> Array:
    """As the kernels take them."""
    return embedding.derived.get("cpu", partial(stored_array, embedding.rows_VH))


def head_operands(head: Head) -> HeadOperands:
    """As the kernels take them."""
    return head.derived.get("cpu", partial(_head_operands, head))


def _head_operands(head: Head) -> HeadOperands:
    return HeadOperands(
        float32_array(head.norm_H.to(torch.float32)),
        np.float32(head.norm_eps),
        stored_array(head.rows_VH),
        np.float32(head.divisor),
    )


@compiled
def all_below(indices: Array, end: int) -> bool:
    """Whether all are at least 0, too."""
    for index in indices:
        if not 0 <= index < end:
            return False
    return True


@compiled
def widen_rows(ids_T: Array, rows_VH: Array, multiplier: np.float32, x_TH: Array) -> bool:
    """False, and nothing done, where an id names no row."""
    if not all_below(ids_T, rows_VH.shape[0]):
        return False
    for token in range(ids_T.size):
        _widen_row(rows_VH[ids_T[token]], multiplier, x_TH[token])
    return True


@compiled
def _widen_row(row_H: Array, multiplier: np.float32, x_H: Array) -> None:
    for i in range(x_H.size):
        x_H[i] = widened(row_H[i]) * multiplier


@compiled
def head_rows(
    x_TH: Array,
    rows_B: Array,
    norm_H: Array,
    eps: np.float32,
    rows_VH: Array,
    divisor: np.float32,
    logits_BV: Array,
    threads: Index,
) -> bool:
    """With up to so many threads. False, and nothing done, where there is no such row."""
    if not all_below(rows_B, x_TH.shape[0]):
        return False
    if rows_B.size * rows_VH.size < SMALL_PRODUCT:
        threads = np.int64(1)
    chosen_BH = np.empty((rows_B.size, x_TH.shape[1]), np.float32)
    together(
        _walk, threads, new_board(2), x_TH, rows_B, norm_H, eps, rows_VH, divisor, chosen_BH,
        logits_BV, threads,
    )  # fmt: skip
    return True


@inner
def _walk(
    board: Array, x_TH: Array, rows_B: Array, norm_H: Array, eps: np.float32, rows_VH: Array,
    divisor: np.float32, chosen_BH: Array, logits_BV: Array, threads: Index,
) -> None:  # fmt: skip
    """What each thread does, see `parts`."""
    parts = np.int64(1) if rows_B.size < FEW_ROWS else parts_for(threads)
    part = take(board, 0)
    while part < parts:
        _norm_part(part, parts, x_TH, rows_B, norm_H, eps, rows_VH, chosen_BH)
        part = take_next(board, 0)
    meet(board, 0, parts)
    parts = parts_for(threads)
    part = take(board, 1)
    while part < parts:
        _logits_part(part, parts, chosen_BH, rows_VH, divisor, logits_BV)
        part = take_next(board, 1)
    meet(board, 1, parts)


@compiled
def _norm_part(
    part: Index, parts: Index, x_TH: Array, rows_B: Array, norm_H: Array, eps: np.float32,
    rows_VH: Array, chosen_BH: Array,
) -> None:  # fmt: skip
    """This part's rows, normed and rounded."""
    first, last = rows_B.size * part // parts, rows_B.size * (part + 1) // parts
    for row in range(first, last):
        chosen_BH[row] = x_TH[rows_B[row]]
    norm_part(part, parts, chosen_BH, norm_H, eps, chosen_BH)
    round_rows(chosen_BH, first, last, rows_VH, chosen_BH)


@compiled
def _logits_part(
    part: Index,
    parts: Index,
    chosen_BH: Array,
    rows_VH: Array,
    divisor: np.float32,
    logits_BV: Array,
) -> None:
    """This part's columns."""
    vocabulary, num_rows = rows_VH.shape[0], chosen_BH.shape[0]
    start, end = vocabulary * part // parts, vocabulary * (part + 1) // parts
    zero = np.int64(0)
    multiply(rows_VH, zero, start, end, chosen_BH, zero, num_rows, logits_BV)
    if divisor != np.float32(1.0):
        for row in range(num_rows):
            for column in range(start, end):
                logits_BV[row, column] /= divisor
