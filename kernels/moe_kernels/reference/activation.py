"""The activations in torch.

Every step is an element-wise call of its own: a fused kernel may round its vector body and its
tail differently. Neighbour: `moe_kernels.activation` is the contract.
"""

from __future__ import annotations

from torch import Tensor

from moe_kernels.activation import Activation, Silu


def gated(both_R2I: Tensor, act: Activation) -> Tensor:
    intermediate = both_R2I.shape[1] // 2
    gate_RI, up_RI = both_R2I[:, :intermediate], both_R2I[:, intermediate:]
    if isinstance(act, Silu):
        return gate_RI / (1.0 + (-gate_RI).exp()) * up_RI
    gate_RI = gate_RI.clamp(max=act.limit)
    up_RI = up_RI.clamp(min=-act.limit, max=act.limit)
    return gate_RI / (1.0 + (-act.alpha * gate_RI).exp()) * (up_RI + 1.0)


def sigmoid_scaled(x_TH: Tensor, logits_T1: Tensor) -> Tensor:
    return x_TH / (1.0 + (-logits_T1).exp())
