"""The dense gated networks of a model: layers without experts, and shared experts.

Neighbours: `transformer` adds their output; routed experts are `moe_kernels.grouped_gemm`.

Letters: T tokens, H hidden, I intermediate.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_kernels.activation import Activation, gated
from moe_kernels.linear import linear
from moe_worker.model.weights import MlpWeights


def mlp(x_TH: Tensor, weights: MlpWeights, act: Activation) -> Tensor:
    """w2 · act(w1 · x, w3 · x), float32 [T, H]; with a gate, times the sigmoid of gate · x."""
    out_TH = linear(gated(linear(x_TH, weights.w13_2IH), act), weights.w2_HI)
    if weights.gate_1H is None:
        return out_TH
    return out_TH / (1.0 + torch.exp(-linear(x_TH, weights.gate_1H)))
