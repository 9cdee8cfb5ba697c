"""FP8 with one scale for a tensor: x̂ = e4m3 · g, one byte an element.

E4M3 has no infinity: what exceeds 448 · g is kept at it, explicitly, because versions of torch
differ. NaN stays NaN. Only a division and one rounding, so a token's bytes do not depend on what is
quantised with it. Neighbours: `kv_formats` has the fixed scales, `kv_pages` stores the bytes.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from moe_kernels.byte_table import look_up, pair_table

E4M3_MAX = 448.0


def quantize_fp8(x: Tensor, global_scale: float | Tensor) -> Tensor:
    """E4M3 as uint8, shaped like float32 `x`. `global_scale` may be a tensor that broadcasts."""
    scaled = (x / global_scale).clamp(-E4M3_MAX, E4M3_MAX)
    return scaled.to(torch.float8_e4m3fn).view(torch.uint8)


def dequantize_fp8(stored: Tensor, global_scale: float | Tensor) -> Tensor:
    """float32 of uint8 `stored`, the last dimension even."""
    return look_up(_table(stored.device), stored).view(stored.shape) * global_scale


@cache
def _table(device: torch.device) -> Tensor:
    every_byte = torch.arange(256, dtype=torch.uint8, device=device)
    return pair_table(every_byte.view(torch.float8_e4m3fn).to(torch.float32).unsqueeze(-1))
