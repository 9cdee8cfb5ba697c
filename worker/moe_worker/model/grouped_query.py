"""Grouped-query attention of one layer, with what its model has of norms, biases, windows, sinks.

Neighbours: `attention` is the contract, `moe_kernels` has the row-invariant operations.

Roles: qkv, o; where the model has them qkv_bias, o_bias, q_norm, k_norm, sinks.

Letters: T tokens, H hidden, N query heads, K kv heads, D head_dim, Q rows of the projection.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from moe_kernels import kv_pages
from moe_kernels.kv_pages import KvPages
from moe_kernels.linear import linear
from moe_kernels.norm_rope import rms_norm, rope
from moe_kernels.paged_attention import paged_attention
from moe_worker.model.attention import AttentionStep, Rotation
from moe_worker.model.spec import ModelSpec


class GroupedQueryAttention:
    def __init__(self, spec: ModelSpec, layer: int, weights: Mapping[str, Tensor]) -> None:
        self._spec, self._eps = spec.grouped_query, spec.rms_eps
        self._window = self._spec.window(layer)
        self._qkv_QH, self._o_HQ = weights["qkv"], weights["o"]
        self._qkv_bias_Q = _wide(weights.get("qkv_bias"))
        self._o_bias_H = _wide(weights.get("o_bias"))
        self._norms = (weights.get("q_norm"), weights.get("k_norm"))
        self._sinks_N = _wide(weights.get("sinks"))

    def __call__(
        self, x_TH: Tensor, pages: KvPages, batch: AttentionStep, rotation: Rotation, /
    ) -> Tensor:
        q_TND, k_TKD, v_TKD = self._project(x_TH)
        # Written first, then read back: a token sees itself as later tokens will see it.
        kv_pages.append(pages, rope(k_TKD, *rotation), v_TKD, batch.slots_T)
        mixed_TND = paged_attention(
            rope(q_TND, *rotation),
            pages,
            batch.attention,
            scale=self._spec.scale,
            window=self._window,
            sinks_H=self._sinks_N,
        )
        out_TH = linear(mixed_TND.reshape(x_TH.shape[0], -1), self._o_HQ)
        return out_TH if self._o_bias_H is None else out_TH + self._o_bias_H

    def _project(self, x_TH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        spec, num_tokens = self._spec, x_TH.shape[0]
        qkv_TQ = linear(x_TH, self._qkv_QH)
        if self._qkv_bias_Q is not None:
            qkv_TQ += self._qkv_bias_Q
        qkv = qkv_TQ.view(num_tokens, -1, spec.head_dim)
        heads = [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads]
        q_TND, k_TKD, v_TKD = torch.split(qkv, heads, dim=1)
        if spec.qk_norm != "none":
            q_TND, k_TKD = self._normed(q_TND, 0), self._normed(k_TKD, 1)
        if spec.clip_qkv is not None:
            q_TND, k_TKD, v_TKD = (
                x.clamp(-spec.clip_qkv, spec.clip_qkv) for x in (q_TND, k_TKD, v_TKD)
            )
        return q_TND, k_TKD, v_TKD

    def _normed(self, x_TND: Tensor, which: int) -> Tensor:
        """Each head, or all heads together, as one contiguous row."""
        weight = self._norms[which]
        assert weight is not None, "the family maps the norms that its description asks for"
        rows = x_TND.reshape(-1, weight.shape[0])
        return rms_norm(rows, weight, self._eps).view(x_TND.shape)


def _wide(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.to(torch.float32)
