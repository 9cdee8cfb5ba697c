"""The next tokens of a step, a row at a time, without sorting; rows are shared among threads.

Weights are whole numbers that float32 holds exactly. Cuts take the weight of tokens that are not
kept (`nearest`), so that no list of the kept ones is made. The draw adds up weights by runs of
tokens, in two halves of 20 bits whose sums fit 32, and walks through the one run that it falls in.
Neighbours: `moe_kernels.sampling` is the contract, whose arithmetic is repeated here bit by bit;
`activation` has the exponential.

Letters: B sequences, V vocabulary, R runs, C columns.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from moe_kernels.cpu.activation import exponential
from moe_kernels.cpu.jit import Array, Index, compiled, inner
from moe_kernels.cpu.nearest import Tokens, bin_of, keep_nearest, room_for, sum_bins
from moe_kernels.cpu.parts import meet, new_board, parts_for, take, take_next
from moe_kernels.cpu.team import num_threads, together
from moe_kernels.sampling import ONE, Cut, NonFiniteLogits

_UNUSABLE = -1
_INFINITY_BITS = 0x7F800000
_TINY, _MAX = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)
_ONE, _ONE_FLOAT32 = np.int64(ONE), np.float32(ONE)
_RUN = 64
_UPPER, _LOWER = np.float32(2.0**-20), np.float32(2.0**20)
_HALF = (1 << 32) - 1
TEMPERATURE, TOP_K, TOP_P, MIN_P, SEED, POSITION, _COLUMNS = 0, 1, 2, 3, 4, 6, 7
"""Columns of a row's numbers, all in one array of float64: a seed as its two halves."""
_LOGITS_PER_THREAD = 1 << 14
"""Looking at fewer takes no longer than a second thread's start."""


def sample(
    logits_BV: Tensor, cuts_B: Sequence[Cut], seeds_B: Sequence[int], positions_B: Sequence[int]
) -> list[int]:
    logits = logits_BV.numpy()
    if not logits.flags.c_contiguous:
        logits = np.ascontiguousarray(logits)
    numbers: list[float] = []
    for cut, seed, position in zip(cuts_B, seeds_B, positions_B, strict=True):
        numbers += (*cut, seed >> 32 & _HALF, seed & _HALF, position)
    numbers_BC = np.array(numbers, np.float64).reshape(-1, _COLUMNS)
    num_rows = len(logits)
    tokens_B = np.empty(num_rows, np.int64)
    worth_it = min(num_rows, 1 + logits.size // _LOGITS_PER_THREAD)
    if worth_it > 1 and num_threads() > 1:
        draw_parallel(logits, numbers_BC, min(num_threads(), worth_it), tokens_B)
    else:
        draw_range(logits, numbers_BC, 0, num_rows, tokens_B)
    tokens: list[int] = tokens_B.tolist()
    if _UNUSABLE in tokens:
        raise NonFiniteLogits([row for row, token in enumerate(tokens) if token == _UNUSABLE])
    return tokens


@compiled
def draw_parallel(logits_BV: Array, numbers_BC: Array, threads: int, tokens_B: Array) -> None:
    together(
        _walk, threads, new_board(1), logits_BV, numbers_BC, tokens_B,
        min(parts_for(threads), logits_BV.shape[0]),
    )  # fmt: skip


@inner
def _walk(board: Array, logits_BV: Array, numbers_BC: Array, tokens_B: Array, parts: Index) -> None:
    """What each thread does, see `parts`."""
    num_rows = np.int64(logits_BV.shape[0])
    part = take(board, 0)
    while part < parts:
        first, last = num_rows * part // parts, num_rows * (part + 1) // parts
        draw_range(logits_BV, numbers_BC, first, last, tokens_B)
        part = take_next(board, 0)
    meet(board, 0, parts)


@compiled
def draw_range(
    logits_BV: Array, numbers_BC: Array, first: Index, last: Index, tokens_B: Array
) -> None:
    size = logits_BV.shape[1]
    tokens = Tokens(
        np.empty(size, np.float32), np.empty(size, np.float32), np.empty(size, np.int32)
    )
    near = room_for(size)
    ones_V = np.empty(size, np.float32)
    sums_R = np.empty(size // _RUN + 1, np.int64)
    for row in range(first, last):
        logits_V, numbers = logits_BV[row], numbers_BC[row]
        largest, is_usable = _largest(logits_V)
        if not is_usable:
            tokens_B[row] = _UNUSABLE
        elif numbers[TEMPERATURE] == 0.0:
            tokens_B[row] = _first(logits_V, largest)
        else:
            steep = np.float32(min(max(1.0 / numbers[TEMPERATURE], _TINY), _MAX))
            _weigh(logits_V, largest, steep, tokens)
            if 0 < numbers[TOP_K] < size:
                _fill(ones_V)
                sum_bins(tokens.bins_V, ones_V, near)
                keep_nearest(tokens, ones_V, np.int64(numbers[TOP_K]), near)
            if numbers[TOP_P] < 1.0:
                whole = sum_bins(tokens.bins_V, tokens.weights_V, near)
                goal = max(_share(numbers[TOP_P], whole), np.int64(1))
                keep_nearest(tokens, tokens.weights_V, goal, near)
            seed = (np.uint64(numbers[SEED]) << np.uint64(32)) + np.uint64(numbers[SEED + 1])
            u = _uniform(seed, np.uint64(numbers[POSITION]))
            least = _least_float(_share(numbers[MIN_P], _ONE))
            tokens_B[row] = _drawn(tokens.weights_V, least, u, sums_R)


@inner
def _largest(logits_V: Array) -> tuple[np.float32, bool | np.bool_]:
    """The largest logit, and whether the contract takes the row.

    As whole numbers the bits of floats are in order once those of negative ones are turned round;
    what is no number then lies beyond the infinities.
    """
    bits_V = logits_V.view(np.int32)
    low, high = np.int32(0x7FFFFFFF), np.int32(-0x80000000)
    for i in range(bits_V.size):
        key = bits_V[i] ^ ((bits_V[i] >> np.int32(31)) & np.int32(0x7FFFFFFF))
        low, high = min(low, key), max(high, key)
    bits = np.empty(1, np.int32)
    bits[0] = high ^ ((high >> np.int32(31)) & np.int32(0x7FFFFFFF))
    is_usable = ~_INFINITY_BITS < high < _INFINITY_BITS and low >= ~_INFINITY_BITS
    return bits.view(np.float32)[0], is_usable


@inner
def _first(logits_V: Array, largest: np.float32) -> int:
    """Its place, the lowest; it is there."""
    i = 0
    while logits_V[i] != largest:
        i += 1
    return i


@inner
def _weigh(logits_V: Array, largest: np.float32, steep: np.float32, tokens: Tokens) -> None:
    for i in range(logits_V.size):
        distance = (largest - logits_V[i]) * steep
        tokens.distances_V[i] = distance
        tokens.bins_V[i] = bin_of(distance)
        tokens.weights_V[i] = np.floor(exponential(-distance) * _ONE_FLOAT32)


@inner
def _fill(ones_V: Array) -> None:
    for i in range(ones_V.size):
        ones_V[i] = np.float32(1.0)


@inner
def _drawn(weights_V: Array, least: np.float32, u: float, sums_R: Array) -> Index:
    """The token at the u-th part of the weight of all that have the least one."""
    num_runs = (weights_V.size + _RUN - 1) // _RUN
    whole = np.int64(0)
    for run in range(num_runs):
        sums_R[run] = _sum(weights_V[run * _RUN : min((run + 1) * _RUN, weights_V.size)], least)
        whole += sums_R[run]
    rest = min(np.int64(u * np.float64(whole)), whole - 1)
    run = 0
    while rest >= sums_R[run]:
        rest -= sums_R[run]
        run += 1
    token = run * _RUN - 1
    while rest >= 0:
        token += 1
        rest -= np.int64(weights_V[token]) if weights_V[token] >= least else np.int64(0)
    return token


@inner
def _sum(weights_R: Array, least: np.float32) -> np.int64:
    """Of at most 2¹⁰ weights."""
    upper, lower = np.int32(0), np.int32(0)
    for i in range(weights_R.size):
        weight = weights_R[i] if weights_R[i] >= least else np.float32(0.0)
        half = np.int32(weight * _UPPER)
        upper = np.int32(upper + half)
        lower = np.int32(lower + np.int32(weight - np.float32(half) * _LOWER))
    return (np.int64(upper) << np.int64(20)) + np.int64(lower)


@inner
def _least_float(whole: Index) -> np.float32:
    """The least float32 that is no less."""
    near = np.float32(whole)
    return near if np.int64(near) >= whole else np.nextafter(near, np.float32(np.inf))


@inner
def _share(part: float, whole: Index) -> Index:
    wanted = np.int64(np.ceil(part * np.float64(whole)))
    return wanted if wanted < whole else whole


@inner
def _uniform(seed: np.uint64, position: np.uint64) -> float:
    mixed = _mix(_mix(seed) + position) >> np.uint64(11)
    return np.float64(mixed) * 2.0**-53


@inner
def _mix(state: np.uint64) -> np.uint64:
    z = state + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
