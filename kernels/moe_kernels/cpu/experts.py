"""The experts' half of a layer in one compiled call, with two parallel regions.

In the first, threads share the columns of the gate and up projections and their activation, in the
second those of the down projection; a thread then adds up its own columns of every token, so that
nobody waits a third time. An expert shared by all tokens goes along with the routed ones, and a
dense layer is a shared expert alone. All parts are the compiled functions that the single
operations run, so that the numbers are theirs.
Neighbours: `moe_kernels.experts` is the contract; `grouped_gemm` and `permute` are the parts.

Letters: T tokens, K choices a token, P pairs with a slot, S slots, H hidden, I expert intermediate,
J intermediate of the shared expert; SI and SH: matrices one below the other.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import prange
from torch import Tensor

from moe_kernels.activation import Activation
from moe_kernels.cpu.activation import divide_row, parameters, whole_exponential
from moe_kernels.cpu.arrays import float32_array, stored_array
from moe_kernels.cpu.grouped_gemm import down_part, up_part
from moe_kernels.cpu.jit import Array, Index, compiled, num_threads, parallel
from moe_kernels.cpu.linear import SMALL_PRODUCT
from moe_kernels.cpu.permute import place_pairs
from moe_kernels.cpu.product import multiply, round_rows
from moe_kernels.experts import Experts
from moe_kernels.mlp import Mlp

FEW_ROWS = 32
"""Rows that one thread rounds sooner than two would meet."""
_ZERO, _ONE = np.float32(0.0), np.float32(1.0)
_NOTHING_TH = np.empty((0, 0), np.float32)


class _Weights(NamedTuple):
    """Of routed experts as the kernel takes them; biases are empty where there are none."""

    w13_SIH: Array
    w2_SHI: Array
    b13_SI: Array
    b2_SH: Array


class _Shared(NamedTuple):
    w13_2JH: Array
    w2_HJ: Array
    gate_1H: Array
    """Without rows where the output has no gate."""


def add_experts(
    onto_TH: Tensor | None,
    x_TH: Tensor,
    slots_TK: Tensor,
    weights_TK: Tensor,
    experts: Experts,
    *,
    shared: Mlp | None = None,
    multiplier: float = 1.0,
) -> tuple[Tensor, Tensor]:
    assert shared is None or shared.act == experts.act, "the contract says so"
    weights: _Weights = experts.derived.get("cpu", partial(_weights, experts))
    dense: _Shared = (
        experts.derived.get("cpu none shared", partial(_none_shared, weights))
        if shared is None
        else shared.derived.get("cpu", partial(_shared, shared))
    )
    served_S = np.empty(experts.w13_S2IH.shape[0], np.int64)
    out_TH = _run(
        onto_TH, x_TH, slots_TK, weights_TK, weights, dense, experts.act, multiplier, served_S
    )
    return out_TH, torch.from_numpy(served_S)


def add_alone(onto_TH: Tensor | None, x_TH: Tensor, network: Mlp, multiplier: float) -> Tensor:
    """A shared expert without routed ones."""
    dense: _Shared = network.derived.get("cpu", partial(_shared, network))
    none: _Weights = network.derived.get("cpu none routed", partial(_none_routed, dense))
    num_tokens = x_TH.shape[0]
    no_slots_TK = torch.empty((num_tokens, 0), dtype=torch.int64)
    no_weights_TK = torch.empty((num_tokens, 0))
    served_S = np.empty(0, np.int64)
    return _run(
        onto_TH, x_TH, no_slots_TK, no_weights_TK, none, dense, network.act, multiplier, served_S
    )


def _run(
    onto_TH: Tensor | None,
    x_TH: Tensor,
    slots_TK: Tensor,
    weights_TK: Tensor,
    weights: _Weights,
    dense: _Shared,
    act: Activation,
    multiplier: float,
    served_S: Array,
) -> Tensor:
    num_tokens, hidden = x_TH.shape
    out_TH = torch.empty((num_tokens, hidden))
    routed = slots_TK.shape[1] * weights.w2_SHI.shape[1]
    products = num_tokens * 2 * hidden * (routed + dense.w2_HJ.shape[1])
    add_expert_rows(
        _NOTHING_TH if onto_TH is None else float32_array(onto_TH),
        float32_array(x_TH),
        slots_TK.contiguous().numpy(),
        float32_array(weights_TK),
        *weights,
        *dense,
        *parameters(act),
        np.float32(multiplier),
        out_TH.numpy(),
        served_S,
        1 if products < SMALL_PRODUCT else num_threads(),
    )
    return out_TH


def _weights(experts: Experts) -> _Weights:
    w13_SIH, w2_SHI = experts.w13_S2IH.flatten(0, 1), experts.w2_SHI.flatten(0, 1)
    b13, b2 = experts.b13_S2I, experts.b2_SH
    return _Weights(
        stored_array(w13_SIH),
        stored_array(w2_SHI),
        stored_array(w13_SIH.new_empty(0) if b13 is None else b13.flatten()),
        stored_array(w2_SHI.new_empty(0) if b2 is None else b2.flatten()),
    )


def _shared(network: Mlp) -> _Shared:
    gate = network.gate_1H
    return _Shared(
        stored_array(network.w13_2IH),
        stored_array(network.w2_HI),
        stored_array(network.w2_HI.new_empty((0, 0)) if gate is None else gate),
    )


def _none_shared(weights: _Weights) -> _Shared:
    empty = np.empty((0, 0), weights.w13_SIH.dtype)
    return _Shared(empty, empty, empty)


def _none_routed(dense: _Shared) -> _Weights:
    empty = np.empty((0, 0), dense.w13_2JH.dtype)
    return _Weights(empty, empty, empty.reshape(0), empty.reshape(0))


@parallel
def add_expert_rows(
    onto_TH: Array,
    x_TH: Array,
    slots_TK: Array,
    weights_TK: Array,
    w13_SIH: Array,
    w2_SHI: Array,
    b13_SI: Array,
    b2_SH: Array,
    w13_2JH: Array,
    w2_HJ: Array,
    gate_1H: Array,
    is_silu: bool,
    limit: float,
    alpha: float,
    multiplier: np.float32,
    out_TH: Array,
    served_S: Array,
    threads: int,
) -> None:
    # As variables: of literals numba would compile everything once more.
    zero = np.int64(0)
    one: Any = np.int64(1)
    num_tokens, hidden = x_TH.shape
    order_P, offsets = place_pairs(slots_TK.reshape(-1), served_S.size)
    place_TK = _places(order_P, offsets, slots_TK.size, served_S)
    num_pairs, intermediate = order_P.size, w2_SHI.shape[1]
    x_PH = np.empty((num_pairs, hidden), np.float32)
    both_P2I = np.empty((num_pairs, 2 * intermediate), np.float32)
    inner_PI = np.empty((num_pairs, intermediate), np.float32)
    y_PH = np.empty((num_pairs, hidden), np.float32)
    # Without a shared expert its arrays have no rows.
    num_dense = num_tokens if w2_HJ.size > 0 else 0
    dense_offsets = np.array([0, num_dense])
    dense_x_TH = np.empty((num_dense, hidden), np.float32)
    both_T2J = np.empty((num_dense, 2 * w2_HJ.shape[1]), np.float32)
    inner_TJ = np.empty((num_dense, w2_HJ.shape[1]), np.float32)
    dense_y_TH = np.empty((num_dense, hidden), np.float32)
    logits_T1 = np.empty((num_dense if gate_1H.size > 0 else 0, 1), np.float32)
    if threads == 1 or num_pairs + num_dense < FEW_ROWS:
        _round_part(zero, one, x_TH, order_P, slots_TK, w13_SIH, x_PH, w13_2JH, dense_x_TH)
    else:
        for part in prange(threads):
            _round_part(
                np.int64(part), threads, x_TH, order_P, slots_TK, w13_SIH, x_PH, w13_2JH,
                dense_x_TH,
            )  # fmt: skip
    if threads == 1:
        _up_both(
            zero, one, x_PH, offsets, w13_SIH, b13_SI, is_silu, limit, alpha, both_P2I, w2_SHI,
            inner_PI, dense_x_TH, dense_offsets, w13_2JH, both_T2J, w2_HJ, inner_TJ, gate_1H,
            logits_T1,
        )  # fmt: skip
        _down_both(
            zero, one, inner_PI, offsets, w2_SHI, b2_SH, y_PH, inner_TJ, dense_offsets, w2_HJ,
            dense_y_TH, logits_T1, place_TK, weights_TK, onto_TH, multiplier, out_TH,
        )  # fmt: skip
    else:
        for part in prange(threads):
            _up_both(
                np.int64(part), threads, x_PH, offsets, w13_SIH, b13_SI, is_silu, limit, alpha,
                both_P2I, w2_SHI, inner_PI, dense_x_TH, dense_offsets, w13_2JH, both_T2J, w2_HJ,
                inner_TJ, gate_1H, logits_T1,
            )  # fmt: skip
        for part in prange(threads):
            _down_both(
                np.int64(part), threads, inner_PI, offsets, w2_SHI, b2_SH, y_PH, inner_TJ,
                dense_offsets, w2_HJ, dense_y_TH, logits_T1, place_TK, weights_TK, onto_TH,
                multiplier, out_TH,
            )  # fmt: skip


@compiled
def _places(order_P: Array, offsets: Array, num_choices: int, served_S: Array) -> Array:
    """The row of each choice, −1 without a slot; and the rows of each slot."""
    for slot in range(served_S.size):
        served_S[slot] = offsets[slot + 1] - offsets[slot]
    place_TK = np.full(num_choices, -1, np.int64)
    for row in range(order_P.size):
        place_TK[order_P[row]] = row
    return place_TK


@compiled
def _round_part(
    part: Index, parts: int, x_TH: Array, order_P: Array, slots_TK: Array, w13_SIH: Array,
    x_PH: Array, w13_2JH: Array, dense_x_TH: Array,
) -> None:  # fmt: skip
    """This part's rows: every pair's, and every token's for the shared expert."""
    num_pairs, num_dense, top_k = order_P.size, dense_x_TH.shape[0], slots_TK.shape[1]
    zero, one = np.int64(0), np.int64(1)
    for row in range(num_pairs * part // parts, num_pairs * (part + 1) // parts):
        token = order_P[row] // top_k
        round_rows(x_TH[token : token + 1], zero, one, w13_SIH, x_PH[row : row + 1])
    first, last = num_dense * part // parts, num_dense * (part + 1) // parts
    round_rows(x_TH, first, last, w13_2JH, dense_x_TH)


@compiled
def _up_both(
    part: Index, parts: int, x_PH: Array, offsets: Array, w13_SIH: Array, b13_SI: Array,
    is_silu: bool, limit: float, alpha: float, both_P2I: Array, w2_SHI: Array, inner_PI: Array,
    dense_x_TH: Array, dense_offsets: Array, w13_2JH: Array, both_T2J: Array, w2_HJ: Array,
    inner_TJ: Array, gate_1H: Array, logits_T1: Array,
) -> None:  # fmt: skip
    up_part(
        part, parts, x_PH, offsets, w13_SIH, b13_SI, is_silu, limit, alpha, both_P2I, w2_SHI,
        inner_PI,
    )  # fmt: skip
    no_bias = b13_SI[:0]
    up_part(
        part, parts, dense_x_TH, dense_offsets, w13_2JH, no_bias, is_silu, limit, alpha, both_T2J,
        w2_HJ, inner_TJ,
    )  # fmt: skip
    num_gated = logits_T1.shape[0]
    first, last = num_gated * part // parts, num_gated * (part + 1) // parts
    zero, one = np.int64(0), np.int64(1)
    multiply(gate_1H, zero, zero, one, dense_x_TH, first, last, logits_T1)


@compiled
def _down_both(
    part: Index, parts: int, inner_PI: Array, offsets: Array, w2_SHI: Array, b2_SH: Array,
    y_PH: Array, inner_TJ: Array, dense_offsets: Array, w2_HJ: Array, dense_y_TH: Array,
    logits_T1: Array, place_TK: Array, weights_TK: Array, onto_TH: Array, multiplier: np.float32,
    out_TH: Array,
) -> None:  # fmt: skip
    """This part's columns of the output, from its own columns of the down projections."""
    no_bias = b2_SH[:0]
    down_part(part, parts, inner_PI, offsets, w2_SHI, b2_SH, y_PH)
    down_part(part, parts, inner_TJ, dense_offsets, w2_HJ, no_bias, dense_y_TH)
    hidden = out_TH.shape[1]
    start, end = hidden * part // parts, hidden * (part + 1) // parts
    top_k = weights_TK.shape[1]
    for token in range(out_TH.shape[0]):
        total = out_TH[token, start:end]
        total[:] = _ZERO
        for choice in range(top_k):
            row, weight = place_TK[token * top_k + choice], weights_TK[token, choice]
            if row >= 0:
                _add_weighted(y_PH[row, start:end], weight, total)
            else:
                _add_constant(_ZERO * weight, total)
        if dense_y_TH.shape[0] > 0:
            dense = dense_y_TH[token, start:end]
            if logits_T1.shape[0] > 0:
                divide_row(dense, _ONE + whole_exponential(-logits_T1[token, 0]), dense)
            if top_k > 0:
                _add_weighted(dense, _ONE, total)
            else:
                total[:] = dense
        if onto_TH.size > 0:
            _add_onto(onto_TH[token, start:end], multiplier, total)
        elif multiplier != _ONE:
            _scale(multiplier, total)


@compiled
def _add_weighted(y_H: Array, weight: np.float32, total_H: Array) -> None:
    for i in range(total_H.size):
        total_H[i] += y_H[i] * weight


@compiled
def _add_constant(value: np.float32, total_H: Array) -> None:
    for i in range(total_H.size):
        total_H[i] += value


@compiled
def _add_onto(onto_H: Array, multiplier: np.float32, total_H: Array) -> None:
    for i in range(total_H.size):
        total_H[i] = onto_H[i] + total_H[i] * multiplier


@compiled
def _scale(multiplier: np.float32, total_H: Array) -> None:
    for i in range(total_H.size):
        total_H[i] *= multiplier
