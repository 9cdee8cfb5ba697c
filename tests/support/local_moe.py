"""All experts of a model on one rank, without exchange: the simplest `moe` callable.

A dense oracle for the distributed layer: same router, same kernels, rows added in top-k order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_kernels.grouped_gemm import expert_mlp
from moe_kernels.linear import linear
from moe_kernels.permute import sort_by_slot
from moe_worker.model.config import ModelArchitecture
from moe_worker.model.weights import Checkpoint


class LocalMoe:
    """Slot = expert id, every expert local."""

    def __init__(self, checkpoint: Checkpoint, arch: ModelArchitecture) -> None:
        self.top_k = arch.top_k
        self.calls: list[int] = []
        """Tokens of every call, in order."""
        experts = [
            [checkpoint.read_expert(layer, expert) for expert in range(arch.num_experts)]
            for layer in arch.moe_layers
        ]
        self._w13 = [torch.stack([expert.w13_2IH for expert in layer]) for layer in experts]
        self._w2 = [torch.stack([expert.w2_HI for expert in layer]) for layer in experts]

    def __call__(self, ordinal: int, hidden_TH: Tensor, gate_EH: Tensor) -> Tensor:
        self.calls.append(hidden_TH.shape[0])
        scores_TE = torch.softmax(linear(hidden_TH, gate_EH), dim=-1)
        weights_TK, experts_TK = torch.topk(scores_TE, self.top_k, dim=-1)
        total_T1 = torch.zeros_like(weights_TK[:, :1])
        for choice in range(self.top_k):
            total_T1 = total_T1 + weights_TK[:, choice : choice + 1]
        weights_TK = weights_TK / total_T1
        order, offsets = sort_by_slot(experts_TK, gate_EH.shape[0])
        rows = hidden_TH[order // self.top_k]
        y_PH = torch.empty_like(rows)
        y_PH[order] = expert_mlp(rows, offsets, self._w13[ordinal], self._w2[ordinal])
        y_TKH = y_PH.view(*experts_TK.shape, hidden_TH.shape[1])
        out_TH = torch.zeros_like(hidden_TH)
        for choice in range(self.top_k):
            out_TH = out_TH + y_TKH[:, choice] * weights_TK[:, choice : choice + 1]
        return out_TH
