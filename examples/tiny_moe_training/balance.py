"""Two ways to keep experts in use while training: an auxiliary loss, or a bias without any loss.

The auxiliary loss is E·Σᵢ fᵢ·Pᵢ of each layer, where fᵢ is the share of expert i in all top-k
choices times k and Pᵢ its mean router probability (Switch Transformer, equation 4, over all k
choices). The bias (DeepSeek-V3, section 2.1.2) is added to the router logits and moves by a fixed
step against the load. The Mixtral layout has no place for a bias, so `trainer` fades it out.
"""

from __future__ import annotations

import torch

from tiny_moe_training.model import Routing


def auxiliary_loss(routing: Routing) -> torch.Tensor:
    """Mean over layers of E·Σᵢ fᵢ·Pᵢ; it is k (the number of choices) at perfect balance."""
    losses = []
    for probabilities_NE, counts_E in zip(
        routing.probabilities_LNE, routing.expert_counts_LE, strict=True
    ):
        tokens, experts = probabilities_NE.shape
        fractions_E = counts_E.float() / tokens
        losses.append(experts * (fractions_E * probabilities_NE.mean(0)).sum())
    return torch.stack(losses).mean()


def moved_bias(bias_LE: torch.Tensor, counts_LE: list[torch.Tensor], step: float) -> torch.Tensor:
    """The bias after one step: up for experts below the mean load, down for those above."""
    counts = torch.stack(counts_LE).float()
    return bias_LE + step * torch.sign(counts.mean(-1, keepdim=True) - counts)
