"""The Mixtral transformer, with its experts elsewhere.

Dense parts and attention run here on this rank's own tokens; for every MoE layer the given `moe`
callable takes the normed hidden states and returns the experts' sum. It is called in every step,
with no tokens too, because other ranks wait for this one.
Neighbours: `weights` gives the tensors, `moe_kernels` the row-invariant operations,
`moe_worker.expert.layer` is `moe`, `moe_worker.engine.runner` calls `forward`.

Letters: T tokens, H hidden, E experts, V vocabulary, B sampled rows, N heads, D head_dim.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from moe_kernels import kv_pages
from moe_kernels.attention_plan import AttentionPlan
from moe_kernels.kv_pages import KvPages
from moe_kernels.linear import linear
from moe_kernels.norm_rope import rms_norm, rope, rope_table
from moe_kernels.paged_attention import paged_attention
from moe_worker.model.config import ModelArchitecture
from moe_worker.model.weights import LayerWeights, SharedWeights


class Moe(Protocol):
    def __call__(self, ordinal: int, hidden_TH: Tensor, gate_EH: Tensor, /) -> Tensor:
        """Routed output float32 [T, H] of MoE layer number `ordinal` (counting MoE layers)."""
        ...


class Step(Protocol):
    """What `forward` reads of a batch."""

    @property
    def token_ids_T(self) -> Tensor: ...
    @property
    def positions_T(self) -> Tensor: ...
    @property
    def slots_T(self) -> Tensor: ...
    @property
    def sample_rows_B(self) -> Tensor: ...
    @property
    def attention(self) -> AttentionPlan: ...


class Cache(Protocol):
    @property
    def layers(self) -> tuple[KvPages, ...]: ...


class Transformer:
    def __init__(self, arch: ModelArchitecture, shared: SharedWeights) -> None:
        self.arch = arch
        self.shared = shared
        cos, sin = rope_table(arch.max_positions, arch.head_dim, arch.rope_theta)
        self._cos = cos.to(shared.embedding_VH.device)
        self._sin = sin.to(shared.embedding_VH.device)

    def forward(self, batch: Step, cache: Cache, moe: Moe) -> Tensor:
        """Logits float32 [B, V] of the batch's sampled rows; writes the batch's keys and values."""
        arch = self.arch
        x_TH = self.shared.embedding_VH[batch.token_ids_T].to(torch.float32)
        rotation = self._cos[batch.positions_T], self._sin[batch.positions_T]
        layers = zip(self.shared.layers, cache.layers, strict=True)
        for ordinal, (layer, pages) in enumerate(layers):
            normed_TH = rms_norm(x_TH, layer.attention_norm_H, arch.rms_eps)
            x_TH = x_TH + self._attention(normed_TH, layer, pages, batch, rotation)
            normed_TH = rms_norm(x_TH, layer.moe_norm_H, arch.rms_eps)
            x_TH = x_TH + moe(ordinal, normed_TH, layer.gate_EH)
        sampled_BH = rms_norm(x_TH[batch.sample_rows_B], self.shared.norm_H, arch.rms_eps)
        return linear(sampled_BH, self.shared.lm_head_VH)

    def _attention(
        self,
        x_TH: Tensor,
        layer: LayerWeights,
        pages: KvPages,
        batch: Step,
        rotation: tuple[Tensor, Tensor],
    ) -> Tensor:
        arch = self.arch
        num_tokens = x_TH.shape[0]
        if num_tokens == 0:
            return x_TH
        qkv = linear(x_TH, layer.qkv_QH).view(num_tokens, -1, arch.head_dim)
        q, k, v = torch.split(qkv, [arch.num_heads, arch.num_kv_heads, arch.num_kv_heads], dim=1)
        # Written first, then read back: a token sees itself as later tokens will see it.
        kv_pages.append(pages, rope(k, *rotation), v, batch.slots_T)
        mixed = paged_attention(rope(q, *rotation), pages, batch.attention)
        return linear(mixed.reshape(num_tokens, -1), layer.o_HQ)
