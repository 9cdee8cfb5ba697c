"""The two products of attention for one or two rows, straight from what a block stores.

Where a kv head has two query heads, writing a block as float32 to scratch memory and reading it
back costs up to half as much as multiplying it. Here eight numbers are decoded in a register and
multiplied by both rows at once. They are the same numbers, added in the same order as by
`attention_products`: so are the bits, and a query's do not depend on whether it came alone or in a
prompt's tile. BF16 is decoded by one shift; of E2M1 sixteen bytes become 32 numbers, which are
multiplied by their two scales before anything else, as the reference does.

While a block is read, the cache lines of one further on are asked for, a few with every few
products: all at once they would fill the processor's queue of misses and hold up its loads, and
over a long context BF16 waits for nothing but memory. E2M1, a quarter of the bytes, does not: half
of its instructions decode.
All places are addresses. Neighbours: `attention` chooses, `kv_codes` has the codes.
"""

# mypy: ignore-errors

from __future__ import annotations

from moe_kernels.cpu.attention_products import STEP, ZERO, load_four, store_four
from moe_kernels.cpu.jit import inner
from moe_kernels.cpu.kv_codes import (
    BF16,
    LINE_BYTES,
    MXFP4,
    NVFP4,
    rows_of,
    scales_of,
    second_scale,
)
from moe_kernels.cpu.lanes import (
    fma,
    keep_apart,
    load,
    load_bf16,
    load_splat,
    prefetch,
    splat,
    store_sums,
)
from moe_kernels.cpu.small_floats import load_e2m1, step_of

MOST_ROWS = 2
ELEMENTS = 32
"""That are mixed at once; a vector has a multiple."""


@inner
def multiplies_stored(side, num_rows):
    """Whether these functions take the code, the width and the number of rows."""
    known = side.code == BF16 or side.code == NVFP4 or side.code == MXFP4
    return known and num_rows <= MOST_ROWS and side.width % ELEMENTS == 0


@inner
def score_stored(
    side, block, ahead, first_head, num_heads, num_tokens, q, row_bytes, q_other, scores,
    score_bytes, scores_other,
):  # fmt: skip
    """Scores of a block's keys with one or two rows of each head.

    `q_other` and `scores_other` lie between a head's two rows, 0 where there is one; `row_bytes`
    and `score_bytes` between heads. `ahead` is a block that will be read some blocks later.
    """
    for head in range(first_head, first_head + num_heads):
        at = rows_of(side, block, head)
        if side.code == BF16:
            _score_bf16(
                at, side.row_bytes, rows_of(side, ahead, head), num_tokens,
                q, q_other, scores, scores_other,
            )  # fmt: skip
        else:
            _prefetch_scales(side, ahead, head)
            _score_e2m1(
                at, side.row_bytes, rows_of(side, ahead, head), scales_of(side, block, head),
                side.scale_row_bytes, second_scale(side), side.steps, num_tokens,
                q, q_other, scores, scores_other,
            )  # fmt: skip
        q += row_bytes
        scores += score_bytes


@inner
def _prefetch_scales(side, block, head):
    at = scales_of(side, block, head)
    for byte in range(0, side.scale_head_bytes, LINE_BYTES):
        prefetch(at, byte)


@inner
def _score_bf16(k, row_bytes, ahead, num_tokens, q, q_other, scores, scores_other):
    keep_apart()
    for _ in range(0, num_tokens, 4):
        a0, a1, a2, a3 = splat(ZERO), splat(ZERO), splat(ZERO), splat(ZERO)
        b0, b1, b2, b3 = splat(ZERO), splat(ZERO), splat(ZERO), splat(ZERO)
        for byte in range(0, row_bytes, 16):
            # Four rows of 16 bytes are a line.
            prefetch(ahead, 4 * byte)
            qa, qb = load(q, 2 * byte), load(q, q_other + 2 * byte)
            k0, k1 = load_bf16(k, byte), load_bf16(k, row_bytes + byte)
            k2, k3 = load_bf16(k, 2 * row_bytes + byte), load_bf16(k, 3 * row_bytes + byte)
            a0, a1, a2, a3 = fma(qa, k0, a0), fma(qa, k1, a1), fma(qa, k2, a2), fma(qa, k3, a3)
            b0, b1, b2, b3 = fma(qb, k0, b0), fma(qb, k1, b1), fma(qb, k2, b2), fma(qb, k3, b3)
        store_sums(scores, 0, scores_other, a0, a1, a2, a3, b0, b1, b2, b3)
        k += 4 * row_bytes
        ahead += 4 * row_bytes
        scores += 16


@inner
def _score_e2m1(
    k, row_bytes, ahead, scales, scale_bytes, second, steps, num_tokens, q, q_other, scores,
    scores_other,
):  # fmt: skip
    keep_apart()
    for _ in range(0, num_tokens, 4):
        a0, b0, a1, b1 = _two_scores(
            k, row_bytes, ahead, scales, scale_bytes, second, steps, q, q_other
        )
        k += 2 * row_bytes
        ahead += 2 * row_bytes
        scales += 2 * scale_bytes
        a2, b2, a3, b3 = _two_scores(
            k, row_bytes, ahead, scales, scale_bytes, second, steps, q, q_other
        )
        k += 2 * row_bytes
        ahead += 2 * row_bytes
        scales += 2 * scale_bytes
        store_sums(scores, 0, scores_other, a0, a1, a2, a3, b0, b1, b2, b3)
        scores += 16


@inner
def _two_scores(k, row_bytes, ahead, scales, scale_bytes, second, steps, q, q_other):
    """Lanes of both rows with a key, then with the next key."""
    a0, b0, a1, b1 = splat(ZERO), splat(ZERO), splat(ZERO), splat(ZERO)
    end = k + row_bytes
    while k < end:
        prefetch(ahead, 0)
        first_step, second_step = step_of(steps, scales, 0), step_of(steps, scales, second)
        k0, k1, k2, k3 = load_e2m1(k, 0, first_step, second_step)
        first_step = step_of(steps, scales, scale_bytes)
        second_step = step_of(steps, scales, scale_bytes + second)
        l0, l1, l2, l3 = load_e2m1(k, row_bytes, first_step, second_step)
        q0, q1, q2, q3 = load_four(q)
        p0, p1, p2, p3 = load_four(q + q_other)
        a0, b0, a1, b1 = fma(q0, k0, a0), fma(p0, k0, b0), fma(q0, l0, a1), fma(p0, l0, b1)
        a0, b0, a1, b1 = fma(q1, k1, a0), fma(p1, k1, b0), fma(q1, l1, a1), fma(p1, l1, b1)
        a0, b0, a1, b1 = fma(q2, k2, a0), fma(p2, k2, b0), fma(q2, l2, a1), fma(p2, l2, b1)
        a0, b0, a1, b1 = fma(q3, k3, a0), fma(p3, k3, b0), fma(q3, l3, a1), fma(p3, l3, b1)
        k += 16
        ahead += 32
        scales += 1 + second
        q += 4 * STEP
    return a0, b0, a1, b1


@inner
def mix_stored(
    side, block, ahead, first_head, num_heads, first_token, num_tokens, weights, weight_bytes,
    weights_other, sums, sum_bytes, sums_other,
):  # fmt: skip
    """Add a block's values by weight, so many tokens from the first on, to one or two rows of sums
    of each head. Distances as in `score_stored`."""
    for head in range(first_head, first_head + num_heads):
        at = rows_of(side, block, head) + first_token * side.row_bytes
        if side.code == BF16:
            _mix_bf16(
                at, side.row_bytes, rows_of(side, ahead, head), num_tokens,
                weights, weights_other, sums, sums_other,
            )  # fmt: skip
        else:
            _prefetch_scales(side, ahead, head)
            scale_at = scales_of(side, block, head) + first_token * side.scale_row_bytes
            _mix_e2m1(
                at, side.row_bytes, rows_of(side, ahead, head), scale_at, side.scale_row_bytes,
                second_scale(side), side.steps, num_tokens,
                weights, weights_other, sums, sums_other,
            )  # fmt: skip
        weights += weight_bytes
        sums += sum_bytes


@inner
def _mix_bf16(v, row_bytes, ahead, num_tokens, weights, weights_other, sums, sums_other):
    keep_apart()
    for byte in range(0, row_bytes, LINE_BYTES):
        a0, a1, a2, a3 = load_four(sums)
        b0, b1, b2, b3 = load_four(sums + sums_other)
        here = v + byte
        for token in range(num_tokens):
            prefetch(ahead, token * row_bytes + byte)
            weight = weights + token * 4
            wa, wb = load_splat(weight, 0), load_splat(weight, weights_other)
            v0, v1, v2, v3 = (
                load_bf16(here, 0),
                load_bf16(here, 16),
                load_bf16(here, 32),
                load_bf16(here, 48),
            )
            a0, a1, a2, a3 = fma(wa, v0, a0), fma(wa, v1, a1), fma(wa, v2, a2), fma(wa, v3, a3)
            b0, b1, b2, b3 = fma(wb, v0, b0), fma(wb, v1, b1), fma(wb, v2, b2), fma(wb, v3, b3)
            here += row_bytes
        store_four(sums, a0, a1, a2, a3)
        store_four(sums + sums_other, b0, b1, b2, b3)
        sums += 4 * STEP


@inner
def _mix_e2m1(
    v, row_bytes, ahead, scales, scale_bytes, second, steps, num_tokens, weights, weights_other,
    sums, sums_other,
):  # fmt: skip
    keep_apart()
    for byte in range(0, row_bytes, 16):
        a0, a1, a2, a3 = load_four(sums)
        b0, b1, b2, b3 = load_four(sums + sums_other)
        here, scale = v + byte, scales
        for token in range(num_tokens):
            prefetch(ahead, token * row_bytes + byte)
            weight = weights + token * 4
            wa, wb = load_splat(weight, 0), load_splat(weight, weights_other)
            first_step, second_step = step_of(steps, scale, 0), step_of(steps, scale, second)
            v0, v1, v2, v3 = load_e2m1(here, 0, first_step, second_step)
            a0, a1, a2, a3 = fma(wa, v0, a0), fma(wa, v1, a1), fma(wa, v2, a2), fma(wa, v3, a3)
            b0, b1, b2, b3 = fma(wb, v0, b0), fma(wb, v1, b1), fma(wb, v2, b2), fma(wb, v3, b3)
            here += row_bytes
            scale += scale_bytes
        store_four(sums, a0, a1, a2, a3)
        store_four(sums + sums_other, b0, b1, b2, b3)
        sums += 4 * STEP
        scales += 1 + second
