"""Keys and values of one layer in blocks of fixed length, written token by token, read by block.

A block's bytes are one contiguous slice per head, keys and values apart:
  fp32, bf16, fp16:  data [blocks, 2, kv_heads, block, D]
  nvfp4:             data uint8 [blocks, 2, kv_heads, block, D/2]
                     scales uint8 (E4M3) [blocks, 2, kv_heads, block, D/16], linear
What is written is rounded or quantised at once and always read back from the pages, so attention
sees the same numbers however a prompt was cut. Neighbours: `fp4` is the NVFP4 code,
`paged_attention` the reader.

Letters: T tokens, N kv heads, D head_dim, S runs of B blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Literal, get_args

import torch
from torch import Tensor

from moe_kernels import fp4

KvFormat = Literal["fp32", "bf16", "fp16", "nvfp4"]
KV_FORMATS: tuple[KvFormat, ...] = get_args(KvFormat)
KEY_GLOBAL_SCALE = 2.0**-4
VALUE_GLOBAL_SCALE = 2.0**-6
"""Powers of two that keep E4M3 scales in range for standard deviations from .001 to 10 and more."""

_PLAIN_DTYPES: dict[str, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


@dataclass(frozen=True)
class KvPages:
    format: KvFormat
    data: Tensor
    scales: Tensor | None
    """Only for nvfp4."""

    @property
    def num_blocks(self) -> int:
        return self.data.shape[0]

    @property
    def block_size(self) -> int:
        return self.data.shape[3]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All that is stored, block by block along dimension 0."""
        return (self.data,) if self.scales is None else (self.data, self.scales)

    @property
    def num_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors)


def allocate_pages(
    kv_format: KvFormat,
    num_blocks: int,
    num_kv_heads: int,
    block_size: int,
    head_dim: int,
    device: str | torch.device = "cpu",
) -> KvPages:
    """Zeroed pages. Raises ValueError when NVFP4's blocks do not divide head_dim."""
    lead = (num_blocks, 2, num_kv_heads, block_size)
    if kv_format != "nvfp4":
        data = torch.zeros((*lead, head_dim), dtype=_PLAIN_DTYPES[kv_format], device=device)
        return KvPages(kv_format, data, None)
    if head_dim % fp4.NVFP4_BLOCK:
        raise ValueError(
            f"kvCache.dtype nvfp4 needs a head_dim divisible by {fp4.NVFP4_BLOCK}, the model's is "
            f"{head_dim}; use bf16 or fp32"
        )
    data = torch.zeros((*lead, head_dim // 2), dtype=torch.uint8, device=device)
    scales = torch.zeros((*lead, head_dim // fp4.NVFP4_BLOCK), dtype=torch.uint8, device=device)
    return KvPages(kv_format, data, scales)


def append(pages: KvPages, k_TND: Tensor, v_TND: Tensor, slots_T: Tensor) -> None:
    """Store float32 keys and values of T tokens; token t goes to place `slots_T[t]`.

    A place is block · block_size + offset, int64, each at most once and within the pages. Places
    need not be in order or neighbours. Writing the same token again writes the same bytes.
    """
    blocks = slots_T // pages.block_size
    offsets = slots_T % pages.block_size
    kv_T2ND = torch.stack((k_TND, v_TND), dim=1)
    if pages.scales is None:
        pages.data[blocks, :, :, offsets] = kv_T2ND.to(pages.data.dtype)
        return
    packed, scales = fp4.quantize_nvfp4(kv_T2ND, _global_scales(kv_T2ND.device).view(2, 1, 1))
    pages.data[blocks, :, :, offsets] = packed
    pages.scales[blocks, :, :, offsets] = scales


def read(pages: KvPages, blocks_SB: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values of S runs of B whole blocks, float32 [S, N, B · block, D] each."""
    data = _gather(pages.data, blocks_SB)
    if pages.scales is None:
        kv = data.to(torch.float32)
    else:
        step = _global_scales(data.device).view(2, 1, 1, 1, 1)
        kv = fp4.dequantize_nvfp4(data, _gather(pages.scales, blocks_SB), step)
    return kv[0], kv[1]


@cache
def _global_scales(device: torch.device) -> Tensor:
    return torch.tensor([KEY_GLOBAL_SCALE, VALUE_GLOBAL_SCALE], device=device)


def _gather(stored: Tensor, blocks_SB: Tensor) -> Tensor:
    """[2, S, N, B · block, X] of [blocks, 2, N, block, X], copied head by head of each block."""
    _, _, num_heads, block_size, width = stored.shape
    chunks = blocks_SB[None, :, None, :] * (2 * num_heads) + _heads(num_heads, stored.device)
    rows = stored.view(-1, block_size * width).index_select(0, chunks.reshape(-1))
    return rows.view(2, blocks_SB.shape[0], num_heads, blocks_SB.shape[1] * block_size, width)


@cache
def _heads(num_heads: int, device: torch.device) -> Tensor:
    return torch.arange(2 * num_heads, device=device).view(2, 1, num_heads, 1)
