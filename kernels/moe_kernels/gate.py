"""A MoE layer's choice in one call: norm, gate, and which experts each token goes to.

Neighbours: `norm_rope`, `linear` and `router` are the parts; `experts` computes what was chosen.

Letters: T tokens, H hidden, E logical experts, K choices a token.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from moe_kernels.derived import Derived
from moe_kernels.implementation import implemented
from moe_kernels.linear import linear
from moe_kernels.norm_rope import rms_norm
from moe_kernels.router import RouterSpec, choose_experts


@dataclass(frozen=True, eq=False)
class Gate:
    """What a layer's choice is made with; the tensors never change, views of them are kept."""

    spec: RouterSpec
    norm_H: Tensor
    norm_eps: float
    gate_EH: Tensor
    logit_bias_E: Tensor | None = None
    """Part of the logits."""
    selection_bias_E: Tensor | None = None
    """See `choose_experts`."""
    derived: Derived = field(default_factory=Derived)


@implemented
def route(x_TH: Tensor, gate: Gate) -> tuple[Tensor, Tensor, Tensor]:
    """(normed float32 [T, H], ids int64 [T, K], weights float32 [T, K]) of float32 `x_TH`.

    `normed` is what the experts take. Bit for bit the same as the parts one after the other.
    """
    normed_TH = rms_norm(x_TH, gate.norm_H, gate.norm_eps)
    logits_TE = linear(normed_TH, gate.gate_EH)
    if gate.logit_bias_E is not None:
        logits_TE += gate.logit_bias_E.to(torch.float32)
    return normed_TH, *choose_experts(logits_TE, gate.spec, gate.selection_bias_E)
