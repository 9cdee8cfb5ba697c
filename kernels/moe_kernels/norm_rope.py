"""The element-wise parts of a layer: RMS normalisation and rotary positions.

Only additions, products, divisions and square roots, each a call of its own: IEEE gives them one
answer, so nothing here can depend on the batch. A row's sum of squares is one contiguous reduction.

Letters: T tokens, H hidden, N heads, D head_dim, F rotated pairs of a head.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x_TH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    """x / √(mean(x²) + eps) · weight over the last dimension, float32, of x's shape."""
    mean_T1 = (x_TH * x_TH).sum(dim=-1, keepdim=True) / x_TH.shape[-1]
    return x_TH / torch.sqrt(mean_T1 + eps) * weight_H.to(torch.float32)


def rope_table(
    max_positions: int, frequencies_F: Tensor, magnitude: float = 1.0
) -> tuple[Tensor, Tensor]:
    """cos and sin of position · frequency, times `magnitude`, each float32 [max_positions, F]."""
    positions = torch.arange(max_positions, dtype=torch.float32, device=frequencies_F.device)
    angles = torch.outer(positions, frequencies_F)
    if magnitude == 1.0:
        return angles.cos(), angles.sin()
    return angles.cos() * magnitude, angles.sin() * magnitude


def rope(x_TND: Tensor, cos_TF: Tensor, sin_TF: Tensor) -> Tensor:
    """Rotate the pairs (i, i + F) of every head by the token's angle, float32.

    Elements from 2·F on, if any, are left alone.
    """
    half = cos_TF.shape[-1]
    low, high = x_TND[..., :half], x_TND[..., half : 2 * half]
    cos, sin = cos_TF[:, None, :], sin_TF[:, None, :]
    turned = (low * cos - high * sin, high * cos + low * sin)
    if x_TND.shape[-1] > 2 * half:
        return torch.cat((*turned, x_TND[..., 2 * half :]), dim=-1)
    return torch.cat(turned, dim=-1)
