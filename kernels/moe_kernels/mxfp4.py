"""MXFP4 (OCP): 32 consecutive elements as E2M1 codes, sharing one power of two (E8M0).

x̂ = e2m1 · 2^(byte − 127), byte = floor(log2 amax) − 2 + 127: values between 6 and 8 times the
scale clip to 6. The exponent is read from the number's bits, because rounding to E8M0 is to nearest
in torch, which is not this rule. No other scale: the range is float32's own. 255 is NaN, so a NaN
spoils its block and is seen. Bytes per head and token: D/2 + D/32.
Neighbours: `e2m1` is the four-bit code and its packing, `kv_pages` stores the bytes.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from moe_kernels.e2m1 import encode_e2m1, pack, unpacked_values
from moe_kernels.kv_formats import MXFP4_BLOCK

_LARGEST_EXPONENT = 2
"""Of E2M1: 6 = 1.5 · 2²."""
_INFINITE, _NAN = 254, 255


def quantize_mxfp4(x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes uint8 [..., D/2] and scales uint8 [..., D/32] of float32 `x` [..., D]."""
    blocks = x.reshape(*x.shape[:-1], x.shape[-1] // MXFP4_BLOCK, MXFP4_BLOCK)
    amax = blocks.abs().amax(dim=-1)
    exponents = (amax.view(torch.int32) >> 23).clamp(max=_INFINITE) - _LARGEST_EXPONENT
    scales = torch.where(amax.isnan(), _NAN, exponents.clamp(min=0)).to(torch.uint8)
    # The smallest scale, 2^-127, has no reciprocal in float32: divide.
    ratio = blocks / _scale_values(scales).unsqueeze(-1)
    return pack(encode_e2m1(ratio).flatten(-2)), scales


def dequantize_mxfp4(packed: Tensor, scales: Tensor) -> Tensor:
    """float32 [..., D] of codes uint8 [..., D/2] and scales uint8 [..., D/32]."""
    step = _scale_values(scales).unsqueeze(-1)
    blocks = unpacked_values(packed).view(*scales.shape, MXFP4_BLOCK) * step
    return blocks.flatten(-2)


def _scale_values(scales: Tensor) -> Tensor:
    return _table(scales.device)[scales.to(torch.int32)]


@cache
def _table(device: torch.device) -> Tensor:
    """float32 of every E8M0 byte."""
    exponents = torch.arange(256, dtype=torch.int32, device=device)
    values = (exponents << 23).view(torch.float32).clone()
    values[0], values[_NAN] = 2.0**-127, torch.nan
    return values
