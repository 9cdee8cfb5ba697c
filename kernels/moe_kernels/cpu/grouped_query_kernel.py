"""The attention half of a layer in one call, with numba.

Seven phases, each done for all tokens before the next begins:
  NORM       rows of x normed and rounded to what the weights store;
  QKV        threads share the weight rows, so that each is read once;
  TOKENS     token by token: bias, norms, clip, rotation, keys and values into the pages;
  ATTENTION  units as `attention_work` cuts them;
  JOIN       what threads left of rows whose keys they took apart;
  ROUND      what came out rounded to what the weights store;
  OUT        the output's weight rows, then bias and residual of what they gave.
A phase has several parts only where another thread brings more than it costs: of a single token
only the two products and attention do. What a phase does is done by the compiled functions that the
single operations use (`product`, `norm_rope`, `kv_encode`, `attention`), in their order, so the
bits are theirs; `moe_kernels.grouped_query.composed` says that order.
Arrays come as a few tuples, because a call costs by the argument.
Neighbour: `grouped_query` makes the tuples.

Letters: T tokens, H hidden, N query heads, K kv heads, D head_dim, Q = (N + 2·K) · D, F rotated
pairs of a head.
"""

# mypy: ignore-errors

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import types

from moe_kernels.cpu.apart import Slot, call_apart
from moe_kernels.cpu.attention import attend_range
from moe_kernels.cpu.attention_chunks import PARTIALS, Partials, join_units
from moe_kernels.cpu.jit import Array, Index, compiled, inner
from moe_kernels.cpu.kv_codes import STORED_SIDE, StoredSide
from moe_kernels.cpu.kv_encode import encode_range
from moe_kernels.cpu.parts import cut, meet, new_board, share, take, take_next
from moe_kernels.cpu.product import STORED, multiply, round_rows
from moe_kernels.cpu.row_lanes import (
    copy_columns,
    norm_columns,
    turn_columns,
)
from moe_kernels.cpu.team import together

NORM, QKV, TOKENS, ATTENTION, JOIN, ROUND, OUT = range(7)
NUM_PHASES = 7


class LayerArrays(NamedTuple):
    """Float32 but for the two matrices; what a model lacks is empty."""

    norm_H: Array
    qkv_QH: Array
    o_HX: Array
    qkv_bias_Q: Array
    o_bias_H: Array
    q_norm: Array
    k_norm: Array
    sinks_N: Array
    sizes: Array
    """Int64: query heads, kv heads, head_dim, window or 0."""
    numbers: Array
    """Float32: eps, clip or infinity, scale, residual."""


class CacheArrays(NamedTuple):
    center_KD: Array
    channel_KD: Array
    """Empty = none."""
    sizes: Array
    """Int64: block size, 1 for FourOverSix."""
    global_scales: Array
    """Float32, of keys and of values."""


class HalfArrays(NamedTuple):
    """What the attention half of a layer has of its own."""

    layer: LayerArrays
    key: StoredSide
    no_key_tail: StoredSide
    value: StoredSide
    cache: CacheArrays


class StepArrays(NamedTuple):
    cos_TF: Array
    sin_TF: Array
    slots_T: Array
    units: Array
    bounds: Array
    tables: Array
    """See `attention_work`."""
    parts: Array
    """Int64, how many each phase has."""


class Rows(NamedTuple):
    """What phases leave to the next."""

    rounded_TH: Array
    qkv_TQ: Array
    q_TND: Array
    k_TKD: Array
    v_TKD: Array
    mixed_TND: Array
    rounded_TX: Array


@compiled
def attention_half(
    x_TH: Array, half: HalfArrays, step: StepArrays, partials: Partials, out_TH: Array
) -> None:
    """`fill_slots` of what the matrices store comes before the first call."""
    board = new_board(NUM_PHASES)
    room = np.empty(half_floats(x_TH.shape[0], half.layer), np.float32)
    threads = step.bounds.size - 1
    together(_half_alone, threads, board, x_TH, half, step, partials, room, out_TH)


@inner
def _half_alone(board, x_TH, half, step, partials, room, out_TH):
    half_phases(board, 0, x_TH, half, step, partials, room, out_TH)


@inner
def half_phases(
    board: Array, first_phase: Index, x_TH: Array, half: HalfArrays, step: StepArrays,
    partials: Partials, room: Array, out_TH: Array,
) -> None:  # fmt: skip
    """What each thread does, see `parts`; `room` has at least `half_floats`."""
    rows = _rows_in(room, x_TH.shape[0], half.layer)
    for phase in range(NUM_PHASES):
        parts = step.parts[phase]
        part = take(board, first_phase + phase)
        while part < parts:
            call_apart(
                "attention_part", phase, part, parts, x_TH, half.layer, half.key, half.no_key_tail,
                half.value, half.cache, step, partials, rows, out_TH,
            )  # fmt: skip
            part = take_next(board, first_phase + phase)
        meet(board, first_phase + phase, parts)


@inner
def half_floats(num_tokens: Index, layer: LayerArrays) -> Index:
    """Room that a layer needs for its rows."""
    heads, kv_heads, width = layer.sizes[0], layer.sizes[1], layer.sizes[2]
    outputs, hidden = layer.qkv_QH.shape
    return num_tokens * (hidden + outputs + (3 * heads + 2 * kv_heads) * width)


@inner
def _rows_in(room, num_tokens, layer):
    heads, kv_heads, width = layer.sizes[0], layer.sizes[1], layer.sizes[2]
    outputs, hidden = layer.qkv_QH.shape
    rounded_TH, room = cut(room, (num_tokens, hidden))
    qkv_TQ, room = cut(room, (num_tokens, outputs))
    q_TND, room = cut(room, (num_tokens, heads, width))
    k_TKD, room = cut(room, (num_tokens, kv_heads, width))
    v_TKD, room = cut(room, (num_tokens, kv_heads, width))
    mixed_TND, room = cut(room, (num_tokens, heads, width))
    rounded_TX, room = cut(room, (num_tokens, heads * width))
    return Rows(rounded_TH, qkv_TQ, q_TND, k_TKD, v_TKD, mixed_TND, rounded_TX)


def half_kind(stored):
    """The type of `HalfArrays` to kernels, of matrices that store numbers of this type."""
    matrix = types.Array(stored, 2, "C")
    floats, wholes = types.Array(types.float32, 1, "C"), types.Array(types.int64, 1, "C")
    layer = [floats, matrix, matrix, *[floats] * 5, wholes, floats]
    cache = [_NUMBERS, _NUMBERS, wholes, floats]
    return types.NamedTuple(
        [
            types.NamedTuple(layer, LayerArrays),
            *[STORED_SIDE] * 3,
            types.NamedTuple(cache, CacheArrays),
        ],
        HalfArrays,
    )


_NUMBERS = types.Array(types.float32, 2, "C")
_WHOLES = types.Array(types.int64, 1, "C")
STEP_ARRAYS = types.NamedTuple(
    [*[_NUMBERS] * 2, _WHOLES, types.Array(types.int64, 2, "C"), *[_WHOLES] * 3], StepArrays
)
"""Their type to kernels."""


def _part(
    phase, part, parts, x_TH, layer, key, no_key_tail, value, cache, step, partials, rows, out_TH
):  # fmt: skip
    if phase == NORM:
        _norm_part(part, parts, x_TH, layer, rows)
    elif phase == QKV:
        start, end = share(part, parts, layer.qkv_QH.shape[0])
        multiply(layer.qkv_QH, 0, start, end, rows.rounded_TH, 0, len(x_TH), rows.qkv_TQ)
    elif phase == TOKENS:
        _tokens_part(part, parts, layer, key, value, cache, step, rows)
    elif phase == ATTENTION:
        begin = step.bounds[part] if parts > 1 else 0
        end = step.bounds[part + 1] if parts > 1 else len(step.units)
        attend_range(
            rows.q_TND, key, no_key_tail, value, step.units, begin, end, step.tables,
            cache.sizes[0], layer.sizes[3], layer.numbers[2], layer.sinks_N, cache.center_KD,
            cache.channel_KD, partials, rows.mixed_TND,
        )  # fmt: skip
    elif phase == JOIN:
        if len(partials.tops_P):
            join_units(step.units, partials, rows.mixed_TND)
    elif phase == ROUND:
        first, last = share(part, parts, len(x_TH))
        mixed_TX = rows.mixed_TND.reshape(rows.rounded_TX.shape)
        round_rows(mixed_TX, first, last, layer.o_HX, rows.rounded_TX)
    else:
        start, end = share(part, parts, layer.o_HX.shape[0])
        multiply(layer.o_HX, 0, start, end, rows.rounded_TX, 0, len(x_TH), out_TH)
        _add_residual(start, end, x_TH, layer, out_TH)


@inner
def _norm_part(part, parts, x_TH, layer, rows):
    first, last = share(part, parts, x_TH.shape[0])
    normed_TH, hidden = rows.rounded_TH, x_TH.shape[1]
    norm_columns(x_TH, first, last, np.int64(0), hidden, layer.norm_H, layer.numbers[0], normed_TH)
    round_rows(normed_TH, first, last, layer.qkv_QH, normed_TH)


@inner
def _tokens_part(part, parts, layer, key, value, cache, step, rows):
    first, last = share(part, parts, rows.qkv_TQ.shape[0])
    _make_heads(first, last, layer, step, rows)
    block_size, four_over_six = cache.sizes[0], cache.sizes[1] == 1
    encode_range(
        rows.k_TKD, step.slots_T, first, last, block_size, key, cache.global_scales[0],
        four_over_six, cache.center_KD, cache.channel_KD,
    )  # fmt: skip
    none_KD = cache.center_KD[:0]
    encode_range(
        rows.v_TKD, step.slots_T, first, last, block_size, value, cache.global_scales[1],
        four_over_six, none_KD, none_KD,
    )  # fmt: skip


@inner
def _make_heads(first, last, layer, step, rows):
    """Queries and keys as they meet, and values."""
    heads, kv_heads, width = layer.sizes[0], layer.sizes[1], layer.sizes[2]
    eps, qkv_TQ = layer.numbers[0], rows.qkv_TQ
    q_start, k_start, v_start = np.int64(0), heads * width, (heads + kv_heads) * width
    if len(layer.qkv_bias_Q):
        for token in range(first, last):
            _add(layer.qkv_bias_Q, qkv_TQ[token])
    if len(layer.q_norm):
        norm_columns(qkv_TQ, first, last, q_start, k_start, layer.q_norm, eps, qkv_TQ)
        norm_columns(qkv_TQ, first, last, k_start, v_start, layer.k_norm, eps, qkv_TQ)
    if layer.numbers[1] < np.inf:
        for token in range(first, last):
            _clip(qkv_TQ[token], layer.numbers[1])
    turn_columns(qkv_TQ, first, last, q_start, step.cos_TF, step.sin_TF, rows.q_TND)
    turn_columns(qkv_TQ, first, last, k_start, step.cos_TF, step.sin_TF, rows.k_TKD)
    copy_columns(qkv_TQ, first, last, v_start, rows.v_TKD)


@inner
def _add(bias, x):
    for each in range(len(x)):
        x[each] += bias[each]


@inner
def _clip(x, bound):
    """A NaN stays."""
    for each in range(len(x)):
        value = x[each]
        value = bound if value > bound else value
        x[each] = -bound if value < -bound else value


@inner
def _add_residual(start, end, x_TH, layer, out_TH):
    for token in range(len(x_TH)):
        x, out = x_TH[token, start:end], out_TH[token, start:end]
        if len(layer.o_bias_H):
            bias = layer.o_bias_H[start:end]
            for each in range(len(out)):
                out[each] += bias[each]
        if layer.numbers[3] != np.float32(1.0):
            for each in range(len(out)):
                out[each] *= layer.numbers[3]
        for each in range(len(out)):
            out[each] = x[each] + out[each]


_HEADS = types.Array(types.float32, 3, "C")
_ROWS = types.NamedTuple([*[_NUMBERS] * 2, *[_HEADS] * 4, _NUMBERS], Rows)


def _slot(stored):
    """A part of a phase."""
    given = [*half_kind(stored), STEP_ARRAYS, PARTIALS]
    part = [*[types.int64] * 3, _NUMBERS, *given, _ROWS, _NUMBERS]
    return Slot("attention_part", _part, part)


_SLOTS = {np.dtype(str(stored)): _slot(stored) for stored in STORED}


def fill_slots(stored: np.dtype) -> None:
    """Make `attention_half` ready for matrices of this dtype."""
    _SLOTS[stored].fill()
