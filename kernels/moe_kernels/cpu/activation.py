"""The gated activations on the CPU, element by element, with an exponential of its own.

The C library's exponential is a call per element and keeps a loop from being vectorised. This one
is a polynomial between additions and products that IEEE rounds alike in every lane and in a loop's
tail, so that an element's bits depend on nothing but its inputs.
Neighbours: `moe_kernels.activation` is the contract; `grouped_gemm` gates a thread's own columns.

Letters: R rows, I intermediate, T tokens, H hidden.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from moe_kernels.activation import Activation, Silu
from moe_kernels.cpu.arrays import float32_array
from moe_kernels.cpu.intrinsics import power_of_two
from moe_kernels.cpu.jit import Array, Index, compiled

_PER_LN2 = np.float32(1.4426950408889634)
_LN2_HIGH, _LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
"""Their sum is ln 2; the first has few bits, so that its product with a whole number is exact."""
_HALF, _ONE = np.float32(0.5), np.float32(1.0)
_C2, _C3, _C4, _C5, _C6, _C7 = (np.float32(1.0 / divisor) for divisor in (2, 6, 24, 120, 720, 5040))
_SMALLEST, _LARGEST = np.float32(-87.0), np.float32(88.0)
_INFINITY = np.float32(np.inf)
_ZERO_BELOW, _INFINITE_ABOVE = np.float32(-104.0), np.float32(89.0)


def gated(both_R2I: Tensor, act: Activation) -> Tensor:
    both = float32_array(both_R2I)
    rows, intermediate = both.shape[0], both.shape[1] // 2
    inner_RI = torch.empty((rows, intermediate), dtype=torch.float32)
    gate_rows(both, 0, rows, 0, intermediate, *parameters(act), inner_RI.numpy())
    return inner_RI


def sigmoid_scaled(x_TH: Tensor, logits_T1: Tensor) -> Tensor:
    y_TH = torch.empty(x_TH.shape, dtype=torch.float32)
    scale_rows(float32_array(x_TH), float32_array(logits_T1), y_TH.numpy())
    return y_TH


def parameters(act: Activation) -> tuple[bool, float, float]:
    """What `gate_rows` takes of an activation."""
    return (True, 0.0, 1.0) if isinstance(act, Silu) else (False, act.limit, act.alpha)


@compiled
def gate_rows(
    both_R2I: Array,
    first: Index,
    last: Index,
    start: Index,
    end: Index,
    is_silu: bool,
    limit: float,
    alpha: float,
    inner_RI: Array,
) -> None:
    """inner[first:last, start:end] of the same columns of both halves."""
    intermediate = both_R2I.shape[1] // 2
    for row in range(first, last):
        gate = both_R2I[row, start:end]
        up = both_R2I[row, intermediate + start : intermediate + end]
        inner = inner_RI[row, start:end]
        if is_silu:
            _silu_gate(gate, up, inner)
        else:
            _swiglu_oai_gate(gate, up, np.float32(limit), np.float32(alpha), inner)


@compiled
def _silu_gate(gate_I: Array, up_I: Array, inner_I: Array) -> None:
    for i in range(inner_I.size):
        gate = gate_I[i]
        inner_I[i] = gate / (_ONE + exponential(-gate)) * up_I[i]


@compiled
def _swiglu_oai_gate(
    gate_I: Array, up_I: Array, limit: np.float32, alpha: np.float32, inner_I: Array
) -> None:
    for i in range(inner_I.size):
        # Comparisons with NaN are false: it stays.
        gate = limit if gate_I[i] > limit else gate_I[i]
        up = limit if up_I[i] > limit else up_I[i]
        up = -limit if up < -limit else up
        inner_I[i] = gate / (_ONE + exponential(-alpha * gate)) * (up + _ONE)


@compiled
def scale_rows(x_TH: Array, logits_T1: Array, y_TH: Array) -> None:
    for row in range(x_TH.shape[0]):
        divide_row(x_TH[row], _ONE + whole_exponential(-logits_T1[row, 0]), y_TH[row])


@compiled
def divide_row(x_H: Array, divisor: np.float32, y_H: Array) -> None:
    for i in range(x_H.size):
        y_H[i] = x_H[i] / divisor


@compiled
def exponential(x: np.float32) -> np.float32:
    """eˣ, relative error < 2·10⁻⁷; below −87 as at −87, infinite above 88, of NaN any number."""
    bounded = x if x > _SMALLEST else _SMALLEST
    bounded = bounded if bounded < _LARGEST else _LARGEST
    whole = np.floor(bounded * _PER_LN2 + _HALF)
    power = _small_power(bounded - whole * _LN2_HIGH - whole * _LN2_LOW)
    return _INFINITY if x > _LARGEST else power * power_of_two(np.int32(whole))


@compiled
def whole_exponential(x: np.float32) -> np.float32:
    """eˣ to both ends of float32's range: 0 below it, infinite above, NaN of NaN."""
    bounded = x if x > _ZERO_BELOW else _ZERO_BELOW
    bounded = bounded if bounded < _INFINITE_ABOVE else _INFINITE_ABOVE
    whole = np.floor(bounded * _PER_LN2 + _HALF)
    power = _small_power(bounded - whole * _LN2_HIGH - whole * _LN2_LOW)
    exponent = np.int32(whole)
    half = np.int32(exponent >> 1)
    y = power * power_of_two(half) * power_of_two(np.int32(exponent - half))
    return y if x == x else x


@compiled
def _small_power(f: np.float32) -> np.float32:
    """eᶠ for |f| ≤ ln 2 ÷ 2."""
    series = _C3 + f * (_C4 + f * (_C5 + f * (_C6 + f * _C7)))
    return _ONE + f * (_ONE + f * (_C2 + f * series))
