"""The two products of attention between rows of queries and one block of keys or values, float32.

What a row gets does not depend on the rows beside it: a score is one sum of eight lanes along the
head's width, a mixed value adds tokens one after the other. Two rows at a time share what is
loaded, with four tokens or four times eight elements: eight sums that the processor has in
registers and that do not wait for one another. A row that is left over is its own other: computed
twice and stored twice, with the same bits.
All places are addresses. Neighbours: `lanes` has the operations, `attention` the order of
blocks, `attention_stored` the same products for few rows without a copy in float32.
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
def score_block(q, num_rows, k, num_tokens, row_bytes, scores, score_bytes):
    """scores[row, token] = q[row] · k[token]; rows of q and k are `row_bytes` long, rows of scores
    `score_bytes`; `num_tokens` is a multiple of four."""
    for row in range(0, num_rows, 2):
        other = min(num_rows - row - 1, 1)
        _score_two(
            q + row * row_bytes, other * row_bytes, k, num_tokens, row_bytes,
            scores + row * score_bytes, other * score_bytes,
        )  # fmt: skip


@inner
def _score_two(q, q_other, k, num_tokens, row_bytes, scores, scores_other):
    for _ in range(0, num_tokens, 4):
        a0, a1, a2, a3 = splat(ZERO), splat(ZERO), splat(ZERO), splat(ZERO)
        b0, b1, b2, b3 = splat(ZERO), splat(ZERO), splat(ZERO), splat(ZERO)
        for byte in range(0, row_bytes, STEP):
            qa, qb = load(q, byte), load(q, q_other + byte)
            k0, k1 = load(k, byte), load(k, row_bytes + byte)
            k2, k3 = load(k, 2 * row_bytes + byte), load(k, 3 * row_bytes + byte)
            a0, a1, a2, a3 = fma(qa, k0, a0), fma(qa, k1, a1), fma(qa, k2, a2), fma(qa, k3, a3)
            b0, b1, b2, b3 = fma(qb, k0, b0), fma(qb, k1, b1), fma(qb, k2, b2), fma(qb, k3, b3)
        store_sums(scores, 0, scores_other, a0, a1, a2, a3, b0, b1, b2, b3)
        k += 4 * row_bytes
        scores += 16


@inner
def mix_block(weights, weight_bytes, num_rows, v, v_row_bytes, num_tokens, sums, sum_bytes):
    """sums[row] += Σ weights[row, token] · v[token], tokens in order, over `sum_bytes` of each row
    of v, which is also the length of a row of sums."""
    for row in range(0, num_rows, 2):
        others = min(num_rows - row - 1, 1)
        w, to = weights + row * weight_bytes, sums + row * sum_bytes
        byte = 0
        while byte + 4 * STEP <= sum_bytes:
            _mix_two_by_four(
                w, others * weight_bytes, v + byte, v_row_bytes, num_tokens,
                to + byte, others * sum_bytes,
            )  # fmt: skip
            byte += 4 * STEP
        while byte < sum_bytes:
            for each in range(1 + others):
                _mix_one(
                    w + each * weight_bytes, v + byte, v_row_bytes, num_tokens,
                    to + each * sum_bytes + byte,
                )  # fmt: skip
            byte += STEP


@inner
def _mix_two_by_four(weights, weights_other, v, v_row_bytes, num_tokens, sums, sums_other):
    a0, a1, a2, a3 = load_four(sums)
    b0, b1, b2, b3 = load_four(sums + sums_other)
    for _ in range(num_tokens):
        wa, wb = load_splat(weights, 0), load_splat(weights, weights_other)
        v0, v1, v2, v3 = load_four(v)
        a0, a1, a2, a3 = fma(wa, v0, a0), fma(wa, v1, a1), fma(wa, v2, a2), fma(wa, v3, a3)
        b0, b1, b2, b3 = fma(wb, v0, b0), fma(wb, v1, b1), fma(wb, v2, b2), fma(wb, v3, b3)
        v += v_row_bytes
        weights += 4
    store_four(sums, a0, a1, a2, a3)
    store_four(sums + sums_other, b0, b1, b2, b3)


@inner
def _mix_one(weights, v, v_row_bytes, num_tokens, sums):
    total = load(sums, 0)
    for token in range(num_tokens):
        total = fma(load_splat(weights, token * 4), load(v, token * v_row_bytes), total)
    store(sums, 0, total)


@inner
def load_four(at):
    return load(at, 0), load(at, STEP), load(at, 2 * STEP), load(at, 3 * STEP)


@inner
def store_four(at, a, b, c, d):
    store(at, 0, a)
    store(at, STEP, b)
    store(at, 2 * STEP, c)
    store(at, 3 * STEP, d)
