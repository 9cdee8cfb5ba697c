"""The attention half of a layer: from the residual stream to the residual stream in one operation.

    q, k, v = qkv · norm(x) + bias          normed by head or whole, clipped
    keys, values of the step → pages        rotated k, and v
    x' = x + residual · (o · attention(rotated q, pages) + bias)

A decode step of one token spends more on the calls between small operations than on the operations,
so an implementation may do all of it in one call. What it computes is `composed`, which is the
other contracts one after the other, and the same bits as their functions of that implementation.
Neighbours: `linear`, `norm_rope`, `kv_pages` and `paged_attention` are the parts,
`moe_worker.model.grouped_query` makes a `GroupedQueryLayer` of a model's weights.

Letters: T tokens, H hidden, N query heads, K kv heads, D head_dim, Q = (N + 2·K) · D.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from moe_kernels import kv_pages
from moe_kernels.attention_step import AttentionStep
from moe_kernels.derived import Derived
from moe_kernels.implementation import implemented
from moe_kernels.kv_pages import KvPages
from moe_kernels.linear import linear
from moe_kernels.norm_rope import rms_norm, rope
from moe_kernels.paged_attention import paged_attention


@dataclass(frozen=True)
class GroupedQueryLayer:
    """One layer's weights and what they mean. Absent tensors are absent in the model."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    """Of all norms."""
    norm_H: Tensor
    """Of the input."""
    qkv_QH: Tensor
    """Rows of q, then k, then v."""
    o_HQ: Tensor
    """[H, N · D]."""
    qkv_bias_Q: Tensor | None = None
    """Biases and sinks are float32."""
    o_bias_H: Tensor | None = None
    q_norm: Tensor | None = None
    """[D]: of each head; [N · D]: of all heads as one row."""
    k_norm: Tensor | None = None
    """[D] or [K · D], as of the queries; both or none."""
    clip: float | None = None
    """q, k and v are clipped to ± this, after the norm."""
    scale: float | None = None
    """Multiplies q · k; absent = 1/√D."""
    window: int | None = None
    """A query sees this many tokens back, itself included; absent = all."""
    sinks_N: Tensor | None = None
    residual: float = 1.0
    """What is added to x is multiplied by this."""
    derived: Derived = field(default_factory=Derived, init=False, compare=False, repr=False)


@implemented
def grouped_query(
    x_TH: Tensor, layer: GroupedQueryLayer, pages: KvPages, step: AttentionStep
) -> Tensor:
    """x + residual · attention(norm(x)), float32 [T, H], new; the step's tokens are written to
    the pages. `x_TH` is float32; T may be 0.

    A token's row depends on its own earlier tokens alone. Numbers that are no numbers: as the parts
    have it, so a NaN in a row of x stays in that sequence.
    """
    return composed(x_TH, layer, pages, step)


def composed(x_TH: Tensor, layer: GroupedQueryLayer, pages: KvPages, step: AttentionStep) -> Tensor:
    """`grouped_query` by the contracts of its parts."""
    if not x_TH.shape[0]:
        return x_TH.clone()
    # Written first, then read back: a token sees itself as later tokens will see it.
    q_TND, k_TKD, v_TKD = meeting(x_TH, layer, step.cos_TF, step.sin_TF)
    kv_pages.append(pages, k_TKD, v_TKD, step.slots_T)
    mixed_TND = paged_attention(
        q_TND,
        pages,
        step.plan,
        scale=layer.scale,
        window=layer.window,
        sinks_H=layer.sinks_N,
    )
    out_TH = linear(mixed_TND.flatten(1), layer.o_HQ)
    if layer.o_bias_H is not None:
        out_TH += layer.o_bias_H
    if layer.residual != 1.0:
        out_TH *= layer.residual
    return x_TH + out_TH


def meeting(
    x_TH: Tensor, layer: GroupedQueryLayer, cos_TF: Tensor, sin_TF: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys as they meet, and values: [T, N, D], [T, K, D] and [T, K, D]."""
    q_TND, k_TKD, v_TKD = _project(rms_norm(x_TH, layer.norm_H, layer.eps), layer)
    return rope(q_TND, cos_TF, sin_TF), rope(k_TKD, cos_TF, sin_TF), v_TKD


def _project(x_TH: Tensor, layer: GroupedQueryLayer) -> tuple[Tensor, Tensor, Tensor]:
    qkv_TQ = linear(x_TH, layer.qkv_QH)
    if layer.qkv_bias_Q is not None:
        qkv_TQ += layer.qkv_bias_Q
    heads = [layer.num_heads, layer.num_kv_heads, layer.num_kv_heads]
    qkv = qkv_TQ.view(x_TH.shape[0], -1, layer.head_dim)
    q_TND, k_TKD, v_TKD = torch.split(qkv, heads, dim=1)
    if layer.q_norm is not None and layer.k_norm is not None:
        q_TND = _normed(q_TND, layer.q_norm, layer.eps)
        k_TKD = _normed(k_TKD, layer.k_norm, layer.eps)
    if layer.clip is not None:
        q_TND, k_TKD, v_TKD = (x.clamp(-layer.clip, layer.clip) for x in (q_TND, k_TKD, v_TKD))
    return q_TND, k_TKD, v_TKD


def _normed(x_TND: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Each head, or all heads together, as one contiguous row."""
    return rms_norm(x_TND.reshape(-1, weight.shape[0]), weight, eps).view(x_TND.shape)
