"""NVFP4: 16 consecutive elements of head_dim as E2M1 codes, sharing one E4M3 scale.

x̂ = e2m1 · sf · g, with g the tensor's global scale in decode direction. Quantised at append, read
back always; `kv_pages` stores the bytes.

* E2M1: sign · {0, .5, 1, 1.5, 2, 3, 4, 6}, code = sign·8 + index, so code 8 is −0; midpoints round
  to the even code, beyond 6 saturates.
* sf = e4m3(amax / (6·g)), kept within E4M3's finite range; a block with sf 0 decodes to zeros.
* Packing: element 2i in the low nibble, 2i+1 in the high one.

Only comparisons, products, divisions and one rounding to E4M3: a token's bytes do not depend on
what is quantised with it. Bytes per head and token: D/2 + D/16.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

NVFP4_BLOCK = 16
E2M1_MAX = 6.0
E4M3_MAX = 448.0
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def quantize_nvfp4(x: Tensor, global_scale: float | Tensor) -> tuple[Tensor, Tensor]:
    """Codes uint8 [..., D/2] and E4M3 scales as uint8 [..., D/16] of float32 `x` [..., D].

    `global_scale` is a number, or a tensor that broadcasts against the scales.
    """
    blocks = x.reshape(*x.shape[:-1], -1, NVFP4_BLOCK)
    wanted = blocks.abs().amax(dim=-1) / (E2M1_MAX * global_scale)
    sf_e4m3 = wanted.clamp(max=E4M3_MAX).to(torch.float8_e4m3fn)
    step = (sf_e4m3.to(torch.float32) * global_scale).unsqueeze(-1)
    ratio = torch.where(step == 0.0, torch.zeros_like(blocks).copysign(blocks), blocks / step)
    codes = _e2m1_codes(ratio).reshape(*x.shape[:-1], -1, 2)
    packed = codes[..., 0] | (codes[..., 1] << 4)
    return packed, sf_e4m3.view(torch.uint8)


def dequantize_nvfp4(packed: Tensor, scales: Tensor, global_scale: float | Tensor) -> Tensor:
    """float32 [..., D] of codes uint8 [..., D/2] and scales uint8 [..., D/16]."""
    byte_pairs = packed.contiguous().view(torch.uint16).reshape(-1).to(torch.int32)
    values = torch.index_select(_byte_pair_table(packed.device), 0, byte_pairs).view(torch.float32)
    step = scales.view(torch.float8_e4m3fn).to(torch.float32) * global_scale
    blocks = values.view(*scales.shape, NVFP4_BLOCK) * step.unsqueeze(-1)
    return blocks.view(*packed.shape[:-1], -1)


def _e2m1_codes(ratio: Tensor) -> Tensor:
    """Nearest E2M1 code, uint8, the even one at a midpoint."""
    index = torch.bucketize(ratio.abs(), _bounds(ratio.device), out_int32=True)
    return index.to(torch.uint8) | (torch.signbit(ratio).to(torch.uint8) << 3)


@cache
def _bounds(device: torch.device) -> Tensor:
    """The largest float32 that still rounds to each index, so that index = bounds below |x|.

    That is the midpoint where the lower code is even, and its neighbour below where it is odd.
    """
    values = torch.tensor(E2M1_VALUES, device=device)
    midpoints = (values[1:] + values[:-1]) / 2
    odd_below = torch.arange(len(midpoints), device=device) % 2 == 1
    below = torch.nextafter(midpoints, torch.zeros_like(midpoints))
    return torch.where(odd_below, below, midpoints)


@cache
def _byte_pair_table(device: torch.device) -> Tensor:
    """The four values of every pair of bytes, 16 bytes of float32 in one complex128: [65536].

    One lookup of 16 bytes per four elements is ten times as fast on a CPU as a lookup per element.
    The pair is a little-endian uint16, as on every machine torch supports.
    """
    signed = torch.tensor([*E2M1_VALUES, *(-value for value in E2M1_VALUES)], device=device)
    pairs = torch.arange(1 << 16, device=device)
    values = torch.stack([signed[(pairs >> shift) & 15] for shift in (0, 4, 8, 12)], dim=-1)
    return values.contiguous().view(torch.complex128).reshape(-1)
