"""The experts' half of a layer in one compiled call, in four phases.

  SORT   the pairs of tokens and choices by slot;
  ROUND  rows of the chosen experts, rounded to what the weights store;
  UP     threads share the columns of the gate and up projections and their activation;
  DOWN   they share those of the down projection, and a thread then adds up its own columns of
         every token, so that nobody waits once more.
An expert shared by all tokens goes along with the routed ones, and a dense layer is a shared expert
alone. All parts are the compiled functions that the single operations run, so that the numbers are
theirs.
Neighbours: `moe_kernels.experts` is the contract; `grouped_gemm` and `permute` are the parts.

Letters: T tokens, K choices a token, P pairs with a slot, S slots, H hidden, I expert intermediate,
J intermediate of the shared expert; SI and SH: matrices one below the other.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import types
from torch import Tensor

from moe_kernels.cpu.activation import divide_row, parameters, whole_exponential
from moe_kernels.cpu.apart import Slot, call_apart
from moe_kernels.cpu.arrays import UnsupportedDtype, float32_array, stored_array
from moe_kernels.cpu.grouped_gemm import down_part, up_part
from moe_kernels.cpu.jit import Array, Index, compiled, inner
from moe_kernels.cpu.linear import SMALL_PRODUCT
from moe_kernels.cpu.parts import cut, meet, new_board, parts_for, take, take_next
from moe_kernels.cpu.permute import sort_pairs
from moe_kernels.cpu.product import STORED, multiply, round_rows
from moe_kernels.cpu.team import num_threads, together
from moe_kernels.experts import Experts
from moe_kernels.mlp import Mlp

FEW_ROWS = 32
"""Rows that one thread rounds sooner than two would meet."""
_SORT, _ROUND, _UP, _DOWN = range(4)
NUM_PHASES = 4
_ZERO, _ONE = np.float32(0.0), np.float32(1.0)
_NOTHING_TH = np.empty((0, 0), np.float32)


class RoutedArrays(NamedTuple):
    """Of routed experts; biases are empty where there are none."""

    w13_SIH: Array
    w2_SHI: Array
    b13_SI: Array
    b2_SH: Array


class SharedArrays(NamedTuple):
    """Of the expert of all tokens; without rows where there is none."""

    w13_2JH: Array
    w2_HJ: Array
    gate_1H: Array
    """Without rows where the output has no gate."""


class ExpertNumbers(NamedTuple):
    is_silu: bool
    limit: float
    alpha: float
    multiplier: np.float32
    """Of what the experts add."""


class ExpertArrays(NamedTuple):
    """A layer's experts as the kernel takes them."""

    routed: RoutedArrays
    shared: SharedArrays
    numbers: ExpertNumbers


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
    arrays = expert_arrays(experts, shared, multiplier)
    served_S = np.empty(experts.w13_S2IH.shape[0], np.int64)
    out_TH = _run(onto_TH, x_TH, slots_TK, weights_TK, arrays, served_S)
    return out_TH, torch.from_numpy(served_S)


def add_alone(onto_TH: Tensor | None, x_TH: Tensor, network: Mlp, multiplier: float) -> Tensor:
    """A shared expert without routed ones."""
    dense: SharedArrays = network.derived.get("cpu", partial(_shared, network))
    none: RoutedArrays = network.derived.get("cpu none routed", partial(_none_routed, dense))
    numbers = ExpertNumbers(*parameters(network.act), np.float32(multiplier))
    num_tokens = x_TH.shape[0]
    no_slots_TK = torch.empty((num_tokens, 0), dtype=torch.int64)
    no_weights_TK = torch.empty((num_tokens, 0))
    served_S = np.empty(0, np.int64)
    return _run(
        onto_TH, x_TH, no_slots_TK, no_weights_TK, ExpertArrays(none, dense, numbers), served_S
    )


def expert_arrays(experts: Experts, shared: Mlp | None, multiplier: float) -> ExpertArrays:
    """As the kernel takes them, which is ready to be called."""
    assert shared is None or shared.act == experts.act, "the contract says so"
    routed: RoutedArrays = experts.derived.get("cpu", partial(_routed, experts))
    dense: SharedArrays = (
        experts.derived.get("cpu none shared", partial(_none_shared, routed))
        if shared is None
        else shared.derived.get("cpu", partial(_shared, shared))
    )
    numbers = ExpertNumbers(*parameters(experts.act), np.float32(multiplier))
    return ExpertArrays(routed, dense, numbers)


def _run(
    onto_TH: Tensor | None,
    x_TH: Tensor,
    slots_TK: Tensor,
    weights_TK: Tensor,
    arrays: ExpertArrays,
    served_S: Array,
) -> Tensor:
    out_TH = torch.empty(x_TH.shape)
    add_expert_rows(
        _NOTHING_TH if onto_TH is None else float32_array(onto_TH),
        float32_array(x_TH),
        slots_TK.contiguous().numpy(),
        float32_array(weights_TK),
        arrays,
        out_TH.numpy(),
        served_S,
        num_threads(),
    )
    return out_TH


def _routed(experts: Experts) -> RoutedArrays:
    w13_SIH, w2_SHI = experts.w13_S2IH.flatten(0, 1), experts.w2_SHI.flatten(0, 1)
    b13, b2 = experts.b13_S2I, experts.b2_SH
    return RoutedArrays(
        *_alike(
            w13_SIH,
            w2_SHI,
            w13_SIH.new_empty(0) if b13 is None else b13.flatten(),
            w2_SHI.new_empty(0) if b2 is None else b2.flatten(),
        )
    )


def _shared(network: Mlp) -> SharedArrays:
    gate = network.gate_1H
    nothing = network.w2_HI.new_empty((0, 0))
    return SharedArrays(*_alike(network.w13_2IH, network.w2_HI, nothing if gate is None else gate))


def _alike(*tensors: Tensor) -> list[Array]:
    """Views for the kernel, which is made ready for what they store."""
    dtypes = {tensor.dtype for tensor in tensors}
    if len(dtypes) > 1:
        names = ", ".join(sorted(map(str, dtypes)))
        raise UnsupportedDtype(f"weights of one network are {names}: must be of one type")
    arrays = [stored_array(tensor) for tensor in tensors]
    _SLOTS[arrays[0].dtype].fill()
    return arrays


def _none_shared(routed: RoutedArrays) -> SharedArrays:
    empty = np.empty((0, 0), routed.w13_SIH.dtype)
    return SharedArrays(empty, empty, empty)


def _none_routed(dense: SharedArrays) -> RoutedArrays:
    empty = np.empty((0, 0), dense.w13_2JH.dtype)
    return RoutedArrays(empty, empty, empty.reshape(0), empty.reshape(0))


@compiled
def add_expert_rows(
    onto_TH: Array,
    x_TH: Array,
    slots_TK: Array,
    weights_TK: Array,
    experts: ExpertArrays,
    out_TH: Array,
    served_S: Array,
    threads: int,
) -> None:
    """Fills the last two, with up to so many threads; `expert_arrays` comes before. `onto_TH`
    without rows = nothing is added to."""
    board = new_board(NUM_PHASES)
    num_floats, num_numbers = expert_room(x_TH.shape[0], slots_TK.shape[1], experts, served_S.size)
    room, numbers_room = np.empty(num_floats, np.float32), np.empty(num_numbers, np.int64)
    together(
        _experts_alone, threads, board, onto_TH, x_TH, slots_TK, weights_TK, experts, room,
        numbers_room, out_TH, served_S, threads,
    )  # fmt: skip


@inner
def _experts_alone(
    board: Array, onto_TH: Array, x_TH: Array, slots_TK: Array, weights_TK: Array,
    experts: ExpertArrays, room: Array, numbers_room: Array, out_TH: Array, served_S: Array,
    threads: int,
) -> None:  # fmt: skip
    expert_phases(
        board, 0, onto_TH, x_TH, slots_TK, weights_TK, experts, room, numbers_room, out_TH,
        served_S, threads,
    )  # fmt: skip


@inner
def expert_phases(
    board: Array, first_phase: Index, onto_TH: Array, x_TH: Array, slots_TK: Array,
    weights_TK: Array, experts: ExpertArrays, room: Array, numbers_room: Array, out_TH: Array,
    served_S: Array, threads: Index,
) -> None:  # fmt: skip
    """What each thread does, see `parts`; the rooms have at least what `expert_room` says."""
    routed, shared = experts.routed, experts.shared
    num_tokens, hidden = x_TH.shape
    most_rows = slots_TK.size + num_tokens
    rows = _rows_in(room, numbers_room, num_tokens, slots_TK.shape[1], experts, served_S.size)
    products = 2 * num_tokens * hidden
    products *= slots_TK.shape[1] * routed.w2_SHI.shape[1] + shared.w2_HJ.shape[1]
    if products < SMALL_PRODUCT:
        threads = np.int64(1)
    for phase in range(NUM_PHASES):
        alone = phase == _SORT or (phase == _ROUND and most_rows < FEW_ROWS)
        parts = np.int64(1) if alone else parts_for(threads)
        part = take(board, first_phase + phase)
        while part < parts:
            call_apart(
                "experts_part", phase, part, parts, x_TH, slots_TK, routed, shared, experts.numbers,
                rows, weights_TK, onto_TH, out_TH, served_S,
            )  # fmt: skip
            part = take_next(board, first_phase + phase)
        meet(board, first_phase + phase, parts)


@inner
def expert_room(
    num_tokens: int, top_k: int, experts: ExpertArrays, num_slots: int
) -> tuple[int, int]:
    """How many float32 and int64 a layer needs for its rows and their places."""
    routed, shared = experts.routed, experts.shared
    hidden = max(routed.w13_SIH.shape[1], shared.w13_2JH.shape[1])
    num_floats = num_tokens * top_k * (2 * hidden + 3 * routed.w2_SHI.shape[1])
    num_floats += num_tokens * (2 * hidden + 3 * shared.w2_HJ.shape[1] + 1)
    return num_floats, num_slots + 1 + 2 * num_tokens * top_k + 2


@inner
def _rows_in(
    room: Array, numbers_room: Array, num_tokens: int, top_k: int, experts: ExpertArrays,
    num_slots: int,
) -> _Rows:  # fmt: skip
    routed, shared = experts.routed, experts.shared
    hidden = max(routed.w13_SIH.shape[1], shared.w13_2JH.shape[1])
    wide, dense_wide = routed.w2_SHI.shape[1], shared.w2_HJ.shape[1]
    num_pairs = num_tokens * top_k
    # Without a shared expert its arrays have no rows.
    num_dense = num_tokens if shared.w2_HJ.size > 0 else 0
    num_gated = num_dense if shared.gate_1H.size > 0 else 0
    order_P, numbers_room = cut(numbers_room, (num_pairs,))
    offsets, numbers_room = cut(numbers_room, (num_slots + 1,))
    place_TK, numbers_room = cut(numbers_room, (num_pairs,))
    dense_offsets, numbers_room = cut(numbers_room, (2,))
    x_PH, room = cut(room, (num_pairs, hidden))
    both_P2I, room = cut(room, (num_pairs, 2 * wide))
    inner_PI, room = cut(room, (num_pairs, wide))
    y_PH, room = cut(room, (num_pairs, hidden))
    dense_x_TH, room = cut(room, (num_dense, hidden))
    both_T2J, room = cut(room, (num_dense, 2 * dense_wide))
    inner_TJ, room = cut(room, (num_dense, dense_wide))
    dense_y_TH, room = cut(room, (num_dense, hidden))
    logits_T1, room = cut(room, (num_gated, 1))
    return _Rows(
        order_P, offsets, place_TK, dense_offsets, x_PH, both_P2I, inner_PI, y_PH, dense_x_TH,
        both_T2J, inner_TJ, dense_y_TH, logits_T1,
    )  # fmt: skip


def _part(
    phase: Index, part: Index, parts: Index, x_TH: Array, slots_TK: Array, routed: RoutedArrays,
    shared: SharedArrays, numbers: ExpertNumbers, rows: _Rows, weights_TK: Array, onto_TH: Array,
    out_TH: Array, served_S: Array,
) -> None:  # fmt: skip
    if phase == _SORT:
        _sort_pairs(slots_TK, rows, served_S)
    elif phase == _ROUND:
        _round_part(part, parts, x_TH, slots_TK, routed, shared, rows)
    elif phase == _UP:
        _up_both(part, parts, routed, shared, numbers, rows)
    else:
        _down_both(part, parts, routed, shared, numbers, rows, weights_TK, onto_TH, out_TH)


class _Rows(NamedTuple):
    """What phases leave to the next: of routed experts, then of the shared one."""

    order_P: Array
    """Pairs (token, choice) by slot, as many as `offsets` ends with."""
    offsets: Array
    place_TK: Array
    """The row of each choice, −1 without a slot."""
    dense_offsets: Array
    x_PH: Array
    both_P2I: Array
    inner_PI: Array
    y_PH: Array
    dense_x_TH: Array
    both_T2J: Array
    inner_TJ: Array
    dense_y_TH: Array
    logits_T1: Array


def expert_kind(stored: Any) -> Any:
    """The type of `ExpertArrays` to kernels, of matrices that store numbers of this type."""
    matrix, row = types.Array(stored, 2, "C"), types.Array(stored, 1, "C")
    routed = types.NamedTuple([matrix, matrix, row, row], RoutedArrays)
    shared = types.NamedTuple([matrix] * 3, SharedArrays)
    members = [types.boolean, types.float64, types.float64, types.float32]
    return types.NamedTuple(
        [routed, shared, types.NamedTuple(members, ExpertNumbers)], ExpertArrays
    )


_FLOATS, _TABLE = types.Array(types.float32, 2, "C"), types.Array(types.int64, 2, "C")
_LIST = types.Array(types.int64, 1, "C")
_ROWS = types.NamedTuple([*[_LIST] * 4, *[_FLOATS] * 9], _Rows)


def _slot(stored: Any) -> Slot:
    """A part of a phase."""
    experts = expert_kind(stored)
    given = [*experts, _ROWS, *[_FLOATS] * 3, _LIST]
    return Slot("experts_part", _part, [*[types.int64] * 3, _FLOATS, _TABLE, *given])


_SLOTS = {np.dtype(str(stored)): _slot(stored) for stored in STORED}


@inner
def _sort_pairs(slots_TK: Array, rows: _Rows, served_S: Array) -> None:
    """Rows of each slot, how many there are, and the row of each choice."""
    sort_pairs(slots_TK.reshape(-1), rows.order_P, rows.offsets)
    for slot in range(served_S.size):
        served_S[slot] = rows.offsets[slot + 1] - rows.offsets[slot]
    rows.place_TK[:] = -1
    for row in range(rows.offsets[-1]):
        rows.place_TK[rows.order_P[row]] = row
    rows.dense_offsets[0], rows.dense_offsets[1] = 0, rows.dense_x_TH.shape[0]


@inner
def _round_part(
    part: Index, parts: Index, x_TH: Array, slots_TK: Array, routed: RoutedArrays,
    shared: SharedArrays, rows: _Rows,
) -> None:  # fmt: skip
    """This part's rows: every pair's, and every token's for the shared expert."""
    num_pairs, num_dense, top_k = rows.offsets[-1], rows.dense_x_TH.shape[0], slots_TK.shape[1]
    zero, one = np.int64(0), np.int64(1)
    w13_SIH, x_PH, order_P = routed.w13_SIH, rows.x_PH, rows.order_P
    for row in range(num_pairs * part // parts, num_pairs * (part + 1) // parts):
        token = order_P[row] // top_k
        round_rows(x_TH[token : token + 1], zero, one, w13_SIH, x_PH[row : row + 1])
    first, last = num_dense * part // parts, num_dense * (part + 1) // parts
    round_rows(x_TH, first, last, shared.w13_2JH, rows.dense_x_TH)


@inner
def _up_both(
    part: Index, parts: Index, routed: RoutedArrays, shared: SharedArrays, numbers: ExpertNumbers,
    rows: _Rows,
) -> None:  # fmt: skip
    is_silu, limit, alpha = numbers.is_silu, numbers.limit, numbers.alpha
    up_part(
        part, parts, rows.x_PH, rows.offsets, routed.w13_SIH, routed.b13_SI, is_silu, limit, alpha,
        rows.both_P2I, routed.w2_SHI, rows.inner_PI,
    )  # fmt: skip
    no_bias = routed.b13_SI[:0]
    up_part(
        part, parts, rows.dense_x_TH, rows.dense_offsets, shared.w13_2JH, no_bias, is_silu, limit,
        alpha, rows.both_T2J, shared.w2_HJ, rows.inner_TJ,
    )  # fmt: skip
    num_gated = rows.logits_T1.shape[0]
    first, last = num_gated * part // parts, num_gated * (part + 1) // parts
    zero, one = np.int64(0), np.int64(1)
    multiply(shared.gate_1H, zero, zero, one, rows.dense_x_TH, first, last, rows.logits_T1)


@inner
def _down_both(
    part: Index, parts: Index, routed: RoutedArrays, shared: SharedArrays, numbers: ExpertNumbers,
    rows: _Rows, weights_TK: Array, onto_TH: Array, out_TH: Array,
) -> None:  # fmt: skip
    """This part's columns of the output, from its own columns of the down projections."""
    multiplier = numbers.multiplier
    y_PH, dense_y_TH, logits_T1 = rows.y_PH, rows.dense_y_TH, rows.logits_T1
    no_bias = routed.b2_SH[:0]
    down_part(part, parts, rows.inner_PI, rows.offsets, routed.w2_SHI, routed.b2_SH, y_PH)
    down_part(part, parts, rows.inner_TJ, rows.dense_offsets, shared.w2_HJ, no_bias, dense_y_TH)
    hidden = out_TH.shape[1]
    start, end = hidden * part // parts, hidden * (part + 1) // parts
    top_k = weights_TK.shape[1]
    for token in range(out_TH.shape[0]):
        total = out_TH[token, start:end]
        total[:] = _ZERO
        for choice in range(top_k):
            row, weight = rows.place_TK[token * top_k + choice], weights_TK[token, choice]
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
