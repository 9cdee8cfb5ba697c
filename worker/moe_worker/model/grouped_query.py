"""Grouped-query attention of one layer, with what its model has of norms, biases, windows, sinks.

Neighbours: `attention` is the contract, `moe_kernels.grouped_query` computes it.

Roles: qkv, o; where the model has them qkv_bias, o_bias, q_norm, k_norm, sinks.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from moe_kernels.attention_step import AttentionStep
from moe_kernels.grouped_query import GroupedQueryLayer, grouped_query
from moe_kernels.kv_pages import KvPages
from moe_worker.model.spec import ModelSpec


class GroupedQueryAttention:
    def __init__(
        self, spec: ModelSpec, layer: int, norm_H: Tensor, weights: Mapping[str, Tensor]
    ) -> None:
        attention = spec.grouped_query
        has_norms = attention.qk_norm != "none"
        self.layer = GroupedQueryLayer(
            num_heads=attention.num_heads,
            num_kv_heads=attention.num_kv_heads,
            head_dim=attention.head_dim,
            eps=spec.rms_eps,
            norm_H=norm_H,
            qkv_QH=weights["qkv"],
            o_HQ=weights["o"],
            qkv_bias_Q=_wide(weights.get("qkv_bias")),
            o_bias_H=_wide(weights.get("o_bias")),
            q_norm=weights["q_norm"] if has_norms else None,
            k_norm=weights["k_norm"] if has_norms else None,
            clip=attention.clip_qkv,
            scale=attention.scale,
            window=attention.window(layer),
            sinks_N=_wide(weights.get("sinks")),
            residual=spec.multipliers.residual,
        )

    def __call__(self, x_TH: Tensor, pages: KvPages, step: AttentionStep, /) -> Tensor:
        return grouped_query(x_TH, self.layer, pages, step)


def _wide(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.to(torch.float32)
