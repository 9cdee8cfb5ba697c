"""The next tokens of a step, a row at a time, without sorting; rows are shared among threads.

Only tokens within `FAR` of the best have a weight at all. They are gathered in order of id, the
cuts of top_k and top_p keep the nearest of them, and the draw adds up what is left. The distance at
which a cut falls is found by bisection over the bits of distances, which are in order as the
distances are; what a round leaves no doubt about is put aside, so that the rounds grow short.
Neighbours: `moe_kernels.sampling` is the contract, whose arithmetic is repeated here bit by bit;
`activation` has the exponential.

Letters: B sequences, V vocabulary, N candidates.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numba import prange
from torch import Tensor

from moe_kernels.cpu.activation import exponential
from moe_kernels.cpu.jit import Array, Index, compiled, num_threads, parallel
from moe_kernels.sampling import ONE, Cut, NonFiniteLogits, as_rows

FAR = np.float32(28.0)
"""ONE times e to the minus this is below 1."""
_FAR_BITS = int(FAR.view(np.int32))
_FIRST_PIVOT = int(np.float32(4.0).view(np.int32))
"""Half of all positive bits are of distances below 2: the middle of the range is no guess."""
_UNUSABLE = -1
_INFINITY_BITS = 0x7F800000
_TINY, _MAX = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)
_ONE, _ONE_FLOAT32 = np.int64(ONE), np.float32(ONE)
_NO_LIMIT = np.iinfo(np.int64).max
_MASK = (1 << 64) - 1
_LOGITS_PER_THREAD = 1 << 16
"""Looking at fewer takes no longer than a second thread's start."""


def sample(
    logits_BV: Tensor, cuts_B: Sequence[Cut], seeds_B: Sequence[int], positions_B: Sequence[int]
) -> Tensor:
    logits = np.ascontiguousarray(as_rows(logits_BV))
    num_rows = len(logits)
    tokens = torch.empty(num_rows, dtype=torch.int64)
    operands = (
        logits,
        np.array(cuts_B, dtype=np.float64).reshape(num_rows, len(Cut._fields)),
        np.array([seed & _MASK for seed in seeds_B], dtype=np.uint64),
        np.array(positions_B, dtype=np.uint64),
    )
    threads = min(num_threads(), num_rows, 1 + logits.size // _LOGITS_PER_THREAD)
    if threads > 1:
        draw_parallel(*operands, threads, tokens.numpy())
    else:
        draw_range(*operands, 0, num_rows, tokens.numpy())
    if num_rows and int(tokens.min()) == _UNUSABLE:
        raise NonFiniteLogits((tokens == _UNUSABLE).nonzero()[:, 0].tolist())
    return tokens


@parallel
def draw_parallel(
    logits_BV: Array,
    cuts_B: Array,
    seeds_B: Array,
    positions_B: Array,
    num_parts: int,
    tokens_B: Array,
) -> None:
    num_rows = np.int64(logits_BV.shape[0])
    for part in prange(num_parts):
        first = num_rows * np.int64(part) // num_parts
        last = num_rows * (np.int64(part) + 1) // num_parts
        draw_range(logits_BV, cuts_B, seeds_B, positions_B, first, last, tokens_B)


@compiled
def draw_range(
    logits_BV: Array,
    cuts_B: Array,
    seeds_B: Array,
    positions_B: Array,
    first: Index,
    last: Index,
    tokens_B: Array,
) -> None:
    size = logits_BV.shape[1]
    distances, near = np.empty(size, np.float32), np.empty(size, np.int32)
    weights, heavy = np.empty(size, np.int64), np.empty(size, np.int64)
    ids = np.empty(size, np.int32)
    for row in range(first, last):
        logits_V, cut = logits_BV[row], cuts_B[row]
        best = _largest(logits_V)
        if best == _UNUSABLE or cut[0] == 0.0:
            tokens_B[row] = best
            continue
        steep = np.float32(min(max(1.0 / cut[0], _TINY), _MAX))
        num = _gather(logits_V, logits_V[best], steep, distances, weights, ids)
        bits = distances.view(np.int32)
        if 0 < cut[1] < num:
            most = np.int64(cut[1])
            num = _keep_nearest(bits, weights, ids, num, most, _NO_LIMIT, near, heavy)
        if cut[2] < 1.0:
            reach = _share(cut[2], weights[:num].sum())
            num = _keep_nearest(bits, weights, ids, num, _NO_LIMIT, reach, near, heavy)
        u = _uniform(seeds_B[row], positions_B[row])
        tokens_B[row] = ids[_drawn(weights, num, _share(cut[3], _ONE), u)]


@compiled
def _largest(logits_V: Array) -> int:
    """The first place of the largest logit; _UNUSABLE where the contract refuses the row.

    As whole numbers the bits of floats are in order once those of negative ones are turned round;
    what is no number then lies beyond the infinities.
    """
    bits_V = logits_V.view(np.int32)
    low, high = np.int32(0x7FFFFFFF), np.int32(-0x80000000)
    for i in range(bits_V.size):
        key = bits_V[i] ^ ((bits_V[i] >> np.int32(31)) & np.int32(0x7FFFFFFF))
        low, high = min(low, key), max(high, key)
    if high >= _INFINITY_BITS or high <= ~_INFINITY_BITS or low < ~_INFINITY_BITS:
        return _UNUSABLE
    bits = np.empty(1, np.int32)
    bits[0] = high ^ ((high >> np.int32(31)) & np.int32(0x7FFFFFFF))
    largest = bits.view(np.float32)[0]
    for i in range(logits_V.size):
        if logits_V[i] == largest:
            return i
    return _UNUSABLE


@compiled
def _gather(
    logits_V: Array,
    largest: np.float32,
    steep: np.float32,
    distances_N: Array,
    weights_N: Array,
    ids_N: Array,
) -> int:
    """Fill in the candidates in order of id; their number."""
    num = 0
    for i in range(logits_V.size):
        distance = (largest - logits_V[i]) * steep
        distances_N[num], ids_N[num] = distance, i
        num += distance <= FAR
    for i in range(num):
        weights_N[i] = np.int64(exponential(-distances_N[i]) * _ONE_FLOAT32)
    return num


@compiled
def _keep_nearest(
    bits_N: Array,
    weights_N: Array,
    ids_N: Array,
    num: Index,
    most: Index,
    reach: Index,
    near_N: Array,
    heavy_N: Array,
) -> int:
    """Keep the nearest candidates, the lowest id first on ties, until there are `most` of them or
    their weights reach `reach`; how many. One of the two comes about."""
    near_N[:num], heavy_N[:num] = bits_N[:num], weights_N[:num]
    left, count, weight = num, np.int64(0), np.int64(0)
    low, high, pivot = np.int32(0), np.int32(_FAR_BITS), np.int32(_FIRST_PIVOT)
    # The last one kept is among the `left`; `count` and `weight` are of all that are nearer.
    while left > 1 and low < high:
        inside, heft = _up_to(near_N, heavy_N, left, pivot)
        is_inside = count + inside >= most or weight + heft >= reach
        if is_inside:
            high = pivot
        else:
            low, count, weight = np.int32(pivot + 1), count + inside, weight + heft
        left = _put_aside(near_N, heavy_N, left, pivot, is_inside)
        pivot = np.int32(low + (high - low) // 2)
    return _keep(bits_N, weights_N, ids_N, num, near_N[0], most - count, reach - weight)


@compiled
def _up_to(near_N: Array, heavy_N: Array, num: Index, pivot: np.int32) -> tuple[Index, Index]:
    """How many are not past the pivot, and their weight."""
    count, weight = np.int64(0), np.int64(0)
    for i in range(num):
        count += near_N[i] <= pivot
        weight += heavy_N[i] if near_N[i] <= pivot else np.int64(0)
    return count, weight


@compiled
def _put_aside(
    near_N: Array, heavy_N: Array, num: Index, pivot: np.int32, is_inside: bool | np.bool_
) -> int:
    left = 0
    for i in range(num):
        near_N[left], heavy_N[left], stays = near_N[i], heavy_N[i], near_N[i] <= pivot
        left += stays == is_inside
    return left


@compiled
def _keep(
    bits_N: Array,
    weights_N: Array,
    ids_N: Array,
    num: Index,
    last: np.int32,
    most: Index,
    reach: Index,
) -> int:
    """All nearer than `last`, and of those as far the first, until `most` or `reach`."""
    kept = 0
    for i in range(num):
        bits, weight = bits_N[i], weights_N[i]
        bits_N[kept], weights_N[kept], ids_N[kept] = bits, weight, ids_N[i]
        if bits < last:
            kept += 1
        elif bits == last and most > 0 and reach > 0:
            kept, most, reach = kept + 1, most - 1, reach - weight
    return kept


@compiled
def _drawn(weights_N: Array, num: Index, least: Index, u: float) -> Index:
    """The candidate at the u-th part of the weight of all that have the least one."""
    whole = np.int64(0)
    for i in range(num):
        whole += weights_N[i] if weights_N[i] >= least else np.int64(0)
    rest = min(np.int64(u * np.float64(whole)), whole - 1)
    for i in range(num):
        if weights_N[i] >= least:
            rest -= weights_N[i]
            if rest < 0:
                return i
    return num - 1


@compiled
def _share(part: float, whole: Index) -> Index:
    wanted = np.int64(np.ceil(part * np.float64(whole)))
    return wanted if wanted < whole else whole


@compiled
def _uniform(seed: np.uint64, position: np.uint64) -> float:
    mixed = _mix(_mix(seed) + position) >> np.uint64(11)
    return np.float64(mixed) * 2.0**-53


@compiled
def _mix(state: np.uint64) -> np.uint64:
    z = state + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
