"""NVFP4: 16 consecutive elements of head_dim as E2M1 codes, sharing one E4M3 scale.

x̂ = e2m1 · sf · g, with g the tensor's global scale in decode direction. Quantised at append, read
back always; `kv_pages` stores the bytes, `e2m1` is the four-bit code and its packing.

* Standard: sf = e4m3(amax / (6·g)), kept within E4M3's finite range.
* FourOverSix: also sf = e4m3(amax / (4·g)), where the largest element becomes 4 and those below it
  find a finer grid; of the two the one with the smaller squared error, Standard's when equal. The
  reader is the same.
* A block with sf 0 decodes to zeros.

Only comparisons, products, divisions, one rounding to E4M3 and sums in a fixed order: a token's
bytes do not depend on what is quantised with it. Bytes per head and token: D/2 + D/16.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_kernels.e2m1 import E2M1_MAX, encode_e2m1, pack, unpacked_values, values_of_codes
from moe_kernels.fp8 import E4M3_MAX
from moe_kernels.kv_formats import NVFP4_BLOCK, Encoding

_FOUR = 4.0


def quantize_nvfp4(
    x: Tensor, global_scale: float | Tensor, encoding: Encoding = "Standard"
) -> tuple[Tensor, Tensor]:
    """Codes uint8 [..., D/2] and E4M3 scales as uint8 [..., D/16] of float32 `x` [..., D].

    `global_scale` is a number, or a tensor that broadcasts against the scales.
    """
    blocks = x.reshape(*x.shape[:-1], x.shape[-1] // NVFP4_BLOCK, NVFP4_BLOCK)
    amax = blocks.abs().amax(dim=-1)
    codes, sf_e4m3, step = _quantize(blocks, amax / (E2M1_MAX * global_scale), global_scale)
    if encoding == "FourOverSix":
        wider = _quantize(blocks, amax / (_FOUR * global_scale), global_scale)
        better = _squared_error(blocks, wider[0], wider[2]) < _squared_error(blocks, codes, step)
        codes = torch.where(better.unsqueeze(-1), wider[0], codes)
        sf_e4m3 = torch.where(better, wider[1], sf_e4m3)
    return pack(codes.flatten(-2)), sf_e4m3


def dequantize_nvfp4(packed: Tensor, scales: Tensor, global_scale: float | Tensor) -> Tensor:
    """float32 [..., D] of codes uint8 [..., D/2] and scales uint8 [..., D/16]."""
    step = scales.view(torch.float8_e4m3fn).to(torch.float32) * global_scale
    blocks = unpacked_values(packed).view(*scales.shape, NVFP4_BLOCK) * step.unsqueeze(-1)
    return blocks.flatten(-2)


def _quantize(
    blocks: Tensor, wanted: Tensor, global_scale: float | Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [..., D/16, 16], scales uint8 [..., D/16], and what a code of 1 stands for."""
    sf_e4m3 = wanted.clamp(max=E4M3_MAX).to(torch.float8_e4m3fn)
    step = sf_e4m3.to(torch.float32) * global_scale
    wide = step.unsqueeze(-1)
    ratio = torch.where(wide == 0.0, torch.zeros_like(blocks).copysign(blocks), blocks / wide)
    return encode_e2m1(ratio), sf_e4m3.view(torch.uint8), step


def _squared_error(blocks: Tensor, codes: Tensor, step: Tensor) -> Tensor:
    """Of each block, added up in a fixed order: a library's sum may depend on the shape."""
    error = (values_of_codes(codes) * step.unsqueeze(-1) - blocks).square()
    while error.shape[-1] > 1:
        half = error.shape[-1] // 2
        error = error[..., :half] + error[..., half:]
    return error[..., 0]
