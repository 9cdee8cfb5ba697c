"""Causal attention over paged keys and values: the same for decode and prefill, alone or batched.

A query's result depends on its own keys alone, in order of position: neither on its chunk nor on
the other sequences, nor on where its blocks lie.
Neighbours: `attention_plan` has the step's rows, `kv_pages` the cache, `latent_attention` is this
between two products.

Letters: T tokens, H query heads, N kv heads, G query heads per kv head, D head_dim.
"""

from __future__ import annotations

from torch import Tensor

from moe_kernels.attention_plan import AttentionPlan
from moe_kernels.implementation import implemented
from moe_kernels.kv_pages import KvPages
from moe_kernels.reference import paged_attention as reference


@implemented
def paged_attention(
    q_THD: Tensor,
    pages: KvPages,
    plan: AttentionPlan,
    *,
    scale: float | None = None,
    window: int | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """softmax(scale · q · kᵀ) · v over each query's keys up to its own position, float32 [T, H, D].

    H = N · G query heads, head h reading kv head h // G. The step's own keys and values must lie
    in the pages already. Of latent pages the one key is the latent and the rotated part after it,
    the value is the latent: what comes back is as wide as that.
    A NaN that a query sees makes its result NaN; what lies past a sequence's end, before every
    window or in other sequences' blocks has no part in it. T may be 0.

    Args:
        scale: absent = 1/√D.
        window: a query sees this many tokens back, itself included; absent = all.
        sinks_H: float32, a logit per head that takes its part of the softmax and has no value.
    """
    return reference.paged_attention(
        q_THD, pages, plan, scale=scale, window=window, sinks_H=sinks_H
    )
