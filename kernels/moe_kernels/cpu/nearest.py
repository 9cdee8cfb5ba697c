"""Keep a row's nearest tokens until their weights reach a goal, without sorting.

Distances fall into bins, equally wide, whose weights are summed in one pass; the goal is reached
within one of them. Only that one's tokens, in order of id, are looked at one by one: the distance
at which the goal is reached is found by bisection over the bits of distances, which are in order as
the distances are. Whoever is farther loses its weight, and of those just as far the later ids do.
Four sums of a bin take turns, because the next addition to one sum waits for the last.
Neighbour: `sampling` weighs the tokens and draws from what is left.

Letters: V vocabulary, N tokens of one bin.
"""

# mypy: ignore-errors

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from moe_kernels.cpu.jit import Array, Index, inner
from moe_kernels.cpu.lanes import WIDTH, _load, _splat

FAR = np.float32(28.0)
"""A token so far has no weight: sampling.ONE times e to the minus this is below 1."""
NUM_BINS = 1024
_BINS_PER_UNIT = np.float32(NUM_BINS / FAR)
_TURNS = 4
_I8, _I32 = ir.IntType(8), ir.IntType(32)


class Tokens(NamedTuple):
    """A row's, float32 but for the bins."""

    distances_V: Array
    weights_V: Array
    """Whole numbers."""
    bins_V: Array
    """Int32."""


class Near(NamedTuple):
    """Scratch: the sums of bins, and the tokens of one."""

    sums_BT: Array
    """Int64 [NUM_BINS + 1, _TURNS]."""
    bits_N: Array
    weights_N: Array
    ids_N: Array


@inner
def room_for(size: Index) -> Near:
    """Scratch for so many tokens."""
    return Near(
        np.empty((NUM_BINS + 1, _TURNS), np.int64),
        np.empty(size, np.int32),
        np.empty(size, np.int64),
        np.empty(size, np.int32),
    )


@inner
def bin_of(distance: np.float32) -> np.int32:
    """All that are FAR share the last one."""
    return np.int32((distance if distance < FAR else FAR) * _BINS_PER_UNIT)


@inner
def sum_bins(bins_V: Array, counted_V: Array, near: Near) -> np.int64:
    """Sum up by bin what of each token is counted, whole numbers; the sum of all."""
    sums_BT = near.sums_BT
    for each in range(len(sums_BT)):
        for turn in range(_TURNS):
            sums_BT[each, turn] = 0
    whole = len(bins_V) // _TURNS * _TURNS
    for i in range(0, whole, _TURNS):
        sums_BT[bins_V[i], 0] += np.int64(counted_V[i])
        sums_BT[bins_V[i + 1], 1] += np.int64(counted_V[i + 1])
        sums_BT[bins_V[i + 2], 2] += np.int64(counted_V[i + 2])
        sums_BT[bins_V[i + 3], 3] += np.int64(counted_V[i + 3])
    for i in range(whole, len(bins_V)):
        sums_BT[bins_V[i], 0] += np.int64(counted_V[i])
    total = np.int64(0)
    for each in range(len(sums_BT)):
        sums_BT[each, 0] += sums_BT[each, 1] + sums_BT[each, 2] + sums_BT[each, 3]
        total += sums_BT[each, 0]
    return total


@inner
def keep_nearest(tokens: Tokens, counted_V: Array, goal: Index, near: Near) -> None:
    """Take the weight of all but the nearest that are counted until `goal` is reached, which is at
    least 1 and at most what `sum_bins` found in all."""
    reached_in = np.int64(0)
    while goal > near.sums_BT[reached_in, 0]:
        goal -= near.sums_BT[reached_in, 0]
        reached_in += 1
    if reached_in == NUM_BINS:  # nobody there has a weight
        return
    num = _gather(tokens, counted_V, np.int32(reached_in), near)
    last = _reached_at(near, num, goal)
    goal -= _up_to(near, num, np.int32(last - 1))
    for i in range(num):
        if near.bits_N[i] == last:
            if goal <= 0:
                tokens.weights_V[near.ids_N[i]] = 0
            goal -= near.weights_N[i]
    _take_beyond(tokens, last)


@inner
def _gather(tokens, counted_V, wanted, near):
    bits_V = tokens.distances_V.view(np.int32)
    whole = len(bits_V) // WIDTH
    num = np.int64(0)
    for group in range(whole):
        found = _places_of(tokens.bins_V, np.int64(4 * WIDTH * group), wanted)
        while found:
            i = np.int64(WIDTH * group + _first_place(found))
            num = _put(bits_V, counted_V, i, num, near)
            found = np.int32(found & (found - 1))
    for i in range(WIDTH * whole, len(bits_V)):
        if tokens.bins_V[i] == wanted:
            num = _put(bits_V, counted_V, np.int64(i), num, near)
    return num


@inner
def _put(bits_V, counted_V, i, num, near):
    near.bits_N[num], near.weights_N[num] = bits_V[i], np.int64(counted_V[i])
    near.ids_N[num] = i
    return np.int64(num + 1)


@inner
def _reached_at(near, num, goal):
    """The bits of the distance up to which the goal is reached."""
    low, high = near.bits_N[0], near.bits_N[0]
    for i in range(num):
        low, high = min(low, near.bits_N[i]), max(high, near.bits_N[i])
    while low < high:
        middle = np.int32(low + (high - low) // 2)
        if _up_to(near, num, middle) >= goal:
            high = middle
        else:
            low = np.int32(middle + 1)
    return low


@inner
def _up_to(near, num, last):
    weight = np.int64(0)
    for i in range(num):
        weight += near.weights_N[i] if near.bits_N[i] <= last else np.int64(0)
    return weight


@inner
def _take_beyond(tokens, last):
    bits_V = tokens.distances_V.view(np.int32)
    for i in range(len(bits_V)):
        # A choice would become a store for some, which is slow.
        tokens.weights_V[i] *= np.float32(bits_V[i] <= last)


@intrinsic
def _places_of(typing_context, memory, offset, wanted):
    """Which of the eight int32 are `wanted`: bit by bit, an int32."""

    def generate(context, builder, signature, arguments):
        numbers = _load(context, builder, signature, arguments, _I32)
        found = builder.icmp_signed("==", numbers, _splat(builder, arguments[2]))
        return builder.zext(builder.bitcast(found, _I8), _I32)

    return types.int32(memory, types.int64, types.int32), generate


@intrinsic
def _first_place(typing_context, found):
    """Of the lowest bit of an int32 that is not 0."""

    def generate(context, builder, signature, arguments):
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 1))

    return types.int32(types.int32), generate
