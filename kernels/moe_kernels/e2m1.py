"""E2M1, the four-bit number of NVFP4 and MXFP4: sign · {0, .5, 1, 1.5, 2, 3, 4, 6}.

Code = sign·8 + index, so code 8 is −0; midpoints round to the even code, beyond 6 saturates.
Packing: element 2i in the low nibble, 2i+1 in the high one. Neighbours: `fp4` and `mxfp4` scale
blocks of these.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from moe_kernels.byte_table import look_up, pair_table

E2M1_MAX = 6.0
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def encode_e2m1(ratio: Tensor) -> Tensor:
    """Nearest code, uint8, of float32 `ratio`, the even one at a midpoint."""
    index = torch.bucketize(ratio.abs(), _bounds(ratio.device), out_int32=True)
    return index.to(torch.uint8) | (torch.signbit(ratio).to(torch.uint8) << 3)


def values_of_codes(codes: Tensor) -> Tensor:
    """float32, shaped like the unpacked uint8 `codes`."""
    return _signed_values(codes.device)[codes.to(torch.int32)]


def pack(codes: Tensor) -> Tensor:
    """uint8 [..., D/2] of codes [..., D]."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpacked_values(packed: Tensor) -> Tensor:
    """float32, flat, of uint8 `packed` [..., D/2], D a multiple of four."""
    return look_up(_packed_table(packed.device), packed)


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
def _signed_values(device: torch.device) -> Tensor:
    return torch.tensor([*E2M1_VALUES, *(-value for value in E2M1_VALUES)], device=device)


@cache
def _packed_table(device: torch.device) -> Tensor:
    signed, every_byte = _signed_values(device), torch.arange(256, device=device)
    return pair_table(torch.stack((signed[every_byte & 15], signed[every_byte >> 4]), dim=-1))
