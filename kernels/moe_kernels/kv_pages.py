"""Keys and values of one layer in blocks of fixed length, written token by token, read by block.

A format's parts (`kv_formats.KvPart`) are a tensor each, a block's bytes one contiguous slice per
side and head, scales apart and linear:
  plain codes:  data [blocks, sides, heads, block, D], fp32, bf16 or fp16
  fp8:          data uint8 (E4M3) [blocks, sides, heads, block, D]
  nvfp4:        data uint8 [.., D/2], scales uint8 (E4M3) [blocks, sides, heads, block, D/16]
  mxfp4:        data uint8 [.., D/2], scales uint8 (E8M0) [blocks, sides, heads, block, D/32]
Keys and values of one code are the two sides of one part; latent attention has a part for the
latent and one for the rotated key, each with one side and one head.
What is written is rounded or quantised at once and always read back from the pages, so attention
sees the same numbers however a prompt was cut. Neighbours: `fp4`, `mxfp4` and `fp8` are the codes,
`paged_attention` the reader, `kv_error` looks at what quantising cost.

Letters: T tokens, N heads, D width of a vector, S runs of B blocks, Z sides of a part.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache

import torch
from torch import Tensor

from moe_kernels import fp4, fp8, mxfp4
from moe_kernels.derived import Derived
from moe_kernels.implementation import implemented
from moe_kernels.kv_error import ErrorProbe
from moe_kernels.kv_formats import (
    CodeName,
    Encoding,
    HeadsShape,
    KvFormat,
    KvPart,
    KvShape,
    LatentShape,
    Side,
)

_DTYPES: dict[CodeName, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
"""Of stored elements; every other code stores bytes."""


@dataclass(frozen=True)
class LayerScales:
    """What a layer's scales are when they are not the format's fixed ones."""

    of_side: Mapping[Side, float] = field(default_factory=dict)
    """Global scales, decode direction; a side that is absent keeps its fixed one."""
    key_center_ND: Tensor | None = None
    """Float32, subtracted from every key. Adds one constant to all of a query's scores, so only a
    reader that compares them with something else (a sink) has to undo it."""
    key_channel_ND: Tensor | None = None
    """Float32, positive: keys are divided by it, and readers multiply queries by it."""


@dataclass(frozen=True)
class PagePart:
    """A part of the page of every block."""

    part: KvPart
    data: Tensor
    scales: Tensor | None
    """Only of the FP4 codes."""
    global_scales_Z: Tensor | None
    """Float32, of each side; only of the codes that have them."""


@dataclass(frozen=True)
class KvPages:
    format: KvFormat
    shape: KvShape
    parts: tuple[PagePart, ...]
    key_center_ND: Tensor | None = None
    key_channel_ND: Tensor | None = None
    """See `LayerScales`."""
    probe: ErrorProbe = field(default_factory=ErrorProbe, compare=False, repr=False)
    derived: Derived = field(default_factory=Derived, init=False, compare=False, repr=False)

    @property
    def num_blocks(self) -> int:
        return self.parts[0].data.shape[0]

    @property
    def block_size(self) -> int:
        return self.parts[0].data.shape[3]

    @property
    def num_heads(self) -> int:
        return self.parts[0].data.shape[2]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All that is stored, block by block along dimension 0."""
        stored = ((part.data, part.scales) for part in self.parts)
        return tuple(tensor for pair in stored for tensor in pair if tensor is not None)

    @property
    def num_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors)

    @property
    def global_scales(self) -> dict[Side, float]:
        """Those in use, by side; empty for codes without."""
        return {
            side: float(scale)
            for part in self.parts
            if part.global_scales_Z is not None
            for side, scale in zip(part.part.sides, part.global_scales_Z.tolist(), strict=True)
        }


def allocate_pages(
    kv_format: KvFormat,
    shape: KvShape,
    num_blocks: int,
    block_size: int,
    device: str | torch.device = "cpu",
    scales: LayerScales | None = None,
) -> KvPages:
    """Zeroed pages. Raises KvFormatError when the format cannot hold the shape."""
    scales = scales or LayerScales()
    parts = tuple(
        _allocate_part(part, num_blocks, block_size, device, scales)
        for part in kv_format.parts(shape)
    )
    center, channel = (
        None if values is None else values.to(device=device, dtype=torch.float32)
        for values in (scales.key_center_ND, scales.key_channel_ND)
    )
    return KvPages(kv_format, shape, parts, center, channel)


@implemented
def append(pages: KvPages, k_TND: Tensor, v_TND: Tensor, slots_T: Tensor) -> None:
    """Store float32 keys and values of T tokens; token t goes to place `slots_T[t]`.

    A place is block · block_size + offset, int64, each at most once and within the pages. Places
    need not be in order or neighbours. Writing the same token again writes the same bytes.
    """
    append_reference(pages, k_TND, v_TND, slots_T)


def append_reference(pages: KvPages, k_TND: Tensor, v_TND: Tensor, slots_T: Tensor) -> None:
    """The oracle of `append`."""
    assert isinstance(pages.shape, HeadsShape), "latents are appended by append_latent"
    scaled_k_TND = k_TND
    if pages.key_center_ND is not None:
        scaled_k_TND = scaled_k_TND - pages.key_center_ND
    if pages.key_channel_ND is not None:
        scaled_k_TND = scaled_k_TND / pages.key_channel_ND
    _store(pages, (scaled_k_TND, v_TND), slots_T)
    if pages.probe.wanted:
        show(pages, k_TND, v_TND, slots_T)


def show(pages: KvPages, k_TND: Tensor, v_TND: Tensor, slots_T: Tensor) -> None:
    """Let the probe see what a reader gets of the first of these tokens, which are stored."""
    kept_k_TND, kept_v_TND = _kept(pages, slots_T[: pages.probe.max_tokens])
    if pages.key_channel_ND is not None:
        kept_k_TND = kept_k_TND * pages.key_channel_ND
    if pages.key_center_ND is not None:
        kept_k_TND = kept_k_TND + pages.key_center_ND
    pages.probe.take((k_TND, v_TND), (kept_k_TND, kept_v_TND))


@implemented
def append_latent(pages: KvPages, latent_TD: Tensor, rope_TR: Tensor, slots_T: Tensor) -> None:
    """Store float32 latents [T, latent_dim] and rotated keys [T, rope_dim]; places as in
    `append`."""
    append_latent_reference(pages, latent_TD, rope_TR, slots_T)


def append_latent_reference(
    pages: KvPages, latent_TD: Tensor, rope_TR: Tensor, slots_T: Tensor
) -> None:
    """The oracle of `append_latent`."""
    assert isinstance(pages.shape, LatentShape), "keys and values are appended by append"
    given = latent_TD.unsqueeze(1), rope_TR.unsqueeze(1)
    _store(pages, given, slots_T)
    if pages.probe.wanted:
        pages.probe.take(given, _kept(pages, slots_T[: pages.probe.max_tokens]))


def read(pages: KvPages, blocks_SB: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values of S runs of B whole blocks, float32 [S, N, B · block, D] each.

    Keys are as stored: less `key_center_ND`, divided by `key_channel_ND`.
    """
    assert isinstance(pages.shape, HeadsShape), "latents are read by read_latent"
    k_SNLD, v_SNLD = _sides(pages, blocks_SB)
    return k_SNLD, v_SNLD


def read_latent(pages: KvPages, blocks_SB: Tensor) -> tuple[Tensor, Tensor]:
    """Latents [S, B · block, latent_dim] and rotated keys [S, B · block, rope_dim], float32."""
    assert isinstance(pages.shape, LatentShape), "keys and values are read by read"
    latent, rope = _sides(pages, blocks_SB)
    return latent[:, 0], rope[:, 0]


def _store(pages: KvPages, sides: tuple[Tensor, ...], slots_T: Tensor) -> None:
    """Store one float32 [T, N, D] per side, in the order of the parts' sides."""
    blocks, offsets = slots_T // pages.block_size, slots_T % pages.block_size
    begin = 0
    for page in pages.parts:
        end = begin + len(page.part.sides)
        data, scales = _encode(page, torch.stack(sides[begin:end], dim=1), pages.format.encoding)
        page.data[blocks, :, :, offsets] = data
        if page.scales is not None and scales is not None:
            page.scales[blocks, :, :, offsets] = scales
        begin = end


def _kept(pages: KvPages, slots_T: Tensor) -> tuple[Tensor, ...]:
    """What a reader gets of tokens there, float32 [T, N, D] of each side."""
    blocks, offsets = slots_T // pages.block_size, slots_T % pages.block_size
    kept: list[Tensor] = []
    for page in pages.parts:
        data = page.data[blocks, :, :, offsets]
        scales = None if page.scales is None else page.scales[blocks, :, :, offsets]
        kept += _decode(page, data, scales, sides_dim=1).unbind(1)
    return tuple(kept)


def _sides(pages: KvPages, blocks_SB: Tensor) -> tuple[Tensor, ...]:
    """Float32 [S, N, B · block, D] of each side."""
    sides: list[Tensor] = []
    for page in pages.parts:
        scales = None if page.scales is None else _gather(page.scales, blocks_SB)
        sides += _decode(page, _gather(page.data, blocks_SB), scales, sides_dim=0).unbind(0)
    return tuple(sides)


def _encode(page: PagePart, x_TZND: Tensor, encoding: Encoding) -> tuple[Tensor, Tensor | None]:
    code = page.part.code
    if code == "mxfp4":
        return mxfp4.quantize_mxfp4(x_TZND)
    if page.global_scales_Z is None:
        return x_TZND.to(page.data.dtype), None
    step = page.global_scales_Z.view(-1, 1, 1)
    if code == "fp8":
        return fp8.quantize_fp8(x_TZND, step), None
    return fp4.quantize_nvfp4(x_TZND, step, encoding)


def _decode(page: PagePart, data: Tensor, scales: Tensor | None, sides_dim: int) -> Tensor:
    """Float32, freshly made, of stored data whose dimension `sides_dim` counts sides."""
    if page.part.code == "mxfp4" and scales is not None:
        return mxfp4.dequantize_mxfp4(data, scales)
    if page.global_scales_Z is None:
        return data.to(torch.float32)
    step = page.global_scales_Z.view(-1, *[1] * (data.ndim - sides_dim - 1))
    if scales is None:
        return fp8.dequantize_fp8(data, step)
    return fp4.dequantize_nvfp4(data, scales, step)


def _allocate_part(
    part: KvPart,
    num_blocks: int,
    block_size: int,
    device: str | torch.device,
    scales: LayerScales,
) -> PagePart:
    lead = (num_blocks, len(part.sides), part.heads, block_size)
    dtype = _DTYPES.get(part.code, torch.uint8)
    in_use = [scales.of_side.get(side, fixed) for side, fixed in part.fixed_scales.items()]
    return PagePart(
        part=part,
        data=torch.zeros((*lead, part.data_width), dtype=dtype, device=device),
        scales=(
            torch.zeros((*lead, part.scale_width), dtype=torch.uint8, device=device)
            if part.scale_width
            else None
        ),
        global_scales_Z=torch.tensor(in_use, device=device) if in_use else None,
    )


def _gather(stored: Tensor, blocks_SB: Tensor) -> Tensor:
    """[Z, S, N, B · block, X] of [blocks, Z, N, block, X], copied head by head of each block."""
    _, num_sides, num_heads, block_size, width = stored.shape
    heads = _heads(num_sides, num_heads, stored.device)
    chunks = blocks_SB[None, :, None, :] * (num_sides * num_heads) + heads
    rows = stored.view(-1, block_size * width).index_select(0, chunks.reshape(-1))
    num_runs, num_blocks = blocks_SB.shape
    return rows.view(num_sides, num_runs, num_heads, num_blocks * block_size, width)


@cache
def _heads(num_sides: int, num_heads: int, device: torch.device) -> Tensor:
    heads = torch.arange(num_sides * num_heads, device=device)
    return heads.view(num_sides, 1, num_heads, 1)
