"""The element-wise parts of a layer: RMS normalisation and rotary positions.

Letters: T tokens, H hidden, N heads, D head_dim, F rotated pairs of a head.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_kernels.implementation import implemented
from moe_kernels.reference import norm_rope as reference


@implemented
def rms_norm(x_TH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    """x / √(mean(x²) + eps) · weight over the last dimension, float32, of x's shape.

    `x_TH` is float32, `weight_H` of any float dtype. A NaN makes its row NaN; in a row with an
    infinity every finite element becomes 0 and the infinite ones NaN.
    """
    return reference.rms_norm(x_TH, weight_H, eps)


def rope_table(
    max_positions: int, frequencies_F: Tensor, magnitude: float = 1.0
) -> tuple[Tensor, Tensor]:
    """cos and sin of position · frequency, times `magnitude`, each float32 [max_positions, F]."""
    positions = torch.arange(max_positions, dtype=torch.float32, device=frequencies_F.device)
    angles = torch.outer(positions, frequencies_F)
    if magnitude == 1.0:
        return angles.cos(), angles.sin()
    return angles.cos() * magnitude, angles.sin() * magnitude


@implemented
def rope(x_TND: Tensor, cos_TF: Tensor, sin_TF: Tensor) -> Tensor:
    """Rotate the pairs (i, i + F) of every head by the token's angle, float32.

    Elements from 2·F on, if any, are left alone. NaN and infinities stay in their pair.
    """
    return reference.rope(x_TND, cos_TF, sin_TF)
