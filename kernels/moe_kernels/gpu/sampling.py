"""The next token of every sequence: a program per row, which it walks in blocks of SIZE tokens.

    logits [B, V] float32 → token ids [B], −1 where a row cannot be used
Weights are whole numbers, so sums of them are exact in any order and the token is the reference's.
Nothing is sorted. The tokens that top_k or top_p keep are those nearer than a distance, and the
first few at it: the distance is found by halving the range of float32's bit patterns, which are in
order for numbers that are not negative: 31 walks over a row that lies in the cache. Where neither
is asked for there are three walks: the largest logit, the sum of weights, the draw.
Parameters come in two tensors, results go in one: two copies to the device, one back. Rows that are
on the host already, as those with penalties or a grammar are, are drawn there.
Neighbour: `moe_kernels.sampling` is the contract, and has the arithmetic of the host.

Letters: B sequences, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from moe_kernels.gpu.jit import SAFE, compiled, compiled_for_any
from moe_kernels.gpu.numbers import INFINITY_BITS, LN2_HIGH, LN2_LOW, LOG2_E, bits, power_of_two
from moe_kernels.reference import sampling as reference
from moe_kernels.sampling import ONE, Cut, NonFiniteLogits, share, steepness, uniform

SIZE = 2048
BITS = tl.constexpr(31)
"""Of a distance's pattern."""
WEIGHT_OF_FIRST = tl.constexpr(float(ONE))


def sample(
    logits_BV: Tensor, cuts_B: Sequence[Cut], seeds_B: Sequence[int], positions_B: Sequence[int]
) -> list[int]:
    num_rows, vocabulary = logits_BV.shape
    if not num_rows:
        return []
    if logits_BV.device.type == "cpu" and torch.cuda.is_available():
        return reference.sample(logits_BV, cuts_B, seeds_B, positions_B)
    logits_BV = logits_BV.to(torch.float32).contiguous()
    whole, real = _parameters(cuts_B, seeds_B, positions_B)
    device = logits_BV.device
    tokens_B = torch.zeros(num_rows, dtype=torch.int64, device=device)
    draw_tokens[(num_rows,)](
        logits_BV, torch.from_numpy(whole).to(device), torch.from_numpy(real).to(device), tokens_B,
        vocabulary, SIZE=SIZE, num_warps=8, **SAFE,
    )  # fmt: skip
    tokens: list[int] = tokens_B.tolist()
    unusable = [row for row, token in enumerate(tokens) if token < 0]
    if unusable:
        raise NonFiniteLogits(unusable)
    return tokens


def _parameters(
    cuts_B: Sequence[Cut], seeds_B: Sequence[int], positions_B: Sequence[int]
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Of each row: top_k and the least weight; steepness (0 = nothing is drawn), top_p and u."""
    whole, real = [], []
    for cut, seed, position in zip(cuts_B, seeds_B, positions_B, strict=True):
        is_drawn = cut.temperature > 0.0
        whole.append((cut.top_k, share(cut.min_p, ONE)))
        steep = float(steepness(cut.temperature)) if is_drawn else 0.0
        real.append((steep, cut.top_p, uniform(seed, position) if is_drawn else 0.0))
    return np.array(whole, dtype=np.int64), np.array(real, dtype=np.float64)


@compiled_for_any("vocabulary")
def draw_tokens(
    logits_BV: tl.tensor,
    whole_B2: tl.tensor,
    real_B3: tl.tensor,
    tokens_B: tl.tensor,
    vocabulary: tl.tensor,
    SIZE: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    logits = logits_BV + row.to(tl.int64) * vocabulary
    top, token = largest(logits, vocabulary, SIZE)
    steep = tl.load(real_B3 + row * 3).to(tl.float32)
    is_usable = bits(tl.abs(top)) < INFINITY_BITS
    if is_usable & (steep > 0.0):
        top_k, least = tl.load(whole_B2 + row * 2), tl.load(whole_B2 + row * 2 + 1)
        top_p, u = tl.load(real_B3 + row * 3 + 1), tl.load(real_B3 + row * 3 + 2)
        # All: no distance has a pattern above infinity's.
        ties = vocabulary.to(tl.int64)
        edge = ties * 0 + (INFINITY_BITS + 1)
        if (top_k > 0) & (top_k < vocabulary):
            edge, ties = nearest(logits, vocabulary, top, steep, edge, ties, top_k, False, SIZE)
        if top_p < 1.0:
            total = weight_until(logits, vocabulary, top, steep, edge, ties, 0, SIZE)
            goal = tl.ceil(top_p * total.to(tl.float64)).to(tl.int64)
            goal = tl.maximum(tl.minimum(goal, total), 1)
            edge, ties = nearest(logits, vocabulary, top, steep, edge, ties, goal, True, SIZE)
        total = weight_until(logits, vocabulary, top, steep, edge, ties, least, SIZE)
        place = tl.minimum((u * total.to(tl.float64)).to(tl.int64), total - 1)
        token = token_at(logits, vocabulary, top, steep, edge, ties, least, place, SIZE)
    tl.store(tokens_B + row, tl.where(is_usable, token, -1))


@compiled
def largest(
    logits: tl.tensor, vocabulary: tl.tensor, SIZE: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """The largest logit and the first token that has it; NaN where there is one."""
    at = tl.arange(0, SIZE)
    tops = tl.full((SIZE,), float("-inf"), tl.float32)
    firsts = tl.zeros((SIZE,), tl.int64)
    no_number = tl.zeros((SIZE,), tl.int32)
    for start in range(0, vocabulary, SIZE):
        x = tl.load(logits + start + at, mask=start + at < vocabulary, other=float("-inf"))
        no_number = no_number | (x != x).to(tl.int32)
        firsts = tl.where(x > tops, (start + at).to(tl.int64), firsts)
        tops = tl.where(x > tops, x, tops)
    top = tl.max(tops, 0)
    token = tl.min(tl.where(tops == top, firsts, vocabulary.to(tl.int64)), 0)
    return tl.where(tl.max(no_number, 0) > 0, float("nan"), top), token


@compiled
def distances_and_weights(
    logits: tl.tensor,
    token: tl.tensor,
    vocabulary: tl.tensor,
    top: tl.tensor,
    steep: tl.tensor,
) -> tuple[tl.tensor, tl.tensor]:
    """Patterns of distances, int64 above any past the vocabulary, and weights, int64."""
    has = token < vocabulary
    distance = (top - tl.load(logits + token, mask=has, other=float("-inf"))) * steep
    x = tl.where(distance > 87.0, -87.0, -distance)
    n = tl.floor(x * LOG2_E + 0.5)
    f = x - n * LN2_HIGH - n * LN2_LOW
    # The contract's polynomial, not `exponential`'s: weights are its bits.
    power = f * (1 / 5040) + (1 / 720)
    power = power * f + (1 / 120)
    power = power * f + (1 / 24)
    power = power * f + (1 / 6)
    power = power * f + 0.5
    power = power * f + 1.0
    power = power * f + 1.0
    weight = (power * power_of_two(n.to(tl.int32)) * WEIGHT_OF_FIRST).to(tl.int64)
    pattern = bits(tl.abs(distance)).to(tl.int64)
    return tl.where(has, pattern, INFINITY_BITS + 2), tl.where(has, weight, 0)


@compiled
def is_kept(
    pattern: tl.tensor, edge: tl.tensor, ties: tl.tensor, before: tl.tensor
) -> tuple[tl.tensor, tl.tensor]:
    """Whether a token is nearer than the edge or one of the first `ties` at it, of which there were
    `before`; and how many there are with this block."""
    at_edge = (pattern == edge).to(tl.int64)
    rank = before + tl.cumsum(at_edge, 0)
    return (pattern < edge) | ((at_edge > 0) & (rank <= ties)), before + tl.sum(at_edge, 0)


@compiled
def weight_until(
    logits: tl.tensor,
    vocabulary: tl.tensor,
    top: tl.tensor,
    steep: tl.tensor,
    edge: tl.tensor,
    ties: tl.tensor,
    least: tl.tensor,
    SIZE: tl.constexpr,
) -> tl.tensor:
    """The sum of what is kept of weights that are not less than the least."""
    total = tl.zeros((SIZE,), tl.int64)
    before = vocabulary.to(tl.int64) * 0
    for start in range(0, vocabulary, SIZE):
        token = start + tl.arange(0, SIZE)
        pattern, weight = distances_and_weights(logits, token, vocabulary, top, steep)
        kept, before = is_kept(pattern, edge, ties, before)
        total += tl.where(kept & (weight >= least), weight, 0)
    return tl.sum(total, 0)


@compiled
def nearest(
    logits: tl.tensor,
    vocabulary: tl.tensor,
    top: tl.tensor,
    steep: tl.tensor,
    edge: tl.tensor,
    ties: tl.tensor,
    goal: tl.tensor,
    BY_WEIGHT: tl.constexpr,
    SIZE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Edge and ties of the fewest of the nearest tokens, among those kept so far, that count (or
    weigh) `goal` together."""
    low, high = goal * 0, edge + goal * 0
    for _ in range(BITS):
        middle = (low + high) // 2
        nearer, there, _each = counted(
            logits, vocabulary, top, steep, edge, ties, middle, BY_WEIGHT, SIZE
        )
        is_enough = nearer + there >= goal
        high = tl.where(is_enough, middle, high)
        low = tl.where(is_enough, low, tl.minimum(middle + 1, high))
    nearer, there, each = counted(logits, vocabulary, top, steep, edge, ties, high, BY_WEIGHT, SIZE)
    return high, (goal - nearer + each - 1) // each


@compiled
def counted(
    logits: tl.tensor,
    vocabulary: tl.tensor,
    top: tl.tensor,
    steep: tl.tensor,
    edge: tl.tensor,
    ties: tl.tensor,
    at: tl.tensor,
    BY_WEIGHT: tl.constexpr,
    SIZE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Of tokens kept so far: count (or weight) of those nearer than `at` and of those at it, and
    of one at it."""
    nearer = tl.zeros((SIZE,), tl.int64)
    there = tl.zeros((SIZE,), tl.int64)
    each = tl.zeros((SIZE,), tl.int64)
    before = vocabulary.to(tl.int64) * 0
    for start in range(0, vocabulary, SIZE):
        token = start + tl.arange(0, SIZE)
        pattern, weight = distances_and_weights(logits, token, vocabulary, top, steep)
        kept, before = is_kept(pattern, edge, ties, before)
        amount = weight
        if not BY_WEIGHT:
            amount = weight * 0 + 1
        nearer += tl.where(kept & (pattern < at), amount, 0)
        there += tl.where(kept & (pattern == at), amount, 0)
        each = tl.maximum(each, tl.where(kept & (pattern == at), amount, 0))
    return tl.sum(nearer, 0), tl.sum(there, 0), tl.max(each, 0)


@compiled
def token_at(
    logits: tl.tensor,
    vocabulary: tl.tensor,
    top: tl.tensor,
    steep: tl.tensor,
    edge: tl.tensor,
    ties: tl.tensor,
    least: tl.tensor,
    place: tl.tensor,
    SIZE: tl.constexpr,
) -> tl.tensor:
    """The first kept token, in order of id, at which the running sum exceeds `place`: as many
    tokens come before it as sums do not."""
    passed = vocabulary.to(tl.int64) * 0
    running, before = passed, passed
    for start in range(0, vocabulary, SIZE):
        token = start + tl.arange(0, SIZE)
        pattern, weight = distances_and_weights(logits, token, vocabulary, top, steep)
        kept, before = is_kept(pattern, edge, ties, before)
        sums = running + tl.cumsum(tl.where(kept & (weight >= least), weight, 0), 0)
        passed += tl.sum(((sums <= place) & (token < vocabulary)).to(tl.int64), 0)
        running = tl.max(sums, 0)
    return passed
