"""What the attention half of a layer takes of a step, the same for all layers of a kind.

Compiled, and made of a step's lines at once: Python would call numpy forty times.
Neighbours: `attention_work` cuts the units, `grouped_query_kernel` is what takes it; `forward` and
`grouped_query` have it made.

Letters: T tokens, S sequences, F rotated pairs of a head.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from moe_kernels.attention_plan import Int64s
from moe_kernels.cpu.attention_chunks import Partials
from moe_kernels.cpu.attention_work import cut_units
from moe_kernels.cpu.grouped_query_kernel import (
    ATTENTION,
    NORM,
    NUM_PHASES,
    OUT,
    QKV,
    ROUND,
    TOKENS,
    StepArrays,
)
from moe_kernels.cpu.jit import Array, compiled
from moe_kernels.cpu.linear import FEW_ROWS, SMALL_PRODUCT
from moe_kernels.cpu.parts import parts_for
from moe_kernels.grouped_query import GroupedQueryLayer

MANY_ELEMENTS = 1 << 13
"""Of q, k and v, that are normed, turned and stored sooner by two threads."""
HEADS, KV_HEADS, WIDTH, WINDOW, HIDDEN = range(5)
"""Of a kind of layer: query heads, kv heads, a head's width, tokens that a query sees back (0 =
all), width of the residual stream."""


class StepLines(NamedTuple):
    """A line for each sequence, see `attention_plan.RowTable`."""

    start_S: Array
    num_tokens_S: Array
    first_row_S: Array
    first_block_S: Array
    blocks: Array


def kind_of(layer: GroupedQueryLayer) -> Int64s:
    sizes = layer.num_heads, layer.num_kv_heads, layer.head_dim, layer.window or 0
    return np.array([*sizes, layer.o_HQ.shape[0]], dtype=np.int64)


@compiled
def make_step(
    cos_TF: Array, sin_TF: Array, slots_T: Array, lines: StepLines, kind: Array, threads: int
) -> tuple[StepArrays, Partials]:
    heads, kv_heads, width = kind[HEADS], kind[KV_HEADS], kind[WIDTH]
    units, bounds, num_partials = cut_units(
        lines.start_S,
        lines.num_tokens_S,
        lines.first_row_S,
        lines.first_block_S,
        kv_heads,
        heads // kv_heads,
        kind[WINDOW],
        threads,
    )
    num_tokens = slots_T.size
    qkv_rows, mixed = (heads + 2 * kv_heads) * width, heads * width
    parts, several = np.ones(NUM_PHASES, np.int64), parts_for(threads)
    if num_tokens >= FEW_ROWS:
        parts[NORM] = parts[ROUND] = several
    if num_tokens * qkv_rows * kind[HIDDEN] >= SMALL_PRODUCT:
        parts[QKV] = several
    if num_tokens * qkv_rows >= MANY_ELEMENTS:
        parts[TOKENS] = several
    if units.shape[0] > 1:
        parts[ATTENTION] = threads
    if num_tokens * mixed * kind[HIDDEN] >= SMALL_PRODUCT:
        parts[OUT] = several
    step = StepArrays(cos_TF, sin_TF, slots_T, units, bounds, lines.blocks, parts)
    partials = Partials(
        np.empty(num_partials, np.float32),
        np.empty(num_partials, np.float32),
        np.empty(num_partials * width * 4, np.uint8),
    )
    return step, partials
