"""The least time of a step: what it must read ÷ what the machine reads, or its multiply-adds ÷
those that the library's product makes. Pure.

Bytes of a decode step: every matrix that all tokens pass (attention, routers, head), the experts
touched, keys and values of all tokens before. Norms, embeddings and activations are left out.
"""

from __future__ import annotations

from dataclasses import dataclass

from moe_worker.model.spec import ModelSpec


@dataclass(frozen=True)
class Sizes:
    """Of a model."""

    num_layers: int
    num_experts: int
    top_k: int
    shared_bytes: int
    """Of what every step reads."""
    shared_elements: int
    bytes_per_expert: int
    elements_per_expert: int
    attention_elements: int
    """Of all layers' query heads, for a token."""


def sizes(arch: ModelSpec, weight_bytes: int) -> Sizes:
    """For grouped-query attention and experts in every layer; `weight_bytes` of an element."""
    of = arch.grouped_query
    rows = (of.num_heads + 2 * of.num_kv_heads) * of.head_dim
    attention = arch.num_layers * (rows + of.num_heads * of.head_dim) * arch.hidden
    routers = len(arch.moe_layers) * arch.num_experts * arch.hidden
    shared = attention + routers + arch.vocab_size * arch.hidden
    return Sizes(
        num_layers=len(arch.moe_layers),
        num_experts=arch.num_experts,
        top_k=arch.top_k,
        shared_bytes=shared * weight_bytes,
        shared_elements=shared,
        bytes_per_expert=arch.bytes_per_expert,
        elements_per_expert=arch.bytes_per_expert // weight_bytes,
        attention_elements=arch.num_layers * of.num_heads * of.head_dim,
    )


def touched_by_chance(of: Sizes, batch: int) -> float:
    """Experts that `batch` tokens touch on average when each chooses evenly."""
    return of.num_experts * (1 - (1 - of.top_k / of.num_experts) ** batch)


def decode_bytes(of: Sizes, touched: float, kv_tokens: float, kv_bytes_per_token: int) -> float:
    """Read in a step that touches so many experts a layer and so many tokens' keys and values."""
    experts = of.num_layers * touched * of.bytes_per_expert
    return of.shared_bytes + experts + kv_tokens * kv_bytes_per_token


def prefill_operations(of: Sizes, num_tokens: int) -> float:
    """Multiplications and additions; the head is for one token, a token sees half of the others."""
    experts = of.num_layers * of.top_k * of.elements_per_expert
    products = 2 * num_tokens * (of.shared_elements + experts)
    return products + 2 * num_tokens * num_tokens * of.attention_elements
