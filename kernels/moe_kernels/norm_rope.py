"""The element-wise parts of a layer: RMS normalisation and rotary positions.

Only additions, products, divisions and square roots, each a call of its own: IEEE gives them one
answer, so nothing here can depend on the batch. A row's sum of squares is one contiguous reduction.

Letters: T tokens, H hidden, N heads, D head_dim.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x_TH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    """x / √(mean(x²) + eps) · weight, float32 [T, H]."""
    mean_T1 = (x_TH * x_TH).sum(dim=-1, keepdim=True) / x_TH.shape[-1]
    return x_TH / torch.sqrt(mean_T1 + eps) * weight_H.to(torch.float32)


def rope_table(max_positions: int, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """cos and sin of position · theta^(−2i/D), each float32 [max_positions, D/2]."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).to(torch.float32) / head_dim
    frequencies = 1.0 / (theta**exponents)
    angles = torch.outer(torch.arange(max_positions, dtype=torch.float32), frequencies)
    return angles.cos(), angles.sin()


def rope(x_TND: Tensor, cos_TF: Tensor, sin_TF: Tensor) -> Tensor:
    """Rotate the pairs (i, i + D/2) of every head by the token's angle; F = D/2, float32."""
    half = x_TND.shape[-1] // 2
    low, high = x_TND[..., :half], x_TND[..., half:]
    cos, sin = cos_TF[:, None, :], sin_TF[:, None, :]
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)
