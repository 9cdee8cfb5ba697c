"""What compiled kernels need besides their operands; `moe_kernels.memory` has the contracts.

A unit of attention is one thread's: its rows' scores of a chunk of keys, queries, sums and a block
of the cache as float32. Where threads take the chunks of a long context apart, each leaves its
sums. Products read weights as they are stored.
Neighbours: `attention` allocates a unit's, `attention_work` says how many rows a unit has.
"""

from __future__ import annotations

from moe_kernels.cpu.attention_work import CHUNK_TOKENS, ROWS_PER_TILE, UNITS_PER_THREAD
from moe_kernels.cpu.lanes import WIDTH
from moe_kernels.cpu.team import num_threads
from moe_kernels.reference import memory as reference

COMPILER_BYTES = 384 << 20
"""numba and LLVM after a cold start, measured; what is loaded from the cache takes a third."""
_FLOAT_BYTES = 4
_ALIGNED_WIDTH = 4 * WIDTH
"""Vectors of such widths are read by the kernels in every format."""
_MOST_BLOCK_TOKENS = 64


def attention_bytes(num_heads: int, head_dim: int, kv_elements: int, longest_tokens: int) -> int:
    rows = max(ROWS_PER_TILE, num_heads)
    unit = rows * (CHUNK_TOKENS + WIDTH + 3 * head_dim) + _MOST_BLOCK_TOKENS * head_dim
    # Sequences whose chunks are taken apart are fewer than the units that are wanted.
    chunks = -(-longest_tokens // CHUNK_TOKENS) + 1
    partials = UNITS_PER_THREAD * chunks * num_heads * (head_dim + 2)
    own = num_threads() * (unit + partials) * _FLOAT_BYTES
    if head_dim % _ALIGNED_WIDTH == 0:
        return own
    # Pages that the kernels cannot read are left to the reference.
    left = reference.attention_bytes(num_heads, head_dim, kv_elements, longest_tokens)
    return max(own, left)


def product_bytes(weight_elements: int) -> int:
    return 0


def process_bytes() -> int:
    return COMPILER_BYTES
