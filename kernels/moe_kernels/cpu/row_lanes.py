"""What is done with rows of float32 between products, eight elements at a time: norms, rotations.

A call goes over all its rows, and a row is a place in an array and the elements from there on:
calls count references to arrays, and slices are made, in more time than a row of 64 takes. The sum
of squares has the order of additions of every product here (`intrinsics`): sixteen sums side by
side, added as a tree, then what is left one by one. The rest is element-wise, and IEEE gives it one
answer. All arrays are C-contiguous.
Neighbours: `norm_rope` and `grouped_query_kernel` call these.

Letters: T tokens, Q columns, N heads, D head_dim, F rotated pairs of a head.
"""

# mypy: ignore-errors

from __future__ import annotations

import numpy as np
from numba import types
from numba.extending import intrinsic

from moe_kernels.cpu.intrinsics import _load as _load_elements
from moe_kernels.cpu.intrinsics import _round, _widen, widened
from moe_kernels.cpu.jit import Array, Index, inner
from moe_kernels.cpu.lanes import (
    WIDTH,
    _call,
    add,
    fma,
    lanes,
    load,
    load_float,
    multiply,
    splat,
    store,
    sum_of,
)

_GROUP = 2 * WIDTH


@inner
def norm_columns(
    x_TQ: Array,
    first: Index,
    last: Index,
    start: Index,
    end: Index,
    weight_D: Array,
    eps: np.float32,
    y_TQ: Array,
) -> None:
    """Columns start:end of tokens first:last, cut into rows as long as the weight, each
    x · (1 / √(mean of squares + eps)) · weight; y may be x. To divide every element would take as
    long as all the rest."""
    size = np.int64(len(weight_D))
    whole, grouped = size // WIDTH * WIDTH, size // _GROUP * _GROUP
    for token in range(first, last):
        for row in range((end - start) // size):
            at = token * x_TQ.shape[1] + start + row * size
            lower, upper = splat(np.float32(0.0)), splat(np.float32(0.0))
            for i in range(0, grouped, _GROUP):
                low, high = load(x_TQ, in_bytes(at + i)), load(x_TQ, in_bytes(at + i + WIDTH))
                lower, upper = fma(low, low, lower), fma(high, high, upper)
            rest = np.float32(0.0)
            for i in range(grouped, size):
                value = load_float(x_TQ, in_bytes(at + i))
                rest = _fused(value, value, rest)
            squares = np.float32(sum_of(add(lower, upper)) + rest)
            factor = np.float32(1.0) / np.sqrt(squares / np.float32(size) + eps)
            factors = splat(factor)
            for i in range(0, whole, WIDTH):
                values = multiply(load(x_TQ, in_bytes(at + i)), factors)
                values = multiply(values, load_widened(weight_D, np.int64(i)))
                store(y_TQ, in_bytes(at + i), values)
            for i in range(whole, size):
                value = load_float(x_TQ, in_bytes(at + i)) * factor * widened(weight_D[i])
                store(y_TQ, in_bytes(at + i), value)


@inner
def turn_columns(
    x_TQ: Array,
    first: Index,
    last: Index,
    start: Index,
    cos_TF: Array,
    sin_TF: Array,
    y_TND: Array,
) -> None:
    """Heads from column `start` on: pairs (i, F + i) turned by the token's angles, the rest as it
    is."""
    heads, width, half = y_TND.shape[1], y_TND.shape[2], cos_TF.shape[1]
    whole = half // WIDTH * WIDTH
    for token in range(first, last):
        for head in range(heads):
            at = token * x_TQ.shape[1] + start + head * width
            to, angle = (token * heads + head) * width, token * half
            for i in range(0, whole, WIDTH):
                low, high = load(x_TQ, in_bytes(at + i)), load(x_TQ, in_bytes(at + half + i))
                c, s = load(cos_TF, in_bytes(angle + i)), load(sin_TF, in_bytes(angle + i))
                store(y_TND, in_bytes(to + i), subtract(multiply(low, c), multiply(high, s)))
                store(y_TND, in_bytes(to + half + i), add(multiply(high, c), multiply(low, s)))
            for i in range(whole, half):
                low, high = (
                    load_float(x_TQ, in_bytes(at + i)),
                    load_float(x_TQ, in_bytes(at + half + i)),
                )
                c, s = (
                    load_float(cos_TF, in_bytes(angle + i)),
                    load_float(sin_TF, in_bytes(angle + i)),
                )
                store(y_TND, in_bytes(to + i), low * c - high * s)
                store(y_TND, in_bytes(to + half + i), high * c + low * s)
            for i in range(2 * half, width):
                store(y_TND, in_bytes(to + i), load_float(x_TQ, in_bytes(at + i)))


@inner
def copy_columns(x_TQ: Array, first: Index, last: Index, start: Index, y_TND: Array) -> None:
    """As many columns as y has, from `start` on."""
    size = y_TND.shape[1] * y_TND.shape[2]
    whole = size // WIDTH * WIDTH
    for token in range(first, last):
        at, to = token * x_TQ.shape[1] + start, token * size
        for i in range(0, whole, WIDTH):
            store(y_TND, in_bytes(to + i), load(x_TQ, in_bytes(at + i)))
        for i in range(whole, size):
            store(y_TND, in_bytes(to + i), load_float(x_TQ, in_bytes(at + i)))


@inner
def in_bytes(element: Index) -> np.int64:
    """Where a float32 lies."""
    return np.int64(4 * element)


@intrinsic
def _fused(typing_context, a, b, c):
    """a · b + c of float32, rounded once."""

    def generate(context, builder, signature, arguments):
        return _call(builder, "llvm.fma.f32", *arguments)

    return types.float32(types.float32, types.float32, types.float32), generate


@intrinsic
def subtract(typing_context, a, b):
    def generate(context, builder, signature, arguments):
        return builder.fsub(*arguments)

    return lanes(lanes, lanes), generate


@intrinsic
def load_widened(typing_context, stored, index):
    """Eight neighbours of such an array as float32."""

    def generate(context, builder, signature, arguments):
        array, index = arguments
        kind = signature.args[0]
        data = context.make_array(kind)(context, builder, array).data
        return _widen(builder, kind.dtype, _load_elements(builder, data, index, WIDTH), WIDTH)

    return lanes(stored, types.int64), generate


@intrinsic
def rounded_lanes(typing_context, values, like):
    """Each `rounded`."""

    def generate(context, builder, signature, arguments):
        return _round(builder, signature.args[1].dtype, arguments[0], WIDTH)

    return lanes(lanes, like), generate
