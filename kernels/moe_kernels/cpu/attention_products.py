"""The two products of attention between rows of queries and one block of keys or values, float32.

What a row gets does not depend on the rows beside it: a score is one sum of eight lanes along the
head's width, a mixed value adds tokens one after the other. Two rows at a time share what is
loaded, with four tokens or four times eight elements: eight sums that the processor has in
registers and that do not wait for one another.
All places are offsets in bytes. Neighbours: `lanes` has the operations, `attention` the order of
blocks.
"""

# mypy: ignore-errors

from __future__ import annotations

import numpy as np

from moe_kernels.cpu.jit import inner
from moe_kernels.cpu.lanes import fma, load, load_splat, splat, store, store_sums

STEP = 32
"""Bytes of eight float32."""
ZERO = np.float32(0.0)


@inner
def score_block(q, q_at, num_rows, k, k_at, num_tokens, row_bytes, scores, scores_at, score_bytes):
    """scores[row, token] = q[row] · k[token]; rows of q and k are `row_bytes` long, rows of scores
    `score_bytes`; `num_tokens` is a multiple of four."""
    row = 0
    while row + 1 < num_rows:
        _score_two(
            q, q_at + row * row_bytes, k, k_at, num_tokens, row_bytes,
            scores, scores_at + row * score_bytes, score_bytes,
        )  # fmt: skip
        row += 2
    if row < num_rows:
        _score_one(
            q, q_at + row * row_bytes, k, k_at, num_tokens, row_bytes,
            scores, scores_at + row * score_bytes,
        )  # fmt: skip


@inner
def _score_two(q, q_at, k, k_at, num_tokens, row_bytes, scores, scores_at, score_bytes):
    for token in range(0, num_tokens, 4):
        a0, a1, a2, a3 = splat(ZERO), splat(ZERO), splat(ZERO), splat(ZERO)
        b0, b1, b2, b3 = splat(ZERO), splat(ZERO), splat(ZERO), splat(ZERO)
        first = k_at + token * row_bytes
        for byte in range(0, row_bytes, STEP):
            qa = load(q, np.int64(q_at + byte))
            qb = load(q, np.int64(q_at + row_bytes + byte))
            k0 = load(k, np.int64(first + byte))
            k1 = load(k, np.int64(first + row_bytes + byte))
            k2 = load(k, np.int64(first + 2 * row_bytes + byte))
            k3 = load(k, np.int64(first + 3 * row_bytes + byte))
            a0, a1, a2, a3 = fma(qa, k0, a0), fma(qa, k1, a1), fma(qa, k2, a2), fma(qa, k3, a3)
            b0, b1, b2, b3 = fma(qb, k0, b0), fma(qb, k1, b1), fma(qb, k2, b2), fma(qb, k3, b3)
        store_sums(scores, np.int64(scores_at + token * 4), a0, a1, a2, a3)
        store_sums(scores, np.int64(scores_at + score_bytes + token * 4), b0, b1, b2, b3)


@inner
def _score_one(q, q_at, k, k_at, num_tokens, row_bytes, scores, scores_at):
    for token in range(0, num_tokens, 4):
        a0, a1, a2, a3 = splat(ZERO), splat(ZERO), splat(ZERO), splat(ZERO)
        first = k_at + token * row_bytes
        for byte in range(0, row_bytes, STEP):
            qa = load(q, np.int64(q_at + byte))
            a0 = fma(qa, load(k, np.int64(first + byte)), a0)
            a1 = fma(qa, load(k, np.int64(first + row_bytes + byte)), a1)
            a2 = fma(qa, load(k, np.int64(first + 2 * row_bytes + byte)), a2)
            a3 = fma(qa, load(k, np.int64(first + 3 * row_bytes + byte)), a3)
        store_sums(scores, np.int64(scores_at + token * 4), a0, a1, a2, a3)


@inner
def mix_block(
    weights, weights_at, weight_bytes, num_rows, v, v_at, v_row_bytes, num_tokens, sums, sums_at,
    sum_bytes,
):  # fmt: skip
    """sums[row] += Σ weights[row, token] · v[token], tokens in order, over `sum_bytes` of each row
    of v, which is also the length of a row of sums."""
    row = 0
    while row + 1 < num_rows:
        w_at, to = weights_at + row * weight_bytes, sums_at + row * sum_bytes
        byte = 0
        while byte + 4 * STEP <= sum_bytes:
            _mix_two_by_four(
                weights, w_at, weight_bytes, v, v_at + byte, v_row_bytes, num_tokens,
                sums, to + byte, sum_bytes,
            )  # fmt: skip
            byte += 4 * STEP
        while byte < sum_bytes:
            for each in range(2):
                _mix_one(
                    weights, w_at + each * weight_bytes, v, v_at + byte, v_row_bytes, num_tokens,
                    sums, to + each * sum_bytes + byte,
                )  # fmt: skip
            byte += STEP
        row += 2
    if row < num_rows:
        w_at, to = weights_at + row * weight_bytes, sums_at + row * sum_bytes
        byte = 0
        while byte + 4 * STEP <= sum_bytes:
            _mix_one_by_four(
                weights, w_at, v, v_at + byte, v_row_bytes, num_tokens, sums, to + byte
            )
            byte += 4 * STEP
        while byte < sum_bytes:
            _mix_one(weights, w_at, v, v_at + byte, v_row_bytes, num_tokens, sums, to + byte)
            byte += STEP


@inner
def _mix_two_by_four(
    weights, w_at, weight_bytes, v, v_at, v_row_bytes, num_tokens, sums, to, sum_bytes
):
    other = to + sum_bytes
    a0, a1 = load(sums, np.int64(to)), load(sums, np.int64(to + STEP))
    a2, a3 = load(sums, np.int64(to + 2 * STEP)), load(sums, np.int64(to + 3 * STEP))
    b0, b1 = load(sums, np.int64(other)), load(sums, np.int64(other + STEP))
    b2, b3 = load(sums, np.int64(other + 2 * STEP)), load(sums, np.int64(other + 3 * STEP))
    for token in range(num_tokens):
        wa = load_splat(weights, np.int64(w_at + token * 4))
        wb = load_splat(weights, np.int64(w_at + weight_bytes + token * 4))
        at = v_at + token * v_row_bytes
        v0, v1 = load(v, np.int64(at)), load(v, np.int64(at + STEP))
        v2, v3 = load(v, np.int64(at + 2 * STEP)), load(v, np.int64(at + 3 * STEP))
        a0, a1, a2, a3 = fma(wa, v0, a0), fma(wa, v1, a1), fma(wa, v2, a2), fma(wa, v3, a3)
        b0, b1, b2, b3 = fma(wb, v0, b0), fma(wb, v1, b1), fma(wb, v2, b2), fma(wb, v3, b3)
    store(sums, np.int64(to), a0)
    store(sums, np.int64(to + STEP), a1)
    store(sums, np.int64(to + 2 * STEP), a2)
    store(sums, np.int64(to + 3 * STEP), a3)
    store(sums, np.int64(other), b0)
    store(sums, np.int64(other + STEP), b1)
    store(sums, np.int64(other + 2 * STEP), b2)
    store(sums, np.int64(other + 3 * STEP), b3)


@inner
def _mix_one_by_four(weights, w_at, v, v_at, v_row_bytes, num_tokens, sums, to):
    a0, a1 = load(sums, np.int64(to)), load(sums, np.int64(to + STEP))
    a2, a3 = load(sums, np.int64(to + 2 * STEP)), load(sums, np.int64(to + 3 * STEP))
    for token in range(num_tokens):
        wa = load_splat(weights, np.int64(w_at + token * 4))
        at = v_at + token * v_row_bytes
        a0 = fma(wa, load(v, np.int64(at)), a0)
        a1 = fma(wa, load(v, np.int64(at + STEP)), a1)
        a2 = fma(wa, load(v, np.int64(at + 2 * STEP)), a2)
        a3 = fma(wa, load(v, np.int64(at + 3 * STEP)), a3)
    store(sums, np.int64(to), a0)
    store(sums, np.int64(to + STEP), a1)
    store(sums, np.int64(to + 2 * STEP), a2)
    store(sums, np.int64(to + 3 * STEP), a3)


@inner
def _mix_one(weights, w_at, v, v_at, v_row_bytes, num_tokens, sums, to):
    total = load(sums, np.int64(to))
    for token in range(num_tokens):
        weight = load_splat(weights, np.int64(w_at + token * 4))
        total = fma(weight, load(v, np.int64(v_at + token * v_row_bytes)), total)
    store(sums, np.int64(to), total)
