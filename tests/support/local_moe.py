"""All experts of a model on one rank, without exchange: the simplest `moe` callable.

A dense oracle for the distributed layer: same router, same kernels, rows added in top-k order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_kernels.grouped_gemm import expert_mlp
from moe_kernels.linear import linear
from moe_kernels.permute import sort_by_slot
from moe_worker.expert.router import choose_experts
from moe_worker.model.spec import ModelSpec
from moe_worker.model.weights import Checkpoint, RouterWeights


class LocalMoe:
    """Slot = expert id, every expert local."""

    def __init__(self, checkpoint: Checkpoint, arch: ModelSpec) -> None:
        self.arch = arch
        self.calls: list[int] = []
        """Tokens of every call, in order."""
        self._experts = [
            [checkpoint.read_expert(layer, expert) for expert in range(arch.num_experts)]
            for layer in arch.moe_layers
        ]
        self._w13 = [torch.stack([expert.w13_2IH for expert in layer]) for layer in self._experts]
        self._w2 = [torch.stack([expert.w2_HI for expert in layer]) for layer in self._experts]

    def __call__(self, ordinal: int, hidden_TH: Tensor, router: RouterWeights) -> Tensor:
        self.calls.append(hidden_TH.shape[0])
        logits_TE = linear(hidden_TH, router.gate_EH)
        if router.logit_bias_E is not None:
            logits_TE = logits_TE + router.logit_bias_E.float()
        experts_TK, weights_TK = choose_experts(
            logits_TE, self.arch.router, router.selection_bias_E
        )
        top_k = self.arch.top_k
        order, offsets = sort_by_slot(experts_TK, self.arch.num_experts)
        rows = hidden_TH[order // top_k]
        y_PH = torch.empty_like(rows)
        y_PH[order] = expert_mlp(
            rows,
            offsets,
            self._w13[ordinal],
            self._w2[ordinal],
            act=self.arch.expert.act,
            b13_S2I=self._biases(ordinal, "b13_2I"),
            b2_SH=self._biases(ordinal, "b2_H"),
        )
        y_TKH = y_PH.view(*experts_TK.shape, hidden_TH.shape[1])
        out_TH = torch.zeros_like(hidden_TH)
        for choice in range(top_k):
            out_TH = out_TH + y_TKH[:, choice] * weights_TK[:, choice : choice + 1]
        return out_TH

    def _biases(self, ordinal: int, part: str) -> Tensor | None:
        if not self.arch.expert.bias:
            return None
        return torch.stack([getattr(expert, part) for expert in self._experts[ordinal]])
