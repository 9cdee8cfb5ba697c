"""How many bytes the operations need besides their operands, before they run.

Contracts like the operations themselves: each implementation counts its own. The worker keeps these
bytes free before the cache takes the rest.
Neighbours: `paged_attention` and `linear` allocate them; `moe_worker.engine.loading` asks.
"""

from __future__ import annotations

from moe_kernels.implementation import implemented
from moe_kernels.reference import memory as reference


@implemented
def attention_bytes(num_heads: int, head_dim: int, kv_elements: int, longest_tokens: int) -> int:
    """Most that attention allocates at a time while sequences have up to `longest_tokens` tokens;
    it does not fall with them.

    `kv_elements` are the elements of a token that are read from the pages of a layer.
    """
    return reference.attention_bytes(num_heads, head_dim, kv_elements, longest_tokens)


@implemented
def product_bytes(weight_elements: int) -> int:
    """Of a product with a matrix of so many elements."""
    return reference.product_bytes(weight_elements)


@implemented
def process_bytes() -> int:
    """That an implementation takes for itself, whatever it computes."""
    return reference.process_bytes()
