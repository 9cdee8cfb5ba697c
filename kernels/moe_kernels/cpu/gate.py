"""Norm, gate and choice in one compiled call.

Threads share the tokens; where there are fewer tokens than threads and the gate is large they share
its rows instead. Each part is the compiled function that the single operations run, so that the
numbers are theirs.
Neighbours: `moe_kernels.gate` is the contract; `norm_rope`, `product` and `router` are the parts.

Letters: T tokens, H hidden, E logical experts, K choices a token.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import prange
from torch import Tensor

from moe_kernels.cpu.arrays import float32_array, stored_array
from moe_kernels.cpu.jit import Array, Index, compiled, num_threads, parallel
from moe_kernels.cpu.linear import SMALL_PRODUCT
from moe_kernels.cpu.norm_rope import norm_part
from moe_kernels.cpu.product import multiply, round_rows
from moe_kernels.cpu.router import NO_BIAS, RouterNumbers, choose_rows, router_numbers
from moe_kernels.gate import Gate
from moe_kernels.router import check_fit


class _Operands(NamedTuple):
    norm_H: Array
    """Widened: one type of kernel less, and the same numbers."""
    eps: np.float32
    gate_EH: Array
    logit_bias_E: Array
    selection_bias_E: Array
    numbers: RouterNumbers


def route(x_TH: Tensor, gate: Gate) -> tuple[Tensor, Tensor, Tensor]:
    operands: _Operands = gate.derived.get("cpu", partial(_operands, gate))
    num_tokens = x_TH.shape[0]
    normed_TH = torch.empty(x_TH.shape)
    ids_TK = torch.empty((num_tokens, gate.spec.top_k), dtype=torch.int64)
    weights_TK = torch.empty((num_tokens, gate.spec.top_k))
    small = num_tokens * operands.gate_EH.size < SMALL_PRODUCT
    route_rows(
        float32_array(x_TH),
        operands.norm_H,
        operands.eps,
        operands.gate_EH,
        operands.logit_bias_E,
        operands.selection_bias_E,
        *operands.numbers,
        normed_TH.numpy(),
        ids_TK.numpy(),
        weights_TK.numpy(),
        1 if small else num_threads(),
    )
    return normed_TH, ids_TK, weights_TK


def _operands(gate: Gate) -> _Operands:
    check_fit(gate.gate_EH.shape[0], gate.spec, gate.selection_bias_E)

    def bias(values_E: Tensor | None) -> Array:
        return NO_BIAS if values_E is None else float32_array(values_E.to(torch.float32))

    return _Operands(
        float32_array(gate.norm_H.to(torch.float32)),
        np.float32(gate.norm_eps),
        stored_array(gate.gate_EH),
        bias(gate.logit_bias_E),
        bias(gate.selection_bias_E),
        router_numbers(gate.spec),
    )


@parallel
def route_rows(
    x_TH: Array,
    norm_H: Array,
    eps: np.float32,
    gate_EH: Array,
    logit_bias_E: Array,
    selection_bias_E: Array,
    score: int,
    num_groups: int,
    keep: int,
    two_best: bool,
    renorm: bool,
    epsilon: np.float32,
    scale: np.float32,
    normed_TH: Array,
    ids_TK: Array,
    weights_TK: Array,
    threads: int,
) -> None:
    # As variables: of literals numba would compile everything once more.
    zero = np.int64(0)
    one: Any = np.int64(1)
    rounded_TH = np.empty(x_TH.shape, np.float32)
    logits_TE = np.empty((x_TH.shape[0], gate_EH.shape[0]), np.float32)
    by_tokens = threads if x_TH.shape[0] >= threads else 1
    if by_tokens == 1:
        _norm_part(zero, one, x_TH, norm_H, eps, gate_EH, normed_TH, rounded_TH)
        if threads == 1:
            _gate_part(zero, one, rounded_TH, gate_EH, logits_TE)
        else:
            for part in prange(threads):
                _gate_part(np.int64(part), threads, rounded_TH, gate_EH, logits_TE)
        _choose_part(
            zero, one, logits_TE, logit_bias_E, selection_bias_E, score, num_groups, keep, two_best,
            renorm, epsilon, scale, ids_TK, weights_TK,
        )  # fmt: skip
    else:
        for part in prange(by_tokens):
            _route_part(
                np.int64(part), by_tokens, x_TH, norm_H, eps, gate_EH, logit_bias_E,
                selection_bias_E, score, num_groups, keep, two_best, renorm, epsilon, scale,
                normed_TH, rounded_TH, logits_TE, ids_TK, weights_TK,
            )  # fmt: skip


@compiled
def _route_part(
    part: Index, parts: int, x_TH: Array, norm_H: Array, eps: np.float32, gate_EH: Array,
    logit_bias_E: Array, selection_bias_E: Array, score: int, num_groups: int, keep: int,
    two_best: bool, renorm: bool, epsilon: np.float32, scale: np.float32, normed_TH: Array,
    rounded_TH: Array, logits_TE: Array, ids_TK: Array, weights_TK: Array,
) -> None:  # fmt: skip
    """Everything for this part's tokens."""
    first, last = _share(part, parts, x_TH.shape[0])
    _norm_part(part, parts, x_TH, norm_H, eps, gate_EH, normed_TH, rounded_TH)
    zero = np.int64(0)
    multiply(gate_EH, zero, zero, gate_EH.shape[0], rounded_TH, first, last, logits_TE)
    _choose_part(
        part, parts, logits_TE, logit_bias_E, selection_bias_E, score, num_groups, keep, two_best,
        renorm, epsilon, scale, ids_TK, weights_TK,
    )  # fmt: skip


@compiled
def _share(part: Index, parts: int, number: int) -> tuple[Index, Index]:
    return number * part // parts, number * (part + 1) // parts


@compiled
def _norm_part(
    part: Index, parts: int, x_TH: Array, norm_H: Array, eps: np.float32, gate_EH: Array,
    normed_TH: Array, rounded_TH: Array,
) -> None:  # fmt: skip
    first, last = _share(part, parts, x_TH.shape[0])
    norm_part(part, parts, x_TH, norm_H, eps, normed_TH)
    round_rows(normed_TH, first, last, gate_EH, rounded_TH)


@compiled
def _gate_part(
    part: Index, parts: int, rounded_TH: Array, gate_EH: Array, logits_TE: Array
) -> None:
    """This part's columns of the logits."""
    start, end = _share(part, parts, gate_EH.shape[0])
    zero = np.int64(0)
    multiply(gate_EH, zero, start, end, rounded_TH, zero, rounded_TH.shape[0], logits_TE)


@compiled
def _choose_part(
    part: Index, parts: int, logits_TE: Array, logit_bias_E: Array, selection_bias_E: Array,
    score: int, num_groups: int, keep: int, two_best: bool, renorm: bool, epsilon: np.float32,
    scale: np.float32, ids_TK: Array, weights_TK: Array,
) -> None:  # fmt: skip
    first, last = _share(part, parts, logits_TE.shape[0])
    for row in range(first, last):
        for expert in range(logit_bias_E.size):
            logits_TE[row, expert] += logit_bias_E[expert]
    choose_rows(
        logits_TE, selection_bias_E, score, num_groups, keep, two_best, renorm, epsilon, scale,
        first, last, ids_TK, weights_TK,
    )  # fmt: skip
