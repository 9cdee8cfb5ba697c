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
from numba import prange, types
from torch import Tensor

from moe_kernels.cpu.apart import Slot, call_apart
from moe_kernels.cpu.arrays import float32_array, stored_array
from moe_kernels.cpu.jit import Array, Index, compiled, inner, num_threads
from moe_kernels.cpu.linear import SMALL_PRODUCT
from moe_kernels.cpu.norm_rope import norm_part
from moe_kernels.cpu.product import STORED, multiply, round_rows
from moe_kernels.cpu.router import CHOOSING, NO_BIAS, choose_rows, router_numbers
from moe_kernels.gate import Gate
from moe_kernels.router import check_fit


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
    _ROUTES[gate_EH.dtype].fill()
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
    call_apart("route", x_TH, gate, normed_TH, ids_TK, weights_TK, threads)


def _route(
    x_TH: Array,
    gate: GateArrays,
    normed_TH: Array,
    ids_TK: Array,
    weights_TK: Array,
    threads: int,
) -> None:
    # As variables: of literals numba would compile everything once more.
    zero = np.int64(0)
    one: Any = np.int64(1)
    rounded_TH = np.empty(x_TH.shape, np.float32)
    logits_TE = np.empty((x_TH.shape[0], gate.gate_EH.shape[0]), np.float32)
    if x_TH.shape[0] * gate.gate_EH.size < SMALL_PRODUCT:
        threads = one
    by_tokens = threads if x_TH.shape[0] >= threads else one
    if by_tokens == 1:
        _norm_part(zero, one, x_TH, gate, normed_TH, rounded_TH)
        if threads == 1:
            _gate_part(zero, one, rounded_TH, gate, logits_TE)
        else:
            for part in prange(threads):
                _gate_part(np.int64(part), threads, rounded_TH, gate, logits_TE)
        _choose_part(zero, one, logits_TE, gate, ids_TK, weights_TK)
    else:
        for part in prange(by_tokens):
            _route_part(
                np.int64(part), by_tokens, x_TH, gate, normed_TH, rounded_TH, logits_TE, ids_TK,
                weights_TK,
            )  # fmt: skip


def gate_kind(stored: Any) -> Any:
    """The type of `GateArrays` to kernels, of a gate that stores numbers of this type."""
    numbers = [*[types.int64] * 3, *[types.boolean] * 2, *[types.float32] * 2]
    matrix = types.Array(stored, 2, "C")
    return types.NamedTuple(
        [_FLOATS, types.float32, matrix, _FLOATS, _FLOATS, *numbers], GateArrays
    )


_FLOATS, _ROWS = types.Array(types.float32, 1, "C"), types.Array(types.float32, 2, "C")
_IDS = types.Array(types.int64, 2, "C")
_ROUTES = {
    np.dtype(str(stored)): Slot(
        "route", _route, [_ROWS, gate_kind(stored), _ROWS, _IDS, _ROWS, types.int64], parallel=True
    )
    for stored in STORED
}


@inner
def _route_part(
    part: Index, parts: int, x_TH: Array, gate: GateArrays, normed_TH: Array, rounded_TH: Array,
    logits_TE: Array, ids_TK: Array, weights_TK: Array,
) -> None:  # fmt: skip
    """Everything for this part's tokens."""
    first, last = _share(part, parts, x_TH.shape[0])
    _norm_part(part, parts, x_TH, gate, normed_TH, rounded_TH)
    zero, gate_EH = np.int64(0), gate.gate_EH
    multiply(gate_EH, zero, zero, gate_EH.shape[0], rounded_TH, first, last, logits_TE)
    _choose_part(part, parts, logits_TE, gate, ids_TK, weights_TK)


@inner
def _share(part: Index, parts: int, number: int) -> tuple[Index, Index]:
    return number * part // parts, number * (part + 1) // parts


@inner
def _norm_part(
    part: Index, parts: int, x_TH: Array, gate: GateArrays, normed_TH: Array, rounded_TH: Array
) -> None:
    first, last = _share(part, parts, x_TH.shape[0])
    norm_part(part, parts, x_TH, gate.norm_H, gate.eps, normed_TH)
    round_rows(normed_TH, first, last, gate.gate_EH, rounded_TH)


@inner
def _gate_part(
    part: Index, parts: int, rounded_TH: Array, gate: GateArrays, logits_TE: Array
) -> None:
    """This part's columns of the logits."""
    start, end = _share(part, parts, gate.gate_EH.shape[0])
    zero = np.int64(0)
    multiply(gate.gate_EH, zero, start, end, rounded_TH, zero, rounded_TH.shape[0], logits_TE)


@inner
def _choose_part(
    part: Index, parts: int, logits_TE: Array, gate: GateArrays, ids_TK: Array, weights_TK: Array
) -> None:
    first, last = _share(part, parts, logits_TE.shape[0])
    bias_E = gate.logit_bias_E
    for row in range(first, last):
        for expert in range(bias_E.size):
            logits_TE[row, expert] += bias_E[expert]
    choose_rows(
        logits_TE, gate.selection_bias_E, gate.score, gate.num_groups, gate.keep, gate.two_best,
        gate.renorm, gate.epsilon, gate.scale, first, last, ids_TK, weights_TK,
    )  # fmt: skip
