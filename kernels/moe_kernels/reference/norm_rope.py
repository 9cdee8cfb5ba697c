"""RMS normalisation and rotary positions in torch.

Only additions, products, divisions and square roots, each a call of its own: IEEE gives them one
answer, so nothing here can depend on the batch. A row's sum of squares is one contiguous reduction.
Neighbour: `moe_kernels.norm_rope` is the contract.

Letters: T tokens, H hidden, N heads, D head_dim, F rotated pairs of a head.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x_TH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    mean_T1 = (x_TH * x_TH).sum(dim=-1, keepdim=True) / x_TH.shape[-1]
    return x_TH / torch.sqrt(mean_T1 + eps) * weight_H.to(torch.float32)


def rope(x_TND: Tensor, cos_TF: Tensor, sin_TF: Tensor) -> Tensor:
    half = cos_TF.shape[-1]
    low, high = x_TND[..., :half], x_TND[..., half : 2 * half]
    cos, sin = cos_TF[:, None, :], sin_TF[:, None, :]
    turned = (low * cos - high * sin, high * cos + low * sin)
    if x_TND.shape[-1] > 2 * half:
        return torch.cat((*turned, x_TND[..., 2 * half :]), dim=-1)
    return torch.cat(turned, dim=-1)
