"""Norm, gate and choice in one compiled call.

Threads share the tokens; where there are fewer tokens than parts and the gate is large they share
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
from numba import types
from torch import Tensor

from moe_kernels.cpu.apart import Slot, call_apart
from moe_kernels.cpu.arrays import float32_array, stored_array
from moe_kernels.cpu.jit import Array, Index, compiled, inner
from moe_kernels.cpu.linear import SMALL_PRODUCT
from moe_kernels.cpu.norm_rope import norm_part
from moe_kernels.cpu.parts import cut, meet, new_board, parts_for, share, take, take_next
from moe_kernels.cpu.product import STORED, multiply, round_rows
from moe_kernels.cpu.router import CHOOSING, NO_BIAS, choose_rows, router_numbers
from moe_kernels.cpu.team import num_threads, together
from moe_kernels.gate import Gate
from moe_kernels.router import check_fit

_ALL, _NORM, _PRODUCT, _CHOICE = range(4)
"""Phases: all for a part's tokens; or one after the other, where there are fewer tokens than
parts."""
NUM_PHASES = 4


class GateArrays(NamedTuple):
    norm_H: Array
    """Widened: one type of kernel less, and the same numbers."""
    eps: np.float32
    gate_EH: Array
    logit_bias_E: Array
    selection_bias_E: Array
    """Biases are empty where there are none."""
    score: int
    num_groups: int
    keep: int
    two_best: bool
    renorm: bool
    epsilon: np.float32
    scale: np.float32
    """From `score` on as `RouterNumbers`: a parallel region takes no tuples of tuples."""


def route(x_TH: Tensor, gate: Gate) -> tuple[Tensor, Tensor, Tensor]:
    arrays = gate_arrays(gate)
    num_tokens = x_TH.shape[0]
    normed_TH = torch.empty(x_TH.shape)
    ids_TK = torch.empty((num_tokens, gate.spec.top_k), dtype=torch.int64)
    weights_TK = torch.empty((num_tokens, gate.spec.top_k))
    route_rows(
        float32_array(x_TH),
        arrays,
        normed_TH.numpy(),
        ids_TK.numpy(),
        weights_TK.numpy(),
        num_threads(),
    )
    return normed_TH, ids_TK, weights_TK


def gate_arrays(gate: Gate) -> GateArrays:
    """As the kernel takes it, which is ready to be called."""
    return gate.derived.get("cpu", partial(_gate_arrays, gate))


def _gate_arrays(gate: Gate) -> GateArrays:
    check_fit(gate.gate_EH.shape[0], gate.spec, gate.selection_bias_E)

    def bias(values_E: Tensor | None) -> Array:
        return NO_BIAS if values_E is None else float32_array(values_E.to(torch.float32))

    gate_EH = stored_array(gate.gate_EH)
    CHOOSING.fill()
    _PARTS[gate_EH.dtype].fill()
    return GateArrays(
        float32_array(gate.norm_H.to(torch.float32)),
        np.float32(gate.norm_eps),
        gate_EH,
        bias(gate.logit_bias_E),
        bias(gate.selection_bias_E),
        *router_numbers(gate.spec),
    )


@compiled
def route_rows(
    x_TH: Array,
    gate: GateArrays,
    normed_TH: Array,
    ids_TK: Array,
    weights_TK: Array,
    threads: int,
) -> None:
    """Fills the last three, with up to so many threads; `gate_arrays` comes before."""
    board = new_board(NUM_PHASES)
    room = np.empty(route_floats(x_TH.shape[0], gate), np.float32)
    together(_route_alone, threads, board, x_TH, gate, room, normed_TH, ids_TK, weights_TK, threads)


@inner
def _route_alone(
    board: Array, x_TH: Array, gate: GateArrays, room: Array, normed_TH: Array, ids_TK: Array,
    weights_TK: Array, threads: int,
) -> None:  # fmt: skip
    route_phases(board, 0, x_TH, gate, room, normed_TH, ids_TK, weights_TK, threads)


@inner
def route_phases(
    board: Array, first_phase: Index, x_TH: Array, gate: GateArrays, room: Array, normed_TH: Array,
    ids_TK: Array, weights_TK: Array, threads: int,
) -> None:  # fmt: skip
    """What each thread does, see `parts`; `room` has at least `route_floats`."""
    num_tokens, (num_experts, hidden) = x_TH.shape[0], gate.gate_EH.shape
    rounded_TH, room = cut(room, (num_tokens, hidden))
    logits_TE, room = cut(room, (num_tokens, num_experts))
    shared = parts_for(threads)
    if num_tokens * num_experts * hidden < SMALL_PRODUCT:
        shared = np.int64(1)
    by_tokens = num_tokens >= shared
    phase, end = (_ALL, _ALL + 1) if by_tokens else (_NORM, NUM_PHASES)
    while phase < end:
        parts = shared if phase == _ALL or phase == _PRODUCT else np.int64(1)
        part = take(board, first_phase + phase)
        while part < parts:
            call_apart(
                "route_part", phase, part, parts, x_TH, gate, normed_TH, rounded_TH, logits_TE,
                ids_TK, weights_TK,
            )  # fmt: skip
            part = take_next(board, first_phase + phase)
        meet(board, first_phase + phase, parts)
        phase += 1


@inner
def route_floats(num_tokens: Index, gate: GateArrays) -> Index:
    """Room that a layer's gate needs."""
    num_experts, hidden = gate.gate_EH.shape
    num_floats: Index = num_tokens * (num_experts + hidden)
    return num_floats


def _part(
    phase: Index, part: Index, parts: Index, x_TH: Array, gate: GateArrays, normed_TH: Array,
    rounded_TH: Array, logits_TE: Array, ids_TK: Array, weights_TK: Array,
) -> None:  # fmt: skip
    zero, gate_EH = np.int64(0), gate.gate_EH
    first, last = share(part, parts, x_TH.shape[0])
    if phase == _ALL or phase == _NORM:
        norm_part(part, parts, x_TH, gate.norm_H, gate.eps, normed_TH)
        round_rows(normed_TH, first, last, gate_EH, rounded_TH)
    if phase == _ALL:
        multiply(gate_EH, zero, zero, gate_EH.shape[0], rounded_TH, first, last, logits_TE)
    elif phase == _PRODUCT:
        start, end = share(part, parts, gate_EH.shape[0])
        multiply(gate_EH, zero, start, end, rounded_TH, zero, rounded_TH.shape[0], logits_TE)
    if phase == _ALL or phase == _CHOICE:
        _choose_part(first, last, logits_TE, gate, ids_TK, weights_TK)


def gate_kind(stored: Any) -> Any:
    """The type of `GateArrays` to kernels, of a gate that stores numbers of this type."""
    numbers = [*[types.int64] * 3, *[types.boolean] * 2, *[types.float32] * 2]
    matrix = types.Array(stored, 2, "C")
    return types.NamedTuple(
        [_FLOATS, types.float32, matrix, _FLOATS, _FLOATS, *numbers], GateArrays
    )


_FLOATS, _ROWS = types.Array(types.float32, 1, "C"), types.Array(types.float32, 2, "C")
_IDS = types.Array(types.int64, 2, "C")
_PARTS = {
    np.dtype(str(stored)): Slot(
        "route_part",
        _part,
        [*[types.int64] * 3, _ROWS, gate_kind(stored), *[_ROWS] * 3, _IDS, _ROWS],
    )
    for stored in STORED
}


@inner
def _choose_part(
    first: Index, last: Index, logits_TE: Array, gate: GateArrays, ids_TK: Array, weights_TK: Array
) -> None:
    bias_E = gate.logit_bias_E
    for row in range(first, last):
        for expert in range(bias_E.size):
            logits_TE[row, expert] += bias_E[expert]
    choose_rows(
        logits_TE, gate.selection_bias_E, gate.score, gate.num_groups, gate.keep, gate.two_best,
        gate.renorm, gate.epsilon, gate.scale, first, last, ids_TK, weights_TK,
    )  # fmt: skip
