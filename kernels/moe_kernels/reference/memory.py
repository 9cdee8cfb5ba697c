"""What torch's operations need besides their operands; `moe_kernels.memory` has the contracts.

Neighbours: `moe_kernels.attention_plan` bounds a pass of attention, `paged_attention` and `linear`
allocate it.
"""

from __future__ import annotations

from moe_kernels.attention_plan import (
    MAX_PAIRS_PER_PASS,
    MAX_SPANS_PER_PASS,
    PAIRS_PER_PRODUCT,
    SPAN_TOKENS,
    TILE_TOKENS,
)

_READ_BYTES_PER_ELEMENT = 12
"""Stored bytes gathered, values of codes, values times scales: float32 twice and the bytes."""
_FLOAT_BYTES = 4
_COPIES_OF_ROWS = 3
"""Queries of pairs, their parts of the output, the output."""


def attention_bytes(num_heads: int, head_dim: int, kv_elements: int, longest_tokens: int) -> int:
    """A pass keeps to its bounds unless a single tile of a long sequence passes them."""
    spans_of_one = -(-longest_tokens // SPAN_TOKENS)
    num_spans = max(MAX_SPANS_PER_PASS, spans_of_one)
    num_pairs = max(MAX_PAIRS_PER_PASS, spans_of_one) + PAIRS_PER_PRODUCT
    read = num_spans * SPAN_TOKENS * kv_elements * _READ_BYTES_PER_ELEMENT
    rows = num_heads * TILE_TOKENS
    scores = num_pairs * rows * SPAN_TOKENS * _FLOAT_BYTES
    return read + scores + num_pairs * rows * head_dim * _FLOAT_BYTES * _COPIES_OF_ROWS


def product_bytes(weight_elements: int) -> int:
    """The matrix is read as float32."""
    return weight_elements * _FLOAT_BYTES


def process_bytes() -> int:
    return 0
