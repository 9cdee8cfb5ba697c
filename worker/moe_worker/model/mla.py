"""Multi-head latent attention of one layer (DeepSeek-V2, V3, R1).

The cache keeps of a token its normed latent and one rotated key; what heads make of the latent is
computed by `moe_kernels.latent_attention`, from the matrix of each head for keys and for values.
Neighbours: `attention` is the contract, `families.deepseek` names the tensors.

Roles: q, or q_a, q_a_norm and q_b where queries have a bottleneck; kv_a, kv_a_norm, kv_b, o; and
with biases q_a_bias, kv_a_bias, o_bias.

Letters: T tokens, H hidden, N heads, C elements of a head's key that are not rotated, R rotated
ones, D latent, V value of a head, F rotated pairs, O outputs.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from moe_kernels import kv_pages
from moe_kernels.attention_step import AttentionStep
from moe_kernels.kv_pages import KvPages
from moe_kernels.latent_attention import latent_attention
from moe_kernels.linear import linear
from moe_kernels.norm_rope import rms_norm, rope
from moe_worker.model.spec import LatentSpec, ModelSpec

RMS_EPS = 1e-6
"""Of the norms within attention, whatever the config says of the others."""
Rotation = tuple[Tensor, Tensor]


class LatentAttention:
    def __init__(
        self, spec: ModelSpec, layer: int, norm_H: Tensor, weights: Mapping[str, Tensor]
    ) -> None:
        assert isinstance(spec.attention, LatentSpec), "chosen by the kind of the description"
        self._norm_H, self._eps, self._residual = norm_H, spec.rms_eps, spec.multipliers.residual
        self._spec, self._weights = spec.attention, weights
        heads_NXD = weights["kv_b"].view(self._spec.num_heads, -1, self._spec.latent_dim)
        self._w_k_NCD = heads_NXD[:, : self._spec.nope_dim]
        self._w_v_NVD = heads_NXD[:, self._spec.nope_dim :]

    def __call__(self, x_TH: Tensor, pages: KvPages, step: AttentionStep, /) -> Tensor:
        if not x_TH.shape[0]:
            return x_TH.clone()
        mixed_TH = self._mixed(rms_norm(x_TH, self._norm_H, self._eps), pages, step)
        return x_TH + (mixed_TH if self._residual == 1.0 else mixed_TH * self._residual)

    def _mixed(self, x_TH: Tensor, pages: KvPages, step: AttentionStep) -> Tensor:
        rotation = step.cos_TF, step.sin_TF
        q_TNC, q_rope_TNR = self._queries(x_TH, rotation)
        # Written first, then read back: a token sees itself as later tokens will see it.
        kv_pages.append_latent(pages, *self._latents(x_TH, rotation), step.slots_T)
        mixed_TNV = latent_attention(
            q_TNC,
            q_rope_TNR,
            pages,
            step.plan,
            w_k_NCD=self._w_k_NCD,
            w_v_NVD=self._w_v_NVD,
            scale=self._spec.scale,
        )
        return self._project("o", mixed_TNV.flatten(1))

    def _queries(self, x_TH: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        """[T, N, C] as they are and [T, N, R] rotated."""
        spec = self._spec
        if spec.query_rank is None:
            q = self._project("q", x_TH)
        else:
            narrow = rms_norm(self._project("q_a", x_TH), self._weights["q_a_norm"], RMS_EPS)
            q = self._project("q_b", narrow)
        heads = q.view(x_TH.shape[0], spec.num_heads, spec.nope_dim + spec.rope_dim)
        q_TNC, q_rope_TNR = torch.split(heads, [spec.nope_dim, spec.rope_dim], dim=2)
        return q_TNC, self._rotated(q_rope_TNR, rotation)

    def _latents(self, x_TH: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        """What the cache keeps: [T, D] normed and [T, R] rotated."""
        spec = self._spec
        both = self._project("kv_a", x_TH)
        latent_TD, rope_TR = torch.split(both, [spec.latent_dim, spec.rope_dim], dim=1)
        normed_TD = rms_norm(latent_TD.contiguous(), self._weights["kv_a_norm"], RMS_EPS)
        return normed_TD, self._rotated(rope_TR.unsqueeze(1), rotation)[:, 0]

    def _rotated(self, x_TNR: Tensor, rotation: Rotation) -> Tensor:
        """Pairs stand together in the checkpoint or half the elements apart, here always apart:
        queries and keys are sorted alike, and their product does not know."""
        if self._spec.rope_interleaved:
            x_TNR = torch.cat((x_TNR[..., 0::2], x_TNR[..., 1::2]), dim=-1)
        return rope(x_TNR, *rotation)

    def _project(self, role: str, x_TO: Tensor) -> Tensor:
        out_TO = linear(x_TO, self._weights[role])
        bias_O = self._weights.get(f"{role}_bias")
        return out_TO if bias_O is None else out_TO + bias_O.to(torch.float32)
